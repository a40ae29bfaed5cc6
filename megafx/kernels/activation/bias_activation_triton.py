"""megafx::bias_act on CUDA; bias_activation.py has formulas and ops.

Forward and the gradient without bias: one tile a program, no loop. Gradient with bias: strided tiles by a few programs a
multiprocessor, loads pipelined, column sums in registers (tiles_triton.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.activation.activations_triton import activate, activate_both
from megafx.kernels.activation.bias_activation import check_bias_act
from megafx.kernels.common.op import launch, new_like
from megafx.kernels.common.tiles_triton import (
    STAGES,
    as_rows,
    cdiv,
    fast_math,
    partials_of,
    sum_partials,
    sum_tile_of,
    tile_at,
    tile_flags,
    tile_of,
)


@triton.jit
def _forward(
    x,  # [rows, columns] IN, rows at x_stride
    bias,  # [columns] IN, or x without BIAS
    y,  # [rows, columns] OUT, contiguous
    rows,
    columns,
    x_stride,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
    PRECISE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, column, inside = tile_at(tl.program_id(0), rows, columns, R, C, EVEN, WIDE)
    u = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        u += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, activate(u, ACT, FAST, PRECISE).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad,  # [rows, columns] IN, rows at grad_stride
    x,  # [rows, columns] IN, rows at x_stride
    dx,  # [rows, columns] OUT, contiguous
    y,  # [rows, columns] OUT, contiguous; unused without AGAIN
    rows,
    columns,
    grad_stride,
    x_stride,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
    PRECISE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    AGAIN: tl.constexpr,
):
    row, column, inside = tile_at(tl.program_id(0), rows, columns, R, C, EVEN, WIDE)
    u = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    _, slope = activate_both(u, ACT, FAST, PRECISE)
    tl.store(dx + row * columns + column, (g * slope).to(dx.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(y + row * columns + column, activate(u, ACT, FAST, PRECISE).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_bias(
    grad,  # [rows, columns] IN, rows at grad_stride
    x,  # [rows, columns] IN, rows at x_stride
    bias,  # [columns] IN
    dx,  # [rows, columns] OUT, contiguous
    y,  # [rows, columns] OUT, contiguous; unused without AGAIN
    partials,  # [grid 1, columns] fp32 OUT
    rows,
    columns,
    grad_stride,
    x_stride,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
    PRECISE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    AGAIN: tl.constexpr,
):
    column = tl.program_id(0) * C + tl.arange(0, C)
    within = column < columns
    b = tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([R, C], tl.float32)  # over R once: sums across warps in the loop cost half the speed
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, R), tl.num_programs(1), num_stages=STAGES):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)[:, None]
        inside = (row < rows) & within[None, :]
        u = tl.load(x + row * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32) + b
        g = tl.load(grad + row * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        _, slope = activate_both(u, ACT, FAST, PRECISE)
        du = g * slope
        at = row * columns + column[None, :]
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=inside)
        if AGAIN:
            tl.store(y + at, activate(u, ACT, FAST, PRECISE).to(y.dtype.element_ty), mask=inside)
        total += tl.where(inside, du, 0.0)
    tl.store(partials + tl.program_id(1).to(tl.int64) * columns + column, tl.sum(total, 0), mask=within)


def bias_act(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_bias_act(x, bias, act)
    y = new_like(x)
    source, rows, columns, stride = as_rows(x)
    if bias is None and stride == columns:
        rows, columns = 1, rows * columns  # one long row: any shape is full tiles
    if not rows or not columns:
        return y
    tile = tile_of(rows, columns)
    launch(
        _forward,
        (cdiv(columns, tile.columns) * cdiv(rows, tile.rows),),
        x,
        source,
        source if bias is None else bias.contiguous(),
        y,
        rows,
        columns,
        stride,
        BIAS=bias is not None,
        ACT=act,
        FAST=fast_math(),
        PRECISE=x.dtype == torch.float32,
        R=tile.rows,
        C=tile.columns,
        num_warps=tile.warps,
        **tile_flags(columns, tile.columns),
    )
    return y


def act_backward(grad: Tensor, x: Tensor, act: str) -> Tensor:
    return _run_backward(grad, x, act, None)


def act_backward_again(grad: Tensor, x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    y = new_like(x)
    return _run_backward(grad, x, act, y), y


def bias_act_backward(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return _run_backward_bias(grad, x, bias, act, None)


def bias_act_backward_again(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    y = new_like(x)
    return *_run_backward_bias(grad, x, bias, act, y), y


def _run_backward(grad: Tensor, x: Tensor, act: str, y: Tensor | None) -> Tensor:
    """dx; y is filled if given."""
    dx = new_like(x)
    g, rows, columns, grad_stride = as_rows(grad)
    source, _, _, stride = as_rows(x)
    if grad_stride == stride == columns:
        rows, columns = 1, rows * columns
    if not rows or not columns:
        return dx
    tile = tile_of(rows, columns)
    launch(
        _backward,
        (cdiv(columns, tile.columns) * cdiv(rows, tile.rows),),
        x,
        g,
        source,
        dx,
        source if y is None else y,
        rows,
        columns,
        grad_stride,
        stride,
        ACT=act,
        FAST=fast_math(),
        PRECISE=x.dtype == torch.float32,
        R=tile.rows,
        C=tile.columns,
        AGAIN=y is not None,
        num_warps=tile.warps,
        **tile_flags(columns, tile.columns),
    )
    return dx


def _run_backward_bias(grad: Tensor, x: Tensor, bias: Tensor, act: str, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx and dbias; y is filled if given."""
    dx = new_like(x)
    g, rows, columns, grad_stride = as_rows(grad)
    source, _, _, stride = as_rows(x)
    if not rows or not columns:
        return dx, torch.zeros_like(bias)
    tile = sum_tile_of(columns)
    blocks, partials = partials_of(tile, rows, columns, x)
    launch(
        _backward_bias,
        (blocks, partials.shape[0]),
        x,
        g,
        source,
        bias.contiguous(),
        dx,
        source if y is None else y,
        partials,
        rows,
        columns,
        grad_stride,
        stride,
        ACT=act,
        FAST=fast_math(),
        PRECISE=x.dtype == torch.float32,
        R=tile.rows,
        C=tile.columns,
        STAGES=STAGES,
        AGAIN=y is not None,
        num_warps=tile.warps,
    )
    return dx, sum_partials(partials, bias.dtype)
