"""Cross entropy behind a linear layer whose products read FP8: linear_cross_entropy.py and vocab_linear_cross_entropy.py.

    x [T, K], weight [V, K]      bytes of e4m3, with their scales ([] or one for each row): they make the logits
    xt [K, T], weight_t [K, V]   the same values transposed, with their scales ([] or one for each row): the gradients read them
    logits [T, V]                `dtype`, a chunk of tokens at a time, as are loss, statistics and the logits' gradients

The gradients of the logits become FP8 (`format`) with one scale. Its largest magnitude is known before they are made, as it is
that of the upstream gradient: they are p - y times that. So no pass looks for it, chunks have one scale, and ranks do.

    scaled_linear_cross_entropy   the sum of the losses, and the gradients of x, weight and bias (the whole vocabulary)
    scaled_linear_ce_stats        statistics of a rank's classes
    scaled_linear_ce_loss_backward    the gradients, of a rank's classes
    scaled_linear_cross_entropy_fp32, scaled_linear_ce_loss_fp32_backward    the weight's gradient is fp32

The loss of ranks' statistics is `linear_ce_loss`, which looks at no number of x and weight. A chunk's part of the weight's
gradient is made for CLASSES of classes at a time, and added: FP8 products of the library do not add.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megafx.ir.facts import MATMUL, SampleTensor, fixed, ids
from megafx.kernels.common.op import define_op, wide
from megafx.kernels.fp8.quantize import quantize
from megafx.kernels.fp8.scaled_mm import scaled_mm
from megafx.kernels.loss import cross_entropy as parts
from megafx.kernels.loss.cross_entropy_reference import Loss
from megafx.kernels.loss.linear_cross_entropy import check_linear, loss_and_gradients
from megafx.kernels.loss.logits_chunks import LayerGradients, LogitsChunks, chunk_bytes, padded
from megafx.kernels.loss.vocab_linear_cross_entropy import gradients_of, statistics_of
from megafx.rules.families import OpCall

CLASSES = 1 << 14  # a bf16 part of [CLASSES, 4096] is 128 MiB


class Turned(NamedTuple):
    """What gradients read."""

    xt: Tensor
    weight_t: Tensor
    xt_scale: Tensor
    weight_t_scale: Tensor
    format: str


class ScaledChunks(LogitsChunks):
    """Logits from FP8. turned: None where no gradients are taken."""

    def __init__(
        self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, turned: Turned | None, bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(x, weight, bias, dtype)
        padding = len(self.weight) - self.classes
        self.x_scale, self.weight_scale = x_scale, weight_scale
        if weight_scale.dim():
            self.weight_scale = padded(weight_scale, padding)
        if turned is not None and padding:
            turned = turned._replace(weight_t=F.pad(turned.weight_t, (0, padding)))
        self.turned = turned

    def fill(self, rows: slice, out: Tensor) -> None:
        scale = self.x_scale[rows] if self.x_scale.dim() else self.x_scale
        scaled_mm(self.x[rows], self.weight, scale, self.weight_scale, "e4m3", "e4m3", self.dtype, out=out)
        if self.bias is not None:
            out += self.bias

    def gradients(self, factor: float, fp32: bool, largest: Callable[[], Tensor]) -> ScaledGradients:
        assert self.turned is not None
        return ScaledGradients(self, self.turned, factor, fp32, largest())


class ScaledGradients(LayerGradients):
    """largest: [] of the logits' gradients."""

    def __init__(self, chunks: ScaledChunks, turned: Turned, factor: float, fp32: bool, largest: Tensor) -> None:
        super().__init__(chunks, factor, fp32)
        self.turned, self.largest = turned, largest.to(wide(chunks.dtype))

    def add_products(self, rows: slice, grad: Tensor) -> None:
        xt, weight_t, xt_scale, weight_t_scale, format = self.turned
        q, qt, scale = quantize(grad, self.largest, -1, format, False, True, True)
        scale = scale * self.alpha
        scaled_mm(q, weight_t, scale, weight_t_scale, format, "e4m3", self.x.dtype, out=self.x[rows])
        x = xt[:, rows].contiguous()
        for start in range(0, len(qt), CLASSES):
            out, part = self._weight[start : start + CLASSES], qt[start : start + CLASSES]
            operands = part, x, scale, xt_scale, format, "e4m3", out.dtype
            if self.started:
                out += scaled_mm(*operands)
            else:
                scaled_mm(*operands, out=out)


# -- ops

_LOGITS = "Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale"
_TURNED = "Tensor xt, Tensor weight_t, Tensor xt_scale, Tensor weight_t_scale, str format"
_PLACE = f"{parts.SHARDED}, ScalarType dtype"


def _rule(call: OpCall, results: str, middle: str = "") -> str:
    """Of the ranks of an axis that have tokens each. middle: factors of what is read in addition."""
    scale = lambda name, factor: "~" + (factor if len(call.get(name).shape) else "")
    turned = ""
    if call.get("xt") is not None:
        turned = f", ~k! t, ~k! v!, {scale('xt_scale', 'k!')}, {scale('weight_t_scale', 'k!')}"
    x_scale, weight_scale = scale("x_scale", "t"), scale("weight_scale", "v!")
    return f"~t k!, ~v! k!, {x_scale}, {weight_scale}{turned}, ~v!, ~t{middle} -> {results}"


