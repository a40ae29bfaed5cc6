"""LayerNorm and RMSNorm, as library calls and as written out; and, on one rank's shapes, a sum with the norm that follows.

Hugging Face's RMSNorm rounds the normalised values to the model's dtype before it multiplies by the weight; the kernel
rounds once, which is nearer to the exact result. Weights may be of another dtype than the rows (fp32 vectors in a bf16
model); where their product is then wider than the rows, so is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.dropout.bias_dropout_add
import megafx.kernels.norm.add_norm
import megafx.kernels.norm.norms  # noqa: F401  registers the ops
from megafx.ir.nodes import Draw
from megafx.rewrite.pattern import Pattern, register

ops = torch.ops.megafx


@register
class LayerNorm(Pattern):
    """layer_norm over the last dim -> megafx.layer_norm. cudnn: a flag of the op that changes nothing."""

    name = "layer_norm"
    knob = "norm_fusion"
    tensors = {"x": "D[... h]", "weight": "param W[h]?", "bias": "param W[h]?"}
    variants = {"cudnn": (False, True)}
    scalars = {"eps": float}
    needs = ("layer_norm",)

    def match(x, weight, bias, *, eps, cudnn):
        return torch.layer_norm(x, (x.shape[-1],), weight, bias, eps, cudnn)

    def make(x, weight, bias, *, eps):
        return ops.layer_norm(x, weight, bias, eps)


SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda v: v.pow(2),
    "product": lambda v: v * v,
    "square": torch.square,
}


@register
class WrittenLayerNorm(Pattern):
    """LayerNorm as models write it -> megafx.layer_norm.

    variance  x.var(-1, unbiased=False), or the mean of the squares of x - mean, as in WrittenRMSNorm; "again": that
              difference is written twice
    upcast    "all": the whole row in fp32; "none"; where the model is fp32 these are the same
    root      rsqrt(v), or division by sqrt(v)
    affine    "late": weight and bias in the model's dtype; "wide": before the result is rounded to it; "none"
    """

    name = "written_layer_norm"
    knob = "norm_fusion"
    variants = {
        "variance": ("var", *SQUARES, "pow again", "square again"),
        "upcast": ("all", "none"),
        "root": ("rsqrt", "sqrt"),
        "affine": ("late", "wide", "none"),
    }
    scalars = {"eps": float}

    def tensors(*, affine, **_):
        rows = {"x": "D[... h]"}
        return rows if affine == "none" else {**rows, "weight": "param W[h]", "bias": "param W[h]?"}

    def needs(*, root, variance, **_):
        return (root, "sub", "var" if variance == "var" else "mean")

    def match(x, weight=None, bias=None, *, eps, variance, upcast, root, affine):
        row = x.to(torch.promote_types(x.dtype, torch.float32)) if upcast == "all" else x
        mean = row.mean(-1, keepdim=True)
        centred = row - mean
        if variance == "var":
            spread = row.var(-1, unbiased=False, keepdim=True) + eps
        else:
            squared = row - mean if "again" in variance else centred
            spread = SQUARES[variance.partition(" ")[0]](squared).mean(-1, keepdim=True) + eps
        y = centred * torch.rsqrt(spread) if root == "rsqrt" else centred / torch.sqrt(spread)
        if affine == "none":
            return y.to(x.dtype)
        if affine == "late":
            y = y.to(x.dtype) * weight
            return y if bias is None else y + bias
        y = y * weight.to(y.dtype)
        return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)

    def make(x, weight=None, bias=None, *, eps, affine):
        if affine == "late":  # the result is in the wider of the two dtypes
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        return ops.layer_norm(x, weight, bias, eps)


@register
class StandardDeviationNorm(Pattern):
    """weight * (x - mean) / (std + eps) + bias, of the Annotated Transformer. It is not LayerNorm, and stays."""

    name = "standard_deviation_norm"
    knob = "norm_fusion"
    tensors = {"x": "D[... h]", "weight": "param W[h]", "bias": "param W[h]"}
    scalars = {"eps": float}
    needs = ("std",)

    def match(x, weight, bias, *, eps):
        return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) + bias

    def make(x, weight, bias, *, eps):
        return ops.layer_norm(x, weight, bias, eps)

    def where(m):
        return "it divides by std(unbiased) + eps, which is not LayerNorm's root"


@register
class RMSNorm(Pattern):
    """rms_norm over the last dim -> megafx.rms_norm."""

    name = "rms_norm"
    knob = "norm_fusion"
    tensors = {"x": "D[... h]", "weight": "param W[h]?"}
    scalars = {"eps": float}
    needs = ("rms_norm",)

    def match(x, weight, *, eps):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def make(x, weight, *, eps):
        own = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps  # of what torch computes in
        return ops.rms_norm(x, weight, own if eps is None else eps, 0.0)


@register
class WrittenRMSNorm(Pattern):
    """RMSNorm as models write it -> megafx.rms_norm.

    square    x.pow(2), x * x, torch.square(x)
    upcast    "all": the whole row in fp32 (Llama); "statistics": the mean of squares alone (T5); where the model is fp32
              these are the same
    scale     "late": w * y.to(dtype) (Llama, T5); "wide": (y * w).to(dtype); "unit": (y * (1 + w)).to(dtype), a gamma
              centred on zero (Gemma); "unit late": y.to(dtype) * (1 + w); "none": no weight
    root      rsqrt(m), or division by sqrt(m)
    """

    name = "written_rms_norm"
    knob = "norm_fusion"
    variants = {
        "square": tuple(SQUARES),
        "upcast": ("all", "statistics"),
        "scale": ("late", "wide", "unit", "unit late", "none"),
        "root": ("rsqrt", "sqrt"),
    }
    scalars = {"eps": float}

    def tensors(*, scale, **_):
        return {"x": "D[... h]"} if scale == "none" else {"x": "D[... h]", "weight": "param W[h]"}

    def needs(*, root, **_):
        return (root, "mean")

    def match(x, weight=None, *, eps, square, upcast, scale, root):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = SQUARES[square](wide).mean(-1, keepdim=True) + eps
        row = wide if upcast == "all" else x
        y = row * torch.rsqrt(mean) if root == "rsqrt" else row / torch.sqrt(mean)
        if scale == "none":
            return y.to(x.dtype)
        if scale == "late":
            return weight * y.to(x.dtype)
        if scale == "unit late":
            return y.to(x.dtype) * (1.0 + weight)
        if scale == "wide":
            return (y * weight.to(y.dtype)).to(x.dtype)
        return (y * (1.0 + weight.to(y.dtype))).to(x.dtype)

    def make(x, weight=None, *, eps, scale):
        if weight is not None and "late" in scale:  # the product is in the wider of the two dtypes
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        return ops.rms_norm(x, weight, eps, 1.0 if scale.startswith("unit") else 0.0)


# -- a sum and its norm: both results in one kernel, forward and backward

KINDS = ("layer", "rms", "rms centred")


def _operands(kind: str, **branch: str) -> dict[str, str]:
    vectors = {"weight": "param W[h]?"} | ({"norm_bias": "param W[h]?"} if kind == "layer" else {})
    return branch | {"residual": "E[... h]"} | vectors


def _how(kind: str, weight: Tensor | None, norm_bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    """What the norm's op takes after the sum."""
    return (weight, norm_bias, eps) if kind == "layer" else (weight, eps, float(kind == "rms centred"))


