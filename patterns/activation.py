"""Bias and activation, and gated linear units (SwiGLU, GeGLU, ReGLU), in one pass over memory, saving their operands alone.

The gain is in the backward, where the bias's gradient is summed in the pass that makes the input's, and in what is saved. A
library activation of a linear without bias has neither, and stays as it is. Gate and up come from two linears, or are the
halves of one: then the packed op reads and writes the one tensor, and its backward needs no concatenation of two gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.activation.activation  # noqa: F401  registers the ops
from megafx.rewrite.pattern import Pattern, register

ROOT = math.sqrt(2.0 / math.pi)
ops = torch.ops.megafx


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


# As models write them out. The constants of the tanh form are sqrt(2/pi), or rounded to 8 (Megatron) or 10 digits (BERT);
# Megatron's erf_gelu rounds sqrt(2) to 6.
WRITTEN = {
    "new": Form("gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(ROOT * (u + 0.044715 * torch.pow(u, 3.0))))),
    "new, cube": Form("gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(ROOT * (u + 0.044715 * u * u * u)))),
    "fast": Form(
        "gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(u * 0.7978845608 * (1 + 0.044715 * u * u)))
    ),
    "megatron": Form(
        "gelu_tanh", "tanh", lambda u: u * 0.5 * (1.0 + torch.tanh(0.79788456 * u * (1 + 0.044715 * u * u)))
    ),
    "megatron, openai": Form(
        "gelu_tanh", "tanh", lambda u: 0.5 * u * (1.0 + torch.tanh(ROOT * u * (1.0 + 0.044715 * u * u)))
    ),
    "erf": Form("gelu", "erf", lambda u: u * 0.5 * (1.0 + torch.erf(u / math.sqrt(2.0)))),
    "erf, product": Form("gelu", "erf", lambda u: u * 0.5 * (1.0 + torch.erf(u * math.sqrt(0.5)))),
    "erf, six digits": Form("gelu", "erf", lambda u: u * 0.5 * (torch.erf(u / 1.41421) + 1.0)),
    "megatron, erf": Form("gelu", "erf", lambda u: u * 0.5 * (torch.erf(u / 1.41421) + torch.ones_like(u))),
    "quick": Form("gelu_quick", "sigmoid", lambda u: u * torch.sigmoid(1.702 * u)),
    "swish": Form("silu", "sigmoid", lambda u: u * torch.sigmoid(u)),
    "relu squared": Form("relu2", "relu", lambda u: torch.square(F.relu(u))),
    "relu power": Form("relu2", "relu", lambda u: F.relu(u) ** 2),
    "relu times relu": Form("relu2", "relu", lambda u: (r := F.relu(u)) * r),
}
FORMS = {**LIBRARY, **WRITTEN}
# Forms with a rounded constant, and the dtypes in which they are other functions.
ROUNDED = {
    "fast": (torch.float64,),
    "megatron": (torch.float64,),
    "erf, six digits": (torch.float64, torch.float32),
    "megatron, erf": (torch.float64, torch.float32),
}


def _rounded(form: str, dtype: torch.dtype) -> str | None:
    """Why a form with a rounded constant is another function in this dtype."""
    if dtype not in ROUNDED.get(form, ()):
        return None
    what = "sqrt(2)" if "erf" in form else "sqrt(2/pi)"
    return f"it rounds {what}, which shows in {str(dtype).removeprefix('torch.')}"


class _Activation(Pattern):
    knob = "bias_activation_fusion"
    variants = {"form": tuple(FORMS)}

    def needs(*, form):
        return FORMS[form].needs

    def where(m):
        return _rounded(m["form"], m["x"].dtype)


@register
class LinearBiasActivation(_Activation):
    """act(linear(x, w, b)) -> bias_act(linear(x, w), b)."""

    name = "linear_bias_activation"
    tensors = {"x": "D[... k]", "weight": "param D[n k]", "bias": "param D[n]"}

    def match(x, weight, bias, *, form):
        return FORMS[form].function(F.linear(x, weight, bias))

    def make(x, weight, bias, *, form):
        return ops.bias_act(F.linear(x, weight), bias, FORMS[form].act)


@register
class BiasActivation(_Activation):
    """act(x + b) -> bias_act(x, b), whatever x is."""

    name = "bias_activation"
    tensors = {"x": "D[... n]", "bias": "param D[n]"}

    def match(x, bias, *, form):
        return FORMS[form].function(x + bias)

    def make(x, bias, *, form):
        return ops.bias_act(x, bias, FORMS[form].act)


@register
class WrittenActivation(_Activation):
    """An activation that is written out, of anything -> bias_act without bias."""

    name = "written_activation"
    tensors = {"x": "D[...]"}
    variants = {"form": tuple(WRITTEN)}

    def match(x, *, form):
        return WRITTEN[form].function(x)

    def make(x, *, form):
        return ops.bias_act(x, None, FORMS[form].act)


# -- gated linear units


def _gated(x: Tensor, form: str) -> Any:
    gate, up = x.chunk(2, -1)
    return FORMS[form].function(gate) * up


class _Gated(_Activation):
    priority = 1  # before act(linear(x, w, b)), which is part of it


@register
class Glu(_Gated):
    """act(gate) * up -> glu(gate, up)."""

    name = "glu"
    tensors = {"gate": "D[... h]", "up": "D[... h]"}

    def match(gate, up, *, form):
        return FORMS[form].function(gate) * up

    def make(gate, up, *, form):
        return ops.glu(gate, up, FORMS[form].act)

    def where(m):
        if m["gate"].shape != m["up"].shape:
            return "gate and up have different shapes"
        return _rounded(m["form"], m["gate"].dtype)


@register
class PackedGlu(_Gated):
    """Halves of one tensor: act(x[..., :h]) * x[..., h:] -> glu_packed(x, None)."""

    name = "glu_packed"
    tensors = {"x": "D[... 2h]"}

    def match(x, *, form):
        return _gated(x, form)

    def make(x, *, form):
        return ops.glu_packed(x, None, FORMS[form].act)


@register
class LinearBiasGlu(_Gated):
    """As glu_packed, of a linear with bias: the bias is added in the same pass."""

    name = "linear_bias_glu"
    tensors = {"x": "D[... k]", "weight": "param D[2h k]", "bias": "param D[2h]"}

    def match(x, weight, bias, *, form):
        return _gated(F.linear(x, weight, bias), form)

    def make(x, weight, bias, *, form):
        return ops.glu_packed(F.linear(x, weight), bias, FORMS[form].act)
