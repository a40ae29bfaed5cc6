"""Gated linear units (SwiGLU, GeGLU, ReGLU): act(gate) * up in one pass over memory, saving gate and up alone.

Gate and up come from two linears, or are the halves of one: then the packed op reads and writes the one tensor, and its
backward needs no concatenation of two gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.activation.activation  # noqa: F401  registers the ops
from megafx.patterns.bias_activation import FORMS
from megafx.rewrite.pattern import Pattern, register


def needs(*, form: str) -> str:
    return FORMS[form].needs


def _gated(x: Tensor, form: str) -> Any:
    gate, up = x.chunk(2, -1)
    return FORMS[form].function(gate) * up


@register
class Glu(Pattern):
    """act(gate) * up -> glu(gate, up)."""

    name = "glu"
    knob = "bias_activation_fusion"
    tensors = {"gate": "D[... h]", "up": "D[... h]"}
    variants = {"form": tuple(FORMS)}
    needs = needs
    priority = 1  # before act(linear(x, w, b)), which is part of it

    def match(gate, up, *, form):
        return FORMS[form].function(gate) * up

    def make(gate, up, *, form):
        return torch.ops.megafx.glu(gate, up, FORMS[form].act)

    def where(m):
        if m["gate"].shape != m["up"].shape:
            return "gate and up have different shapes"
        return None


@register
class PackedGlu(Pattern):
    """Halves of one tensor: act(x[..., :h]) * x[..., h:] -> glu_packed(x, None)."""

    name = "glu_packed"
    knob = "bias_activation_fusion"
    tensors = {"x": "D[... 2h]"}
    variants = {"form": tuple(FORMS)}
    needs = needs
    priority = 1

    def match(x, *, form):
        return _gated(x, form)

    def make(x, *, form):
        return torch.ops.megafx.glu_packed(x, None, FORMS[form].act)


@register
class LinearBiasGlu(Pattern):
    """As glu_packed, of a linear with bias: the bias is added in the same pass."""

    name = "linear_bias_glu"
    knob = "bias_activation_fusion"
    tensors = {"x": "D[... k]", "weight": "param D[2h k]", "bias": "param D[2h]"}
    variants = {"form": tuple(FORMS)}
    needs = needs
    priority = 1

    def match(x, weight, bias, *, form):
        return _gated(F.linear(x, weight, bias), form)

    def make(x, weight, bias, *, form):
        return torch.ops.megafx.glu_packed(F.linear(x, weight), bias, FORMS[form].act)
