"""Values that one rank of an axis holds whole and the others not at all: the parameters of an expert that is that rank's.

    Owned(S(0, one block), owner)    rank `owner` holds all rows (dim 0), the others a tensor of no rows

As a placement it is a shard of dim 0, of which the owner's part is the whole. No torch import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafx.placements import Block, Layout, Placement


@dataclass(frozen=True)
class Owned(Placement):
    """See the module docstring. Build with `owned`."""

    owner: int = 0

    def local_shape(self, shape: Sequence[int], rank: int) -> list[int]:
        """What `rank` holds of a tensor of logical `shape`."""
        return [shape[0] if rank == self.owner else 0, *shape[1:]]

    def __str__(self) -> str:
        return f"S0/rank {self.owner}"

    __repr__ = __str__


def owned(rows: int, owner: int) -> Owned:
    """How a tensor whose dim 0 has `rows` is held by `owner` alone."""
    return Owned("S", 0, Layout(1, (Block(1, rows),)), owner)
