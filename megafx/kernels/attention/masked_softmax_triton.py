"""The kernels of megafx::scale_mask_softmax; masked_softmax.py has formulas and ops, masked_softmax_launch.py the launchers.

Rows stay in registers: one row a program, several where rows are short. What a row cannot see is not read: its range of
visible keys follows from position and from the bounds of its row of the mask, which a small kernel finds first (all heads
share it); where all keys between the bounds are visible, the mask itself is not read. Ranges are widened to groups of 8
keys, so that loads stay 16 bytes wide. Rows that see a quarter or a half of the keys compute on that alone. Zeros beyond
are written, as they must be: the floor of a causal softmax is 1.5 N forward, 2 N backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafx.kernels.common.philox_triton import keep_tile, key_of
from megafx.kernels.common.tiles_triton import exp


@triton.jit
def _group(low, high, EIGHTS: tl.constexpr):
    if EIGHTS:
        return low // 8 * 8, (high + 7) // 8 * 8
    else:
        return low, high


@triton.jit
def mask_bounds(
    mask,  # [M0, M1, M2, T or 1] IN by strides: uint8 (1 hides) or floating (added)
    out,  # [M0 * M1 * M2, 4] int32 OUT: first visible key, end, whether all between are visible (and nothing is added), 0
    M1, M2, stride0, stride1, stride2, T, floor,
    MASK: tl.constexpr, KEYS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = row // M2
    at = (head // M1).to(tl.int64) * stride0 + (head % M1).to(tl.int64) * stride1 + (row % M2).to(tl.int64) * stride2
    key = tl.arange(0, B)
    m = tl.load(mask + at + key * KEYS, mask=key < T, other=0)
    if MASK == 1:
        seen = (key < T) & (m == 0)
        free = seen
    else:
        seen = (key < T) & (m.to(tl.float32) > floor)
        free = seen & (m == 0)
    low = tl.min(tl.where(seen, key, T), 0)
    high = tl.max(tl.where(seen, key + 1, 0), 0)
    whole = tl.sum(free.to(tl.int32), 0) == tl.maximum(high - low, 0)
    tl.store(out + row * 4, low)
    tl.store(out + row * 4 + 1, high)
    tl.store(out + row * 4 + 2, whole.to(tl.int32))


@triton.jit
def _masked(
    scores, at, key, near, mask, mask_at, plain, first, end, floor, scale, fill, T,
    MASK: tl.constexpr, KEYS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """z of keys [R, B], -inf beyond T; and where scores count (are not filled). near: keys to read, the others are hidden.

    plain: [first, end) is all that is seen, and the mask need not be read. INSIDE: all keys are below T.
    """
    z = tl.load(scores + at + key, mask=near, other=0.0).to(tl.float32) * scale
    seen = (key >= first) & (key < end)
    if MASK == 1:  # noqa: SIM102 (the outer one is compile time)
        if plain == 0:
            seen &= tl.load(mask + mask_at + key * KEYS, mask=near & (key < T), other=1) == 0
    counted = seen
    if MASK >= 2:  # noqa: SIM102
        if plain == 0:
            given = tl.load(mask + mask_at + key * KEYS, mask=key < T, other=0.0)
            m = given.to(tl.float32)
            total = z + m
            if given.dtype == scores.dtype.element_ty:  # a sum of half precision absorbs scores
                total = tl.where(m <= -5000.0, total.to(given.dtype).to(tl.float32), total)
            if MASK == 3:
                total = tl.where(m <= floor, m, total)
                counted &= m > floor
            z = total
    z = tl.where(seen, z, fill)
    return z if INSIDE else tl.where(key < T, z, -float("inf")), counted


@triton.jit
def _keep(global_at, seed, op_id, threshold, R: tl.constexpr, B: tl.constexpr, ALIGNED: tl.constexpr):
    """global_at: index of each row's first element [R, 1] -> bool [R, B]."""
    k0, k1 = key_of(seed)
    return keep_tile(global_at, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, B)


