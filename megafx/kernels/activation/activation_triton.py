"""bias_act, glu and glu_packed on CUDA; activation.py has formulas and ops, tiles_triton.py the tiling.

One pair of kernels serves the three. GATED: with `up`, a tensor of its own or, PACKED, the second half of gate's rows. Forward
and the gradient without bias: one tile a program, no loop. Gradient with bias: strided tiles by a few programs a
multiprocessor, loads pipelined, column sums in registers. Pointers that are not used get a tensor that is only read: one
tensor given as two outputs would be two tensors to Inductor.

Arithmetic must fit in the shadow of memory traffic. On an H200 a kernel that moves 4 bytes an element has time for some 30
instructions an element; tl.erf and libdevice's tanh take more (measured: 0.65 of the bandwidth, against 0.97).

    gelu_tanh   tanh(z) = 2 sigmoid(2 z) - 1, so y = u sigmoid(2 z): one ex2, one reciprocal, and no cancellation for u < 0
    gelu        Phi(-a) = exp(-a^2/2) P(t), t = 1 / (1 + 0.38 a), a = |u|: P is a minimax fit (degree 5, no constant term) on
                a in [0, 13.3], where Phi leaves fp32; relative error 3.6e-5, half of fp16's rounding is 2.4e-4. PRECISE
                (fp32 tensors): tl.erf.

FAST takes the hardware's approximate reciprocal (1 ulp); off where there is no PTX (the interpreter, other vendors).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.activation.activation import check_glu, check_x, like
from megafx.kernels.common.maxima_triton import asked, leave, magnitude
from megafx.kernels.common.op import launch, new_like
from megafx.kernels.common.tiles_triton import (
    STAGES,
    Rows,
    Tile,
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
from megafx.kernels.fp8.quantize import LEAST, TOP
from megafx.kernels.fp8.quantize_triton import byte_of, quantize, scale_of

# -- functions of fp32 values


@triton.jit
def _reciprocal(z, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / z


@triton.jit
def _sigmoid(z, FAST: tl.constexpr):
    return _reciprocal(1.0 + tl.exp2(z * -1.4426950408889634), FAST)


@triton.jit
def _tail(u, FAST: tl.constexpr):
    """Phi(-|u|) and exp(-u^2 / 2)."""
    v = u * 0.8493218002880191  # sqrt(log2(e) / 2)
    e = tl.exp2(-v * v)
    t = _reciprocal(1.0 + 0.44741580855588037 * tl.abs(v), FAST)  # 0.38 |u|
    p = 0.0919822075 + t * (0.188873394 - t * 0.0899269939)
    return e * t * (0.151225233 + t * (0.157828651 + t * p)), e


@triton.jit
def _tanh_argument(u):
    """2 sqrt(2/pi) (u + 0.044715 u^3)."""
    return u * (1.5957691216057308 + 0.07135481627260025 * u * u)


@triton.jit
def activate(u, ACT: tl.constexpr, FAST: tl.constexpr, PRECISE: tl.constexpr):
    """act(u)."""
    if ACT == "gelu":
        if PRECISE:
            return u * (0.5 + 0.5 * tl.erf(u * 0.7071067811865476))
        tail, _ = _tail(u, FAST)
        return tl.where(u <= 0, 0.0, u) - tl.abs(u) * tail
    elif ACT == "gelu_tanh":
        return u * _sigmoid(_tanh_argument(u), FAST)
    elif ACT == "gelu_quick":
        return u * _sigmoid(1.702 * u, FAST)
    elif ACT == "silu":
        return u * _sigmoid(u, FAST)
    elif ACT == "relu2":
        positive = tl.where(u <= 0, 0.0, u)
        return positive * positive
    else:
        return tl.where(u <= 0, 0.0, u)  # nan stays nan


@triton.jit
def activate_both(u, ACT: tl.constexpr, FAST: tl.constexpr, PRECISE: tl.constexpr):
    """act(u) and act'(u)."""
    if ACT == "gelu":
        if PRECISE:
            phi = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
            e = tl.exp2(u * u * -0.7213475204444817)
        else:
            tail, e = _tail(u, FAST)
            phi = tl.where(u > 0, 1.0 - tail, tail)
        return u * phi, phi + u * 0.3989422804014327 * e
    elif ACT == "gelu_tanh":
        s = _sigmoid(_tanh_argument(u), FAST)
        slope = u * (1.5957691216057308 + 0.21406444881780073 * u * u)
        return u * s, s + _steep(s, slope)
    elif ACT == "gelu_quick":
        s = _sigmoid(1.702 * u, FAST)
        return u * s, s + _steep(s, 1.702 * u)
    elif ACT == "silu":
        s = _sigmoid(u, FAST)
        return u * s, s + _steep(s, u)
    elif ACT == "relu2":
        positive = tl.where(u <= 0, 0.0, u)
        return positive * positive, 2.0 * positive
    else:
        return tl.where(u <= 0, 0.0, u), tl.where(u > 0, 1.0, 0.0)


