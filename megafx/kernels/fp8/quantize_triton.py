"""fp8_amax, fp8_quantize, fp8_restored and fp8_transposed on CUDA; quantize.py has the formulas.

Programs that share a largest magnitude leave partial maxima, which a second kernel joins (common/maxima_triton.py). A cast
reads x once and writes its bytes, their transpose in words of four rows, or both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.maxima_triton import JOINED, join, leave, magnitude
from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import cdiv, fast_math, multiprocessors
from megafx.kernels.fp8.quantize import LEAST, TOP, amax_shape, real_parts, restored_reference

ROWS, COLUMNS = 64, 128  # of a tile: 32 elements a thread at 8 warps
TALL = 128  # rows of a tile of casts: 128 bytes of each column of the transpose; 4 warps


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
    of_rows,  # [grid 0, rows] int32 OUT; written if BOTH
    rows, columns, stride, each, BOTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    first = tl.program_id(1) * each
    found = tl.zeros([R, C], tl.int32)
    for start in tl.range(first, tl.minimum(first + each, rows), R):
        bits = _bits(x, start + tl.arange(0, R)[:, None], column, rows, columns, stride)
        found = tl.maximum(found, bits)
        if BOTH:
            row = start + tl.arange(0, R)
            tl.store(of_rows + tl.program_id(0).to(tl.int64) * rows + row, tl.max(bits, axis=1), mask=row < rows)
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
        _columns(x, out, None)
    else:
        across = cdiv(columns, COLUMNS)
        tiles = cdiv(rows, ROWS) * across
        programs = min(tiles, 4 * multiprocessors(x.device), JOINED)
        partial = torch.empty((programs,), dtype=torch.int32, device=x.device)
        launch(_largest_of_all, (programs,), x, x, partial, *where, tiles, across, R=ROWS, C=COLUMNS, num_warps=8)
        join(partial, out)
    return out


def _columns(x: Tensor, out: Tensor, of_rows: Tensor | None) -> None:
    """Fills out [columns], and of_rows [rows] if given."""
    rows, columns = x.shape
    width = cdiv(columns, COLUMNS)
    parts = min(max(1, cdiv(4 * multiprocessors(x.device), width)), cdiv(rows, ROWS))
    each = cdiv(cdiv(rows, parts), ROWS) * ROWS
    parts = cdiv(rows, each)
    partial = torch.empty((parts, columns), dtype=torch.int32, device=x.device)
    across = partial if of_rows is None else torch.empty((width, rows), dtype=torch.int32, device=x.device)
    launch(
        _largest_of_columns, (width, parts), x, x, partial, across, rows, columns, x.stride(0), each,
        BOTH=of_rows is not None, R=ROWS, C=COLUMNS, num_warps=8,
    )  # fmt: skip
    join(partial, out)
    if of_rows is not None:
        join(across, of_rows)


def amax_both(x: Tensor, cut: int, layout: Sequence[int], axis: str) -> tuple[Tensor, Tensor]:
    if not x.numel() or sum(part.numel() for part in real_parts(x, cut, layout, axis)) < x.numel():
        return amax(x, 0, -1, [], axis), amax(x, 1, cut, layout, axis)
    x = x if x.stride(1) == 1 else x.contiguous()
    of_rows, of_columns = (torch.empty((n,), dtype=torch.float32, device=x.device) for n in x.shape)
    _columns(x, of_columns, of_rows)
    return of_rows, of_columns


# -- casts


@triton.jit
def scale_of(found, TOP: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr):
    """amax -> s and 1 / s."""
    s = tl.div_rn(tl.where(found < LEAST, LEAST, found), tl.full(found.shape, TOP, tl.float32))
    if POWER:  # the mantissa rounded up into the exponent
        bits = s.to(tl.int32, bitcast=True)
        above = (bits & 0x7F800000) + tl.where((bits & 0x007FFFFF) != 0, 0x00800000, 0)
        s = tl.where(bits >= 0x7F800000, s, above.to(tl.float32, bitcast=True))
    s = tl.where(found == 0.0, 1.0, s)
    return s, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)


@triton.jit
def byte_of(value, TOP: tl.constexpr, WIDE_RANGE: tl.constexpr, PTX: tl.constexpr):
    """value clamped to +-TOP, in e4m3 or, WIDE_RANGE, e5m2, as uint8.

    PTX: four at once. Bytes of Triton 3.6's own casts that were then widened, transposed or stored one by one came out wrong on
    GPUs (H100 2026-11-26, H200 2026-11-29), though their PTX read right: by ptxas 12.8, it seems.
    """
    if PTX:
        if WIDE_RANGE:
            return tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
                "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
                "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4,
            )  # fmt: skip
    value = tl.where(value > TOP, TOP, tl.where(value < -TOP, -TOP, value))  # a NaN stays
    if WIDE_RANGE:
        return value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _pushed(word, byte, PTX: tl.constexpr):
    """word's bytes moved down by one, byte on top. After rows r .. r + 3: their bytes, that of r lowest. PTX: one prmt each."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, $8, 0x4321; prmt.b32 $1, $5, $8, 0x5321; "
            "prmt.b32 $2, $6, $8, 0x6321; prmt.b32 $3, $7, $8, 0x7321;",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, byte], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return ((word >> 8) & 0xFFFFFF) | (byte.to(tl.int32) << 24)


