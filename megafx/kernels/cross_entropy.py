"""Cross entropy with index targets, whole or over a sharded vocabulary.

    loss = log sum_v exp(x_v - m) + (1 - a) (m - x_y) + a (m - mean_v x_v)      m = max_v x_v, y the target
    dx_v = g (exp(x_v - m) / sum - (1 - a) [v = y] - a / V)                     both 0 where y = ignore_index

a is the label smoothing in torch's convention: the target distribution is (1 - a) onehot + a / V. T tokens, V classes
in the whole vocabulary. Statistics, loss and gradient arithmetic are fp32 (fp64 for fp64 logits); the gradient is rounded
once, to the dtype of the logits. Subtracting the maximum first keeps large common offsets out of the result. Saved: the
logits and two numbers a token, from which backward recomputes the softmax. CPU and fp64: plain torch on chunks of rows,
never more than one of them in fp32. CUDA: cross_entropy_triton.py, one pass over the logits each way; shards in several
blocks, which the planner does not propose, take the plain path.

Whole vocabulary:      cross_entropy -> cross_entropy_forward (loss, norm); cross_entropy_backward
Sharded vocabulary:    ce_stats (local) -> all-gather, in the graph -> ce_loss; ce_loss_backward needs no collective
"norm" [T, 2] is (m, log sum exp(x - m)): their sum is the log-sum-exp, kept apart for accuracy.

Megatron's vocab-parallel loss gets label smoothing wrong for t > 1 (local V and local mean): here both are global.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import collectives
from ..placements import Layout, Piece

# Elements of the fp32 chunk. CPU: stays in L2 with the logits; CUDA: 64 MiB, launches cost nothing against that.
CPU_CHUNK, CUDA_CHUNK = 1 << 18, 1 << 24

HAVE_TRITON = importlib.util.find_spec("triton") is not None


def statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def on_gpu(x: Tensor) -> bool:
    return HAVE_TRITON and x.device.type == "cuda" and x.dtype != torch.float64


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, (CPU_CHUNK if logits.device.type == "cpu" else CUDA_CHUNK) // max(columns, 1))
    return (slice(r, min(r + step, rows)) for r in range(0, rows, step))


def _check(logits: Tensor, target: Tensor, label_smoothing: float) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"cross entropy needs logits [T, V] and target [T], got {logits.shape} and {target.shape}")
    if target.is_floating_point():
        raise TypeError(f"cross entropy needs class indices as target, got {target.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")


def check_targets(target: Tensor, ignore_index: int, classes: int) -> None:
    """Targets in [0, classes) or ignore_index, as torch: IndexError on CPU, a device-side assertion on CUDA."""
    bad = ((target < 0) | (target >= classes)) & ~ignored_tokens(target, ignore_index)
    if target.device.type != "cpu":
        torch._assert_async(~bad.any(), f"cross entropy: a target is out of bounds of {classes} classes")
    elif bool(bad.any()):
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")


def ignored_tokens(target: Tensor, ignore_index: int) -> Tensor:
    return target.long() == ignore_index  # long: ignore_index need not fit in the dtype of the targets


# -- local statistics, combination and gradient: plain torch


def local_stats(logits: Tensor, target: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Columns `pieces` of logits [T, V_local]; target [T] global -> [T, 4].

    The four: max, sum exp(x - max), x at the target or 0, sum x. Padding is not read. No column: (-inf, 0, 0, 0).
    """
    dtype = statistics_dtype(logits)
    stats = torch.zeros(len(target), 4, dtype=dtype, device=logits.device)
    stats[:, 0] = -torch.inf
    own, local = _local_target(target, pieces)
    for rows in _row_chunks(logits):
        x = _columns(logits[rows], pieces)
        if not x.numel():
            continue
        high = x.amax(1).to(dtype)
        stats[rows, 0] = high
        stats[rows, 3] = x.sum(1, dtype=dtype)
        # A shard of nothing but -inf adds 0 to the sum: its maximum must not make -inf - -inf.
        z = x.to(dtype, copy=True).sub_(high.masked_fill(high == -torch.inf, 0)[:, None])
        stats[rows, 1] = z.exp_().sum(1)
        picked = logits[rows].gather(1, local[rows, None])[:, 0].to(dtype)
        stats[rows, 2] = picked.masked_fill_(~own[rows], 0)
    return stats


def combine(all_stats: Tensor) -> Tensor:
    """[t, T, 4] -> [T, 4]: the statistics of the whole vocabulary, from those of its shards."""
    if len(all_stats) == 1:
        return all_stats[0]
    high = all_stats[:, :, 0].amax(0)
    finite = high.masked_fill(high == -torch.inf, 0)
    total = (all_stats[:, :, 1] * (all_stats[:, :, 0] - finite).exp()).sum(0)
    return torch.stack([high, total, all_stats[:, :, 2].sum(0), all_stats[:, :, 3].sum(0)], 1)


