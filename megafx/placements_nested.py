"""Shards of shards: what a rank holds of a parameter that tensor-parallel ranks cut, and data-parallel ranks cut again.

    Nested(S(d, L), t, ranks, rows)    rank r of ranks * t holds the rows (dim 0) of tensor-parallel rank r % t's shard that
                                       are data-parallel rank r // t's, padded so that every rank has as many

Parameters that tensor-parallel ranks hold whole are cut over all of these ranks, which a plain S(0) says. No torch import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafx.placements import I, Layout, Placement, S


@dataclass(frozen=True)
class Nested(Placement):
    """See the module docstring. tensor: the cut over t ranks; ranks: those that cut again; rows: of one shard's dim 0."""

    tensor: Placement = I
    t: int = 1
    ranks: int = 1
    rows: int = 0

    @property
    def inner(self) -> Placement:
        """How data-parallel ranks cut the tensor-parallel shard."""
        return S(0, Layout.contiguous(self.rows, self.ranks))

    def local_shape(self, shape: Sequence[int]) -> list[int]:
        """Of a parameter of logical `shape`, on every rank."""
        local = [*shape]
        local[self.tensor.dim] = self.tensor.cut.local_size(self.t)
        local[0] = self.inner.cut.local_size(self.ranks)
        return local

    def __str__(self) -> str:
        return f"{self.tensor} of {self.t} ranks, its rows cut over {self.ranks}"

    __repr__ = __str__


def nested(tensor: Placement, shape: Sequence[int], t: int, ranks: int) -> Placement:
    """How `ranks` groups of t tensor-parallel ranks, which hold a parameter of `shape` at `tensor` (I or S), cut it further.

    Of a parameter without dims: I.
    """
    if not shape:
        return I
    if not tensor.is_shard or t == 1:
        return S(0, Layout.contiguous(shape[0], ranks * t))
    rows = tensor.cut.local_size(t) if tensor.dim == 0 else shape[0]
    return Nested("S", 0, Layout.contiguous(rows, ranks), tensor, t, ranks, rows)
