"""Tiles of [rows, columns] for Triton kernels, and sums over rows in a fixed order.

A column sum over many rows is done in two steps: about four programs a multiprocessor each sum the tiles that they go
over into one row of fp32 partials [programs, columns]; `sum_partials` adds those up. No atomics: the same bits each run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .op import launch

TILE = 2048  # elements of a tile of 4 warps, 16 a thread: measured on an H200, no loop
SMALL = 1 << 20  # elements of a tensor below which tiles are smaller
PARTIAL_PROGRAMS = 4  # a multiprocessor


@cache
def fast_math() -> bool:
    """Whether kernels may use PTX."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


def cdiv(a: Any, b: int) -> Any:
    """Of integers, also symbolic ones; triton.cdiv takes microseconds."""
    return (a + b - 1) // b


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


def tile_of(
    rows: int | torch.SymInt, columns: int | torch.SymInt, elements: int = TILE, widest: int = 512
) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two, of about `elements` elements; fewer where the tensor is small.

    Columns: at most `widest` (a single row: `elements`), and the largest that leaves at most an eighth of the lanes idle, else
    the tightest. Sizes that vary (SymInt) count as large, so that they stay free.
    """
    if isinstance(columns, torch.SymInt):
        return (1, elements) if isinstance(rows, int) and rows == 1 else (max(1, elements // widest), widest)
    return _tile(rows if isinstance(rows, int) else None, columns, elements, widest)


@cache
def _tile(rows: int | None, columns: int, elements: int, widest: int) -> tuple[int, int]:
    if rows is not None and rows * columns < SMALL:
        elements = min(elements, 1024)  # else too few programs to fill the device
    c = _column_block(columns, elements if rows == 1 else min(elements, widest))
    r = max(1, elements // c)
    return (r if rows is None else min(r, triton.next_power_of_2(rows))), c


def tile_flags(columns: int | torch.SymInt, c: int) -> dict[str, bool]:
    """EVEN and WIDE of `tile_at`; what serves all sizes where they vary."""
    if isinstance(columns, torch.SymInt):
        return {"EVEN": False, "WIDE": True}
    return {"EVEN": columns % c == 0, "WIDE": columns >= 2**31}


def _column_block(columns: int, largest: int) -> int:
    sizes = [s for s in (2048, 1024, 512, 256, 128) if s <= largest]
    waste = {s: -(-columns // s) * s / columns for s in sizes}
    fitting = [s for s in sizes if waste[s] <= 1.125]
    return fitting[0] if fitting else min(sizes, key=lambda s: (waste[s], -s))


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
    programs,
    columns,
    P: tl.constexpr,
    C: tl.constexpr,
):
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
