"""Tiles of [rows, columns] for Triton kernels, and sums over rows in a fixed order.

A column sum over many rows takes two steps. About four programs a multiprocessor sum their tiles, each into one row of fp32
partials [programs, columns]; then `sum_partials` adds these rows. No atomics: the same bits each run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import launch

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

SMALL = 1 << 20  # elements of a tensor below which tiles are smaller


@cache
def fast_math() -> bool:
    """True if kernels may use PTX."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


def cdiv(a: Any, b: int) -> Any:
    """Of integers, also symbolic ones; triton.cdiv takes microseconds."""
    return (a + b - 1) // b


def power_of_2(n: int | torch.SymInt) -> int:
    """The least that is at least n, as a number: a kernel is compiled for it. Of a symbol, triton's would be an expression that
    sympy works on for minutes."""
    return int(triton.next_power_of_2(int(n)))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


class Rows(NamedTuple):
    """A tensor as rows of consecutive elements, row r at r * stride; `data` holds it (the same storage, or a copy)."""

    data: Tensor
    rows: int
    columns: int
    stride: int


def as_rows(x: Tensor) -> Rows:
    """Last dim -> columns, all others -> rows. Copies only where neither the last dim nor the lead dims lie in order."""
    columns = x.shape[-1] if x.dim() else 1
    rows = x.numel() // columns if columns else 0
    if x.is_contiguous():
        return Rows(x, rows, columns, columns)
    if x.dim() >= 2 and x.stride(-1) == 1:
        stride, in_order = x.stride(-2), True
        for d in range(x.dim() - 3, -1, -1):
            in_order = in_order and (x.shape[d] == 1 or x.stride(d) == x.shape[d + 1] * x.stride(d + 1))
        if in_order and stride >= columns:
            return Rows(x, rows, columns, stride)
    return Rows(x.contiguous(), rows, columns, columns)


class Tile(NamedTuple):
    """rows x columns elements by `warps` warps; a sum over rows takes `programs` programs a multiprocessor."""

    rows: int
    columns: int
    warps: int
    programs: int = 0


# By width; measured on an H200 (bf16, 128 to 256 MiB tensors). What matters: a row of the tile fills whole warps, so that
# the rows of a tile share the loads of the bias; a few vectors of loads a thread; no loop where nothing is summed.
TILES = {1024: Tile(2, 1024, 4), 512: Tile(2, 512, 2), 256: Tile(4, 256, 2), 128: Tile(16, 128, 4)}
LONG_ROW, SHORT_ROW = Tile(1, 2048, 4), Tile(1, 1024, 4)
# With loads pipelined over three stages; one stage costs a quarter of the speed, narrower tiles as much.
SUM_TILES = {1024: Tile(2, 1024, 4, 4), 512: Tile(4, 512, 4, 4), 256: Tile(4, 256, 2, 8)}
STAGES = 3


def tile_of(rows: int | torch.SymInt, columns: int | torch.SymInt) -> Tile:
    """For an elementwise kernel. Sizes that vary (SymInt) count as large, so that they stay free."""
    single = isinstance(rows, int) and rows == 1
    if isinstance(columns, torch.SymInt):
        return LONG_ROW if single else TILES[1024]
    small = isinstance(rows, int) and rows * columns < SMALL
    if single:
        return SHORT_ROW if small else LONG_ROW
    tile = TILES[_width(columns, 1.1, tuple(TILES))]
    return tile._replace(rows=1) if small else tile  # else too few programs to fill the device


def sum_tile_of(columns: int | torch.SymInt) -> Tile:
    """For a kernel that also sums over rows."""
    return SUM_TILES[1024 if isinstance(columns, torch.SymInt) else _width(columns, 1.125, tuple(SUM_TILES))]


@cache
def _width(columns: int, bound: float, widths: tuple[int, ...]) -> int:
    """The widest that computes at most `bound` times the columns, else the one that computes fewest."""
    work = {w: -(-columns // w) * w / columns for w in widths}
    return next((w for w in widths if work[w] <= bound), min(widths, key=lambda w: (work[w], -w)))


def partials_of(
    tile: Tile, rows: int | torch.SymInt, columns: int | torch.SymInt, like: Tensor, sums: int = 1
) -> tuple[int, Tensor]:
    """Column blocks, and an empty fp32 [programs, sums * columns] for what each program has summed."""
    blocks = cdiv(columns, tile.columns)
    programs = max(1, tile.programs * multiprocessors(like.device) // blocks)
    programs = min(programs, cdiv(rows, tile.rows))
    return blocks, torch.empty(programs, sums * columns, dtype=torch.float32, device=like.device)


def tile_flags(columns: int | torch.SymInt, c: int) -> dict[str, bool]:
    """EVEN and WIDE of `tile_at`; what serves all sizes where they vary."""
    if isinstance(columns, torch.SymInt):
        return {"EVEN": False, "WIDE": True}
    return {"EVEN": columns % c == 0, "WIDE": columns >= 2**31}


@triton.jit
def exp(x):
    """e^x of fp32; denormal results are 0, for which tl.exp takes four instructions more."""
    return tl.math.exp2(x * LOG2E)


@triton.jit
def tile_at(program, rows, columns, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):
    """Program number -> row numbers int64 [R, 1], column numbers [1, C], and which of [R, C] are inside.

    EVEN: C divides the columns. WIDE: columns need 64 bits.
    """
    blocks = tl.cdiv(columns, C)
    block = program % blocks
    if WIDE:
        block = block.to(tl.int64)
    column = (block * C + tl.arange(0, C))[None, :]
    row = ((program // blocks) * R + tl.arange(0, R))[:, None]
    inside = row < rows
    if not EVEN:
        inside = inside & (column < columns)
    return row.to(tl.int64), column, inside


@triton.jit
def _sum_partials(
    partials,  # [P, columns] fp32 IN
    out,  # [columns] OUT
    programs, columns,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([P, C], tl.float32)
    for first in range(0, programs, P):
        p = first + tl.arange(0, P)[:, None]
        inside = (p < programs) & (at[None, :] < columns)
        total += tl.load(partials + p.to(tl.int64) * columns + at[None, :], mask=inside, other=0.0)
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=at < columns)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [P, columns] -> [columns] of dtype."""
    programs, columns = partials.shape
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    if columns:
        launch(_sum_partials, (cdiv(columns, 64),), out, partials, out, programs, columns, P=32, C=64, num_warps=4)
    return out