def norm_of(stats: Tensor) -> Tensor:
    """[T, 4] -> [T, 2]: max and log sum exp(x - max)."""
    return torch.stack([stats[:, 0], stats[:, 1].log()], 1)


def loss_of(stats: Tensor, ignored: Tensor, label_smoothing: float, classes: int) -> Tensor:
    """[T, 4] of the whole vocabulary -> loss [T], 0 where ignored."""
    high, total, picked, summed = stats.unbind(1)
    loss = total.log() + (1 - label_smoothing) * (high - picked)
    if label_smoothing:  # not added as 0 * (...): classes masked with -inf make the mean -inf
        loss = loss + label_smoothing * (high - summed / classes)
    return loss.masked_fill(ignored, 0)


def logits_gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    norm: Tensor,
    ignore_index: int,
    label_smoothing: float,
    pieces: Sequence[Piece],
    classes: int,
    out: Tensor | None = None,
) -> Tensor:
    """grad [T], logits [T, V_local], norm [T, 2] of the whole vocabulary -> [T, V_local], 0 in padding columns.

    out: where to write it, possibly `logits` itself.
    """
    whole = _covers(pieces, logits.shape[1])
    if on_gpu(logits) and len(pieces) == 1:
        from . import cross_entropy_triton

        args = (grad, logits, target, norm, ignore_index, label_smoothing, pieces[0], classes, out)
        return cross_entropy_triton.gradient(*args)
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    ignored = ignored_tokens(target, ignore_index)
    own, local = _local_target(target, pieces)
    for rows in _row_chunks(logits):
        z = logits[rows].to(norm.dtype, copy=True)
        z.sub_(norm[rows, :1]).sub_(norm[rows, 1:]).exp_()
        if label_smoothing:
            z.sub_(label_smoothing / classes)
        at_target = own[rows].to(z.dtype) * (label_smoothing - 1)
        z.scatter_add_(1, local[rows, None], at_target[:, None])
        z.mul_(grad[rows, None]).masked_fill_(ignored[rows, None], 0)
        if not whole:
            out[rows] = 0
        for _, start, length in [Piece(0, 0, logits.shape[1])] if whole else pieces:
            out[rows, start : start + length] = z[:, start : start + length]
    return out


def _covers(pieces: Sequence[Piece], columns: int) -> bool:
    return sum(p.length for p in pieces) == columns


