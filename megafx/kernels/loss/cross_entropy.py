"""Cross entropy with index targets, whole or over a sharded vocabulary.

    loss = log sum_v exp(x_v - m) + (1 - a) (m - x_y) + a (m - mean_v x_v)      m = max_v x_v, y the target
    dx_v = g (exp(x_v - m) / sum - (1 - a) [v = y] - a / V)                     both 0 where y = ignore_index

    lse  = log sum_v exp(x_v),  d lse / d x_v = softmax_v      beside the loss (z-loss), of ignored tokens too

a is the label smoothing in torch's convention: the target distribution is (1 - a) onehot + a / V. T tokens, V classes
in the whole vocabulary. Statistics, loss and gradient arithmetic are fp32 (fp64 for fp64 logits); the gradient is rounded
once, to the dtype of the logits. Subtracting the maximum first keeps large common offsets out of the result. Saved: the
logits and two numbers a token, from which backward recomputes the softmax. CPU and fp64: plain torch on chunks of rows,
never more than one of them in fp32. CUDA: cross_entropy_triton.py, one pass over the logits each way; shards in several
blocks, which the planner does not propose, take the plain path.

Whole vocabulary:      cross_entropy, cross_entropy_lse -> cross_entropy_forward (loss, norm); cross_entropy_backward
Sharded vocabulary:    ce_stats (local) -> all-gather, in the graph -> ce_loss, ce_loss_lse; ce_loss_backward: no collective
                       (Megatron-LM's vocab_parallel_cross_entropy has three all-reduces)
Names that end in _lse give [2, T]: the loss, and the log-sum-exp. cross_entropy_backward_ and ce_loss_backward_ write the
gradient over the logits. "norm" [T, 2] is (m, log sum exp(x - m)): their sum is the log-sum-exp, kept apart for accuracy.

Megatron's vocab-parallel loss gets label smoothing wrong for t > 1 (local V and local mean): here both are global.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import Localized, fixed, ids, real
from megafx.kernels.common.op import InPlace, define_composite, define_gradient, define_op, new_like
from megafx.kernels.loss.cross_entropy_parts import (
    logits_gradient,
    loss_of_ranks,
    norm_of_ranks,
    rank_statistics,
    token_losses,
)
from megafx.kernels.loss.cross_entropy_reference import check_shapes, own_pieces, statistics_dtype
from megafx.placements.types import I, Layout, Piece, S

_SHARDED = "SymInt[] layout, int size, str axis"

# -- whole vocabulary


def _whole(logits: Tensor) -> list[Piece]:
    return [Piece(0, 0, logits.shape[1])]


def _forward_fake(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    check_shapes(logits, target, label_smoothing)
    dtype = statistics_dtype(logits)
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty(logits.shape[0], 2, dtype=dtype)


def backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    norm: Tensor,
    lse_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """grad [T] of the loss, lse_grad [T] of the log-sum-exp -> gradient of the logits [T, V]."""
    rest = (ignore_index, label_smoothing, _whole(logits), logits.shape[1])
    return logits_gradient(grad, logits, target, norm, *rest, out, lse_grad)


def _over(found: Tensor, logits: Tensor) -> Tensor:
    return logits if found is logits else logits.copy_(found)


_TOKENS = "Tensor logits, Tensor target, int ignore_index, float label_smoothing"
_OF_BOTH = "Tensor? lse_grad, int ignore_index, float label_smoothing"
_BACKWARD = f"Tensor grad, Tensor logits, Tensor target, Tensor norm, {_OF_BOTH}"

define_op(
    f"cross_entropy_forward({_TOKENS}) -> (Tensor, Tensor)",
    rule="nl: t v!, ~t -> t; t 1",
    samples=[(real(4, 6), ids(6, 4), -100, 0.1)],
    reference=token_losses,
    triton="loss.cross_entropy_triton:forward",
    fake=_forward_fake,
)
define_op(
    f"cross_entropy_backward({_BACKWARD}) -> Tensor",
    rule="nl[0]: t, t v!, ~t, t 1, +t -> t v!",
    samples=[(real(4), real(4, 6), ids(6, 4), fixed(4, 2), None, -100, 0.1)],
    reference=backward,
    triton="loss.cross_entropy_triton:backward",
    fake=lambda grad, logits, *_: new_like(logits),
    inplace=InPlace("logits", lambda grad, x, *rest: _over(backward(grad, x, *rest, out=x), x)),
)


def _loss(*args: Any) -> Tensor:
    found: Tensor = torch.ops.megafx.cross_entropy_forward(*args)[0]
    return found


def _loss_and_lse(*args: Any) -> Tensor:
    loss, norm = torch.ops.megafx.cross_entropy_forward(*args)
    return torch.stack([loss, norm.sum(1)])


def _over_ranks(emit: Callable[..., Any], node: Any, layout: Any, size: int, axis: str) -> Any:
    """cross_entropy(logits S1, target) -> local statistics, one all-gather of [t, T, 4], local loss: invariant."""
    logits, target, ignore_index, smoothing = node.args
    aten, ops, one_each = torch.ops.aten, torch.ops.megafx, Layout.contiguous(size, size)
    fixed_logits = emit(aten.detach.default, logits)  # ce_loss knows the whole derivative
    stats = emit(ops.ce_stats.default, fixed_logits, target, layout, size, axis)
    stacked = emit(aten.unsqueeze.default, stats, 0, placement=S(0, one_each))
    gather = (stacked, "S0", "I", list(one_each.flat()), [], axis, size)
    everyone = emit(ops.transition.default, *gather, placement=I)
    loss = ops.ce_loss_lse if node.target is ops.cross_entropy_lse.default else ops.ce_loss
    return emit(loss.default, logits, target, everyone, ignore_index, smoothing, layout, size, axis, placement=I)


define_composite(
    f"cross_entropy({_TOKENS}) -> Tensor",
    localize=Localized("v", "I", _over_ranks),
    rule="nl: t v, ~t -> t",
    samples=[(real(4, 6), ids(6, 4), -100, 0.1)],
    body=_loss,
)
define_composite(
    f"cross_entropy_lse({_TOKENS}) -> Tensor",
    localize=Localized("v", "I", _over_ranks),
    rule="nl: t v, ~t -> 1 t",
    samples=[(real(4, 6), ids(6, 4), -100, 0.1)],
    body=_loss_and_lse,
)


def _forward_saves(ctx, inputs, output) -> None:
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.set_materialize_grads(False)  # no zeros in traced graphs for what is not used
    ctx.save_for_backward(logits, target, output[1])


def _forward_backward(ctx, grad: Tensor | None, norm_grad: Tensor | None):
    """norm is used by its sum alone, so that the gradients of its two columns are that of the log-sum-exp."""
    if grad is None and norm_grad is None:
        return None, None, None, None
    lse_grad = None if norm_grad is None else norm_grad.select(1, 1)
    grad = torch.zeros_like(lse_grad) if grad is None else grad  # type: ignore[arg-type]
    args = (*ctx.saved_tensors, lse_grad, ctx.ignore_index, ctx.label_smoothing)
    return torch.ops.megafx.cross_entropy_backward(grad, *args), None, None, None


define_gradient("cross_entropy_forward", _forward_backward, _forward_saves)


# -- sharded vocabulary: logits [T, V_local] of this rank, cut by `layout` over the `size` ranks of `axis`


def _stats(logits: Tensor, target: Tensor, layout: Sequence[int], size: int, axis: str) -> Tensor:
    """logits [T, V_local], target [T] global -> [T, 4] of this rank's classes; no gradient (ce_loss carries it)."""
    return rank_statistics(logits, target, own_pieces(layout, axis, size))


