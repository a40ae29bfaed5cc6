"""megafx::glu and megafx::glu_packed on CUDA; glu.py has formulas and ops, tiles_triton.py the tiling.

One pair of kernels serves both: `up` is a tensor of its own or, PACKED, the second half of gate's rows. Unused pointers get
a tensor that is only read: one tensor given as two outputs would be two tensors to Inductor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.activation.activations_triton import activate, activate_both
from megafx.kernels.activation.glu import check_glu, check_glu_packed
from megafx.kernels.common.op import launch, new_like
from megafx.kernels.common.tiles_triton import (
    STAGES,
    Rows,
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
    gate,  # [rows, columns] IN, rows at gate_stride
    up,  # [rows, columns] IN, rows at up_stride; unused if PACKED
    bias,  # [2 * columns] IN, or gate without BIAS
    y,  # [rows, columns] OUT, contiguous
    rows,
    columns,
    gate_stride,
    up_stride,
    PACKED: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
    PRECISE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    if PACKED:
        up = gate + columns
    row, column, inside = tile_at(tl.program_id(0), rows, columns, R, C, EVEN, WIDE)
    a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        b += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
    value = activate(a, ACT, FAST, PRECISE) * b
    tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad,  # [rows, columns] IN, rows at grad_stride
    gate,  # [rows, columns] IN, rows at gate_stride
    up,  # [rows, columns] IN, rows at up_stride; unused if PACKED
    bias,  # [2 * columns] IN, or gate without BIAS
    dgate,  # [rows, columns] OUT, contiguous; PACKED: [rows, 2 * columns], both gradients
    dup,  # [rows, columns] OUT, contiguous; unused if PACKED
    y,  # [rows, columns] OUT, contiguous; unused without AGAIN
    partials,  # [grid 1, 2 * columns] fp32 OUT, unused without BIAS
    rows,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    PACKED: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
    PRECISE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    AGAIN: tl.constexpr,
):
    out_stride = columns
    if PACKED:
        up = gate + columns
        dup = dgate + columns
        out_stride = 2 * columns
    if BIAS:
        column = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
        first, step, last = tl.program_id(1), tl.num_programs(1), tl.cdiv(rows, R)
        within = column < columns
        gate_bias = tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
        up_bias = tl.load(bias + columns + column, mask=within, other=0.0).to(tl.float32)[None, :]
        gate_sum = tl.zeros([R, C], tl.float32)
        up_sum = tl.zeros([R, C], tl.float32)
        for tile in tl.range(first, last, step, num_stages=STAGES):
            row = (tile * R + tl.arange(0, R)).to(tl.int64)[:, None]
            inside = (row < rows) & within[None, :]
            g = tl.load(grad + row * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            a = tl.load(gate + row * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            b = tl.load(up + row * up_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            value, slope = activate_both(a + gate_bias, ACT, FAST, PRECISE)
            da = g * (b + up_bias) * slope
            db = g * value
            at = row * out_stride + column[None, :]
            tl.store(dgate + at, da.to(dgate.dtype.element_ty), mask=inside)
            tl.store(dup + at, db.to(dup.dtype.element_ty), mask=inside)
            if AGAIN:
                out = activate(a + gate_bias, ACT, FAST, PRECISE) * (b + up_bias)
                tl.store(y + row * columns + column[None, :], out.to(y.dtype.element_ty), mask=inside)
            gate_sum += tl.where(inside, da, 0.0)
            up_sum += tl.where(inside, db, 0.0)
        at = partials + tl.program_id(1).to(tl.int64) * (2 * columns) + column
        tl.store(at, tl.sum(gate_sum, 0), mask=within)
        tl.store(at + columns, tl.sum(up_sum, 0), mask=within)
    else:
        row, column, inside = tile_at(tl.program_id(0), rows, columns, R, C, EVEN, WIDE)
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        value, slope = activate_both(a, ACT, FAST, PRECISE)
        at = row * out_stride + column
        tl.store(dgate + at, (g * b * slope).to(dgate.dtype.element_ty), mask=inside)
        tl.store(dup + at, (g * value).to(dup.dtype.element_ty), mask=inside)
        if AGAIN:
            out = activate(a, ACT, FAST, PRECISE) * b
            tl.store(y + row * columns + column, out.to(y.dtype.element_ty), mask=inside)


def _run_forward(y: Tensor, gate: Rows, up: Rows | None, bias: Tensor | None, act: str) -> Tensor:
    """up: None if gate's rows hold both halves."""
    _, rows, columns, stride = gate
    if up is not None and stride == up.stride == columns:
        rows, columns = 1, rows * columns  # one long row: any shape is full tiles
    if not rows or not columns:
        return y
    tile = tile_of(rows, columns)
    launch(
        _forward,
        (cdiv(columns, tile.columns) * cdiv(rows, tile.rows),),
        y,
        gate.data,
        gate.data if up is None else up.data,
        gate.data if bias is None else bias.contiguous(),
        y,
        rows,
        columns,
        stride,
        stride if up is None else up.stride,
        PACKED=up is None,
        BIAS=bias is not None,
        ACT=act,
        FAST=fast_math(),
        PRECISE=y.dtype == torch.float32,
        R=tile.rows,
        C=tile.columns,
        num_warps=tile.warps,
        **tile_flags(columns, tile.columns),
    )
    return y


