"""The kernels of norms_launch.py: layer_norm and rms_norm, alone or after bias + dropout + add.

A row is cut into K parts of C columns, a tile is R rows. Parts are tuples of tensors in registers, so a row costs the
registers of its own length, whether or not that is a power of two.

Forward: one tile a program. Long rows (`reload`) are not kept: statistics are taken in a first pass over the parts (each
lane by Welford's update, combined at the end), and the second pass finds the row in the cache.
Backward: persistent programs take every P-th tile, loads pipelined; the sums for weight, bias and norm bias stay in
registers and leave as partials [P, H], which column_sums adds in a fixed order. grad_h, where given, is added to dx.
"""


# ruff: noqa: RUF005  (Triton reads no starred expressions)

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megafx.kernels.common.maxima_triton import leave, magnitude
from megafx.kernels.common.philox_triton import keep_tile, key_of


@triton.jit
def _zeros(K: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    parts = ()
    for _ in tl.static_range(K):
        parts = parts + (tl.zeros([R, C], tl.float32),)
    return parts


@triton.jit
def _inside(row, rows, column, H, EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Which elements of a part are there. A constant mask costs nothing."""
    if EVEN and R == 1:
        return tl.full([R, C], 1, tl.int1)
    elif EVEN:
        return (row < rows) & tl.full([R, C], 1, tl.int1)
    else:
        return (row < rows) & (column < H)


@triton.jit
def _vector(pointer, column, H, EVEN: tl.constexpr):
    """A part of a vector [H], which other programs read too."""
    if EVEN:
        return tl.load(pointer + column, eviction_policy="evict_last")
    else:
        return tl.load(pointer + column, mask=column < H, other=0.0, eviction_policy="evict_last")


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["rows", "threshold", "op_id", "first_row"])
def norm_forward(
    x,  # [rows, H] IN
    bias,  # [H] IN
    residual,  # [rows, H] IN
    seed,  # [] int64 IN
    weight,  # [H] IN
    norm_bias,  # [H] IN
    h,  # [rows, H] OUT
    y,  # [rows, H] OUT
    mean_out,  # [rows] fp32 OUT
    rstd_out,  # [rows] fp32 OUT
    largest,  # [programs] int32 OUT, of y; written if LARGEST
    rows, H, eps, offset, threshold, scale, op_id, inner,
    first_row,  # row i of the shard is row first_row + (i // inner) * row_stride + i % inner of the whole tensor
    row_stride,
    RMS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHT: tl.constexpr, NORM_BIAS: tl.constexpr, RELOAD: tl.constexpr, LARGEST: tl.constexpr,
    EVEN: tl.constexpr,  # the parts are the row, no more
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    start = row * H
    if DROP:
        k0, k1 = key_of(seed)
        outer = row // inner
        first = (first_row + outer * row_stride + row - outer * inner) * H
    parts = ()
    total = tl.zeros([R, C], tl.float32)  # RELOAD: of rms_norm the squares, of layer_norm each lane's mean
    spread = tl.zeros([R, C], tl.float32)
    for k in tl.static_range(K):
        column = k * C + tl.arange(0, C)[None, :]
        inside = _inside(row, rows, column, H, EVEN or k < K - 1, R, C)
        if ADD:
            value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
            if BIAS:
                value += _vector(bias, column, H, EVEN or k < K - 1).to(tl.float32)
            if DROP:
                keep = keep_tile(
                    first + k * C, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, C
                )
                value = tl.where(keep, value * scale, 0.0)
            value += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
            value = value.to(h.dtype.element_ty)  # columns outside have loaded nothing but zeros
            tl.store(h + start + column, value, mask=inside)
        else:
            value = tl.load(x + start + column, mask=inside, other=0.0)
        wide = value.to(tl.float32)
        if RMS:
            total += wide * wide
        elif RELOAD:
            step = wide - total
            update = total + step * (1.0 / (k + 1))
            if EVEN or k < K - 1:
                spread += step * (wide - update)
                total = update
            else:
                spread = tl.where(column < H, spread + step * (wide - update), spread)
                total = tl.where(column < H, update, total)
        else:
            total += wide
        if not RELOAD:
            parts = parts + (value,)
    mean = tl.zeros([R, 1], tl.float32)
    if RMS:
        square = tl.sum(total, axis=1)[:, None] / H
    else:
        if RELOAD:
            # How many parts a lane has: all, or all but the last.
            count = tl.where(EVEN or (K - 1) * C + tl.arange(0, C)[None, :] < H, K, K - 1).to(tl.float32)
            mean = tl.sum(total * count, axis=1)[:, None] / H
            total = spread + count * (total - mean) * (total - mean)
        else:
            mean = tl.sum(total, axis=1)[:, None] / H
            total = tl.zeros([R, C], tl.float32)
            for k in tl.static_range(K):
                away = parts[k].to(tl.float32) - mean
                if not EVEN and k == K - 1:
                    away = tl.where(k * C + tl.arange(0, C)[None, :] < H, away, 0.0)
                total += away * away
        square = tl.sum(total, axis=1)[:, None] / H
        tl.store(mean_out + row, mean, mask=row < rows)
    rstd = tl.rsqrt(square + eps)
    tl.store(rstd_out + row, rstd, mask=row < rows)
    if RELOAD and ADD:
        tl.debug_barrier()  # the second pass reads h, which other threads may have written
    found = tl.zeros([R, C], tl.int32)
    for k in tl.static_range(K):
        column = k * C + tl.arange(0, C)[None, :]
        inside = _inside(row, rows, column, H, EVEN or k < K - 1, R, C)
        if RELOAD:
            # The eviction policy also keeps the compiler from taking the load for that of the first pass.
            value = tl.load((h if ADD else x) + start + column, mask=inside, other=0.0, eviction_policy="evict_first")
        else:
            value = parts[k]
        out = (value.to(tl.float32) - mean) * rstd
        if WEIGHT:
            w = _vector(weight, column, H, EVEN or k < K - 1).to(tl.float32)
            out *= w + offset
        if NORM_BIAS:
            out += _vector(norm_bias, column, H, EVEN or k < K - 1).to(tl.float32)
        tl.store(y + start + column, out.to(y.dtype.element_ty), mask=inside)
        if LARGEST:
            found = tl.maximum(found, magnitude(out, inside))
    if LARGEST:
        leave(largest, tl.program_id(0), found)


@triton.jit
def _again(value, zero):
    """value in fp32; zero: int16 0 of unknown origin."""
    if value.dtype.primitive_bitwidth == 16:
        value = (value.to(tl.int16, bitcast=True) ^ zero).to(value.dtype, bitcast=True)
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "threshold", "op_id", "first_row"])
def norm_backward(
    grad,  # [rows, H] IN
    x,  # [rows, H] IN
    grad_h,  # [rows, H] IN
    seed,  # [] int64 IN
    weight,  # [H] IN
    mean_in,  # [rows] fp32 IN
    rstd_in,  # [rows] fp32 IN
    dx,  # [rows, H] OUT
    dbranch,  # [rows, H] OUT: keep(i) dx scale
    partial,  # [J, P, H] fp32 OUT, in the order of the flags
    largest,  # [programs] int32 OUT; LARGEST 1: of dx, 2: of dbranch
    rows, H, offset, threshold, scale, op_id, inner, first_row, row_stride,
    RMS: tl.constexpr, GRAD_H: tl.constexpr, BRANCH: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHT: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_NORM_BIAS: tl.constexpr, SUM_BIAS: tl.constexpr,
    LARGEST: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    if DROP:
        k0, k1 = key_of(seed)
    own = tl.program_id(0) % SPLIT * (K * C)  # first of this program's columns
    weights = ()
    if WEIGHT:
        for k in tl.static_range(K * SPLIT):
            column = tl.multiple_of((own + k * C) % (K * SPLIT * C), C) + tl.arange(0, C)[None, :]
            weights = weights + (_vector(weight, column, H, EVEN or (SPLIT == 1 and k < K - 1)),)
    sums_weight = _zeros(K if SUM_WEIGHT else 1, R, C)
    sums_norm_bias = _zeros(K if SUM_NORM_BIAS else 1, R, C)
    sums_bias = _zeros(K if SUM_BIAS else 1, R, C)
    found = tl.zeros([R, C], tl.int32)
    group = tl.program_id(0) // SPLIT
    groups = tl.num_programs(0) // SPLIT
    for tile in tl.range(group, tl.cdiv(rows, R), groups, num_stages=STAGES):
        row = (tl.full([], 0, tl.int64) + tile) * R + tl.arange(0, R)[:, None]
        start = row * H
        rstd = tl.load(rstd_in + row, mask=row < rows, other=0.0)
        mean = tl.zeros([R, 1], tl.float32)
        if not RMS:
            mean = tl.load(mean_in + row, mask=row < rows, other=0.0)
        values = ()
        grads = ()
        product = tl.zeros([R, C], tl.float32)
        plain = tl.zeros([R, C], tl.float32)
        for k in tl.static_range(K * SPLIT):
            column = tl.multiple_of((own + k * C) % (K * SPLIT * C), C) + tl.arange(0, C)[None, :]
            inside = _inside(row, rows, column, H, EVEN or (SPLIT == 1 and k < K - 1), R, C)
            value = tl.load(x + start + column, mask=inside, other=0.0)
            g = tl.load(grad + start + column, mask=inside, other=0.0)
            unit = (value.to(tl.float32) - mean) * rstd
            v = g.to(tl.float32)
            if WEIGHT:
                v *= weights[k].to(tl.float32) + offset
            product += unit * v
            if not RMS:
                plain += v
            if k < K:
                values = values + (value,)
                grads = grads + (g,)
        if RMS:
            c1 = tl.sum(product, axis=1)[:, None] / H
            c2 = 0.0
        else:
            s1, s2 = tl.reduce((product, plain), 1, _add)
            c1 = s1[:, None] / H
            c2 = s2[:, None] / H
        # 0 in a way that the compiler cannot see: so it keeps rows as loaded across the reduction, not twice as wide.
        zero = (c1 != c1).to(tl.int16)
        new_weight = ()
        new_norm_bias = ()
        new_bias = ()
        for k in tl.static_range(K):
            column = own + k * C + tl.arange(0, C)[None, :]
            inside = _inside(row, rows, column, H, EVEN or (SPLIT == 1 and k < K - 1), R, C)
            unit = (_again(values[k], zero) - mean) * rstd
            g = _again(grads[k], zero)
            v = g
            if WEIGHT:
                v = g * (weights[k].to(tl.float32) + offset)
            d = (v - unit * c1 - c2) * rstd
            if SUM_WEIGHT:
                new_weight = new_weight + (sums_weight[k] + g * unit,)
            if SUM_NORM_BIAS:
                new_norm_bias = new_norm_bias + (sums_norm_bias[k] + g,)
            if GRAD_H:
                d += tl.load(grad_h + start + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + start + column, d.to(dx.dtype.element_ty), mask=inside)
            if LARGEST == 1:
                found = tl.maximum(found, magnitude(d, inside))
            if DROP:
                outer = row // inner
                first = (first_row + outer * row_stride + row - outer * inner) * H + own + k * C
                keep = keep_tile(first, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, C)
                d = tl.where(keep, d * scale, 0.0)
            if BRANCH:
                tl.store(dbranch + start + column, d.to(dbranch.dtype.element_ty), mask=inside)
            if LARGEST == 2:
                found = tl.maximum(found, magnitude(d, inside))
            if SUM_BIAS:
                new_bias = new_bias + (sums_bias[k] + d,)
        if SUM_WEIGHT:
            sums_weight = new_weight
        if SUM_NORM_BIAS:
            sums_norm_bias = new_norm_bias
        if SUM_BIAS:
            sums_bias = new_bias
    if LARGEST > 0:
        leave(largest, tl.program_id(0), found)
    out = partial + group.to(tl.int64) * H
    size = groups.to(tl.int64) * H
    for k in tl.static_range(K):
        column = own + k * C + tl.arange(0, C)[None, :]
        if SUM_WEIGHT:
            tl.store(out + column, tl.sum(sums_weight[k], axis=0)[None, :], mask=column < H)
        if SUM_NORM_BIAS:
            at = out + size * SUM_WEIGHT + column
            tl.store(at, tl.sum(sums_norm_bias[k], axis=0)[None, :], mask=column < H)
        if SUM_BIAS:
            at = out + size * (SUM_WEIGHT + SUM_NORM_BIAS) + column
            tl.store(at, tl.sum(sums_bias[k], axis=0)[None, :], mask=column < H)