def _normed(kind: str, h: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    """The two results as they are found: the sum and its norm."""
    return h, (ops.layer_norm if kind == "layer" else ops.rms_norm)(h, *_how(kind, *norm))


def _fused(
    kind: str, x: Tensor, bias: Tensor | None, residual: Tensor, drop: Draw, *norm: Any
) -> tuple[Tensor, Tensor]:
    op = ops.bias_dropout_add_layer_norm if kind == "layer" else ops.bias_dropout_add_rms_norm
    h, y, *_ = op(x, bias, residual, *_how(kind, *norm), *drop.args)
    return h, y


class _AddNorm(Pattern):
    knob = "norm_fusion"
    local = True
    variants = {"kind": KINDS}
    scalars = {"eps": float}

    def needs(*, kind):
        return ("layer_norm" if kind == "layer" else "rms_norm",)


@register
class AddNorm(_AddNorm):
    """x + residual and its norm -> one kernel."""

    name = "add_norm"

    def tensors(*, kind):
        return _operands(kind, x="D[... h]")

    def match(x, residual, weight=None, norm_bias=None, *, eps, kind):
        return _normed(kind, x + residual, weight, norm_bias, eps)

    def make(x, residual, weight=None, norm_bias=None, *, eps, kind, drop):
        return _fused(kind, x, None, residual, drop, weight, norm_bias, eps)


@register
class LinearAddNorm(_AddNorm):
    """linear(x, w, b) + residual and its norm -> one kernel, which sums the gradient of b on the way."""

    name = "linear_add_norm"

    def tensors(*, kind):
        return _operands(kind, x="D[... k]", matrix="param D[h k]", bias="param D[h]")

    def match(x, matrix, bias, residual, weight=None, norm_bias=None, *, eps, kind):
        return _normed(kind, F.linear(x, matrix, bias) + residual, weight, norm_bias, eps)

    def make(x, matrix, bias, residual, weight=None, norm_bias=None, *, eps, kind, drop):
        return _fused(kind, F.linear(x, matrix), bias, residual, drop, weight, norm_bias, eps)


@register
class DropoutAddNorm(_AddNorm):
    """bias_dropout_add and the norm of it -> one kernel."""

    name = "dropout_add_norm"

    def tensors(*, kind):
        return _operands(kind, x="D[... h]", bias="param D[h]?")

    def match(x, bias, residual, weight=None, norm_bias=None, *, eps, kind, drop):
        return _normed(kind, ops.bias_dropout_add(x, bias, residual, *drop.args), weight, norm_bias, eps)

    def make(x, bias, residual, weight=None, norm_bias=None, *, eps, kind, drop):
        return _fused(kind, x, bias, residual, drop, weight, norm_bias, eps)
