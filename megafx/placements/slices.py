"""Which boxes of an original tensor a rank's local tensor holds, and where. No torch import.

Code that reads or writes weights outside of a step (files, checkpoints, initialisation) uses these: a shard's blocks are
boxes in the coordinates of the original tensor, and padding is in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafx.placements.types import Nested, Owned, Placement


@dataclass(frozen=True)
class ShardSlice:
    """A box of `sizes` elements: at `offsets` in the original tensor, at `local_offsets` in the local tensor."""

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def original(self) -> tuple[slice, ...]:
        """Index of the box in the original tensor (one slice a dim: `get_slice` of safetensors takes it too)."""
        return _box(self.offsets, self.sizes)

    @property
    def local(self) -> tuple[slice, ...]:
        """Index of the box in the local tensor."""
        return _box(self.local_offsets, self.sizes)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def shard_slices(shape: Sequence[int], placement: Placement, rank: int, t: int) -> list[ShardSlice]:
    """The boxes of an original tensor of `shape` that `rank` of `t` holds at `placement` (I, R or S), in local order.

    I and R: one box, the whole tensor. S: one box a piece of the layout, none where the rank holds padding only, or nothing
    because another owns the tensor. Over all ranks the boxes of a shard cover the original tensor, each element once.
    """
    if isinstance(placement, Nested):
        return _nested_slices(shape, placement, rank)
    whole = tuple(shape)
    zeros = (0,) * len(whole)
    if not placement.is_shard or t == 1:
        return [ShardSlice(zeros, zeros, whole)]
    if isinstance(placement, Owned):
        return [ShardSlice(zeros, zeros, whole)] if rank == placement.owner else []
    dim = placement.dim

    def at(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return [
        ShardSlice(at(zeros, piece.global_start), at(zeros, piece.local_start), at(whole, piece.length))
        for piece in placement.cut.pieces(rank, t)
    ]


def _nested_slices(shape: Sequence[int], placement: Nested, rank: int) -> list[ShardSlice]:
    """The boxes of a tensor-parallel rank's shard, as far as they lie in this rank's rows of it."""
    if placement.owner >= 0:
        own = rank // placement.t == placement.owner
        return shard_slices(shape, placement.tensor, rank % placement.t, placement.t) if own else []
    per_rank = placement.inner.cut.local_size(placement.ranks)
    first = rank // placement.t * per_rank
    found = []
    for box in shard_slices(shape, placement.tensor, rank % placement.t, placement.t):
        start, end = max(box.local_offsets[0], first), min(box.local_offsets[0] + box.sizes[0], first + per_rank)
        if start < end:
            offset = box.offsets[0] + start - box.local_offsets[0]
            offsets, local = (offset, *box.offsets[1:]), (start - first, *box.local_offsets[1:])
            found.append(ShardSlice(offsets, local, (end - start, *box.sizes[1:])))
    return found