def _ranks_loss(
    logits: Tensor,
    target: Tensor,
    all_stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    size: int,
    axis: str,
) -> Tensor:
    """all_stats [t, T, 4] of all ranks -> loss [T] of the whole vocabulary, the same on all ranks.

    The logits are an operand for the sake of their gradient: ce_loss is differentiable in them alone, and the
    gradient is that of the whole loss, statistics included.
    """
    check_shapes(logits, target, label_smoothing)
    return loss_of_ranks(target, all_stats, ignore_index, label_smoothing, Layout.from_flat(layout).size)


def loss_and_lse_of_ranks(
    target: Tensor, all_stats: Tensor, ignore_index: int, label_smoothing: float, classes: int
) -> Tensor:
    """[2, T]."""
    args = (target, all_stats, ignore_index, label_smoothing, classes)
    return torch.stack([loss_of_ranks(*args), norm_of_ranks(*args).sum(1)])


def _ranks_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    all_stats: Tensor,
    lse_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    size: int,
    axis: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """grad [T] of the loss -> gradient of this rank's logits [T, V_local], 0 in padding columns. No collective."""
    pieces, classes = own_pieces(layout, axis, size), Layout.from_flat(layout).size
    norm = norm_of_ranks(target, all_stats, ignore_index, label_smoothing, classes)
    rest = (ignore_index, label_smoothing, pieces, classes)
    return logits_gradient(grad, logits, target, norm, *rest, out, lse_grad)


