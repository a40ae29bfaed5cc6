"""Random draws of an op: its arguments, and where the elements of a local shard lie in the whole tensor.

An op that draws takes the fields of `Draw` as its last arguments (`DRAW` in its schema). Its bits are those of philox.py at the
index of the element in the whole tensor, so a shard draws its slice of the one-process mask.

A shard is a few strided runs. It is, for each block of its layout, a number of rows of consecutive elements: row r holds
`length` elements, at local_start + r * local_stride in local memory and from global_start + r * global_stride in the whole
tensor (row-major both). Indices into padding run on into whatever follows: harmless, since pads may take any value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megafx.ir.nodes import Draw
from megafx.kernels.common import philox
from megafx.ops import axes
from megafx.placements.types import Layout

DRAW = "Tensor? seed, float p, int op_id, int shard_dim, SymInt[] layout, str axis"


class Run(NamedTuple):
    rows: int
    length: int
    local_start: int
    local_stride: int
    global_start: int
    global_stride: int


def check_draw(name: str, draw: Draw) -> None:
    if not 0.0 <= draw.p <= 1.0:
        raise ValueError(f"{name}: dropout probability must be between 0 and 1, got {draw.p}")
    if not 0 <= draw.op_id <= philox.MASK:
        raise ValueError(f"{name}: op_id must be an unsigned 32-bit number, got {draw.op_id}")
    if draw.seed is None and draws(draw.p):
        raise ValueError(f"{name}: dropout with p = {draw.p} needs a seed")


def draws(p: float) -> bool:
    """True if any element is dropped at this probability."""
    return philox.threshold(p) > 0


def factor_of(p: float) -> float:
    """What kept elements are multiplied by; finite also where none is kept."""
    return philox.scale(p) if philox.threshold(p) < philox.DRAWS else 0.0


def runs_here(shape: Sequence[int], draw: Draw) -> list[Run]:
    """Where the elements of this rank's tensor lie in the whole one; one run where nothing is drawn."""
    if not draws(draw.p):
        return runs_of(shape, -1, [], 0, 1)
    rank, t = (axes.axis_rank(draw.axis), axes.axis_size(draw.axis)) if draw.shard_dim >= 0 else (0, 1)
    return runs_of(shape, draw.shard_dim, draw.layout, rank, t, axes.batch_rank(draw.axis))


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
        length = -(-count // cut.chunks(t)) * unit * inner
        if length == local_stride == global_stride:
            rows, length = 1, rows * length  # t = 1: the rows follow each other
        for chunk in (rank, 2 * t - 1 - rank) if cut.head_tail else (rank,):
            runs.append(Run(rows, length, local, local_stride, start + chunk * length, global_stride))
            local += length
        start += count * unit * inner
    return runs
