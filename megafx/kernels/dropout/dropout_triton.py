"""megafx::dropout on CUDA: one launch for each run of the shard (draw.py); dropout.py has the formula and the op.

Aligned runs (starts, strides and lengths multiples of 8; or a single row that starts at one) take one Philox call for 8
elements; the others one call an element, same bits. The seed is read on the device: no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common import philox
from megafx.kernels.common.draw import Run
from megafx.kernels.common.op import launch
from megafx.kernels.common.philox_triton import draw1, draws8, key_of

GROUPS = 512  # Philox calls a program: 4096 elements, the fastest elementwise tile (measured: H200)


@triton.jit(do_not_specialize=["threshold", "op_id"])  # one compilation serves all ops of a model
def _dropout(
    x,  # [numel] fp16/bf16/fp32/fp64 IN, contiguous
    out,  # [numel] as x, OUT
    seed,  # [] int64 IN
    threshold, scale, op_id,
    total,  # rows * length of this run
    length, local_start, local_stride, global_start, global_stride,
    ONE_ROW: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,  # 64-bit division of indices
    DOUBLE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    k0, k1 = key_of(seed)
    op = tl.cast(op_id, tl.uint32)
    below = tl.cast(threshold, tl.uint32)
    if ALIGNED:
        first = (tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)) * 8  # first element of each group
    else:
        first = tl.program_id(0).to(tl.int64) * (N * 8) + tl.arange(0, N * 8)
    if ONE_ROW:
        at = local_start + first
        index = global_start + first
    else:
        row = first // length if WIDE else (first.to(tl.int32) // length).to(tl.int64)
        column = first - row * length
        at = local_start + row * local_stride + column
        index = global_start + row * global_stride + column
    if ALIGNED:
        lanes = tl.arange(0, 8)[None, :]
        at = at[:, None] + lanes
        inside = first[:, None] + lanes < total
        keep = draws8(index >> 3, op, k0, k1, N) >= below
    else:
        inside = first < total
        keep = draw1(index, op, k0, k1) >= below
    value = tl.load(x + at, mask=inside)
    # A float argument is rounded to fp32, which fp64 must not be.
    factor = 65536.0 / (65536 - threshold).to(tl.float64) if DOUBLE else scale
    scaled = (value if DOUBLE else value.to(tl.float32)) * factor
    tl.store(out + at, tl.where(keep, scaled, 0.0).to(value.dtype), mask=inside)


def dropout(x: Tensor, seed: Tensor, p: float, op_id: int, runs: Sequence[Run]) -> Tensor:
    """x contiguous, seed on the same device, 0 < threshold(p) < 65536."""
    out = torch.empty_like(x)
    for run in runs:
        one_row = run.rows == 1
        aligned = run.global_start % 8 == 0 and (
            one_row or run.length % 8 == run.global_stride % 8 == run.local_stride % 8 == run.local_start % 8 == 0
        )
        total = run.rows * run.length
        launch(
            _dropout, (triton.cdiv(total, GROUPS * 8),), x,
            x, out, seed, philox.threshold(p), philox.scale(p), op_id, total, run.length, run.local_start,
            run.local_stride, run.global_start, run.global_stride,
            ONE_ROW=one_row, ALIGNED=aligned, WIDE=total >= 2**31, DOUBLE=x.dtype == torch.float64, N=GROUPS,
        )  # fmt: skip
    return out
