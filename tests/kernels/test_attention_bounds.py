"""Covers: kernels/attention/attention_bounds.py: which tiles are computed where a rank has some of the queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafx.kernels.attention.attention_bounds import BLOCK, key_bounds, queries_at, query_bounds
from megafx.kernels.attention.attention_reference import places_of
from megafx.placements.types import Layout


def _seen(places: Tensor, keys: int, causal: bool, window: int) -> Tensor:
    distance = places[:, None] - torch.arange(keys)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance.abs() < window) if window else seen


def _places(layout: Layout, rank: int, t: int) -> Tensor:
    return places_of(layout.local_size(t), layout.flat(), rank, t, 0, "cpu").long()


def _tiles(seen: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """[tiles of rows, tiles of columns]: whether some pair is seen, whether all are (beyond the end: none, for columns)."""
    s, t = seen.shape
    tiled = [torch.full((-(-s // rows) * rows, -(-t // columns) * columns), fill) for fill in (False, True)]
    for x in tiled:
        x[:s, :t] = seen
    tiled[1][:s, t:] = False
    some, every = (x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)) for x in tiled)
    return some.any(3).any(1), every.all(3).all(1)


LAYOUTS = {
    "even": (Layout.of([(1024, 1)], 4), 4),
    "uneven": (Layout.of([(1001, 1)], 3), 3),
    "two pieces": (Layout.of([(500, 1)], 2, 2), 2),
    "two pieces, head and tail": (Layout.of([(1000, 1)], 2, head_tail=True), 2),
}


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 100), (False, 70), (False, 0)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_are_those_that_have_a_visible_pair(name: str, causal: bool, window: int) -> None:
    """Forward and the gradient of queries go by rows, the gradient of keys by columns; what is not compared is seen."""
    layout, t = LAYOUTS[name]
    for rank in range(t):
        places = _places(layout, rank, t)
        seen = _seen(places, layout.size, causal, window)
        some, every = _tiles(seen, BLOCK, 64)
        for row, (first, whole, last) in enumerate(key_bounds(places, layout.size, causal, window, BLOCK, 64).tolist()):
            tiles = torch.arange(some.shape[1]) * 64
            taken = (tiles >= first) & (tiles < last)
            assert not (some[row] & ~taken).any() and every[row, (tiles >= first) & (tiles < whole)].all()
            assert torch.equal(taken, some[row]) or "two" in name or not places[row * BLOCK :][:BLOCK].all()
        for column, (first, whole, last) in enumerate(query_bounds(places, layout.size, causal, window, 64).tolist()):
            blocks = torch.arange(some.shape[0]) * BLOCK
            taken = (blocks >= first) & (blocks < last)
            assert not (some[:, column] & ~taken).any()
            known = seen[whole:last, column * 64 : column * 64 + 64]
            assert known.all() and (taken.sum() == some[:, column].sum() or "two" in name or layout.padded(t))


def test_causal_attention_costs_half_on_ranks_together() -> None:
    """128 tiles of queries and keys on 8 ranks: as many tiles as one process computes; head and tail: as many each."""
    n, t = 128 * BLOCK, 8
    for head_tail in (False, True):
        layout, counts = Layout.of([(n, 1)], t, head_tail=head_tail), []
        for rank in range(t):
            places = _places(layout, rank, t)
            first, _, last = key_bounds(places, n, True, 0, BLOCK, 64).unbind(1)
            by_rows = int(((last + 63) // 64 - first // 64).sum())
            first, _, last = query_bounds(places, n, True, 0, 64).unbind(1)
            assert int(((last + BLOCK - 1) // BLOCK - first // BLOCK).clamp(min=0).sum()) == by_rows
            counts.append(by_rows)
        assert sum(counts) == 128 * 129 // 2  # one process: the triangle; before: 128 * 128
        assert max(counts) < 2 * sum(counts) / t and (not head_tail or len({*counts}) == 1)


def test_queries_are_found_by_place() -> None:
    places = _places(LAYOUTS["two pieces"][0], 1, 2)  # 250 .. 499, 750 .. 999
    first, beyond = queries_at(places, 1000).tolist()
    assert [first[i] for i in (0, 4, 8, 12, 15)] == [0, 6, 250, 268, 460]
    assert [beyond[i] for i in (0, 3, 4, 8, 12, 16)] == [0, 0, 6, 250, 268, 500]
