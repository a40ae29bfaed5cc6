"""Bias, dropout and residual add in one pass over memory; the mask is drawn again in backward, never stored.

Without dropout only the sum with the norm that follows pays (norms.py): a GEMM adds its bias for nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import megafx.kernels.dropout.bias_dropout_add  # noqa: F401  registers the op
from megafx.rewrite.pattern import Pattern, register


class _Sum(Pattern):
    """cast: the branch is cast to the residual's dtype, which the result has anyway."""

    knob = "bias_dropout_fusion"
    variants = {"cast": (False, True)}
    scalars = {"p": float}
    needs = ("dropout",)


@register
class LinearBiasDropoutAdd(_Sum):
    """residual + dropout(linear(x, w, b)) -> bias_dropout_add(linear(x, w), b, residual)."""

    name = "linear_bias_dropout_add"
    tensors = {"x": "D[... k]", "weight": "param D[n k]", "bias": "param D[n]", "residual": "E[... n]"}

    def match(x, weight, bias, residual, *, p, cast):
        branch = F.dropout(F.linear(x, weight, bias), p, True)
        return residual + (branch.to(residual.dtype) if cast else branch)

    def make(x, weight, bias, residual, *, drop):
        return torch.ops.megafx.bias_dropout_add(F.linear(x, weight), bias, residual, *drop.args)


@register
class BiasDropoutAdd(_Sum):
    """residual + dropout(x + b) -> bias_dropout_add(x, b, residual), whatever x is; b may be missing."""

    name = "bias_dropout_add"
    tensors = {"x": "D[... n]", "bias": "param D[n]?", "residual": "E[... n]"}

    def match(x, bias, residual, *, p, cast):
        branch = F.dropout(x if bias is None else x + bias, p, True)
        return residual + (branch.to(residual.dtype) if cast else branch)

    def make(x, bias, residual, *, drop):
        return torch.ops.megafx.bias_dropout_add(x, bias, residual, *drop.args)