def _run_backward(
    grad: Tensor,
    gate: Rows,
    up: Rows | None,
    bias: Tensor | None,
    dgate: Tensor,
    dup: Tensor | None,
    act: str,
    y: Tensor | None = None,
) -> Tensor | None:
    """Fills dgate and dup (packed: dgate alone, up and dup are None), and y if given; returns dbias."""
    g, rows, columns, grad_stride = as_rows(grad)
    if up is not None and grad_stride == gate.stride == up.stride == columns:
        rows, columns = 1, rows * columns
    if not rows or not columns:
        return None if bias is None else torch.zeros_like(bias)
    tile, partials = tile_of(rows, columns), g
    grid: tuple[Any, ...] = (cdiv(columns, tile.columns) * cdiv(rows, tile.rows), 1)
    if bias is not None:
        tile = sum_tile_of(columns)
        blocks, partials = partials_of(tile, rows, columns, grad, 2)
        grid = (blocks, partials.shape[0])
    launch(
        _backward,
        grid,
        dgate,
        g,
        gate.data,
        gate.data if up is None else up.data,
        gate.data if bias is None else bias.contiguous(),
        dgate,
        gate.data if dup is None else dup,
        gate.data if y is None else y,
        partials,
        rows,
        columns,
        grad_stride,
        gate.stride,
        gate.stride if up is None else up.stride,
        PACKED=up is None,
        BIAS=bias is not None,
        ACT=act,
        FAST=fast_math(),
        PRECISE=dgate.dtype == torch.float32,
        R=tile.rows,
        C=tile.columns,
        STAGES=STAGES,
        AGAIN=y is not None,
        num_warps=tile.warps,
        **tile_flags(columns, tile.columns),
    )
    return None if bias is None else sum_partials(partials, bias.dtype)


def _half(x: Tensor) -> Rows:
    """The packed tensor as rows of its first half."""
    packed = as_rows(x)
    return packed._replace(columns=packed.columns // 2)


def glu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_glu(gate, up, act)
    return _run_forward(new_like(gate), as_rows(gate), as_rows(up), None, act)


def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    dgate, dup = new_like(gate), new_like(up)
    _run_backward(grad, as_rows(gate), as_rows(up), None, dgate, dup, act)
    return dgate, dup


def glu_packed(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_glu_packed(x, bias, act)
    return _run_forward(x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), _half(x), None, bias, act)


def glu_packed_backward(grad: Tensor, x: Tensor, act: str) -> Tensor:
    dx = new_like(x)
    _run_backward(grad, _half(x), None, None, dx, None, act)
    return dx


def glu_packed_bias_backward(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    dx = new_like(x)
    dbias = _run_backward(grad, _half(x), None, bias, dx, None, act)
    assert dbias is not None
    return dx, dbias


def glu_backward_again(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = new_like(gate), new_like(up), new_like(gate)
    _run_backward(grad, as_rows(gate), as_rows(up), None, dgate, dup, act, y)
    return dgate, dup, y


def glu_packed_backward_again(grad: Tensor, x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    dx, y = new_like(x), new_like(grad, x.dtype)
    _run_backward(grad, _half(x), None, None, dx, None, act, y)
    return dx, y


def glu_packed_bias_backward_again(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    dx, y = new_like(x), new_like(grad, x.dtype)
    dbias = _run_backward(grad, _half(x), None, bias, dx, None, act, y)
    assert dbias is not None
    return dx, dbias, y
