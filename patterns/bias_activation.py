"""Bias and activation: act(linear(x, w, b)), act(x + b), and activations written out by hand, in one pass over memory.

The gain is in the backward, where the bias's gradient is summed in the pass that makes the input's, and in what is saved:
the input alone. A library activation of a linear without bias has neither, and stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.activation.activation  # noqa: F401  registers the op
from megafx.rewrite.pattern import Pattern, register

ROOT = math.sqrt(2.0 / math.pi)


class Form(NamedTuple):
    """One way to write an activation; `needs`: an op that it has and few others have."""

    act: str
    needs: str
    function: Callable[[Tensor], Tensor]


# What torch has a function for.
LIBRARY = {
    "gelu": Form("gelu", "gelu", F.gelu),
    "gelu tanh": Form("gelu_tanh", "gelu", lambda u: F.gelu(u, approximate="tanh")),
    "relu": Form("relu", "relu", F.relu),
    "silu": Form("silu", "silu", F.silu),
}

# As models write them out. The constants of the tanh form are sqrt(2/pi), or rounded to 8 (Megatron) or 10 digits (BERT).
WRITTEN = {
    "new": Form("gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(ROOT * (u + 0.044715 * torch.pow(u, 3.0))))),
    "new, cube": Form("gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(ROOT * (u + 0.044715 * u * u * u)))),
    "fast": Form(
        "gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(u * 0.7978845608 * (1 + 0.044715 * u * u)))
    ),
    "megatron": Form(
        "gelu_tanh", "tanh", lambda u: u * 0.5 * (1.0 + torch.tanh(0.79788456 * u * (1 + 0.044715 * u * u)))
    ),
    "erf": Form("gelu", "erf", lambda u: u * 0.5 * (1.0 + torch.erf(u / math.sqrt(2.0)))),
    "erf, product": Form("gelu", "erf", lambda u: u * 0.5 * (1.0 + torch.erf(u * math.sqrt(0.5)))),
    "quick": Form("gelu_quick", "sigmoid", lambda u: u * torch.sigmoid(1.702 * u)),
    "swish": Form("silu", "sigmoid", lambda u: u * torch.sigmoid(u)),
    "relu squared": Form("relu2", "relu", lambda u: torch.square(F.relu(u))),
    "relu power": Form("relu2", "relu", lambda u: F.relu(u) ** 2),
    "relu times relu": Form("relu2", "relu", lambda u: (r := F.relu(u)) * r),
}
FORMS = {**LIBRARY, **WRITTEN}
ROUNDED = ("fast", "megatron")  # the same function to 9 digits: in fp64 it is another one


def needs(*, form: str) -> str:
    return FORMS[form].needs


def _where(m: Any) -> str | None:
    if m["form"] in ROUNDED and m["x"].dtype == torch.float64:
        return "it rounds sqrt(2/pi), which shows in fp64"
    return None


def _fused(x: Tensor, bias: Tensor | None, form: str) -> Any:
    return torch.ops.megafx.bias_act(x, bias, FORMS[form].act)


@register
class LinearBiasActivation(Pattern):
    """act(linear(x, w, b)) -> bias_act(linear(x, w), b)."""

    name = "linear_bias_activation"
    knob = "bias_activation_fusion"
    tensors = {"x": "D[... k]", "weight": "param D[n k]", "bias": "param D[n]"}
    variants = {"form": tuple(FORMS)}
    needs = needs

    def match(x, weight, bias, *, form):
        return FORMS[form].function(F.linear(x, weight, bias))

    def make(x, weight, bias, *, form):
        return _fused(F.linear(x, weight), bias, form)

    where = _where


@register
class BiasActivation(Pattern):
    """act(x + b) -> bias_act(x, b), whatever x is."""

    name = "bias_activation"
    knob = "bias_activation_fusion"
    tensors = {"x": "D[... n]", "bias": "param D[n]"}
    variants = {"form": tuple(FORMS)}
    needs = needs

    def match(x, bias, *, form):
        return FORMS[form].function(x + bias)

    def make(x, bias, *, form):
        return _fused(x, bias, form)

    where = _where


@register
class WrittenActivation(Pattern):
    """An activation that is written out, of anything -> bias_act without bias."""

    name = "written_activation"
    knob = "bias_activation_fusion"
    tensors = {"x": "D[...]"}
    variants = {"form": tuple(WRITTEN)}
    needs = needs

    def match(x, *, form):
        return WRITTEN[form].function(x)

    def make(x, *, form):
        return _fused(x, None, form)

    where = _where