def _fakes(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, fp32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw = (v.new_empty(v.shape, dtype=dtype) for v in (x, weight))
    dw = dw.to(wide(dtype)) if fp32 else dw
    return dx, dw, x.new_empty(0, dtype=dtype) if bias is None else bias.new_empty(weight.shape[0])


def _workspace(x: Any, weight: Any, itemsize: int, gradients: bool) -> int:
    """The chunk of logits; and its gradient in both orientations."""
    logits = chunk_bytes(x, weight, itemsize)
    return logits + (2 * logits // itemsize if gradients else 0)


def _whole(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, xt: Tensor, weight_t: Tensor, xt_scale: Tensor,
    weight_t_scale: Tensor, format: str, bias: Tensor | None, target: Tensor, ignore_index: int, smoothing: float,
    dtype: torch.dtype, *, fp32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    check_linear(x, weight, bias, target)
    turned = Turned(xt, weight_t, xt_scale, weight_t_scale, format)
    chunks = ScaledChunks(x, weight, x_scale, weight_scale, turned, bias, dtype)
    loss, made = loss_and_gradients(chunks, target, ignore_index, smoothing, True, fp32)
    assert made is not None
    db = loss.new_empty(0, dtype=dtype) if made.bias is None or bias is None else made.bias.to(bias.dtype)
    return loss, made.x, made.weight, db


def _whole_fake(*args: Any, fp32: bool) -> tuple[Tensor, ...]:
    x, weight, bias, dtype = args[0], args[1], args[9], args[-1]
    return x.new_empty((), dtype=wide(dtype)), *_fakes(x, weight, bias, dtype, fp32)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, xt: Tensor, weight_t: Tensor,
    xt_scale: Tensor, weight_t_scale: Tensor, format: str, bias: Tensor | None, target: Tensor, all_stats: Tensor,
    lse_grad: Tensor | None, ignore_index: int, smoothing: float, layout: Any, size: int, axis: str, dtype: torch.dtype,
    *, fp32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    turned, how = (
        Turned(xt, weight_t, xt_scale, weight_t_scale, format),
        Loss.of_rank(ignore_index, smoothing, layout, size, axis),
    )
    chunks = ScaledChunks(x, weight, x_scale, weight_scale, turned, bias, dtype)
    like = grad.new_empty(0, dtype=dtype) if bias is None else bias
    return gradients_of(chunks, grad, target, all_stats, lse_grad, how, fp32, like)


def _backward_fake(grad: Tensor, *args: Any, fp32: bool) -> tuple[Tensor, ...]:
    return _fakes(args[0], args[1], args[9], args[-1], fp32)


def _statistics(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, target: Tensor, layout: Any,
    size: int, axis: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    check_linear(x, weight, bias, target)
    return statistics_of(ScaledChunks(x, weight, x_scale, weight_scale, None, bias, dtype), target, layout, size, axis)


stats = define_op(
    f"scaled_linear_ce_stats({_LOGITS}, Tensor? bias, Tensor target, {_PLACE}) -> Tensor",
    types="R, S0, R, S0, S0, R -> stats",
    outer=lambda call: f"nl: {_rule(call, 't s!')}",
    cost=MATMUL,
    terms=lambda x, w, *_: x[1] * w[0] // 4,  # an element of the result is one of 4 of a row of logits
    reference=_statistics,
    fake=lambda x, *args: x.new_empty(x.shape[0], 4, dtype=wide(args[-1])),
    workspace=lambda args, itemsize: _workspace(args[0], args[1], itemsize, False),
)
_SCALE = functools.partial(SampleTensor, kind="n", low=1)
_SAMPLE = (fixed(4, 6), fixed(6, 6), _SCALE(()), _SCALE(()), fixed(6, 4), fixed(6, 6), _SCALE(()), _SCALE(()), "e5m2")
_ROWS = (
    fixed(4, 6),
    fixed(6, 6),
    _SCALE((4,)),
    _SCALE((6,)),
    fixed(6, 4),
    fixed(6, 6),
    _SCALE((6,)),
    _SCALE((6,)),
    "e4m3",
)
_HOW = (fixed(6), ids(6, 4), -100, 0.1, torch.float64)
wholes, backwards = [], []
for _suffix, _fp32 in (("", False), ("_fp32", True)):
    wholes.append(
        define_op(
            f"scaled_linear_cross_entropy{_suffix}({_LOGITS}, {_TURNED}, Tensor? bias, Tensor target, int ignore_index, "
            "float label_smoothing, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
            rule=lambda call: f"sum: {_rule(call, '; t k!; v! k!; v!')}",
            samples=[(*_SAMPLE, *_HOW), (*_ROWS, *_HOW)],
            cost=MATMUL,
            terms=lambda x, w, *_: x[0] * x[1] * w[0] * 3,
            reference=functools.partial(_whole, fp32=_fp32),
            ends=True,
            fake=functools.partial(_whole_fake, fp32=_fp32),
            workspace=lambda args, itemsize: _workspace(args[0], args[1], itemsize, True),
        )
    )
    backwards.append(
        define_op(
            f"scaled_linear_ce_loss{_suffix}_backward(Tensor grad, {_LOGITS}, {_TURNED}, Tensor? bias, Tensor target, "
            f"{parts.GRADIENT}, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
            types="R, R, S0, R, S0, R, S1, R, R, S0, R, stats, R -> P; S0; S0",
            outer=lambda call: f"sum: t, {_rule(call, 't k!; v! k!; v!', ', r! t s!, t')}",
            cost=MATMUL,
            terms=lambda grad, x, w, *_: 3 * w[0],
            reference=functools.partial(_backward, fp32=_fp32),
            fake=functools.partial(_backward_fake, fp32=_fp32),
            workspace=lambda args, itemsize: _workspace(args[1], args[2], itemsize, True),
        )
    )
OPS = frozenset((stats, *wholes, *backwards))