@triton.jit
def _forward_rows(
    scores, y, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low, high, floor,
    scale, fill, factor, threshold, op_id, T,
    MASK: tl.constexpr, KEYS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, EIGHTS: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Keys [0, B); those in [B, FULL) have probability 0."""
    key = tl.arange(0, B)[None, :]
    from_key, to_key = _group(low, high, EIGHTS)
    near = valid & (key >= from_key) & (key < to_key)
    z, _ = _masked(
        scores, at, key, near, mask, mask_at, plain, first, end, floor, scale, fill, T, MASK, KEYS, EVEN or B < FULL
    )
    top = tl.max(z, 1)[:, None]
    e = exp(z - top)
    total = tl.sum(e, 1)[:, None]
    out = (e * (1.0 / total)).to(y.dtype.element_ty)
    if DROP:
        kept = _keep(global_at, seed, op_id, threshold, R, B, ALIGNED)
        out = tl.where(kept, out.to(tl.float32) * factor, 0.0).to(y.dtype.element_ty)
    tl.store(y + at + key, out, mask=valid if EVEN or B < FULL else valid & (key < T))
    at_stats = stats + row * 2 + tl.zeros([R, 1], tl.int32)
    tl.store(at_stats, top, mask=valid)
    tl.store(at_stats + 1, total, mask=valid)
    if B < FULL:
        for i in tl.static_range(1, FULL // B):
            tl.store(y + at + i * B + key, tl.zeros([R, B], y.dtype.element_ty), mask=i * B + key < T)


@triton.jit
def _forward_parts(
    scores, y, stats, mask, seed, row, at, global_at, mask_at, plain, first, end, low, high, floor,
    scale, fill, factor, threshold, op_id, T,
    MASK: tl.constexpr, KEYS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, EIGHTS: tl.constexpr, EVEN: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """One row whose mask is read, B keys at a time and twice: it takes no more registers than rows that read no mask."""
    from_key, to_key = _group(low, high, EIGHTS)
    top = tl.full([1, 1], -float("inf"), tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    for left in range(0, T, B):
        key = left + tl.arange(0, B)[None, :]
        near = (key >= from_key) & (key < to_key)
        z, _ = _masked(scores, at, key, near, mask, mask_at, plain, first, end, floor, scale, fill, T, MASK, KEYS, EVEN)
        higher = tl.maximum(top, tl.max(z, 1)[:, None])
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * exp(top - safe) + tl.sum(exp(z - safe), 1)[:, None]
        top = higher
    at_stats = stats + row * 2 + tl.zeros([1, 1], tl.int32)
    tl.store(at_stats, top)
    tl.store(at_stats + 1, total)
    for left in range(0, T, B):
        key = left + tl.arange(0, B)[None, :]
        near = (key >= from_key) & (key < to_key)
        z, _ = _masked(scores, at, key, near, mask, mask_at, plain, first, end, floor, scale, fill, T, MASK, KEYS, EVEN)
        out = (exp(z - top) * (1.0 / total)).to(y.dtype.element_ty)
        if DROP:
            kept = _keep(global_at + left, seed, op_id, threshold, 1, B, ALIGNED)
            out = tl.where(kept, out.to(tl.float32) * factor, 0.0).to(y.dtype.element_ty)
        tl.store(y + at + key, out, mask=key < T)


@triton.jit
def _backward_rows(
    grad, saved, dx, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low, high, floor,
    scale, fill, factor, threshold, op_id, T,
    MASK: tl.constexpr, KEYS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, EIGHTS: tl.constexpr, EVEN: tl.constexpr,
    HARD: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    key = tl.arange(0, B)[None, :]
    from_key, to_key = _group(low, high, EIGHTS)
    near = valid & (key >= from_key) & (key < to_key)
    read = near if HARD else valid & (key < T)  # a soft fill leaves hidden keys a probability, which the sum needs
    g = tl.load(grad + at + key, mask=read, other=0.0).to(tl.float32)
    if DROP:
        z, seen = _masked(
            saved, at, key, near, mask, mask_at, plain, first, end, floor, scale, fill, T, MASK, KEYS, EVEN or B < FULL
        )
        top = tl.load(stats + row * 2)  # a row that is not valid is the last one again
        total = tl.load(stats + row * 2 + 1)
        p = exp(z - top) * (1.0 / total)
        g = tl.where(_keep(global_at, seed, op_id, threshold, R, B, ALIGNED), g * factor, 0.0)
    else:
        p = tl.load(saved + at + key, mask=read, other=0.0).to(tl.float32)
        seen = (key >= first) & (key < end)
        if MASK == 1:  # noqa: SIM102
            if plain == 0:
                seen &= tl.load(mask + mask_at + key * KEYS, mask=near & (key < T), other=1) == 0
        if MASK == 3:  # noqa: SIM102
            if plain == 0:
                seen &= tl.load(mask + mask_at + key * KEYS, mask=key < T, other=0.0).to(tl.float32) > floor
    dz = p * (g - tl.sum(p * g, 1)[:, None]) * scale
    dz = tl.where(seen, dz, 0.0)
    tl.store(dx + at + key, dz.to(dx.dtype.element_ty), mask=valid if EVEN or B < FULL else valid & (key < T))
    if B < FULL:
        for i in tl.static_range(1, FULL // B):
            tl.store(dx + at + i * B + key, tl.zeros([R, B], dx.dtype.element_ty), mask=i * B + key < T)


@triton.jit(do_not_specialize=["threshold", "op_id"])
def masked_softmax(
    grad,  # [rows, T] IN, contiguous; BACK only
    source,  # [rows, T] IN, contiguous: scores, or y in backward without dropout
    out,  # [rows, T] as source, OUT, contiguous
    stats,  # [rows, 2] fp32: OUT forward, IN backward with dropout
    mask,  # broadcast IN: uint8 (1 hides) or floating (added; MASK 3: what is below `floor` was filled)
    seed,  # [] int64 IN
    rows,  # of this run: what follows are its starts and strides, in rows and (global) in elements
    rows_a_piece, row_start, row_stride, global_start, global_stride, S, T,
    heads,  # of mask rows: lead = batch * heads + head
    mask_batch, mask_head, mask_query,
    bounds,  # of the mask's rows, by mask_bounds; IN with MASK
    bound_batch, bound_head, bound_query, window, floor, scale, fill, factor, threshold, op_id,
    BACK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
    KEYS: tl.constexpr,  # stride of the mask's keys
    DROP: tl.constexpr, ALIGNED: tl.constexpr, EIGHTS: tl.constexpr,
    EVEN: tl.constexpr,  # T is FULL
    HARD: tl.constexpr, SPLIT: tl.constexpr, ONE_PIECE: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    if R == 1:  # scalars: a [1, 1] tensor is kept, and loaded, several times by every thread
        i = tl.program_id(0)
        valid = tl.zeros([1, 1], tl.int32) == 0
    else:
        i = tl.program_id(0) * R + tl.arange(0, R)[:, None]
        valid = i < rows
        i = tl.minimum(i, rows - 1)
    if ONE_PIECE:
        row = row_start + i
        global_at = global_start + i.to(tl.int64) * T
    else:
        piece = i // rows_a_piece
        within = i - piece * rows_a_piece
        row = row_start + piece * row_stride + within
        global_at = global_start + piece.to(tl.int64) * global_stride + within.to(tl.int64) * T
    at = row.to(tl.int64) * T
    lead = row // S
    query = row - lead * S
    first = query * 0
    end = first + T
    if CAUSAL:
        end = tl.minimum(tl.maximum(query + (T - S + 1), 0), T)
    if WINDOW:
        first = tl.minimum(tl.maximum(query + (T - S + 1) - window, 0), T)
    low = first
    high = end
    reach = end if R == 1 else tl.max(tl.max(end, 1), 0)
    plain = reach * 0
    mask_at = at * 0
    if MASK:
        batch = lead // heads
        head = lead - batch * heads
        mask_at = batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head + query.to(tl.int64) * mask_query
        bound = bounds + (batch * bound_batch + head * bound_head + query * bound_query) * 4
        low = tl.maximum(first, tl.load(bound))
        high = tl.minimum(end, tl.load(bound + 1))
        whole = tl.load(bound + 2)
        if MASK >= 2:  # a row that hides everything has the softmax of its mask, and its gradient
            whole = tl.where(high > low, whole, 0) if HARD else whole * 0
        plain = whole if R == 1 else tl.min(tl.min(whole, 1), 0)
        first = tl.where(plain == 1, low, first)
        end = tl.where(plain == 1, high, end)
        if MASK >= 2:
            low = first
            high = end
        some_high = tl.where(high > low, high, 0)
        reach = tl.where(plain == 1, some_high if R == 1 else tl.max(tl.max(some_high, 1), 0), T)
    if MASK:
        if plain == 1:
            _reaching(
                grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
                high, floor, scale, fill, factor, threshold, op_id, T, reach,
                BACK, DROP, ALIGNED, EIGHTS, EVEN, HARD, SPLIT, R, FULL,
            )  # fmt: skip
        elif (R == 1) & (not BACK):
            _forward_parts(
                source, out, stats, mask, seed, row, at, global_at, mask_at, plain, first, end, low,
                high, floor, scale, fill, factor, threshold, op_id, T, MASK, KEYS, DROP, ALIGNED, EIGHTS, EVEN, FULL // 4,
            )  # fmt: skip
        else:
            _rows(
                grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
                high, floor, scale, fill, factor, threshold, op_id, T,
                BACK, MASK, KEYS, DROP, ALIGNED, EIGHTS, EVEN, HARD, R, FULL, FULL,
            )  # fmt: skip
    else:
        _reaching(
            grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
            high, floor, scale, fill, factor, threshold, op_id, T, reach,
            BACK, DROP, ALIGNED, EIGHTS, EVEN, HARD, SPLIT, R, FULL,
        )  # fmt: skip


@triton.jit
def _reaching(
    grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low, high, floor,
    scale, fill, factor, threshold, op_id, T, reach,
    BACK: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
    EIGHTS: tl.constexpr, EVEN: tl.constexpr, HARD: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Rows that see [first, end), and no key from `reach` on: computed on a quarter or a half of the keys where that is all."""
    if SPLIT:
        some = reach > 0
        if some & (reach <= FULL // 4):
            _rows(
                grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
                high, floor, scale, fill, factor, threshold, op_id, T,
                BACK, 0, 0, DROP, ALIGNED, EIGHTS, EVEN, HARD, R, FULL // 4, FULL,
            )  # fmt: skip
        elif some & (reach <= FULL // 2):
            _rows(
                grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
                high, floor, scale, fill, factor, threshold, op_id, T,
                BACK, 0, 0, DROP, ALIGNED, EIGHTS, EVEN, HARD, R, FULL // 2, FULL,
            )  # fmt: skip
        else:
            _rows(
                grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
                high, floor, scale, fill, factor, threshold, op_id, T,
                BACK, 0, 0, DROP, ALIGNED, EIGHTS, EVEN, HARD, R, FULL, FULL,
            )  # fmt: skip
    else:
        _rows(
            grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
            high, floor, scale, fill, factor, threshold, op_id, T,
            BACK, 0, 0, DROP, ALIGNED, EIGHTS, EVEN, HARD, R, FULL, FULL,
        )  # fmt: skip


@triton.jit
def _rows(
    grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low, high, floor,
    scale, fill, factor, threshold, op_id, T,
    BACK: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
    EIGHTS: tl.constexpr, EVEN: tl.constexpr, HARD: tl.constexpr, R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    if BACK:
        _backward_rows(
            grad, source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low,
            high, floor, scale, fill, factor, threshold, op_id, T, MASK, KEYS, DROP, ALIGNED, EIGHTS, EVEN, HARD, R, B, FULL,
        )  # fmt: skip
    else:
        _forward_rows(
            source, out, stats, mask, seed, row, valid, at, global_at, mask_at, plain, first, end, low, high,
            floor, scale, fill, factor, threshold, op_id, T, MASK, KEYS, DROP, ALIGNED, EIGHTS, EVEN, R, B, FULL,
        )  # fmt: skip
