"""Packed documents on CUDA: which tiles of attention share a segment, found once a call for all heads and kernels.

For every 64 queries a row of `tiles`: keys outside of [first, last) share no segment with any of them; keys [same, beyond)
share one segment with all of them, and need no comparison. By the least and the largest id of each 64 keys: exact for ids in
any order, tight where they rise. Attention's kernels read four numbers a tile: to find them there would take registers and
shared memory from the products (the forward kernel kept one program a core in place of two; measured: H100).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import as_bytes, launch

BLOCK = tl.constexpr(64)
CHUNK = tl.constexpr(512)  # blocks of keys that one program of `_tiles` reads at a time


@triton.jit
def keys_of_segments(first, whole, last, TILES, tiles_at, q0, S, BN: tl.constexpr):
    """`key_range` of the queries from q0 on -> (first, lo, hi, last): without the tiles of BN keys in which no query finds
    its segment; keys [lo, hi) are all visible, inside and of the queries' segment."""
    near, end, same, beyond = tokens_of_segments(TILES, tiles_at, q0, S)
    first = tl.maximum(first, near // BN * BN)
    lo = tl.maximum(first, tl.cdiv(same, BN) * BN)
    hi = tl.minimum(whole, beyond // BN * BN)
    return first, lo, tl.maximum(lo, hi), tl.minimum(last, end)


@triton.jit
def tokens_of_segments(TILES, tiles_at, at, S):
    """(first, last, same, beyond) of the 64 tokens that `at` is one of."""
    row = TILES + tiles_at + at // BLOCK
    blocks = tl.cdiv(S, BLOCK)
    return tl.load(row), tl.load(row + blocks), tl.load(row + 2 * blocks), tl.load(row + 3 * blocks)


@triton.jit
def _ranges(SEGMENTS, RANGES, ids_b, T):
    """ids [b, T] by a stride -> RANGES [b, 2, T / 64]: the least and the largest of each 64."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    at = tl.minimum(block * BLOCK + tl.arange(0, BLOCK), T - 1)
    ids = tl.load(SEGMENTS + tl.program_id(1).to(tl.int64) * ids_b + at)
    to = RANGES + tl.program_id(1).to(tl.int64) * 2 * blocks + block
    tl.store(to, tl.min(ids, 0))
    tl.store(to + blocks, tl.max(ids, 0))


@triton.jit
def _tiles(SEGMENTS, QUERIES, RANGES, TILES, ids_b, S, T):
    """RANGES -> TILES [b, 4, S / 64], int32. QUERIES: [S] int32, places in the whole sequence, or None."""
    block, tiles = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    at = tl.minimum(block * BLOCK + tl.arange(0, BLOCK), S - 1)
    if QUERIES is not None:
        at = tl.load(QUERIES + at)
    ids = tl.load(SEGMENTS + row * ids_b + at)
    least, most = tl.min(ids, 0), tl.max(ids, 0)
    blocks = tl.cdiv(T, BLOCK)
    lows = RANGES + row * 2 * blocks
    first, last, same, beyond, found = blocks, 0, blocks, 0, 0
    for start in range(0, blocks, CHUNK):
        key = start + tl.arange(0, CHUNK)
        low = tl.load(lows + key, mask=key < blocks, other=0)
        high = tl.load(lows + blocks + key, mask=key < blocks, other=0)
        near = (key < blocks) & (low <= most) & (high >= least)
        alike = (key < blocks) & (low == most) & (high == least)
        first = tl.minimum(first, tl.min(tl.where(near, key, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(near, key + 1, 0), 0))
        same = tl.minimum(same, tl.min(tl.where(alike, key, blocks), 0))
        beyond = tl.maximum(beyond, tl.max(tl.where(alike, key + 1, 0), 0))
        found += tl.sum(alike.to(tl.int32), 0)
    if found != beyond - same:  # others between them
        same = blocks
    to = TILES + row * 4 * tiles + block
    tl.store(to, first * BLOCK)
    tl.store(to + tiles, tl.minimum(T, last * BLOCK))
    tl.store(to + 2 * tiles, same * BLOCK)
    tl.store(to + 3 * tiles, tl.maximum(beyond, same) * BLOCK)


class Segments(NamedTuple):
    ids: Tensor | None = None  # [b or 1, t]
    tiles: Tensor | None = None  # [b or 1, 4, s / 64]
    strides: tuple[int, int] = (0, 0)  # of both, from one of the batch to the next

    @classmethod
    def of(cls, segments: Tensor | None, places: Tensor | None, s: int, t: int) -> Segments:
        """places: of the s queries in the whole sequence of t tokens; None: they are all of it."""
        if segments is None or s == 0 or t == 0:
            return cls()
        ids = as_bytes(segments) if segments.dtype == torch.bool else segments
        ids = ids if ids.stride(1) == 1 or t == 1 else ids.contiguous()
        blocks, rows, tiles = triton.cdiv(t, BLOCK.value), triton.cdiv(s, BLOCK.value), len(ids)
        ranges = ids.new_empty(tiles, 2, blocks)
        found = ids.new_empty(tiles, 4, rows, dtype=torch.int32)
        launch(_ranges, (blocks, tiles), ids, ids, ranges, ids.stride(0), t)
        launch(_tiles, (rows, tiles), ids, ids, places, ranges, found, ids.stride(0), s, t)
        return cls(ids, found, (ids.stride(0), found.stride(0)) if tiles > 1 else (0, 0))
