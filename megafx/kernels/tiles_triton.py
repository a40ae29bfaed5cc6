"""Tiles of [rows, columns] for Triton kernels, and sums over rows in a fixed order.

A column sum over many rows is done in two steps: about four programs a multiprocessor each sum the tiles that they go
over into one row of fp32 partials [programs, columns]; `sum_partials` adds those up. No atomics: the same bits each run.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .op import launch

TILE = 4096  # elements of a tile: measured on an H200, 4 warps, no loop
SMALL = 1 << 20  # elements of a tensor below which tiles are smaller
PARTIAL_PROGRAMS = 4  # a multiprocessor


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def fast_math() -> bool:
    """Whether kernels may use PTX."""
    return not interpreted() and torch.version.hip is None


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


def tile_of(rows: int | torch.SymInt, columns: int | torch.SymInt, elements: int = TILE) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two, of about `elements` elements; fewer where the tensor is small.

    Columns: at most 1024 (a single row: `elements`), and the largest that leaves at most an eighth of the lanes idle, else
    the tightest. Sizes that vary (SymInt) count as large, so that they stay free.
    """
    if isinstance(columns, torch.SymInt):
        return (1, elements) if isinstance(rows, int) and rows == 1 else (max(1, elements // 1024), 1024)
    if isinstance(rows, int) and rows * columns < SMALL:
        elements = min(elements, 1024)  # else too few programs to fill the device
    single = isinstance(rows, int) and rows == 1
    c = _column_block(columns, elements if single else min(elements, 1024))
    r = max(1, elements // c)
    return (min(r, triton.next_power_of_2(rows)) if isinstance(rows, int) else r), c


def _column_block(columns: int, largest: int) -> int:
    sizes = [s for s in (4096, 2048, 1024, 512, 256, 128) if s <= largest]
    waste = {s: -(-columns // s) * s / columns for s in sizes}
    fitting = [s for s in sizes if waste[s] <= 1.125]
    return fitting[0] if fitting else min(sizes, key=lambda s: (waste[s], -s))


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
        launch(
            _sum_partials, (triton.cdiv(columns, 64),), out, partials, out, programs, columns, P=32, C=64, num_warps=4
        )
    return out
