"""Zeros in the rows after the last group of a grouped product (grouped_mm.py), of which there mostly are none.

Programs of rows before the last end read that number and are done. Reading and writing all rows once more took 4.3 of the 69 ms
of a step (benchmarks/RESULTS.md, "Experts shared out on two GPUs").
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import launch

ROWS, C = 128, 1024


@triton.jit
def _zero_tail(
    y,  # [S, W] OUT
    ends,  # [E] IN
    S, W,
    E: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    last = tl.load(ends + E - 1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * ROWS
    stop = tl.minimum(start + ROWS, S)
    for row in range(tl.maximum(start, last), stop):
        for left in range(0, W, C):
            column = left + tl.arange(0, C)
            tl.store(y + row * W + column, tl.zeros([C], y.dtype.element_ty), mask=column < W)


def zero_tail(y: Tensor, ends: Tensor) -> None:
    """y: contiguous [S, W], changed in place."""
    rows, width = y.shape
    launch(_zero_tail, (triton.cdiv(rows, ROWS),), y, y, ends, rows, width, E=ends.shape[0], ROWS=ROWS, C=C)
