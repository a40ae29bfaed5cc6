"""Cross entropy in plain torch: the CPU path, and the oracle of the kernels. cross_entropy.py has formulas and ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megafx.kernels.common.op import wide
from megafx.ops import axes
from megafx.placements.types import Layout, Piece

# Elements of the fp32 chunk. CPU: stays in L2 with the logits; CUDA: 64 MiB, launches cost nothing against that.
CPU_CHUNK, CUDA_CHUNK = 1 << 18, 1 << 24


class Loss(NamedTuple):
    """What is asked for. pieces: the classes whose logits are here; classes: number of the whole vocabulary."""

    ignore_index: int
    smoothing: float
    pieces: list[Piece]
    classes: int

    @staticmethod
    def whole(ignore_index: int, smoothing: float, logits: Tensor) -> Loss:
        return Loss(ignore_index, smoothing, [Piece(0, 0, logits.shape[1])], logits.shape[1])

    @staticmethod
    def of_rank(ignore_index: int, smoothing: float, layout: Sequence[int], size: int, axis: str) -> Loss:
        """The classes of this rank; of the only one, where there is no axis to ask."""
        cut, rank = Layout.from_flat(layout), axes.axis_rank(axis) if size > 1 else 0
        return Loss(ignore_index, smoothing, list(cut.pieces(rank, size)), cut.size)


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, (CPU_CHUNK if logits.device.type == "cpu" else CUDA_CHUNK) // max(columns, 1))
    return (slice(r, min(r + step, rows)) for r in range(0, rows, step))


def check_shapes(logits: Tensor, target: Tensor, label_smoothing: float) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"cross entropy needs logits [T, V] and target [T], got {logits.shape} and {target.shape}")
    if target.is_floating_point():
        raise TypeError(f"cross entropy needs class indices as target, got {target.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")


def check_targets(target: Tensor, how: Loss) -> None:
    """Targets in [0, classes) or ignore_index, as torch: IndexError on CPU, a device-side assertion on CUDA."""
    bad = ((target < 0) | (target >= how.classes)) & ~ignored_tokens(target, how)
    if target.device.type != "cpu":
        torch._assert_async(~bad.any(), f"cross entropy: a target is out of bounds of {how.classes} classes")
    elif bool(bad.any()):
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")


def ignored_tokens(target: Tensor, how: Loss) -> Tensor:
    return target.long() == how.ignore_index  # long: ignore_index need not fit in the dtype of the targets


# -- local statistics, combination and gradient: plain torch


def local_stats(logits: Tensor, target: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Columns `pieces` of logits [T, V_local]; target [T] global -> [T, 4].

    The four: max, sum exp(x - max), x at the target or 0, sum x. Padding is not read. No column: (-inf, 0, 0, 0).
    """
    dtype = wide(logits.dtype)
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


def loss_of(stats: Tensor, target: Tensor, how: Loss) -> Tensor:
    """[T, 4] of the whole vocabulary -> loss [T], 0 where ignored."""
    high, total, picked, summed = stats.unbind(1)
    loss = total.log() + (1 - how.smoothing) * (high - picked)
    if how.smoothing:  # not added as 0 * (...): classes masked with -inf make the mean -inf
        loss = loss + how.smoothing * (high - summed / how.classes)
    return loss.masked_fill(ignored_tokens(target, how), 0)


def plain_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, how: Loss, out: Tensor | None = None,
    lse_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """grad [T], logits [T, V_local], norm [T, 2] of the whole vocabulary -> [T, V_local], 0 in padding columns.

    out: where to write it, possibly `logits` itself. lse_grad [T]: gradient of the log-sum-exp.
    """
    whole = _covers(how.pieces, logits.shape[1])
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    ignored = ignored_tokens(target, how)
    own, local = _local_target(target, how.pieces)
    for rows in _row_chunks(logits):
        z = logits[rows].to(norm.dtype, copy=True)
        z.sub_(norm[rows, :1]).sub_(norm[rows, 1:]).exp_()
        share = None if lse_grad is None else z * lse_grad[rows, None]
        if how.smoothing:
            z.sub_(how.smoothing / how.classes)
        at_target = own[rows].to(z.dtype) * (how.smoothing - 1)
        z.scatter_add_(1, local[rows, None], at_target[:, None])
        z.mul_(grad[rows, None]).masked_fill_(ignored[rows, None], 0)
        z = z if share is None else z.add_(share)
        if not whole:
            out[rows] = 0
        for _, start, length in [Piece(0, 0, logits.shape[1])] if whole else how.pieces:
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