@triton.jit
def _steep(s, factor):
    """s (1 - s) factor; 0 where the sigmoid is saturated, though the factor may be infinite there."""
    product = s - s * s
    return tl.where(product == 0.0, 0.0, product * factor)


# -- kernels


@triton.jit
def _forward(
    gate,  # [rows, columns] IN, rows at gate_stride; not GATED: x
    up,  # [rows, columns] IN, rows at up_stride; read if GATED and not PACKED
    bias,  # [columns] IN, GATED: [2 * columns]; read if BIAS
    y,  # [rows, columns] OUT, contiguous
    largest,  # [programs] int32 OUT, of y; written if LARGEST
    rows, columns, gate_stride, up_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr,
    PRECISE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    if PACKED:
        up = gate + columns
    row, column, inside = tile_at(tl.program_id(0), rows, columns, R, C, EVEN, WIDE)
    a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        if GATED:
            b += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
    value = activate(a, ACT, FAST, PRECISE)
    if GATED:
        value = value * b
    tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=inside)
    if LARGEST:
        leave(largest, tl.program_id(0), magnitude(value, inside))


@triton.jit
def _backward(
    grad,  # [rows, columns] IN, rows at grad_stride
    gate,  # [rows, columns] IN, rows at gate_stride; not GATED: x
    up,  # [rows, columns] IN, rows at up_stride; read if GATED and not PACKED
    bias,  # [columns] IN, GATED: [2 * columns]; read if BIAS
    dgate,  # [rows, columns] OUT, contiguous; PACKED: [rows, 2 * columns], both gradients
    dup,  # [rows, columns] OUT, contiguous; written if GATED and not PACKED
    y,  # [rows, columns] OUT, contiguous; written if AGAIN; uint8 if CAST
    partials,  # [grid 1, columns] fp32 OUT, GATED: [grid 1, 2 * columns]; written if BIAS
    largest,  # [programs] int32 OUT, of dgate and dup together; written if LARGEST
    amax,  # [] fp32 IN, of y; read if CAST
    scale,  # [] fp32 OUT, of y in e4m3; written if CAST
    rows, columns, grad_stride, gate_stride, up_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr,
    PRECISE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    CAST: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    out_stride = columns
    if PACKED:
        up = gate + columns
        dup = dgate + columns
        out_stride = 2 * columns
    if CAST:
        s, inverse = scale_of(tl.load(amax + tl.zeros([1], tl.int32)), TOP, LEAST, False)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale + tl.zeros([1], tl.int32), s)
    if BIAS:
        block = tl.program_id(0)
        if GATED:
            block = block.to(tl.int64)
        column = block * C + tl.arange(0, C)
        within = column < columns
        gate_bias = tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
        gate_sum = tl.zeros([R, C], tl.float32)  # over R once: sums across warps in the loop cost half the speed
        if GATED:
            up_bias = tl.load(bias + columns + column, mask=within, other=0.0).to(tl.float32)[None, :]
            up_sum = tl.zeros([R, C], tl.float32)
        found = tl.zeros([R, C], tl.int32)
        for tile in tl.range(tl.program_id(1), tl.cdiv(rows, R), tl.num_programs(1), num_stages=STAGES):
            row = (tile * R + tl.arange(0, R)).to(tl.int64)[:, None]
            inside = (row < rows) & within[None, :]
            g = tl.load(grad + row * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            a = tl.load(gate + row * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32) + gate_bias
            if GATED:
                b = tl.load(up + row * up_stride + column[None, :], mask=inside, other=0.0).to(tl.float32) + up_bias
            value, slope = activate_both(a, ACT, FAST, PRECISE)
            at = row * out_stride + column[None, :]
            da = (g * b if GATED else g) * slope
            tl.store(dgate + at, da.to(dgate.dtype.element_ty), mask=inside)
            gate_sum += tl.where(inside, da, 0.0)
            if LARGEST:
                found = tl.maximum(found, magnitude(da, inside))
            if GATED:
                db = g * value
                tl.store(dup + at, db.to(dup.dtype.element_ty), mask=inside)
                up_sum += tl.where(inside, db, 0.0)
                if LARGEST:
                    found = tl.maximum(found, magnitude(db, inside))
            if AGAIN:
                again = activate(a, ACT, FAST, PRECISE)
                if GATED:
                    again = again * b
                if CAST:
                    again = byte_of(
                        again.to(dgate.dtype.element_ty).to(tl.float32) * inverse[None, :], TOP, False, FAST
                    )
                tl.store(y + row * columns + column[None, :], again.to(y.dtype.element_ty), mask=inside)
        at = partials + tl.program_id(1).to(tl.int64) * (2 * columns if GATED else columns) + column
        tl.store(at, tl.sum(gate_sum, 0), mask=within)
        if GATED:
            tl.store(at + columns, tl.sum(up_sum, 0), mask=within)
        if LARGEST:
            leave(largest, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), found)
    else:
        row, column, inside = tile_at(tl.program_id(0), rows, columns, R, C, EVEN, WIDE)
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        value, slope = activate_both(a, ACT, FAST, PRECISE)
        at = row * out_stride + column
        da = (g * b if GATED else g) * slope
        tl.store(dgate + at, da.to(dgate.dtype.element_ty), mask=inside)
        if LARGEST:
            found = magnitude(da, inside)
        if GATED:
            db = g * value
            tl.store(dup + at, db.to(dup.dtype.element_ty), mask=inside)
            if LARGEST:
                found = tl.maximum(found, magnitude(db, inside))
        if LARGEST:
            leave(largest, tl.program_id(0), found)
        if AGAIN:
            again = activate(a, ACT, FAST, PRECISE)
            if GATED:
                again = again * b
            if CAST:
                again = byte_of(again.to(dgate.dtype.element_ty).to(tl.float32) * inverse[None, :], TOP, False, FAST)
            tl.store(y + row * columns + column, again.to(y.dtype.element_ty), mask=inside)