def _columns(x: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The columns that are no padding."""
    if _covers(pieces, x.shape[1]):
        return x
    parts = [x.narrow(1, p.local_start, p.length) for p in pieces]
    return parts[0] if len(parts) == 1 else torch.cat([x[:, :0], *parts], 1)


def _local_target(target: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Global class indices [T] -> (mine: bool [T], local column: int64 [T], 0 where it is not mine)."""
    target = target.long()
    own, local = torch.zeros_like(target, dtype=torch.bool), torch.zeros_like(target)
    for global_start, local_start, length in pieces:
        here = (target >= global_start) & (target < global_start + length)
        own |= here
        local = torch.where(here, target - global_start + local_start, local)
    return own, local


# -- whole vocabulary

_library = torch.library.Library("megafx", "FRAGMENT")
_library.define("cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> Tensor")


@torch.library.impl(_library, "cross_entropy", "CompositeImplicitAutograd")
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """logits [T, V], target [T] -> loss [T], 0 where ignored; fp32, fp64 for fp64 logits. Traces as its inner op."""
    return torch.ops.megafx.cross_entropy_forward(logits, target, ignore_index, label_smoothing)[0]


@torch.library.custom_op(
    "megafx::cross_entropy_forward",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor loss, Tensor norm)",
)
def cross_entropy_forward(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """logits [T, V], target [T] -> loss [T], norm [T, 2] (max, log sum exp(x - max); not differentiable)."""
    return token_losses(logits, target, ignore_index, label_smoothing)


def token_losses(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    _check(logits, target, label_smoothing)
    classes = logits.shape[1]
    if on_gpu(logits):
        from . import cross_entropy_triton

        return cross_entropy_triton.forward(logits, target, ignore_index, label_smoothing)
    check_targets(target, ignore_index, classes)
    stats = local_stats(logits, target, [Piece(0, 0, classes)])
    return loss_of(stats, ignored_tokens(target, ignore_index), label_smoothing, classes), norm_of(stats)


def rank_statistics(logits: Tensor, target: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """[T, 4] of this rank's classes."""
    _check(logits, target, 0.0)
    if on_gpu(logits) and len(pieces) == 1:
        from . import cross_entropy_triton

        return cross_entropy_triton.stats(logits, target, pieces[0])
    return local_stats(logits, target, pieces)


def loss_of_ranks(target: Tensor, all_stats: Tensor, ignore_index: int, label_smoothing: float, classes: int) -> Tensor:
    """all_stats [t, T, 4] -> loss [T] of the whole vocabulary."""
    if on_gpu(all_stats):
        from . import cross_entropy_triton

        return cross_entropy_triton.combine(all_stats, target, ignore_index, label_smoothing, classes, True)[0]
    check_targets(target, ignore_index, classes)
    return loss_of(combine(all_stats), ignored_tokens(target, ignore_index), label_smoothing, classes)


def norm_of_ranks(target: Tensor, all_stats: Tensor, ignore_index: int, label_smoothing: float, classes: int) -> Tensor:
    """all_stats [t, T, 4] -> norm [T, 2] of the whole vocabulary."""
    if on_gpu(all_stats):
        from . import cross_entropy_triton

        return cross_entropy_triton.combine(all_stats, target, ignore_index, label_smoothing, classes, False)[1]
    return norm_of(combine(all_stats))


@cross_entropy_forward.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    _check(logits, target, label_smoothing)
    dtype = statistics_dtype(logits)
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty(logits.shape[0], 2, dtype=dtype)


@torch.library.custom_op(
    "megafx::cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor logits, Tensor target, Tensor norm, int ignore_index, float label_smoothing)"
    " -> Tensor",
)
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """grad [T] of the loss -> gradient of the logits [T, V]."""
    classes = logits.shape[1]
    pieces = [Piece(0, 0, classes)]
    return logits_gradient(grad, logits, target, norm, ignore_index, label_smoothing, pieces, classes)


@cross_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _forward_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros in traced graphs for the gradient that norm does not have
    ctx.save_for_backward(logits, target, output[1])


def _forward_backward(ctx, grad: Tensor | None, _):  # type: ignore[no-untyped-def]
    if grad is None:
        return None, None, None, None
    arguments = (grad, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing)
    return torch.ops.megafx.cross_entropy_backward(*arguments), None, None, None


cross_entropy_forward.register_autograd(_forward_backward, setup_context=_forward_context)


# -- sharded vocabulary: logits [T, V_local] of this rank, cut by `layout` over the `size` ranks of `axis`


def own_pieces(layout: Sequence[int], axis: str, size: int) -> list[Piece]:
    return list(Layout.from_flat(layout).pieces(collectives.axis_rank(axis), size))


@torch.library.custom_op(
    "megafx::ce_stats",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, SymInt[] layout, str axis, int size) -> Tensor",
)
def ce_stats(logits: Tensor, target: Tensor, layout: Sequence[int], axis: str, size: int) -> Tensor:
    """logits [T, V_local], target [T] global -> [T, 4] of this rank's classes; no gradient (ce_loss carries it)."""
    return rank_statistics(logits, target, own_pieces(layout, axis, size))


@ce_stats.register_fake
def _(logits: Tensor, target: Tensor, layout: Sequence[int], axis: str, size: int) -> Tensor:
    return logits.new_empty(logits.shape[0], 4, dtype=statistics_dtype(logits))


@torch.library.custom_op(
    "megafx::ce_loss",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor all_stats, int ignore_index, float label_smoothing, "
    "SymInt[] layout, str axis, int size) -> Tensor",
)
def ce_loss(
    logits: Tensor,
    target: Tensor,
    all_stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    axis: str,
    size: int,
) -> Tensor:
    """all_stats [t, T, 4] of all ranks -> loss [T] of the whole vocabulary, the same on all ranks.

    The logits are an operand for the sake of their gradient: ce_loss is differentiable in them alone, and the
    gradient is that of the whole loss, statistics included.
    """
    _check(logits, target, label_smoothing)
    return loss_of_ranks(target, all_stats, ignore_index, label_smoothing, Layout.from_flat(layout).size)


@ce_loss.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    all_stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    axis: str,
    size: int,
) -> Tensor:
    return all_stats.new_empty(logits.shape[0])


@torch.library.custom_op(
    "megafx::ce_loss_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor logits, Tensor target, Tensor all_stats, int ignore_index, float label_smoothing, "
    "SymInt[] layout, str axis, int size) -> Tensor",
)
def ce_loss_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    all_stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    axis: str,
    size: int,
) -> Tensor:
    """grad [T] of the loss -> gradient of this rank's logits [T, V_local], 0 in padding columns. No collective."""
    pieces, classes = own_pieces(layout, axis, size), Layout.from_flat(layout).size
    norm = norm_of_ranks(target, all_stats, ignore_index, label_smoothing, classes)
    return logits_gradient(grad, logits, target, norm, ignore_index, label_smoothing, pieces, classes)


@ce_loss_backward.register_fake
def _(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    all_stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    layout: Sequence[int],
    axis: str,
    size: int,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _loss_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, target, all_stats, *ctx.rest = inputs
    ctx.save_for_backward(logits, target, all_stats)


def _loss_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    return torch.ops.megafx.ce_loss_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 7


ce_loss.register_autograd(_loss_backward, setup_context=_loss_context)
