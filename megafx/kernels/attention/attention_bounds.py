"""Which tiles attention's kernels compute where a rank has some of the queries (context parallelism).

Queries at places [s] of the whole sequence, in any order, against all keys. A tile that no query of 64 sees is left out: causal
masks and windows cost what they cost in one process. Where places ascend, each tile that is left has a visible pair. A table is
made once for a layout, on the host; kernels read three numbers a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafx.kernels.attention.attention_reference import Where, places_of, table

BLOCK = 64  # queries that a row of `query_bounds` counts in
BEYOND = 2**31 - 1


def _extremes(places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Least and largest place of each `rows` queries."""
    more = -len(places) % rows
    low = F.pad(places, (0, more), value=BEYOND).view(-1, rows).amin(1)
    return low, F.pad(places, (0, more), value=-1).view(-1, rows).amax(1)


def key_bounds(places: Tensor, keys: int, causal: bool, window: int, rows: int, columns: int) -> Tensor:
    """-> int64 [tiles of `rows` queries, 3]: (first, whole, last). Keys [first, whole) are seen by all of them, [whole, last)
    are to be compared, the others are seen by none. first and whole: multiples of `columns`."""
    low, high = _extremes(places.long(), rows)
    first, last = torch.zeros_like(low), torch.full_like(low, keys)
    whole = last // columns * columns
    if causal:
        last = torch.minimum(last, high + 1)
        whole = torch.minimum(whole, (low + 1) // columns * columns)
    if window:
        first = (low - window + 1).clamp(min=0) // columns * columns
        last = torch.minimum(last, high + window)
        whole = first
    return torch.stack((first, whole, last), 1)


def query_bounds(places: Tensor, keys: int, causal: bool, window: int, columns: int) -> Tensor:
    """-> int64 [tiles of `columns` keys, 3]: (first, whole, last). Queries [first, whole) are to be compared, [whole, last) see
    every key of the tile, the others see none. first and whole: multiples of BLOCK."""
    s, (low, high) = len(places), _extremes(places.long(), BLOCK)
    at = torch.arange(0, keys, columns)[:, None]
    near, clear = (torch.ones(len(at), len(low), dtype=torch.bool) for _ in range(2))
    if causal:
        near, clear = near & (high >= at), clear & (low >= at + columns - 1)
    if window:
        near = near & (high > at - window) & (low < at + columns - 1 + window)
        clear = torch.zeros_like(clear)
    block = torch.arange(len(low), dtype=torch.int32)
    first = torch.where(near, block, len(low)).amin(1)
    last = torch.where(near, block + 1, 0).amax(1)
    edge = ~clear & (block >= first[:, None]) & (block < last[:, None])
    whole = torch.maximum(torch.where(edge, block + 1, 0).amax(1), first)
    found = torch.stack((first, whole, last), 1).long() * BLOCK
    return torch.minimum(found, torch.tensor([s, BEYOND, s]))


def queries_at(places: Tensor, keys: int) -> Tensor:
    """-> int64 [2, blocks of keys + 1]: for places 64 i, the first query there or later; one beyond the last query before."""
    blocks, query = -(-keys // BLOCK), torch.arange(len(places))
    block = (places.long() // BLOCK).clamp(max=blocks)
    first = torch.full((blocks + 1,), len(places)).scatter_reduce(0, block, query, "amin").flip(0)
    last = torch.zeros(blocks + 2, dtype=torch.long).scatter_reduce(0, block + 1, query + 1, "amax")[:-1]
    return torch.stack((first.cummin(0).values.flip(0), last.cummax(0).values))


@table
def bounds_of_queries(
    where: Where, keys: int, causal: bool, window: int, rows: int, columns: int, device: str
) -> Tensor:
    """`key_bounds` as kernels read it: int32, flat."""
    return key_bounds(places_of(*where, "cpu"), keys, causal, window, rows, columns).flatten().int().to(device)


@table
def bounds_of_keys(where: Where, keys: int, causal: bool, window: int, columns: int, device: str) -> Tensor:
    """`query_bounds`, then `queries_at`, as kernels read them: int32, flat."""
    places = places_of(*where, "cpu")
    found = query_bounds(places, keys, causal, window, columns), queries_at(places, keys)
    return torch.cat([x.flatten() for x in found]).int().to(device)
