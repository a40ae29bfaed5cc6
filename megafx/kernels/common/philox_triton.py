"""Philox4x32-7 for Triton kernels; the same bits as philox.py. Imported only where Triton is.

Cost (measured: H200, November 2026): nine SASS instructions an element for `draws8`, free against memory bandwidth;
`draw1`, one call an element, reaches about half of the bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Four uint32 of one shape, two uint32 -> four uint32."""
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
def philox4x32(group, op_id, k0, k1, ROUNDS: tl.constexpr):
    """group: int64; op_id, k0, k1: uint32 scalars -> four uint32 words of group's shape."""
    group = group.to(tl.int64)  # Triton takes a Python int that fits for int32, and a shift by 32 of that is undefined
    low = group.to(tl.uint32)
    return philox(low, (group >> 32).to(tl.uint32), tl.zeros_like(low) + op_id, tl.zeros_like(low), k0, k1, ROUNDS)


@triton.jit
def key_of(seed):  # seed: pointer to int64
    bits = tl.load(seed)
    return bits.to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def _halves(group, op_id, k0, k1):
    """The draws of the 8 elements of each group in the upper halves of uint32: [..., 2, 2, 2] for [...]."""
    a, b, c, d = philox4x32(group, op_id, k0, k1, 7)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # word = 2 * i + j
    return tl.join(words << 16, words)


@triton.jit
def draws8(group, op_id, k0, k1, N: tl.constexpr):
    """group: int64 [N] -> the draws of the 8 elements of each group, uint32 [N, 8]."""
    return tl.reshape(_halves(group, op_id, k0, k1) >> 16, [N, 8])


@triton.jit
def draw1(index, op_id, k0, k1):
    """index: int64, any shape -> the draw of each element, uint32."""
    a, b, c, d = philox4x32(index >> 3, op_id, k0, k1, 7)
    j = (index & 7).to(tl.int32)
    word = tl.where(j < 4, tl.where(j < 2, a, b), tl.where(j < 6, c, d))
    return tl.where((j & 1) == 0, word & 0xFFFF, word >> 16)


@triton.jit
def keep_tile(first, op_id, k0, k1, below, ALIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """first: int64 [R, 1], index in the whole tensor of each row's first element; below: uint32, 1 to 65536.
    -> bool [R, C], True where the draw is not below. ALIGNED: `first` is a multiple of 8."""
    if ALIGNED:
        # Compared as they lie, in the upper halves of words: nothing is to be cut out, and 65536 stays above all.
        words = _halves((first >> 3) + tl.arange(0, C // 8)[None, :], op_id, k0, k1)
        return tl.reshape(words > (below << 16) - 1, [R, C])
    else:
        return draw1(first + tl.arange(0, C)[None, :], op_id, k0, k1) >= below
