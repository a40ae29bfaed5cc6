"""Bias, dropout and residual add in one pass over memory; the mask is drawn again in backward, never stored.

Without dropout only the sum with the norm that follows pays (norms.py): a GEMM adds its bias for nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import megafx.kernels.dropout.bias_dropout_add  # noqa: F401  registers the op
from megafx.rewrite.pattern import Pattern, register


@register
class LinearBiasDropoutAdd(Pattern):
    """residual + dropout(linear(x, w, b)) -> bias_dropout_add(linear(x, w), b, residual).

    cast: the branch is written as one of the residual's dtype; it needs no cast, for the result is.
    """

    name = "linear_bias_dropout_add"
    knob = "bias_dropout_fusion"
    tensors = {
        "x": "D[... k]",
        "weight": "param D[n k]",
        "bias": "param D[n]",
        "residual": "E[... n]",
    }
    variants = {"cast": (False, True)}
    scalars = {"p": float}
    needs = ("dropout",)

    def match(x, weight, bias, residual, *, p, cast):
        branch = F.dropout(F.linear(x, weight, bias), p, True)
        return residual + (branch.to(residual.dtype) if cast else branch)

    def make(x, weight, bias, residual, *, drop):
        return torch.ops.megafx.bias_dropout_add(F.linear(x, weight), bias, residual, *drop.args)


@register
class BiasDropoutAdd(Pattern):
    """residual + dropout(x + b) -> bias_dropout_add(x, b, residual), whatever x is; b may be missing."""

    name = "bias_dropout_add"
    knob = "bias_dropout_fusion"
    tensors = {"x": "D[... n]", "bias": "param D[n]?", "residual": "E[... n]"}
    variants = {"cast": (False, True)}
    scalars = {"p": float}
    needs = ("dropout",)

    def match(x, bias, residual, *, p, cast):
        branch = F.dropout(x if bias is None else x + bias, p, True)
        return residual + (branch.to(residual.dtype) if cast else branch)

    def make(x, bias, residual, *, drop):
        return torch.ops.megafx.bias_dropout_add(x, bias, residual, *drop.args)