# -- launchers


class _Operands(NamedTuple):
    """gate (or x) as rows; up: of a tensor of its own. gated: with up, or with both halves in gate's rows."""

    gate: Rows
    up: Rows | None
    bias: Tensor | None
    act: str
    gated: bool

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        gate = self.gate.data
        return gate, gate if self.up is None else self.up.data, gate if self.bias is None else self.bias.contiguous()

    def strides(self) -> tuple[Any, Any]:
        return self.gate.stride, self.gate.stride if self.up is None else self.up.stride

    def one_row(self, columns: Any) -> bool:
        """True if rows follow each other and no column matters: one long row is full tiles, whatever the shape."""
        packed = self.gated and self.up is None
        return self.bias is None and not packed and self.strides() == (columns, columns)

    def flags(self, columns: Any, tile: Tile, precise: bool) -> dict[str, Any]:
        kind = {"GATED": self.gated, "PACKED": self.gated and self.up is None, "BIAS": self.bias is not None}
        cut = {"R": tile.rows, "C": tile.columns, "num_warps": tile.warps, **tile_flags(columns, tile.columns)}
        return {**kind, **cut, "ACT": self.act, "FAST": fast_math(), "PRECISE": precise}


def _run_forward(y: Tensor, operands: _Operands) -> Tensor:
    _, rows, columns, _ = operands.gate
    if operands.one_row(columns):
        rows, columns = 1, rows * columns
    if not rows or not columns:
        return y
    tile = tile_of(rows, columns)
    grid = (cdiv(columns, tile.columns) * cdiv(rows, tile.rows),)
    flags = operands.flags(columns, tile, y.dtype == torch.float32)
    largest = asked(0, grid[0], y)
    flags["LARGEST"] = largest is not None
    pointers = (*operands.pointers(), y, operands.gate.data if largest is None else largest)
    launch(_forward, grid, y, *pointers, rows, columns, *operands.strides(), **flags)
    return y


