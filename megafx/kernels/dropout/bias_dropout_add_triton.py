"""bias_dropout_add on CUDA; bias_dropout_add.py has the formulas.

Forward: tiles of R rows by C columns, 4096 elements, no loop. Backward with a bias: P programs for each C columns take
every P-th tile, so that the columns' sums stay in registers; partials [P, H] fp32 and a second kernel that adds them in
a fixed order. Aligned rows take one Philox call for 8 elements, others one an element: the same bits.

A run (draw.py) is a grid of tiles: rows of W elements, `inner` of them in each row of the run (a shard of a leading dim: W
is the last dim of the tensor), or one (a shard of the last dim: W is the run's length).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common import philox
from megafx.kernels.common.draw import Draw, Run, check_draw, draws, factor_of, runs_here
from megafx.kernels.common.op import launch, new_like
from megafx.kernels.common.philox_triton import keep_tile, key_of
from megafx.kernels.common.tiles_triton import power_of_2
from megafx.kernels.dropout import bias_dropout_add as reference
from megafx.kernels.dropout.bias_dropout_add import check_sum

TILE = 4096  # elements of a forward tile
PROGRAMS = 528  # of the backward: 4 for each SM of an H100 or H200
ROWS = 2  # of a backward tile
STAGES = 3


@triton.jit
def _inside(row, rows, column, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Which elements of a tile are there; ROWS, COLUMNS: all of them. A constant mask costs nothing."""
    inside = tl.full([R, C], 1, tl.int1)
    if not ROWS:
        inside = inside & (row < rows)
    if not COLUMNS:
        inside = inside & (column < W)
    return inside


@triton.jit(do_not_specialize=["rows", "threshold", "op_id"])
def _forward(
    x,  # [rows, W] in rows of stride local_stride IN
    bias,  # [H] IN, from the run's first column on
    residual,  # as x IN
    out,  # as x OUT
    seed,  # [] int64 IN
    rows, W, inner, start, local_stride, global_start, global_stride, threshold, scale, op_id,
    BIAS: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(W, C)  # columns run fastest: neighbours in memory are read at the same time
    left = tl.program_id(0) % blocks * C
    column = left + tl.arange(0, C)[None, :]
    row = ((tl.program_id(0) // blocks).to(tl.int64) * R + tl.arange(0, R))[:, None]
    inside = _inside(row, rows, column, W, EVEN_ROWS, EVEN_COLUMNS, R, C)
    outer = row // inner
    within = row - outer * inner
    at = start + outer * local_stride + within * W + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=_inside(0, 1, column, W, True, EVEN_COLUMNS, 1, C), other=0.0).to(
            tl.float32
        )
    if DROP:
        k0, k1 = key_of(seed)
        first = global_start + outer * global_stride + within * W + left
        keep = keep_tile(first, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, C)
        value = tl.where(keep, value * scale, 0.0)
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "threshold", "op_id"])
def _backward(
    grad,  # as x of _forward IN
    dx,  # as grad OUT
    partial,  # [P, H] fp32 OUT, from the run's first column on
    seed,  # [] int64 IN
    rows, W, H, inner, start, local_stride, global_start, global_stride, threshold, scale, op_id,
    DX: tl.constexpr, SUM: tl.constexpr, DROP: tl.constexpr, ALIGNED: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    if DROP:
        k0, k1 = key_of(seed)
    total = tl.zeros([R, C], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, R), tl.num_programs(1), num_stages=STAGES):
        row = (tl.full([], 0, tl.int64) + tile) * R + tl.arange(0, R)[:, None]
        inside = _inside(row, rows, column, W, EVEN_ROWS, EVEN_COLUMNS, R, C)
        outer = row // inner
        within = row - outer * inner
        at = start + outer * local_stride + within * W + column
        value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            first = global_start + outer * global_stride + within * W + tl.program_id(0) * C
            keep = keep_tile(first, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, C)
            value = tl.where(keep, value * scale, 0.0)
        if DX:
            tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside)
        if SUM:
            total += value
    if SUM:
        sums = tl.sum(total, axis=0)[None, :]
        tl.store(partial + tl.program_id(1).to(tl.int64) * H + column, sums, mask=column < W)


