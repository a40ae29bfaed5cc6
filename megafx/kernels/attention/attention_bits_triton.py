"""Which weights attention's dropout keeps, for the Triton kernels; attention_reference.py says which bits these are.

In a tile of queries by keys, one Philox call decides for 8 keys that one thread owns in the tensor core's layout: the
decisions are packed into a byte and expanded after the reshape, so that nothing moves between threads. In a tile of keys by
queries, a call would be for elements of four warps. So the kernel that goes by queries leaves its decisions in memory, one
bit each, for the kernel that goes by keys: word i of a tile of 64 queries and 64 keys is what thread i has made (queries
16 w + 8 h + r, groups of keys 2 c + e: i = 32 w + 4 r + c).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafx.kernels.common.philox_triton import philox


@triton.jit
def subkey(SEED, op_id):
    """The op's key, from the 64-bit seed."""
    bits = tl.load(SEED)
    zero = tl.cast(op_id, tl.uint32) * 0
    a, b, _, _ = philox(tl.cast(op_id, tl.uint32), zero, zero, zero, bits.to(tl.uint32), (bits >> 32).to(tl.uint32), 7)
    return a, b


@triton.jit
def low_half(w, below):
    return (w << 16) >= below


@triton.jit
def keep_bytes(group, query, head, batch, k0, k1, below):
    """uint32 of broadcastable shapes -> int32, bit j: keep key j of the group. below: threshold << 16."""
    zero = group * 0 + query * 0
    a, b, c, d = philox(zero + group, zero + query, zero + head, zero + batch, k0, k1, 7)
    m = low_half(a, below).to(tl.int32) | ((a >= below).to(tl.int32) << 1)
    m |= (low_half(b, below).to(tl.int32) << 2) | ((b >= below).to(tl.int32) << 3)
    m |= (low_half(c, below).to(tl.int32) << 4) | ((c >= below).to(tl.int32) << 5)
    m |= (low_half(d, below).to(tl.int32) << 6) | ((d >= below).to(tl.int32) << 7)
    return m


@triton.jit
def keep_tile(n0, query, head, batch, k0, k1, below, BM: tl.constexpr, BN: tl.constexpr):
    """Keys n0 .. n0 + BN (multiples of 64), query: uint32 [BM] -> bool [BM, BN]."""
    group = (n0 // 8 + tl.arange(0, BN // 8)).to(tl.uint32)[None, :]
    return spread(keep_bytes(group, query[:, None], head, batch, k0, k1, below), BM, BN)


@triton.jit
def spread(m, BM: tl.constexpr, BN: tl.constexpr):
    """keep_bytes of [BM, BN // 8] groups -> bool [BM, BN]."""
    m = tl.expand_dims(tl.reshape(m, [BM, BN // 64, 8]), 2)
    return tl.reshape((m & (1 << tl.arange(0, 8)[None, None, :, None])) != 0, [BM, BN])


# -- between the kernels


@triton.jit
def kept_words(S, T):
    """Of one head: 128 for each 64 queries x 64 keys."""
    return tl.cdiv(S, 64).to(tl.int64) * tl.cdiv(T, 64) * 128


@triton.jit
def _words_at(KEPT, q0, n0, S):
    return KEPT + ((n0 // 64) * tl.cdiv(S, 64) + q0 // 64).to(tl.int64) * 128 + q0 % 64 * 2


@triton.jit
def leave(KEPT, bits, q0, n0, S, BM: tl.constexpr):
    """bits: keep_bytes of queries q0, ... and the 8 groups of keys n0, ... -> KEPT, for `kept_tile`."""
    m = tl.permute(tl.reshape(bits, [BM // 16, 2, 8, 4, 2]), [2, 0, 3, 1, 4])  # query 16 w + 8 h + r, group 2 c + e
    even, odd = tl.split(m)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    words = a | (b << 8) | (c << 16) | (d << 24)
    i = tl.arange(0, 8)[:, None, None] * 4 + tl.arange(0, BM // 16)[None, :, None] * 32 + tl.arange(0, 4)[None, None, :]
    tl.store(_words_at(KEPT, q0, n0, S) + i, words)


@triton.jit
def kept_tile(KEPT, q0, n0, S, BM: tl.constexpr):
    """-> bool [64, BM] of keys n0, ... and queries q0, ..."""
    words = tl.load(_words_at(KEPT, q0, n0, S) + tl.arange(0, BM * 2))
    words = tl.permute(tl.reshape(words, [BM // 16, 8, 4]), [2, 0, 1])  # c; w, r
    words = tl.reshape(words, [1, 1, 4, 1, BM // 16, 1, 8])
    four = tl.reshape(tl.arange(0, 4), [4, 1, 1, 1, 1, 1, 1])
    two = tl.arange(0, 2)
    words = words >> (2 * four + 8 * tl.reshape(two, [1, 1, 1, 2, 1, 1, 1]))
    bit = 1 << (tl.reshape(two, [1, 2, 1, 1, 1, 1, 1]) + 16 * tl.reshape(two, [1, 1, 1, 1, 1, 2, 1]))
    return tl.reshape((words & bit) != 0, [64, BM])
