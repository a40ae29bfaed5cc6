"""megafx::dropout: y = x * scale where keep(i), else 0; i = index of the element in the whole (logical) tensor.

    x [any local shape], seed [] int64 -> y like x, contiguous         keep, scale: kernels/common/philox.py
    backward: the same op on the gradient

The random bits are a function of (seed, op_id, i) alone: nothing but the seed is saved, and recomputing gives the same mask.
Arithmetic: x and scale in fp32 (fp64 for fp64), rounded once to x's dtype. Dropped elements are 0 even where x is infinite or
nan. Pads draw anything. shard_dim, layout: how x's dim is cut over the ranks of `axis` (`Layout.flat()`); -1 and [] where x is
whole. Elementwise: any placement but partial sums.

CPU: plain torch in chunks that stay in cache. CUDA, fp64 too: dropout_triton.py.
Measured: 6 to 8 ns an element on one core of a Xeon with AVX-512 (fp32, p = 0.1, 2026-11-21).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import DRAWN, SEED, real
from megafx.kernels.common import philox
from megafx.kernels.common.draw import DRAW, Draw, Run, check_draw, runs_here
from megafx.kernels.common.op import HAVE_TRITON, define_gradient, define_op, new_like, runs_triton

# Philox calls at a time; measured on a Xeon with 2 MiB of L2: 16384 -> 6.4 ns an element, 1024 -> 21, 65536 -> 7.5.
CPU_CHUNK, CUDA_CHUNK = 1 << 14, 1 << 22


def reference(x: Tensor, seed: Tensor, p: float, op_id: int, runs: Sequence[Run]) -> Tensor:
    """Plain torch; the definition on local tensors (contiguous), and the path of the CPU."""
    out = torch.empty_like(x)
    key = philox.key_of(seed)
    for run in runs:
        source, target = (
            a.as_strided((run.rows, run.length), (run.local_stride, 1), a.storage_offset() + run.local_start)
            for a in (x, out)
        )
        # Rows whose starts agree modulo 8 share one alignment: at most 8 families of rows, most often one.
        families = 8 // math.gcd(run.global_stride, 8) if run.rows > 1 else 1
        for family in range(min(families, run.rows)):
            start, stride = run.global_start + family * run.global_stride, families * run.global_stride
            _drop_rows(source[family::families], target[family::families], key, p, op_id, start, stride)
    return out


def _drop_rows(
    source: Tensor, target: Tensor, key: tuple[int, int], p: float, op_id: int, start: int, stride: int
) -> None:
    """Fill target [rows, length]; row r covers global elements start + r * stride onwards; 8 divides stride."""
    rows, length = source.shape
    lead = start & 7  # elements of the first group that belong to what is before the row
    groups = (lead + length + 7) >> 3
    chunk = CPU_CHUNK if source.device.type == "cpu" else CUDA_CHUNK
    width, height = min(groups, chunk), max(1, chunk // groups)
    below, factor = philox.threshold(p), philox.scale(p)
    for r in range(0, rows, height):
        for c in range(0, groups, width):
            h, w = min(height, rows - r), min(width, groups - c)
            first = (start >> 3) + r * (stride >> 3) + c
            index = torch.arange(first, first + w, device=source.device)
            if h > 1:
                index = (torch.arange(h, device=source.device)[:, None] * (stride >> 3) + index).view(-1)
            last = first + (h - 1) * (stride >> 3) + w - 1
            high: philox.Word = first >> 32
            if last >> 32 != high:
                high = index >> 32
            if last >> 32:
                index = index & philox.MASK
            drop = philox.dropped(index, high, key, op_id, below).view(h, w * 8)
            a, b = max(0, c * 8 - lead), min(length, (c + w) * 8 - lead)
            skip = a - (c * 8 - lead)
            part = target[r : r + h, a:b]
            torch.mul(source[r : r + h, a:b], factor, out=part)
            part.masked_fill_(drop[:, skip : skip + b - a], 0)


def dropout(x: Tensor, *drawing: Any) -> Tensor:
    """The op: x, and the fields of Draw."""
    draw = Draw(*drawing)
    check_draw("dropout", draw)
    if not x.is_floating_point():
        raise TypeError(f"dropout needs a floating-point tensor, got {x.dtype} {tuple(x.shape)}")
    below = philox.threshold(draw.p)
    if below == 0:
        return x.clone(memory_format=torch.contiguous_format)
    if below == philox.DRAWS:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    x, runs = x.contiguous(), runs_here(x.shape, draw)
    if runs_triton(x) or (x.is_cuda and HAVE_TRITON):  # fp64 too: the bits are the same
        from megafx.kernels.dropout import dropout_triton

        return dropout_triton.dropout(x, draw.seed.to(x.device), draw.p, draw.op_id, runs)
    return reference(x, draw.seed, draw.p, draw.op_id, runs)


define_op(
    f"dropout(Tensor x, {DRAW.replace('Tensor?', 'Tensor', 1)}) -> Tensor",
    rule="lin: ..., ~ -> ...",
    samples=[(real(4, 6), SEED, *DRAWN)],
    reference=dropout,
    fake=lambda x, *_: new_like(x),
    launches=True,
)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return torch.ops.megafx.dropout(grad, seed, *ctx.rest), None, None, None, None, None, None


define_gradient("dropout", _backward, slice(1, 2))