@triton.jit(do_not_specialize=["P"])
def _column_sums(
    partial,  # [J, P, H] fp32 IN
    a,  # [H] OUT: sums of partial[0]
    b,  # [H] OUT: of partial[1]
    c,  # [H] OUT: of partial[2]
    P, H,
    J: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    column = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    total = tl.zeros([BP, BC], tl.float32)
    for first in range(0, P, BP):
        row = first + tl.arange(0, BP)[:, None]
        at = (which.to(tl.int64) * P + row) * H + column
        total += tl.load(partial + at, mask=(row < P) & (column < H), other=0.0)
    sums = tl.sum(total, axis=0)[None, :]
    inside = column < H
    if which == 0:
        tl.store(a + column, sums.to(a.dtype.element_ty), mask=inside)
    if J > 1:  # noqa: SIM102  apart: what is not there is not stored to in the code either
        if which == 1:
            tl.store(b + column, sums.to(b.dtype.element_ty), mask=inside)
    if J > 2:  # noqa: SIM102
        if which == 2:
            tl.store(c + column, sums.to(c.dtype.element_ty), mask=inside)


def column_sums(partial: Tensor, outputs: Sequence[Tensor]) -> None:
    """partial [J, P, H] fp32 -> up to three outputs [H], summed over P in a fixed order."""
    _, P, H = partial.shape
    a, b, c = (*outputs, *[partial] * (3 - len(outputs)))  # no output twice: Inductor would make it two
    BP, BC = (64, 32) if H >= 8192 else (128, 16)  # measured: H200
    grid = triton.cdiv(H, BC), len(outputs)
    launch(_column_sums, grid, partial, partial, a, b, c, P, H, J=len(outputs), BP=BP, BC=BC, num_warps=4)


class Grid(NamedTuple):
    """A run as rows of W consecutive elements."""

    rows: int
    W: int
    inner: int  # rows in each row of the run
    column: int  # of the tensor, where the rows start
    aligned: bool
    run: Run

    def numbers(self, draw: Draw) -> tuple[Any, ...]:
        """The kernels' arguments from `inner` to `op_id`."""
        run = self.run
        place = (self.inner, run.local_start, run.local_stride, run.global_start, run.global_stride)
        return *place, philox.threshold(draw.p), factor_of(draw.p), draw.op_id

    def flags(self, draw: Draw, R: int, C: int) -> dict[str, Any]:
        even = {"EVEN_ROWS": self.rows % R == 0, "EVEN_COLUMNS": self.W % C == 0}
        return {"DROP": draws(draw.p), "ALIGNED": self.aligned, **even, "R": R, "C": C, "num_warps": 4}


def grids_of(runs: Sequence[Run], H: int) -> list[Grid]:
    """H: last dim of the local tensor."""
    made = []
    for run in runs:
        # a layout that repeats cuts each row several times: a run for each, which starts in one column
        if run.length % H:
            times = H // run.local_stride if run.local_stride < H else 1
            rows, length, local, local_stride, start, stride = run
            for i in range(times):
                piece = Run(rows // times, length, local + i * local_stride, H, start + i * stride, times * stride)
                made.append(_grid(piece, length, 1, H))
            continue
        inner = run.length // H
        if run.rows == 1:
            run, inner = Run(inner, H, run.local_start, H, run.global_start, H), 1
        made.append(_grid(run, H, inner, H))
    return made


def _grid(run: Run, W: int, inner: int, H: int) -> Grid:
    aligned = all(n % 8 == 0 for n in (W, run.global_start, run.global_stride))
    return Grid(run.rows * inner, W, inner, run.local_start % H, aligned, run)


def columns_of_tile(W: int) -> int:
    """Columns of a tile: as few as possible outside of W, then as many as possible."""
    if W <= 128:
        return max(8, power_of_2(W))
    return min((1024, 512, 256, 128), key=lambda c: (-(-W // c) * c * (1 + 32 / c), -c))


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, *drawing: Any) -> Tensor:
    draw = Draw(*drawing)
    check_sum("bias_dropout_add", x, bias, residual)
    check_draw("bias_dropout_add", draw)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if dtype == torch.float64:
        return reference.bias_dropout_add_reference(x, bias, residual, *draw)
    x, residual = x.contiguous(), residual.contiguous()
    out = new_like(residual, dtype)
    key = x if draw.seed is None else draw.seed.to(x.device)
    for grid in grids_of(runs_here(x.shape, draw), _last(x)):
        C = columns_of_tile(grid.W)
        R = max(1, TILE // C)
        launch(
            _forward, (triton.cdiv(grid.rows, R) * triton.cdiv(grid.W, C),), x,
            x, x if bias is None else bias.contiguous()[grid.column :], residual, out, key, grid.rows, grid.W,
            *grid.numbers(draw),
            BIAS=bias is not None, **grid.flags(draw, R, C),
        )  # fmt: skip
    return out


def bias_dropout_add_backward(
    grad: Tensor, dtype: torch.dtype | None, bias_dtype: torch.dtype | None, *drawing: Any
) -> tuple[Tensor, Tensor]:
    """dx in dtype and its sums over rows in bias_dtype; [0] for what has no dtype."""
    draw = Draw(*drawing)
    grad = grad.contiguous()
    dx = grad.new_empty(0) if dtype is None else new_like(grad, dtype)
    H = _last(grad)
    key = grad if draw.seed is None else draw.seed.to(grad.device)
    partials = []
    for grid in grids_of(runs_here(grad.shape, draw), H):
        C = columns_of_tile(grid.W)
        R = ROWS * max(1, 1024 // C) if bias_dtype is not None else max(1, TILE // C)
        blocks = triton.cdiv(grid.W, C)
        tiles = triton.cdiv(grid.rows, R)
        P = min(tiles, max(1, PROGRAMS // blocks)) if bias_dtype is not None else tiles
        # A run of some columns leaves the others of its partial sums untouched: zeros.
        make = torch.empty if grid.W == H else torch.zeros
        partial = make((P if bias_dtype is not None else 0, H), dtype=torch.float32, device=grad.device)
        partials.append(partial)
        launch(
            _backward, (blocks, P), grad,
            grad, grad if dtype is None else dx, partial[:, grid.column :], key, grid.rows, grid.W, H,
            *grid.numbers(draw),
            DX=dtype is not None, SUM=bias_dtype is not None, STAGES=STAGES, **grid.flags(draw, R, C),
        )  # fmt: skip
    if bias_dtype is None:
        return dx, grad.new_empty(0)
    if not partials:
        return dx, torch.zeros(grad.shape[-1:], dtype=bias_dtype, device=grad.device)
    dbias = torch.empty(grad.shape[-1:], dtype=bias_dtype, device=grad.device)
    column_sums((partials[0] if len(partials) == 1 else torch.cat(partials))[None], [dbias])
    return dx, dbias


def _last(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 1
