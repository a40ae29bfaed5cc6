"""Cross entropy of a linear layer whose classes are sharded over ranks, without this rank's logits.

    logits = x W^T + b          x [T, K] the same on every rank; weight [V_local, K], bias [V_local] or none of this rank
    linear_ce_stats             this rank's statistics [T, 4] of each token (cross_entropy.py): gathered in the graph, [t, T, 4]
    linear_ce_loss              loss [T] of the whole vocabulary, from the statistics alone: the same on every rank
    linear_ce_loss_lse          [2, T]: that, and the log-sum-exp
    linear_ce_loss_backward     dx [T, K], a summand of this rank; dweight, dbias, this rank's; no collective

Logits exist a chunk of tokens at a time (logits_chunks.py): once for the statistics, and again in backward, where they become
their gradient in place: four products in all, against three and [T, V_local] logits kept. The operands of the layer are those
of linear_ce_loss for the sake of their gradients: these are of the whole loss, statistics included. Saved: x, weight, bias and
the gathered statistics.

fp16: the gradient of the loss is taken relative to the largest of all tokens, so that neither loss scaling nor the mean over
many tokens drives the logits' gradient out of range, and the layer's gradients are multiplied by it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafx.kernels.common.op import define_gradient, define_op, wide
from megafx.kernels.loss.cross_entropy import loss_and_lse_of_ranks
from megafx.kernels.loss.cross_entropy_parts import logits_gradient, loss_of_ranks, norm_of_ranks, rank_statistics
from megafx.kernels.loss.cross_entropy_reference import own_pieces
from megafx.kernels.loss.linear_cross_entropy import check_linear
from megafx.kernels.loss.logits_chunks import FP16_FACTOR, LayerGradients, LogitsChunks
from megafx.placements.types import Layout


def statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, layout: Sequence[int], size: int, axis: str
) -> Tensor:
    """[T, 4] of this rank's classes."""
    check_linear(x, weight, bias, target)
    pieces, target = own_pieces(layout, axis, size), target.contiguous()
    stats = x.new_empty(len(x), 4, dtype=wide(x.dtype))
    for rows, logits in LogitsChunks(x, weight, bias):
        stats[rows] = rank_statistics(logits, target[rows], pieces)
    return stats


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    all_stats: Tensor,
    lse_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [T] of the loss, lse_grad [T] of the log-sum-exp -> dx (this rank's summand), dweight, dbias (empty without one)."""
    pieces, classes, target = own_pieces(layout, axis, size), Layout.from_flat(layout).size, target.contiguous()
    norm = norm_of_ranks(target, all_stats, ignore_index, label_smoothing, classes)
    low, most = x.dtype == torch.float16, None
    if low:
        given = grad if lse_grad is None else torch.cat([grad, lse_grad])
        most = given.abs().amax() if len(given) else grad.new_ones(())
        most = torch.where(most == 0, 1.0, most)
        grad = grad / most * FP16_FACTOR
        lse_grad = None if lse_grad is None else lse_grad / most * FP16_FACTOR
    chunks = LogitsChunks(x, weight, bias)
    made = LayerGradients(chunks, FP16_FACTOR if low else 1.0)
    for rows, logits in chunks:
        args = (ignore_index, label_smoothing, pieces, classes, logits, None if lse_grad is None else lse_grad[rows])
        logits_gradient(grad[rows], logits, target[rows], norm[rows], *args)
        made.add(rows)
    db = weight.new_empty(0, dtype=wide(x.dtype)) if made.bias is None else made.bias
    found = [made.x, made.weight, db]
    if most is not None:
        found = [v.mul_(most) for v in found]
    return found[0], found[1], found[2].to(weight.dtype if bias is None else bias.dtype)


define_op(
    "linear_ce_stats(Tensor x, Tensor weight, Tensor? bias, Tensor target, SymInt[] layout, int size, str axis) -> Tensor",
    types="R, S0, S0, R -> stats",
    reference=statistics,
    fake=lambda x, weight, bias, target, layout, size, axis: x.new_empty(x.shape[0], 4, dtype=wide(x.dtype)),
)
define_op(
    "linear_ce_loss(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor all_stats, int ignore_index, "
    "float label_smoothing, SymInt[] layout, int size, str axis) -> Tensor",
    types="R, S0, S0, R, stats -> R",
    reference=lambda x, weight, bias, target, all_stats, ignore_index, label_smoothing, layout, size, axis: (
        loss_of_ranks(target, all_stats, ignore_index, label_smoothing, Layout.from_flat(layout).size)
    ),
    fake=lambda x, weight, bias, target, all_stats, *_: all_stats.new_empty(x.shape[0]),
)
define_op(
    "linear_ce_loss_lse(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor all_stats, int ignore_index, "
    "float label_smoothing, SymInt[] layout, int size, str axis) -> Tensor",
    types="R, S0, S0, R, stats -> R",
    reference=lambda x, weight, bias, target, all_stats, ignore_index, label_smoothing, layout, size, axis: (
        loss_and_lse_of_ranks(target, all_stats, ignore_index, label_smoothing, Layout.from_flat(layout).size)
    ),
    fake=lambda x, weight, bias, target, all_stats, *_: all_stats.new_empty(2, x.shape[0]),
)
define_op(
    "linear_ce_loss_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor all_stats, "
    "Tensor? lse_grad, int ignore_index, float label_smoothing, SymInt[] layout, int size, str axis) "
    "-> (Tensor, Tensor, Tensor)",
    types="R, R, S0, S0, R, stats, R -> P; S0; S0",
    reference=backward,
    fake=lambda grad, x, weight, bias, *_: (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=weight.device),
        weight.new_empty(0) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device),
    ),
)


def _saves(ctx, inputs, output) -> None:
    *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.layout, ctx.size, ctx.axis = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad: Tensor, lse_grad: Tensor | None = None):
    rest = (ctx.ignore_index, ctx.label_smoothing, ctx.layout, ctx.size, ctx.axis)
    dx, dw, db = torch.ops.megafx.linear_ce_loss_backward(grad, *ctx.saved_tensors, lse_grad, *rest)
    return dx, dw, None if ctx.saved_tensors[2] is None else db, *[None] * 7


define_gradient("linear_ce_loss", _gradients, _saves)
define_gradient("linear_ce_loss_lse", lambda ctx, grad: _gradients(ctx, grad.select(0, 0), grad.select(0, 1)), _saves)
