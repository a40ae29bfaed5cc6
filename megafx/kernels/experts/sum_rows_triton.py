"""sum_rows on CUDA; sum_rows.py has the formula. One program for a row of the result and C columns; sums in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import launch

C = 1024


@triton.jit
def _sum_rows(
    y,  # [U, W] IN
    table,  # [Q, M] int64 IN
    out,  # [Q, W] OUT
    W,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = column < W
    total = tl.zeros([C], tl.float32)
    for j in tl.static_range(M):
        row = tl.load(table + q * M + j + tl.zeros([C], tl.int64))
        total += tl.load(y + row * W + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + q * W + column, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(y: Tensor, table: Tensor) -> Tensor:
    out = torch.empty(table.shape[0], *y.shape[1:], dtype=y.dtype, device=y.device)
    width = out[0].numel() if out.shape[0] else 0
    if width:
        columns = min(C, triton.next_power_of_2(width))
        grid = (table.shape[0], triton.cdiv(width, columns))
        launch(_sum_rows, grid, y, y.contiguous(), table.contiguous(), out, width, M=table.shape[1], C=columns)
    return out
