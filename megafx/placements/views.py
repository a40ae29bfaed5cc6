"""Layouts through views, slices and concatenations. No torch import.

A view maps groups of dims onto groups of dims with the same product. Within a group a shard of one dim is a layout of the
group's flat index, because a Layout is closed under both steps:

    flatten   dim of n with `outer` elements before it and `inner` after it, cut by L = rep*(c x u, ...):
              the flat index is cut by (outer*rep)*(c x u*inner, ...)
    refit     the reverse, onto a dim with `outer` before and `inner` after it: rep must be a multiple of outer and each
              unit a multiple of inner. Else the cut would go through a row of the inner dims, or differ between outer rows

Examples, t = 2:

    [b, s, 4096] S2 (2x2048)      -> [b, s, 32, 128]   S2 (2x16)          heads
    [b, s, 1600] S2 (2x800)       -> [b, s, 25, 64]    none               12.5 heads
    [b, s, 25, 64] S2 (25x1)      -> [b, s, 1600]      S2 (25x64)         a padded rank holds whole heads
    [b, s, 3, 12, 64] S3 (2x6)    -> [b, s, 2304]      S2 3*(2x384)       fused q|k|v
    [b, s, h] S1 (s)              -> [b*s, h]          S0 b*(s)           rep is symbolic: it is never enumerated

The same algebra holds for local shapes: a rank's flat index is (outer*rep) repeats of ceil(c/t) units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from megafx.placements.types import Block, Layout

Shape = tuple[int, ...]
Way = Callable[[int], "Sequence[tuple[int, int]] | None"]  # size of an interval -> its blocks
MAX_BLOCKS = 64  # cuts of a dim written out one by one; real fusions have 2 to 4


@lru_cache(maxsize=65536)
def dim_groups(a: Shape, b: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Smallest groups of dims (of a, of b) with equal products; () where there are none (unequal or zero sizes)."""
    if math.prod(a) != math.prod(b) or 0 in a:
        return ()
    groups = []
    i = j = 0
    while i < len(a) or j < len(b):
        first_i, first_j = i, j
        product_a = product_b = 1
        if i < len(a):
            product_a, i = a[i], i + 1
        if j < len(b):
            product_b, j = b[j], j + 1
        while product_a != product_b:
            if product_a < product_b:
                if i == len(a):
                    return ()
                product_a, i = product_a * a[i], i + 1
            else:
                if j == len(b):
                    return ()
                product_b, j = product_b * b[j], j + 1
        groups.append((tuple(range(first_i, i)), tuple(range(first_j, j))))
    return tuple(groups)


def flatten(layout: Layout, outer: int, inner: int, t: int) -> Layout:
    """The layout of the flat index of [outer, dim, inner], the dim being cut by `layout`."""
    return Layout.of([(c, u * inner) for c, u in layout.blocks], t, layout.rep * outer, layout.head_tail)