def _run_backward(
    grad: Tensor, operands: _Operands, dgate: Tensor, dup: Tensor | None, y: Tensor | None,
    cast: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Fills dgate and dup (packed: dgate alone), and y if given; returns dbias, [0] without a bias.

    cast: y becomes e4m3; its largest magnitude, and its scale, to be filled.
    """
    bias = operands.bias
    g, rows, columns, grad_stride = as_rows(grad)
    if grad_stride == columns and operands.one_row(columns):
        rows, columns = 1, rows * columns
    if not rows or not columns:
        return dgate.new_empty(0) if bias is None else torch.zeros_like(bias)
    tile, partials = tile_of(rows, columns), g
    grid: tuple[Any, ...] = (cdiv(columns, tile.columns) * cdiv(rows, tile.rows), 1)
    if bias is not None:
        tile = sum_tile_of(columns)
        blocks, partials = partials_of(tile, rows, columns, grad, 2 if operands.gated else 1)
        grid = (blocks, partials.shape[0])
    unused, largest = operands.gate.data, asked(0, grid[0] * grid[1], dgate)
    amax, scale = (unused, unused) if cast is None else cast
    launch(
        _backward, grid, dgate,
        g, *operands.pointers(), dgate, unused if dup is None else dup, unused if y is None else y, partials,
        unused if largest is None else largest, amax, scale, rows, columns, grad_stride, *operands.strides(),
        CAST=cast is not None, TOP=TOP["e4m3"], LEAST=LEAST, STAGES=STAGES, AGAIN=y is not None,
        LARGEST=largest is not None, **operands.flags(columns, tile, dgate.dtype == torch.float32),
    )  # fmt: skip
    return dgate.new_empty(0) if bias is None else sum_partials(partials, bias.dtype)


def _of_x(packed: bool, x: Tensor, bias: Tensor | None, act: str) -> _Operands:
    rows = as_rows(x)
    return _Operands(rows._replace(columns=rows.columns // 2) if packed else rows, None, bias, act, packed)


def _forward_of_x(packed: bool, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return _run_forward(like(packed, check_x(packed, x, bias, act)), _of_x(packed, x, bias, act))


def _backward_of_x(
    packed: bool, grad: Tensor, x: Tensor, bias: Tensor | None, act: str, want_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, y = new_like(x), like(packed, x) if want_output else None
    dbias = _run_backward(grad, _of_x(packed, x, bias, act), dx, None, y)
    return dx, dbias, x.new_empty(0) if y is None else y


def _cast_of_x(
    packed: bool, grad: Tensor, x: Tensor, bias: Tensor | None, act: str, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, q = new_like(x), like(packed, x, torch.uint8)
    scale = torch.empty((), dtype=torch.float32, device=dx.device)
    if not dx.numel():  # no kernel runs, but the scale is of all ranks
        scale = quantize(dx.view(-1, 1), largest, -1, "e4m3", False, True, False)[2]
    dbias = _run_backward(grad, _of_x(packed, x, bias, act), dx, None, q, (largest, scale))
    return dx, dbias, q, scale


bias_act, glu_packed = (partial(_forward_of_x, packed) for packed in (False, True))
bias_act_backward, glu_packed_backward = (partial(_backward_of_x, packed) for packed in (False, True))
bias_act_backward_cast, glu_packed_backward_cast = (partial(_cast_of_x, packed) for packed in (False, True))


def glu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_glu(gate, up, act)
    return _run_forward(new_like(gate), _Operands(as_rows(gate), as_rows(up), None, act, True))


def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, act: str, want_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = new_like(gate), new_like(up), new_like(gate) if want_output else None
    _run_backward(grad, _Operands(as_rows(gate), as_rows(up), None, act, True), dgate, dup, y)
    return dgate, dup, gate.new_empty(0) if y is None else y
