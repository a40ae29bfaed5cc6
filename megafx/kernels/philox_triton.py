"""Philox4x32-7 for Triton kernels; the same bits as philox.py. Imported only where Triton is.

Cost (measured: H200, November 2026): nine SASS instructions an element for `draws8`, free against memory bandwidth;
`draw1`, one call an element, reaches about half of the bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4x32(group, op_id, k0, k1, ROUNDS: tl.constexpr):
    """group: int64; op_id, k0, k1: uint32 scalars -> four uint32 words of group's shape."""
    c0 = group.to(tl.uint32)
    group = group.to(tl.int64)  # Triton takes a Python int that fits for int32, and a shift by 32 of that is undefined
    c1 = (group >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + op_id
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(ROUNDS):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def key_of(seed):  # seed: pointer to int64
    bits = tl.load(seed)
    return bits.to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def draws8(group, op_id, k0, k1, N: tl.constexpr):
    """group: int64 [N] -> the draws of the 8 elements of each group, uint32 [N, 8]."""
    a, b, c, d = philox4x32(group, op_id, k0, k1, 7)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [N, 2, 2], word = 2 * i + j
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [N, 8])


@triton.jit
def draw1(index, op_id, k0, k1):
    """index: int64, any shape -> the draw of each element, uint32."""
    a, b, c, d = philox4x32(index >> 3, op_id, k0, k1, 7)
    j = (index & 7).to(tl.int32)
    word = tl.where(j < 4, tl.where(j < 2, a, b), tl.where(j < 6, c, d))
    return tl.where((j & 1) == 0, word & 0xFFFF, word >> 16)
