"""Covers: views.py. The algebra against brute force: view every rank's shard, compare with the shard of the whole view."""

import itertools
import random

import numpy as np
import pytest

from megafx.placements.types import Layout
from megafx.placements.views import (
    concat_layouts,
    dim_groups,
    local_offset,
    map_view,
    slice_layout,
    view_options,
    wholes_of_part,
)

PRIME = 2**31 + 11  # stands for a symbol


def cut(x: np.ndarray, dim: int, layout: Layout, rank: int, t: int) -> np.ndarray:
    """The shard of one rank, -1 in its padding."""
    shape = list(x.shape)
    shape[dim] = layout.local_size(t)
    out = np.full(shape, -1)
    before = (slice(None),) * dim
    for start, local, n in layout.pieces(rank, t):
        out[(*before, slice(local, local + n))] = x[(*before, slice(start, start + n))]
    return out


def layouts_of(n: int, t: int) -> list[Layout]:
    """Contiguous, in units, repeated, in two unequal blocks, and head-tail."""
    found = {Layout.contiguous(n, t)}
    for unit in range(1, n + 1):
        if n % unit == 0:
            found.add(Layout.of([(n // unit, unit)], t))
            found.add(Layout.of([(n // unit, unit)], t, head_tail=True))
            for rep in range(1, n // unit + 1):
                if n % (unit * rep) == 0:
                    found.add(Layout.of([(n // unit // rep, unit)], t, rep))
            if n // unit > 2:
                found.add(Layout.of([(n // unit - 1, unit), (1, unit)], t))
    return sorted(found, key=str)


def factorings(n: int, depth: int = 3) -> list[tuple[int, ...]]:
    if depth == 1:
        return [(n,)]
    return [(n,)] + [(k, *rest) for k in range(1, n + 1) if n % k == 0 for rest in factorings(n // k, depth - 1)]


CASES = [(n, t) for n in (4, 6, 12) for t in (2, 3, 4)]


@pytest.mark.parametrize("n, t", CASES)
def test_views_of_shards_are_shards_of_views(n, t):
    """Every view of every shape of n elements, every layout: a mapped shard is exact, pads included."""
    whole = np.arange(n)
    shapes = factorings(n)
    rng = random.Random(0)
    pairs = [(a, b) for a in shapes for b in shapes]
    checked = 0
    for a, b in rng.sample(pairs, min(len(pairs), 150)):
        for dim, layout in ((d, one) for d in range(len(a)) if a[d] > 1 for one in layouts_of(a[d], t)):
            mapped = map_view(a, b, dim, layout, t)
            if mapped is None:
                continue
            new_dim, new_layout = mapped
            assert new_layout.size == b[new_dim]
            for rank in range(t):
                shard = cut(whole.reshape(a), dim, layout, rank, t)
                local = [new_layout.local_size(t) if d == new_dim else m for d, m in enumerate(b)]
                got = shard.reshape(local)
                want = cut(whole.reshape(b), new_dim, new_layout, rank, t)
                assert np.array_equal(got, want), (a, b, dim, str(layout), new_dim, str(new_layout))
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("n, t", [(6, 2), (12, 3)])
def test_views_that_are_not_mapped_are_no_shards(n, t):
    """Nothing is missed: where map_view says None, no layout of the view gives the ranks' elements (in order)."""
    whole = np.arange(n)
    shapes = factorings(n, 2)
    for a, b in itertools.product(shapes, shapes):
        for dim in (d for d in range(len(a)) if a[d] > 1):
            layout = Layout.contiguous(a[dim], t)
            if map_view(a, b, dim, layout, t) is not None or layout.padded(t):
                continue
            shards = [cut(whole.reshape(a), dim, layout, r, t).ravel() for r in range(t)]
            for new_dim in (d for d in range(len(b)) if b[d] > 1):
                for new in layouts_of(b[new_dim], t):
                    others = [cut(whole.reshape(b), new_dim, new, r, t).ravel() for r in range(t)]
                    assert not all(map(np.array_equal, shards, others)), (a, b, dim, str(new))


@pytest.mark.parametrize(
    "a, b, dim, layout, want",
    [
        # heads of a projection, evenly and with padding
        ((2, 5, 4096), (2, 5, 32, 128), 2, [(4096, 1)], (2, [(32, 1)], 1)),
        ((2, 5, 1600), (2, 5, 25, 64), 2, [(1600, 1)], None),
        ((2, 5, 25, 64), (2, 5, 1600), 2, [(25, 1)], (2, [(25, 64)], 1)),
        # symbolic batch (PRIME) times sequence 8, sharded on the sequence: rep stays symbolic
        ((PRIME, 8, 6), (PRIME * 8, 6), 1, [(8, 1)], (0, [(8, 1)], PRIME)),
        ((PRIME, 8, 6), (PRIME * 8, 6), 0, [(PRIME, 1)], (0, [(PRIME, 8)], 1)),
        ((PRIME * 8, 6), (PRIME, 8, 6), 0, [(PRIME * 8, 1)], None),
    ],
)
def test_known_views(a, b, dim, layout, want):
    got = map_view(a, b, dim, Layout.of(layout, 2), 2)
    if want is None:
        assert got is None
    else:
        assert got == (want[0], Layout.of(want[1], 2, rep=want[2]))
        assert map_view(b, a, *got, 2) == (dim, Layout.of(layout, 2)), "and back"


def test_the_other_half_of_a_symbolic_dim_maps_back():
    shard = Layout.of([(8, 1)], 2, rep=PRIME)
    assert map_view((PRIME * 8, 6), (PRIME, 8, 6), 0, shard, 2) == (1, Layout.of([(8, 1)], 2))


def test_a_local_head_may_be_a_whole_head_or_part_of_one():
    options = view_options((3, 64), (3, 1, 64), 1, Layout.of([(2, 64)], 2), 2)
    assert options == [(1, Layout.of([(2, 1)], 2)), (2, Layout.of([(2, 64)], 2))]


def test_a_local_dim_of_one_row_may_be_any_of_its_neighbours():
    options = view_options(
        (1, 1, 1, 6), (1, 6), 2, Layout.of([(4, 1)], 4), 4
    )  # as the gradient of a bias [heads, 6] is made
    assert options == [(0, Layout.of([(4, 1)], 4)), (1, Layout.of([(4, 6)], 4))]


def test_groups_of_a_view():
    assert dim_groups((2, 3, 8), (6, 2, 4)) == (((0, 1), (0,)), ((2,), (1, 2)))
    assert dim_groups((2, 3), (7,)) == ()
    assert dim_groups((PRIME, 1, 4), (PRIME * 4,)) == (((0, 1, 2), (0,)),)


@pytest.mark.parametrize("t", [2, 3, 4])
def test_slices_between_blocks_are_shards(t):
    """Fused q|k|v of unequal sizes: each part of the whole's shard is the shard of the part, at local_offset."""
    layout = Layout.of([(5, 2), (3, 2), (3, 2)], t)
    x = np.arange(layout.size)
    points = [0, 10, 16, 22]
    for low, high in itertools.combinations(points, 2):
        part = slice_layout(layout, low, high, t)
        start, end = local_offset(layout, low, t), local_offset(layout, high, t)
        for rank in range(t):
            assert np.array_equal(cut(x, 0, layout, rank, t)[start:end], cut(x[low:high], 0, part, rank, t))
    assert slice_layout(layout, 0, 11, t) is None and slice_layout(layout, 9, 22, t) is None
    assert local_offset(layout, 11, t) is None


def test_slice_of_a_symbolic_number_of_repeats():
    layout = Layout.of([(8, 1)], 2, rep=PRIME)
    assert slice_layout(layout, 0, 16, 2) == Layout.of([(8, 1)], 2, rep=2)
    assert slice_layout(layout, 4, 16, 2) is None


@pytest.mark.parametrize("t", [2, 3])
def test_concatenation_is_the_inverse_of_slicing(t):
    parts = [Layout.of([(25, 64)], t), Layout.of([(5, 64)], t), Layout.of([(5, 64)], t)]
    whole = concat_layouts(parts, t)
    assert [slice_layout(whole, *b, t) for b in ((0, 1600), (1600, 1920), (1920, 2240))] == parts
    assert concat_layouts([Layout.of([(8, 1)], 2, rep=PRIME)], 2) is None


def test_a_cut_of_one_slice_becomes_a_cut_of_the_whole():
    def wholes(part, start, bounds):
        return [str(layout) for layout in wholes_of_part(part, start, bounds, 2)]

    assert wholes(Layout.of([(4, 64)], 2), 0, (0, 256, 512, 768)) == ["3*(2x128)"]  # even: contiguous in each
    assert wholes(Layout.of([(25, 64)], 2), 0, (0, 1600, 3200, 4800)) == ["3*(25x64)"]
    fewer = wholes(Layout.of([(25, 64)], 2), 0, (0, 1600, 1920, 2240))
    assert fewer == ["25x64+2x160+2x160", "25x64+5x64+5x64"]  # other heads are cut evenly, or whole too
    groups = wholes(Layout.of([(5, 24)], 2), 0, (0, 120, 160, 200))
    assert groups == ["5x24+2x20+2x20", "5x24+5x8+5x8"]  # heads of another size are cut evenly, or with their groups
    assert wholes(Layout.of([(2, 32)], 2, rep=4), 256, (0, 256, 512)) == ["2x128+2x32+2x32+2x32+2x32", "8*(2x32)"]
    groups = wholes(Layout.of([(2, 32)], 2, rep=2), 0, (0, 128, 144, 160))
    assert groups == ["2x32+2x32+2x8+2x8", "2x32+2x32+2x4+2x4+2x4+2x4"]  # q in groups; k and v evenly, or in as many
    assert wholes(Layout.of([(2, 3), (2, 4)], 2), 0, (0, 14, 19)) == ["2x3+2x4+5"]
    assert wholes(Layout.of([(2, 3)], 2, rep=PRIME), 0, (0, 6 * PRIME)) == []
