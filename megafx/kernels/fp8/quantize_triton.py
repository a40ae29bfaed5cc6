"""fp8_amax, fp8_quantize and fp8_transposed on CUDA; quantize.py has the formulas.

Programs that share a largest magnitude leave partial maxima, which a second kernel joins (common/maxima_triton.py). A cast
reads x once and writes its bytes, their transpose, or both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.maxima_triton import JOINED, join, leave, magnitude
from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import cdiv, multiprocessors
from megafx.kernels.fp8.quantize import LEAST, TOP, amax_shape, real_parts

ROWS, COLUMNS = 64, 128  # of a tile: 32 elements a thread at 8 warps


@triton.jit
def _bits(x, row, column, rows, columns, stride):
    """Bits of |x| as int32, 0 outside. x fp32, bf16 or fp16."""
    inside = (row < rows) & (column < columns)
    return magnitude(tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32), inside)


@triton.jit
def _largest_of_all(
    x,  # [rows, columns] IN, stride between rows
    partial,  # [programs] int32 OUT
    rows, columns, stride, tiles, across, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    found = tl.zeros([R, C], tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across) * R + tl.arange(0, R)[:, None]
        column = (tile % across) * C + tl.arange(0, C)[None, :]
        found = tl.maximum(found, _bits(x, row, column, rows, columns, stride))
    leave(partial, tl.program_id(0), found)


@triton.jit
def _largest_of_rows(
    x,  # [rows, columns] IN
    out,  # [rows] fp32 OUT
    rows, columns, stride, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    found = tl.zeros([R, C], tl.int32)
    for start in tl.range(0, columns, C):
        found = tl.maximum(found, _bits(x, row, start + tl.arange(0, C)[None, :], rows, columns, stride))
    at = tl.program_id(0) * R + tl.arange(0, R)
    tl.store(out + at, tl.max(found, axis=1).to(tl.float32, bitcast=True), mask=at < rows)


@triton.jit
def _largest_of_columns(
    x,  # [rows, columns] IN
    partial,  # [parts, columns] int32 OUT
    rows, columns, stride, each, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    first = tl.program_id(1) * each
    found = tl.zeros([R, C], tl.int32)
    for start in tl.range(first, tl.minimum(first + each, rows), R):
        found = tl.maximum(found, _bits(x, start + tl.arange(0, R)[:, None], column, rows, columns, stride))
    at = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(partial + tl.program_id(1).to(tl.int64) * columns + at, tl.max(found, axis=0), mask=at < columns)


def amax(x: Tensor, kept: int, cut: int, layout: Sequence[int], axis: str) -> Tensor:
    parts = [part for part in real_parts(x, cut, layout, axis) if part.numel()]
    if not parts:
        return torch.zeros(amax_shape(x, kept), dtype=torch.float32, device=x.device)
    found = _amax(parts[0], kept)
    for part in parts[1:]:
        found = torch.maximum(found, _amax(part, kept))
    return found


def _amax(x: Tensor, kept: int) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    where = (rows, columns, x.stride(0))
    out = torch.empty(amax_shape(x, kept), dtype=torch.float32, device=x.device)
    if kept == 0:  # one program has all of a row: what it finds needs no joining
        launch(_largest_of_rows, (cdiv(rows, 4),), x, x, out, *where, R=4, C=1024, num_warps=8)
    elif kept == 1:
        width = cdiv(columns, COLUMNS)
        parts = min(max(1, cdiv(4 * multiprocessors(x.device), width)), cdiv(rows, ROWS))
        each = cdiv(cdiv(rows, parts), ROWS) * ROWS
        parts = cdiv(rows, each)
        partial = torch.empty((parts, columns), dtype=torch.int32, device=x.device)
        launch(_largest_of_columns, (width, parts), x, x, partial, *where, each, R=ROWS, C=COLUMNS, num_warps=8)
        join(partial, out)
    else:
        across = cdiv(columns, COLUMNS)
        tiles = cdiv(rows, ROWS) * across
        programs = min(tiles, 4 * multiprocessors(x.device), JOINED)
        partial = torch.empty((programs,), dtype=torch.int32, device=x.device)
        launch(_largest_of_all, (programs,), x, x, partial, *where, tiles, across, R=ROWS, C=COLUMNS, num_warps=8)
        join(partial, out)
    return out


# -- casts


@triton.jit
def _quantize(
    x,  # [rows, columns] IN
    largest,  # [], [rows] or [columns] fp32 IN
    q,  # [rows, columns] uint8 OUT
    qt,  # [columns, rows] uint8 OUT
    scale,  # as largest OUT
    rows, columns, stride,
    TOP: tl.constexpr, LEAST: tl.constexpr, KEPT: tl.constexpr, WIDE_RANGE: tl.constexpr, POWER: tl.constexpr,
    PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if KEPT == 0:
        found = tl.load(largest + row, mask=row < rows, other=0.0)
    elif KEPT == 1:
        found = tl.load(largest + column, mask=column < columns, other=0.0)
    else:
        found = tl.load(largest + tl.zeros([1], tl.int32))
    s = tl.div_rn(tl.where(found < LEAST, LEAST, found), tl.full(found.shape, TOP, tl.float32))
    if POWER:  # the mantissa rounded up into the exponent
        bits = s.to(tl.int32, bitcast=True)
        above = (bits & 0x7F800000) + tl.where((bits & 0x007FFFFF) != 0, 0x00800000, 0)
        s = tl.where(bits >= 0x7F800000, s, above.to(tl.float32, bitcast=True))
    s = tl.where(found == 0.0, 1.0, s)
    inverse = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    if KEPT == 0:
        if tl.program_id(1) == 0:
            tl.store(scale + row, s, mask=row < rows)
        value = value * inverse[:, None]
    elif KEPT == 1:
        if tl.program_id(0) == 0:
            tl.store(scale + column, s, mask=column < columns)
        value = value * inverse[None, :]
    else:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale + tl.zeros([1], tl.int32), s)
        value = value * inverse[None, :]
    value = tl.where(value > TOP, TOP, tl.where(value < -TOP, -TOP, value))  # a NaN stays
    if WIDE_RANGE:
        byte = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        byte = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if PLAIN:
        tl.store(q + row.to(tl.int64)[:, None] * columns + column[None, :], byte, mask=inside)
    if TRANSPOSED:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(qt + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(byte), mask=turned)


def quantize(
    x: Tensor, largest: Tensor, kept: int, format: str, power_of_two: bool, plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if transposed and x.dtype == torch.float32:
        # Triton 3.6 writes wrong transposes of what it loads as fp32 where 16 divides the columns (H100, 2026-11-26).
        q, _, scale = quantize(x, largest, kept, format, power_of_two, True, False)
        return (q if plain else q.new_empty((0, 0))), _turned(q), scale
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    q = torch.empty((rows, columns) if plain else (0, 0), dtype=torch.uint8, device=x.device)
    qt = torch.empty((columns, rows) if transposed else (0, 0), dtype=torch.uint8, device=x.device)
    scale = torch.empty(largest.shape, dtype=torch.float32, device=x.device)
    launch(
        _quantize, (max(1, cdiv(rows, ROWS)), max(1, cdiv(columns, COLUMNS))), x,
        x, largest.contiguous(), q, qt, scale, rows, columns, x.stride(0),
        TOP=TOP[format], LEAST=LEAST, KEPT=kept, WIDE_RANGE=format == "e5m2", POWER=power_of_two, PLAIN=plain,
        TRANSPOSED=transposed, R=ROWS, C=COLUMNS, num_warps=8,
    )  # fmt: skip
    return q, qt, scale


@triton.jit
def _turn(
    q,  # [rows, columns] uint8 IN
    qt,  # [columns, rows] uint8 OUT
    rows, columns, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    byte = tl.load(q + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
    turned = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(qt + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(byte), mask=turned)


def transposed(q: Tensor) -> Tensor:
    return _turned(q)


def _turned(q: Tensor) -> Tensor:
    q = q.contiguous()
    rows, columns = q.shape
    qt = torch.empty((columns, rows), dtype=torch.uint8, device=q.device)
    if q.numel():
        grid = (cdiv(rows, COLUMNS), cdiv(columns, COLUMNS))
        launch(_turn, grid, q, q, qt, rows, columns, R=COLUMNS, C=COLUMNS, num_warps=8)
    return qt
