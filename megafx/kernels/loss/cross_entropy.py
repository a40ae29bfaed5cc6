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

Whole vocabulary:      cross_entropy -> cross_entropy_forward (loss, norm); cross_entropy_backward
Sharded vocabulary:    ce_stats (local) -> all-gather, in the graph -> ce_loss; ce_loss_backward: no collective
                       (Megatron-LM's vocab_parallel_cross_entropy has three all-reduces)
With `lse` the result is [2, T]: the loss, and the log-sum-exp. cross_entropy_backward_ and ce_loss_backward_ write the gradient
over the logits. "norm" [T, 2] is (m, log sum exp(x - m)): their sum is the log-sum-exp, kept apart for accuracy. A whole
vocabulary is not computed as the only shard: that would be one launch more each way, which combines the statistics.

Megatron's vocab-parallel loss gets label smoothing wrong for t > 1 (local V and local mean): here both are global.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import Localized, fixed, ids, real
from megafx.kernels.common.op import InPlace, define_composite, define_gradient, define_op, new_like, runs_triton, wide
from megafx.kernels.loss.cross_entropy_reference import (
    Loss,
    check_shapes,
    check_targets,
    combine,
    local_stats,
    loss_of,
    norm_of,
    plain_gradient,
)
from megafx.placements.types import I, Layout, S

# -- parts, in Triton where that runs and else in plain torch


def _kernels() -> Any:
    return importlib.import_module(f"{__package__}.cross_entropy_triton")


def token_losses(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of all classes -> loss [T], norm [T, 2]."""
    check_shapes(logits, target, smoothing)
    if runs_triton(logits):
        return _kernels().forward(logits, target, ignore_index, smoothing)
    how = Loss.whole(ignore_index, smoothing, logits)
    check_targets(target, how)
    stats = local_stats(logits, target, how.pieces)
    return loss_of(stats, target, how), norm_of(stats)


def rank_statistics(logits: Tensor, target: Tensor, layout: Sequence[int], size: int, axis: str) -> Tensor:
    """logits [T, V_local], target [T] global -> [T, 4] of this rank's classes; no gradient (ce_loss carries it)."""
    check_shapes(logits, target, 0.0)
    pieces = Loss.of_rank(0, 0.0, layout, size, axis).pieces
    if runs_triton(logits) and len(pieces) == 1:
        return _kernels().stats(logits, target, pieces[0])
    return local_stats(logits, target, pieces)


def of_all_ranks(all_stats: Tensor, target: Tensor, how: Loss, check: bool = False) -> tuple[Tensor, Tensor]:
    """all_stats [t, T, 4] -> loss [T], norm [T, 2] of the whole vocabulary. check: that targets are classes."""
    if runs_triton(all_stats):
        return _kernels().combine(all_stats, target, how, check)
    if check:
        check_targets(target, how)
    stats = combine(all_stats)
    return loss_of(stats, target, how), norm_of(stats)


def with_lse(loss: Tensor, norm: Tensor, lse: bool) -> Tensor:
    """What ops give: the loss [T], or [2, T]."""
    return torch.stack([loss, norm.sum(1)]) if lse else loss


def logits_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, how: Loss, out: Tensor | None = None,
    lse_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `plain_gradient`."""
    if runs_triton(logits) and len(how.pieces) == 1:
        return _kernels().gradient(grad, logits, target, norm, how, out, lse_grad)
    return plain_gradient(grad, logits, target, norm, how, out, lse_grad)


def _over(found: Tensor, logits: Tensor) -> Tensor:
    return logits if found is logits else logits.copy_(found)


# -- whole vocabulary


def _forward_fake(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    check_shapes(logits, target, smoothing)
    dtype = wide(logits.dtype)
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty(logits.shape[0], 2, dtype=dtype)


def backward(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, lse_grad: Tensor | None, ignore_index: int,
    smoothing: float, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """grad [T] of the loss, lse_grad [T] of the log-sum-exp -> gradient of the logits [T, V]."""
    return logits_gradient(grad, logits, target, norm, Loss.whole(ignore_index, smoothing, logits), out, lse_grad)


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, lse: bool) -> Tensor:
    loss, norm = torch.ops.megafx.cross_entropy_forward(logits, target, ignore_index, smoothing)
    return with_lse(loss, norm, lse)


def _over_ranks(emit: Callable[..., Any], node: Any, layout: Any, size: int, axis: str) -> Any:
    """cross_entropy(logits S1, target) -> local statistics, one all-gather of [t, T, 4], local loss: invariant."""
    logits, target, *how = node.args
    aten, ops, one_each = torch.ops.aten, torch.ops.megafx, Layout.contiguous(size, size)
    fixed_logits = emit(aten.detach.default, logits)  # ce_loss knows the whole derivative
    stats = emit(ops.ce_stats.default, fixed_logits, target, layout, size, axis)
    stacked = emit(aten.unsqueeze.default, stats, 0, placement=S(0, one_each))
    gather: Any = (stacked, "S0", "I", list(one_each.flat()), [], axis, size)
    everyone = emit(ops.transition.default, *gather, placement=I)
    return emit(ops.ce_loss.default, logits, target, everyone, *how, layout, size, axis, placement=I)


_TOKENS = "Tensor logits, Tensor target, int ignore_index, float label_smoothing"
_OF_BOTH = "Tensor? lse_grad, int ignore_index, float label_smoothing"

define_composite(
    f"cross_entropy({_TOKENS}, bool lse) -> Tensor",
    localize=Localized("v", "I", _over_ranks),
    rule=lambda call: f"nl: t v, ~t -> {'1 t' if call.get('lse') else 't'}",
    samples=[(real(4, 6), ids(6, 4), -100, 0.1, lse) for lse in (False, True)],
    body=_cross_entropy,
)
define_op(
    f"cross_entropy_forward({_TOKENS}) -> (Tensor, Tensor)",
    rule="nl: t v!, ~t -> t; t 1",
    samples=[(real(4, 6), ids(6, 4), -100, 0.1)],
    reference=token_losses,
    triton="loss.cross_entropy_triton:forward",
    fake=_forward_fake,
)
define_op(
    f"cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor norm, {_OF_BOTH}) -> Tensor",
    rule="nl[0]: t, t v!, ~t, t 1, +t -> t v!",
    samples=[(real(4), real(4, 6), ids(6, 4), fixed(4, 2), None, -100, 0.1)],
    reference=backward,
    triton="loss.cross_entropy_triton:backward",
    fake=lambda grad, logits, *_: new_like(logits),
    inplace=InPlace("logits", lambda grad, x, *rest: _over(backward(grad, x, *rest, out=x), x)),
)


def _forward_saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, target, *ctx.how = inputs
    ctx.set_materialize_grads(False)  # no zeros in traced graphs for what is not used
    ctx.save_for_backward(logits, target, output[1])


def _forward_backward(ctx: Any, grad: Tensor | None, norm_grad: Tensor | None) -> tuple[Any, ...]:
    """norm is used by its sum alone, so that the gradients of its two columns are that of the log-sum-exp."""
    lse_grad = None if norm_grad is None else norm_grad.select(1, 1)
    if grad is None:
        if lse_grad is None:
            return None, None, None, None
        grad = torch.zeros_like(lse_grad)
    return torch.ops.megafx.cross_entropy_backward(grad, *ctx.saved_tensors, lse_grad, *ctx.how), None, None, None


define_gradient("cross_entropy_forward", _forward_backward, _forward_saves)


# -- sharded vocabulary: logits [T, V_local] of this rank, cut by `layout` over the `size` ranks of `axis`


def ranks_loss(
    logits: Tensor, target: Tensor, all_stats: Tensor, ignore_index: int, smoothing: float, lse: bool, *shard: Any
) -> Tensor:
    """all_stats [t, T, 4] of all ranks -> loss [T] of the whole vocabulary, the same on all ranks.

    The logits are an operand for the sake of their gradient: ce_loss is differentiable in them alone, and the
    gradient is that of the whole loss, statistics included.
    """
    check_shapes(logits, target, smoothing)
    how = Loss.of_rank(ignore_index, smoothing, *shard)
    return with_lse(*of_all_ranks(all_stats, target, how, check=True), lse)


def ranks_backward(
    grad: Tensor, logits: Tensor, target: Tensor, all_stats: Tensor, lse_grad: Tensor | None, ignore_index: int,
    smoothing: float, *shard: Any, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """grad [T] of the loss -> gradient of this rank's logits [T, V_local], 0 in padding columns. No collective."""
    how = Loss.of_rank(ignore_index, smoothing, *shard)
    return logits_gradient(grad, logits, target, of_all_ranks(all_stats, target, how)[1], how, out, lse_grad)


def losses_like(all_stats: Tensor, tokens: int, lse: bool) -> Tensor:
    return all_stats.new_empty(2, tokens) if lse else all_stats.new_empty(tokens)


def both_gradients(grad: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Of what ops give -> of the loss, and of the log-sum-exp."""
    return (grad.select(0, 0), grad.select(0, 1)) if lse else (grad, None)


SHARDED = "SymInt[] layout, int size, str axis"
LOSS = f"Tensor all_stats, int ignore_index, float label_smoothing, bool lse, {SHARDED}"
GRADIENT = f"Tensor all_stats, {_OF_BOTH}, {SHARDED}"

define_op(
    f"ce_stats(Tensor logits, Tensor target, {SHARDED}) -> Tensor",
    types="S1, R -> stats",
    outer="nl: t v!, ~t -> t s!",
    reference=rank_statistics,
    triton="loss.cross_entropy_triton:rank_statistics",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], 4, dtype=wide(logits.dtype)),
)
define_op(
    f"ce_loss(Tensor logits, Tensor target, {LOSS}) -> Tensor",
    types="S1, R, stats -> R",
    outer="nl: t v!, ~t, r! t s! -> t",
    reference=ranks_loss,
    triton="loss.cross_entropy_triton:ranks_loss",
    fake=lambda logits, target, all_stats, *how: losses_like(all_stats, logits.shape[0], how[2]),
)
define_op(
    f"ce_loss_backward(Tensor grad, Tensor logits, Tensor target, {GRADIENT}) -> Tensor",
    types="R, S1, R, stats, R -> S1",
    outer="nl[0]: t, t v!, ~t, r! t s!, +t -> t v!",
    reference=ranks_backward,
    triton="loss.cross_entropy_triton:ranks_backward",
    fake=lambda grad, logits, *_: new_like(logits),
    inplace=InPlace("logits", lambda grad, x, *rest: _over(ranks_backward(grad, x, *rest, out=x), x)),
)


def _loss_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, all_stats, ignore_index, smoothing, ctx.lse, *shard = inputs
    ctx.how = ignore_index, smoothing, *shard
    ctx.save_for_backward(logits, target, all_stats)


def _loss_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad, lse_grad = both_gradients(grad, ctx.lse)
    return torch.ops.megafx.ce_loss_backward(grad, *ctx.saved_tensors, lse_grad, *ctx.how), *[None] * 8


define_gradient("ce_loss", _loss_backward, _loss_saves)