_LOSS = f"Tensor logits, Tensor target, Tensor all_stats, int ignore_index, float label_smoothing, {_SHARDED}"
_RANKS_BACKWARD = f"Tensor grad, Tensor logits, Tensor target, Tensor all_stats, {_OF_BOTH}, {_SHARDED}"

define_op(
    f"ce_stats(Tensor logits, Tensor target, {_SHARDED}) -> Tensor",
    types="S1, R -> stats",
    reference=_stats,
    triton="loss.cross_entropy_triton:rank_stats",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], 4, dtype=statistics_dtype(logits)),
)
define_op(
    f"ce_loss({_LOSS}) -> Tensor",
    types="S1, R, stats -> R",
    reference=_ranks_loss,
    triton="loss.cross_entropy_triton:ranks_loss",
    fake=lambda logits, target, all_stats, *_: all_stats.new_empty(logits.shape[0]),
)
define_op(
    f"ce_loss_lse({_LOSS}) -> Tensor",
    types="S1, R, stats -> R",
    reference=lambda logits, target, all_stats, ignore_index, label_smoothing, layout, size, axis: (
        loss_and_lse_of_ranks(target, all_stats, ignore_index, label_smoothing, Layout.from_flat(layout).size)
    ),
    fake=lambda logits, target, all_stats, *_: all_stats.new_empty(2, logits.shape[0]),
)
define_op(
    f"ce_loss_backward({_RANKS_BACKWARD}) -> Tensor",
    types="R, S1, R, stats, R -> S1",
    reference=_ranks_backward,
    triton="loss.cross_entropy_triton:ranks_backward",
    fake=lambda grad, logits, *_: new_like(logits),
    inplace=InPlace("logits", lambda grad, x, *rest: _over(_ranks_backward(grad, x, *rest, out=x), x)),
)


def _loss_saves(ctx, inputs, output) -> None:
    logits, target, all_stats, *ctx.rest = inputs
    ctx.save_for_backward(logits, target, all_stats)


def _loss_backward(ctx, grad: Tensor):
    return torch.ops.megafx.ce_loss_backward(grad, *ctx.saved_tensors, None, *ctx.rest), *[None] * 7


def _loss_lse_backward(ctx, grad: Tensor):
    first, second = grad.select(0, 0), grad.select(0, 1)
    return torch.ops.megafx.ce_loss_backward(first, *ctx.saved_tensors, second, *ctx.rest), *[None] * 7


define_gradient("ce_loss", _loss_backward, _loss_saves)
define_gradient("ce_loss_lse", _loss_lse_backward, _loss_saves)