@triton.jit
def _quantize(
    x,  # [rows, columns] IN
    largest,  # [], [rows] or [columns] fp32 IN
    largest_columns,  # [columns] fp32 IN; read if KEPT is 2
    q,  # [rows, columns] uint8 OUT
    qt,  # [columns, rows] uint8 OUT; if TRANSPOSED 4 divides rows
    scale,  # as largest OUT
    scale_columns,  # [columns] fp32 OUT; written if KEPT is 2
    rows, columns, stride,
    TOP: tl.constexpr, LEAST: tl.constexpr, KEPT: tl.constexpr, WIDE_RANGE: tl.constexpr, POWER: tl.constexpr,
    PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, PTX: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)
    four = tl.program_id(1) * (R // 4) + tl.arange(0, R // 4)
    if KEPT == 1:
        largest_columns, scale_columns = largest, scale
    if KEPT == 1 or KEPT == 2:  # of 2, the transpose has scales of its own
        s, of_columns = scale_of(tl.load(largest_columns + column, mask=column < columns, other=0.0), TOP, LEAST, POWER)
        if tl.program_id(1) == 0:
            tl.store(scale_columns + column, s, mask=column < columns)
    elif KEPT == -1:
        s, of_columns = scale_of(tl.load(largest + tl.zeros([1], tl.int32)), TOP, LEAST, POWER)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale + tl.zeros([1], tl.int32), s)
    word = tl.zeros([R // 4, C], tl.int32)
    for j in tl.static_range(4):
        row = four * 4 + j
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
        value = value.to(tl.float32)
        if KEPT == 0 or KEPT == 2:
            s, of_rows = scale_of(tl.load(largest + row, mask=row < rows, other=0.0), TOP, LEAST, POWER)
            if tl.program_id(0) == 0:
                tl.store(scale + row, s, mask=row < rows)
            byte = byte_of(value * of_rows[:, None], TOP, WIDE_RANGE, PTX)
        else:
            byte = byte_of(value * of_columns[None, :], TOP, WIDE_RANGE, PTX)
        if PLAIN:
            tl.store(q + row.to(tl.int64)[:, None] * columns + column[None, :], byte, mask=inside)
        if KEPT == 2:
            byte = byte_of(value * of_columns[None, :], TOP, WIDE_RANGE, PTX)
        if TRANSPOSED:
            word = _pushed(word, byte, PTX)
    if TRANSPOSED:
        at = qt.to(tl.pointer_type(tl.int32)) + column.to(tl.int64)[:, None] * (rows // 4) + four[None, :]
        tl.store(at, tl.trans(word), mask=(column < columns)[:, None] & (four * 4 < rows)[None, :])


def quantize(
    x: Tensor, largest: Tensor, kept: int, format: str, power_of_two: bool, plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if transposed and not _in_words(x):
        q, _, scale = quantize(x, largest, kept, format, power_of_two, True, False)
        return (q if plain else q.new_empty((0, 0))), q.t().contiguous(), scale
    return _cast(x, largest, None, kept, format, power_of_two, plain, transposed)[:3]


def quantize_both(
    x: Tensor, rows: Tensor, columns: Tensor, format: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _in_words(x):
        q, _, scale = quantize(x, rows, 0, format, power_of_two, True, False)
        _, qt, scale_columns = quantize(x, columns, 1, format, power_of_two, False, True)
        return q, qt, scale, scale_columns
    return _cast(x, rows, columns, 2, format, power_of_two, True, True)


def _in_words(x: Tensor) -> bool:
    """True if the rows of x's transpose are known to be words."""
    return isinstance(x.shape[0], int) and x.shape[0] % 4 == 0


def _cast(
    x: Tensor, largest: Tensor, largest_columns: Tensor | None, kept: int, format: str, power_of_two: bool, plain: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> q, qt, scale, scale of columns."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    q = torch.empty((rows, columns) if plain else (0, 0), dtype=torch.uint8, device=x.device)
    qt = torch.empty((columns, rows) if transposed else (0, 0), dtype=torch.uint8, device=x.device)
    scale = torch.empty(largest.shape, dtype=torch.float32, device=x.device)
    second, scale_columns = largest, scale
    if largest_columns is not None:
        second, scale_columns = (
            largest_columns.contiguous(),
            torch.empty((columns,), dtype=torch.float32, device=x.device),
        )
    launch(
        _quantize, (max(1, cdiv(columns, COLUMNS)), max(1, cdiv(rows, TALL))), x,
        x, largest.contiguous(), second, q, qt, scale, scale_columns, rows, columns, x.stride(0),
        TOP=TOP[format], LEAST=LEAST, KEPT=kept, WIDE_RANGE=format == "e5m2", POWER=power_of_two, PLAIN=plain,
        TRANSPOSED=transposed, PTX=fast_math(), R=TALL, C=COLUMNS, num_warps=4,
    )  # fmt: skip
    return q, qt, scale, scale_columns


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
    q = q.contiguous()
    rows, columns = q.shape
    qt = torch.empty((columns, rows), dtype=torch.uint8, device=q.device)
    if q.numel():
        grid = (cdiv(rows, COLUMNS), cdiv(columns, COLUMNS))
        launch(_turn, grid, q, q, qt, rows, columns, R=COLUMNS, C=COLUMNS, num_warps=8)
    return qt


@triton.jit
def _restore(
    q,  # [n] uint8 IN
    scale,  # [] fp32 IN
    out,  # [n] OUT
    n, C: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    byte = tl.load(q + at, mask=at < n, other=0)
    value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)  # which Triton's interpreter takes for a number
    tl.store(out + at, value * tl.load(scale), mask=at < n)


def restored(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    q = q.contiguous()
    if dtype == torch.float64:
        return restored_reference(q, scale, dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if q.numel():
        n, each = q.numel(), 4096
        launch(_restore, (cdiv(n, each),), q, q, scale, out, n, C=each, num_warps=8)
    return out
