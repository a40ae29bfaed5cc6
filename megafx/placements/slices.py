"""Which boxes of an original tensor a rank's local tensor holds, and where. No torch import.

Code that reads or writes weights outside of a step (files, checkpoints, initialisation) uses these: a shard's blocks are
boxes in the coordinates of the original tensor, and padding is in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub

from megafx.placements.types import Cuts, Owned, Placement, local_shape, on_axes


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


def shard_slices(shape: Sequence[int], cuts: Cuts, rank: int) -> list[ShardSlice]:
    """The boxes of an original tensor of `shape` that `rank` holds, in local order: of one axis a box for each piece of its
    layout, none where the rank holds padding only, or nothing because another owns the tensor. Over all ranks they cover the
    original tensor, each element once.
    """
    zeros = (0,) * len(shape)
    found, left = [ShardSlice(zeros, zeros, tuple(shape))], [*shape]
    for n, (cut, at, size) in enumerate(on_axes(cuts, rank)):
        own = _slices(tuple(left), cut, at, size)
        found = [part for box in found for of in own if (part := _common(box, of)).sizes[0] > 0] if n else own
        left = local_shape(left, ((cut, size),), at)
    return found


def _slices(whole: tuple[int, ...], placement: Placement, rank: int, t: int) -> list[ShardSlice]:
    """Of one axis."""
    zeros, dim = (0,) * len(whole), placement.dim
    if t == 1 or (isinstance(placement, Owned) and rank == placement.owner):
        return [ShardSlice(zeros, zeros, whole)]
    if isinstance(placement, Owned):
        return []

    def at(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return [
        ShardSlice(at(zeros, piece.global_start), at(zeros, piece.local_start), at(whole, piece.length))
        for piece in placement.cut.pieces(rank, t)
    ]


def _common(box: ShardSlice, of: ShardSlice) -> ShardSlice:
    """What a box of the original tensor has in common with one of the local tensor: in the local tensor of that."""
    starts = [*map(max, box.local_offsets, of.offsets)]
    ends = map(min, map(add, box.local_offsets, box.sizes), map(add, of.offsets, of.sizes))
    offsets = (a + s - b for a, s, b in zip(box.offsets, starts, box.local_offsets, strict=True))
    local = (a + s - b for a, s, b in zip(of.local_offsets, starts, of.offsets, strict=True))
    return ShardSlice(tuple(offsets), tuple(local), tuple(map(sub, ends, starts)))
