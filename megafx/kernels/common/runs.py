"""Where the elements of a local shard lie in the whole tensor, as few strided runs.

A shard is, for each block of its layout, a number of rows of consecutive elements: row r holds `length` elements, at
local_start + r * local_stride in local memory and from global_start + r * global_stride in the whole tensor (row-major
both). Indices into padding run on into whatever follows: harmless where, as for random draws, pads may take any value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megafx.placements.types import Layout


class Run(NamedTuple):
    rows: int
    length: int
    local_start: int
    local_stride: int
    global_start: int
    global_stride: int


def runs_of(
    shape: Sequence[int], shard_dim: int, layout: Sequence[int], rank: int, t: int, before: int = 0
) -> list[Run]:
    """Local shape, cut along shard_dim (-1: whole) by a flat layout over t ranks -> runs that cover it.

    before: tensors like the whole one that precede it in memory (the batches of other data-parallel ranks).
    """
    numel = math.prod(shape)
    if shard_dim < 0 or numel == 0:
        return [Run(1, numel, 0, numel, before * numel, numel)] if numel else []
    cut = Layout.from_flat(layout)
    if shape[shard_dim] != cut.local_size(t):
        raise ValueError(
            f"dim {shard_dim} of local shape {tuple(shape)} is not a shard of layout {cut} on {t} ranks "
            f"(expected {cut.local_size(t)})"
        )
    inner = math.prod(shape[shard_dim + 1 :])
    rows = math.prod(shape[:shard_dim]) * cut.rep
    local_stride, global_stride = cut.local_size(t) // cut.rep * inner, cut.pattern_size * inner
    runs, local, start = [], 0, before * global_stride * rows
    for count, unit in cut.blocks:
        length = -(-count // t) * unit * inner
        if length == local_stride == global_stride:
            rows, length = 1, rows * length  # t = 1: the rows follow each other
        runs.append(Run(rows, length, local, local_stride, start + rank * length, global_stride))
        local += length
        start += count * unit * inner
    return runs
