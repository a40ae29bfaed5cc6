"""Cross entropy of a linear layer whose classes are sharded over ranks, without this rank's logits.

    logits = x W^T + b          x [T, K] the same on every rank; weight [V_local, K], bias [V_local] or none of this rank
    linear_ce_stats             this rank's statistics [T, 4] of each token (cross_entropy.py): gathered in the graph, [t, T, 4]
    linear_ce_loss              loss [T] of the whole vocabulary, from the statistics alone: the same on every rank; with `lse`
                                [2, T], that and the log-sum-exp
    linear_ce_loss_backward     dx [T, K], a summand of this rank; dweight, dbias, this rank's; no collective;
                                `linear_ce_loss_fp32_backward` gives dweight in fp32

Logits exist a chunk of tokens at a time (logits_chunks.py): once for the statistics, and again in backward, where they become
their gradient in place: four products in all, against three and [T, V_local] logits kept. The operands of the layer are those
of linear_ce_loss for the sake of their gradients: these are of the whole loss, statistics included. Saved: x, weight, bias and
the gathered statistics.

fp16: the gradient of the loss is taken relative to the largest of all tokens, so that neither loss scaling nor the mean over
many tokens drives the logits' gradient out of range, and the layer's gradients are multiplied by it at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import MATMUL
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide
from megafx.kernels.loss import cross_entropy as parts
from megafx.kernels.loss.cross_entropy_reference import Loss
from megafx.kernels.loss.linear_cross_entropy import check_linear
from megafx.kernels.loss.logits_chunks import FP16_FACTOR, LogitsChunks, chunk_bytes


def statistics(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *shard: Any) -> Tensor:
    """[T, 4] of this rank's classes."""
    check_linear(x, weight, bias, target)
    return statistics_of(LogitsChunks(x, weight, bias), target, *shard)


def statistics_of(chunks: LogitsChunks, target: Tensor, *shard: Any) -> Tensor:
    target = target.contiguous()
    stats = chunks.x.new_empty(len(chunks.x), 4, dtype=wide(chunks.dtype))
    for rows, logits in chunks:
        stats[rows] = parts.rank_statistics(logits, target[rows], *shard)
    return stats


def loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, all_stats: Tensor, ignore_index: int,
    smoothing: float, lse: bool, *shard: Any,
) -> Tensor:  # fmt: skip
    how = Loss.of_rank(ignore_index, smoothing, *shard)
    return parts.with_lse(*parts.of_all_ranks(all_stats, target, how, check=True), lse)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, all_stats: Tensor,
    lse_grad: Tensor | None, ignore_index: int, smoothing: float, *shard: Any, fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """grad [T] of the loss, lse_grad [T] of the log-sum-exp -> dx (this rank's summand), dweight, dbias (empty without one)."""
    chunks, how = LogitsChunks(x, weight, bias), Loss.of_rank(ignore_index, smoothing, *shard)
    return gradients_of(chunks, grad, target, all_stats, lse_grad, how, fp32, weight if bias is None else bias)


def gradients_of(
    chunks: LogitsChunks, grad: Tensor, target: Tensor, all_stats: Tensor, lse_grad: Tensor | None, how: Loss, fp32: bool,
    bias_like: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """bias_like: has the dtype of the bias' gradient."""
    target, dtype = target.contiguous(), chunks.dtype
    norm = parts.of_all_ranks(all_stats, target, how)[1]
    low, most = dtype == torch.float16, None
    if low:
        given = grad if lse_grad is None else torch.cat([grad, lse_grad])
        most = given.abs().amax() if len(given) else grad.new_ones(())
        most = torch.where((most == 0) | ~most.isfinite(), 1.0, most)  # infinite: a mean over no label at all
        grad = grad / most * FP16_FACTOR
        lse_grad = None if lse_grad is None else lse_grad / most * FP16_FACTOR
    made = chunks.gradients(FP16_FACTOR if low else 1.0, fp32, lambda: _bound(grad, lse_grad, target, how))
    for rows, logits in chunks:
        of_lse = None if lse_grad is None else lse_grad[rows]
        parts.logits_gradient(grad[rows], logits, target[rows], norm[rows], how, logits, of_lse)
        made.add(rows)
    db = made.weight.new_empty(0, dtype=wide(dtype)) if made.bias is None else made.bias
    found = [made.x, made.weight, db]
    if most is not None:
        found = [v.mul_(most) for v in found]
    return found[0], found[1], found[2].to(bias_like.dtype)


def _bound(grad: Tensor, lse_grad: Tensor | None, target: Tensor, how: Loss) -> Tensor:
    """[] that no gradient of a logit exceeds in magnitude: those of a token are its own, times numbers of at most 1."""
    most = grad.abs().masked_fill(target == how.ignore_index, 0.0)
    most = most if lse_grad is None else most + lse_grad.abs()
    return most.amax() if len(most) else grad.new_zeros(())


_LAYER = "Tensor x, Tensor weight, Tensor? bias, Tensor target"

define_op(
    f"linear_ce_stats({_LAYER}, {parts.SHARDED}) -> Tensor",
    types="R, S0, S0, R -> stats",
    outer="nl: t k!, v! k!, v!, ~t -> t s!",
    cost=MATMUL,
    terms=lambda x, w, *_: x[1] * w[0] // 4,  # an element of the result is one of 4 of a row of logits
    reference=statistics,
    fake=lambda x, *_: x.new_empty(x.shape[0], 4, dtype=wide(x.dtype)),
    workspace=lambda args, itemsize: chunk_bytes(args[0], args[1], itemsize),
)
define_op(
    f"linear_ce_loss({_LAYER}, {parts.LOSS}) -> Tensor",
    types="R, S0, S0, R, stats -> R",
    outer="nl: t k!, v! k!, v!, ~t, r! t s! -> t",
    reference=loss,
    fake=lambda x, w, b, target, all_stats, *how: parts.losses_like(all_stats, x.shape[0], how[2]),
)


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, fp32: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    dw = new_like(weight, wide(weight.dtype) if fp32 else None)
    return new_like(x), dw, weight.new_empty(0) if bias is None else new_like(bias)


for _name, _fp32 in (("linear_ce_loss_backward", False), ("linear_ce_loss_fp32_backward", True)):
    define_op(
        f"{_name}(Tensor grad, {_LAYER}, {parts.GRADIENT}) -> (Tensor, Tensor, Tensor)",
        types="R, R, S0, S0, R, stats, R -> P; S0; S0",
        outer="sum: t, t k!, v! k!, v!, ~t, r! t s!, t -> t k!; v! k!; v!",
        cost=MATMUL,
        terms=lambda grad, x, w, *_: 3 * w[0],
        reference=functools.partial(backward, fp32=_fp32),
        fake=functools.partial(_fake_backward, fp32=_fp32),
        workspace=lambda args, itemsize: chunk_bytes(args[1], args[2], itemsize),
    )


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ignore_index, smoothing, ctx.lse, layout, size, axis = inputs
    ctx.how = ignore_index, smoothing, layout, size, axis
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad, lse_grad = parts.both_gradients(grad, ctx.lse)
    dx, dw, db = torch.ops.megafx.linear_ce_loss_backward(grad, *ctx.saved_tensors, lse_grad, *ctx.how)
    return dx, dw, None if ctx.saved_tensors[2] is None else db, *[None] * 8


define_gradient("linear_ce_loss", _gradients, _saves)
