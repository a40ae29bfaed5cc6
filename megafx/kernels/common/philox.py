"""Counter-based random bits: Philox4x32-7 keyed by (seed, op id, global element index).

Definition. The element with row-major index i in the whole tensor has:

    counter = (g & 0xffffffff, g >> 32, op_id, 0) with g = i >> 3      key = low and high 32 bits of the 64-bit seed
    draw(i) = half (j & 1) of output word (j >> 1) with j = i & 7      a 16-bit integer; half 0 is the low one
    keep(i) = draw(i) >= threshold(p)                                  threshold(p) = round(p * 65536)
    scale   = 1 / (1 - threshold / 65536)                              so the expectation is exactly unbiased

One Philox call serves 8 elements. A draw depends on nothing but (seed, op_id, i), so a shard draws exactly its slice of
the one-process mask. Philox is Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): the
round function and the constants. Seven rounds pass the statistical tests of tests/kernels/test_dropout.py.

32-bit words are held in int64: products wrap modulo 2**64, which leaves both halves of the 64-bit product right. Words that are
the same for all elements (op id, high half of the index) stay Python integers: most of the first two rounds is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in 32 bits
MASK = 0xFFFFFFFF
DRAWS = 1 << 16  # number of values that a draw takes

Word = Tensor | int  # 32-bit unsigned: int64 tensor, or an integer common to all elements


def key_of(seed: Tensor) -> tuple[int, int]:
    """0-d int64 -> the two 32-bit words of the key."""
    bits = int(seed.item()) & (2**64 - 1)
    return bits & MASK, bits >> 32


def threshold(p: float) -> int:
    """Draws below this are dropped: p = 0.1 -> 6554, that is a drop rate of 0.100006."""
    return round(p * DRAWS)


def scale(p: float) -> float:
    """What kept elements are multiplied by. Infinite where everything is dropped."""
    kept = DRAWS - threshold(p)
    return DRAWS / kept if kept else float("inf")


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[Word, ...]:
    """Counter words and key -> four output words."""
    return tuple(w & MASK for w in _rounds(counter, key, rounds))


def _rounds(counter: tuple[Word, Word, Word, Word], key: tuple[int, int], rounds: int) -> tuple[Word, ...]:
    """As philox4x32, but words 1 and 3 may carry garbage above bit 31 (every use masks it away)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = _mix(p1, c1, k0), _mix(p0, c3, k1)
        c1, c3 = p1, p0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def _mix(product: Word, word: Word, key: int) -> Word:
    """(high half of product) ^ word ^ key."""
    if isinstance(product, int):
        return (word ^ (product >> 32) ^ key) & MASK
    high = product >> 32  # arithmetic shift: the sign bits it brings in are masked away
    if isinstance(word, int):
        high.bitwise_xor_((word ^ key) & MASK)
    else:
        high.bitwise_xor_(word).bitwise_xor_(key)
    return high.bitwise_and_(MASK)


def dropped(groups: Tensor, high: Word, key: tuple[int, int], op_id: int, below: int) -> Tensor:
    """Groups of 8 elements -> bool [len(groups), 8], True where the draw is less than `below` (in [0, 65536)).

    groups: int64 [n], low 32 bits of the group indices; high: their high 32 bits. The CPU's hot path: the draws are
    never widened. The four words are packed as they lie in (little-endian) memory and compared as signed 16-bit
    integers, the sign bit flipped on both sides.
    """
    c0, c1, c2, c3 = _rounds((groups, high, op_id, 0), key, ROUNDS)
    assert isinstance(c0, Tensor) and isinstance(c1, Tensor) and isinstance(c2, Tensor) and isinstance(c3, Tensor)
    packed = torch.empty(len(groups), 2, dtype=torch.int64, device=groups.device)
    torch.bitwise_or(c0, c1 << 32, out=packed[:, 0])
    torch.bitwise_or(c2, c3 << 32, out=packed[:, 1])
    return packed.view(torch.int16).bitwise_xor_(-0x8000) < below - 0x8000