def refit(flat: Layout, outer: int, inner: int, t: int) -> Layout | None:
    """The layout of the middle dim of [outer, dim, inner] whose flat index is cut by `flat`, if it is such a cut."""
    if flat.rep % outer or any(u % inner for _, u in flat.blocks):
        return None
    return Layout.of([(c, u // inner) for c, u in flat.blocks], t, flat.rep // outer, flat.head_tail)


@lru_cache(maxsize=65536)
def map_view(a: Shape, b: Shape, dim: int, layout: Layout, t: int) -> tuple[int, Layout] | None:
    """Shard of `dim` of shape a -> the same shard of shape b as (dim, layout); None where b cannot express it."""
    options = view_options(a, b, dim, layout, t)
    return next((o for o in options if b[o[0]] != 1), None)


def view_options(a: Shape, b: Shape, dim: int, layout: Layout, t: int) -> list[tuple[int, Layout]]:
    """All ways to see the shard in b, those of the fewest repeats first, then the outermost dim.

    On whole shapes there is at most one dim longer than 1. On local shapes a sharded dim may have length 1, and a rank's
    [1, 64] may be one head of two, or the half of one head: both are returned. A dim of 1 may also belong to the dim beside it:
    [b, 2, 1, s] cut at dim 2 -> [b, 2, s]: the rank's copy of each of two heads (of 2*2).
    """
    near = next((into for group, into in dim_groups(a, b) if dim in group), None)
    if near is None:
        return []
    flat = flatten(layout, math.prod(a[:dim]), math.prod(a[dim + 1 :]), t)
    found: list[tuple[int, Layout]] = []
    for d in range(len(b)):
        part = refit(flat, math.prod(b[:d]), math.prod(b[d + 1 :]), t) if d in near or 1 in (a[dim], b[d]) else None
        if part is not None:
            found.append((d, part))
    return sorted(found, key=lambda option: option[1].rep)


def blocks_of(layout: Layout) -> tuple[Block, ...] | None:
    """All blocks with repeats written out; None for more than MAX_BLOCKS (a symbolic rep)."""
    if layout.rep * len(layout.blocks) > MAX_BLOCKS:
        return None
    return layout.blocks * layout.rep


def slice_layout(layout: Layout, start: int, end: int, t: int, local: bool = False) -> Layout | None:
    """The layout of elements [start, end) of a dim, if both ends lie between blocks; else None.

    local: the bounds are those in a rank's shape.
    """
    lengths = [layout.local_block(b, t) if local else b.size for b in layout.blocks]
    pattern = sum(lengths)
    if pattern == 0 or end <= start:
        return None
    if start % pattern == 0 and end % pattern == 0:
        return Layout.of(layout.blocks, t, (end - start) // pattern, layout.head_tail)
    blocks = blocks_of(layout)
    if blocks is None:
        return None
    taken, at = [], 0
    for block, length in zip(blocks, lengths * layout.rep, strict=True):
        if at < start < at + length or at < end < at + length:
            return None
        if start <= at < end:
            taken.append(block)
        at += length
    return Layout.of(taken, t, head_tail=layout.head_tail) if taken else None


def concat_layouts(layouts: Iterable[Layout], t: int) -> Layout | None:
    """The layout of dims laid one after another; None where there are too many blocks, or some of a head-tail layout."""
    blocks: list[Block] = []
    layouts = [*layouts]
    if len({layout.head_tail for layout in layouts}) > 1:
        return None
    for layout in layouts:
        part = blocks_of(layout)
        if part is None or len(blocks) + len(part) > MAX_BLOCKS:
            return None
        blocks += part
    return Layout.of(blocks, t, head_tail=layouts[0].head_tail)


def local_offset(layout: Layout, position: int, t: int) -> int | None:
    """Where the block that starts at `position` of the whole dim starts in a rank's dim; None inside a block."""
    if position == layout.size:
        return layout.local_size(t)
    repeat, rest = divmod(position, layout.pattern_size)
    local = repeat * (layout.local_size(t) // layout.rep)
    for block in layout.blocks:
        if rest == 0:
            return local
        rest -= block.size
        local += layout.local_block(block, t)
        if rest < 0:
            return None
    return local


def wholes_of_part(part: Layout, start: int, bounds: Sequence[int], t: int) -> list[Layout]:
    """Layouts of a dim that is cut at `bounds`, such that [start, start + part.size) has layout `part`.

    Each other interval is cut evenly (k and v that are gathered), or like `part`: by whole periods of it, in as many blocks (of
    heads that are exchanged over an outer axis, those of each of its ranks), or, where it is one uneven block, in the same
    units (the heads of a fused q|k|v), and in as many units (15 query heads as 5 groups of 3, with 5 heads of k and v).
    """
    period, (count, unit) = part.pattern_size, part.blocks[0]
    ways: list[Way] = [lambda size: [(size, 1)]]
    if not part.simple():
        ways.append(lambda size: [*part.blocks] * (size // period) if size % period == 0 else None)
        units = part.rep * count
        if len(part.blocks) == 1:
            ways.append(lambda size: [(count, size // units)] * part.rep if size % units == 0 else None)
    elif part.padded(t):
        ways.append(lambda size: [(size // unit, unit)] if size % unit == 0 else None)
        ways.append(lambda size: [(count, size // count)] if size % count == 0 else None)
    found = [_whole(part, start, bounds, t, way) for way in ways]
    return list(dict.fromkeys(layout for layout in found if layout is not None))


def _whole(part: Layout, start: int, bounds: Sequence[int], t: int, way: Way) -> Layout | None:
    """way: the blocks of an interval of this size; an interval that is as long as a part of one block is cut as that is."""
    end = start + part.size
    own = blocks_of(part)
    if own is None:
        return None
    blocks: list[tuple[int, int]] = []
    placed = False
    for low, high in pairwise(bounds):
        if start <= low and high <= end:
            blocks += () if placed else own
            placed = True
            continue
        cut = own if part.simple() and high - low == part.size else way(high - low)
        if cut is None:
            return None
        blocks += cut
        if len(blocks) > MAX_BLOCKS:
            return None
    return Layout.of(blocks, t, head_tail=part.head_tail)
