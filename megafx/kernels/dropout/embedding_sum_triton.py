"""embedding_sum on CUDA; embedding_sum.py has the formulas.

Forward: tiles of R rows by C columns as in bias_dropout_add_triton.py; each row reads its ids and gathers. Backward: a
program has R positions and C columns and goes over the batch, so that the sum over it stays in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common import philox
from megafx.kernels.common.op import launch
from megafx.kernels.common.philox_triton import key_of
from megafx.kernels.dropout import embedding_sum as reference
from megafx.kernels.dropout.bias_dropout_add import runs_here
from megafx.kernels.dropout.bias_dropout_add_triton import columns_of_tile, factor_of, grids_of, keep_tile
from megafx.kernels.dropout.embedding_sum import Part, check_parts, parts_of, result_like
from megafx.ops import axes

TILE = 2048  # elements of a forward tile: three gathers are in flight


@triton.jit
def _gathered(
    value, ids, V, H, n, s, batch, seq, column, inside, TABLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Rows of a summand, fp32 [R, C]. n, s: batch and position, int64 [R, 1]; inside: bool [R, C]."""
    at = n * batch + s * seq
    if TABLE:
        row = tl.load(ids + at, mask=tl.sum(inside.to(tl.int32), axis=1)[:, None] > 0, other=0).to(tl.int64)
        there = (row >= 0) & (row < V)
        found = tl.load(value + row * H + column, mask=inside & there, other=0.0).to(tl.float32)
        return tl.where(there, found, float("nan"))
    else:
        return tl.load(value + at + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "threshold", "op_id"])
def _forward(
    a,  # [VA, H] or [B or 1, S, H] IN
    a_ids,  # [B or 1, S] IN, where a is a table
    b,  # as a IN
    b_ids,
    c,
    c_ids,
    out,  # [B, S, H] OUT
    seed,  # [] int64 IN
    VA,
    VB,
    VC,
    a_batch,  # strides of ids (of a, where there are none) over batch and sequence
    a_seq,
    b_batch,
    b_seq,
    c_batch,
    c_seq,
    S,
    H,
    rows,
    W,
    inner,
    start,
    local_stride,
    global_start,
    global_stride,
    threshold,
    scale,
    op_id,
    A_TABLE: tl.constexpr,
    B_TABLE: tl.constexpr,
    C_TABLE: tl.constexpr,
    THIRD: tl.constexpr,
    DROP: tl.constexpr,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    blocks = tl.cdiv(W, C)
    left = tl.program_id(0) % blocks * C
    column = left + tl.arange(0, C)[None, :]
    row = ((tl.program_id(0) // blocks).to(tl.int64) * R + tl.arange(0, R))[:, None]
    inside = (row < rows) & (column < W)
    outer = row // inner
    within = row - outer * inner
    first = start + outer * local_stride + within * W  # element of out where the row starts
    token = first // H
    here = first - token * H + column  # column of the tensor
    n = token // S
    s = token - n * S
    total = _gathered(a, a_ids, VA, H, n, s, a_batch, a_seq, here, inside, A_TABLE, R, C)
    total += _gathered(b, b_ids, VB, H, n, s, b_batch, b_seq, here, inside, B_TABLE, R, C)
    if THIRD:
        total += _gathered(c, c_ids, VC, H, n, s, c_batch, c_seq, here, inside, C_TABLE, R, C)
    if DROP:
        k0, k1 = key_of(seed)
        origin = global_start + outer * global_stride + within * W + left
        keep = keep_tile(origin, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, C)
        total = tl.where(keep, total * scale, 0.0)
    tl.store(out + first + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["threshold", "op_id"])
def _backward(
    grad,  # [B, S, H] IN
    d,  # as grad OUT
    over_batch,  # [1, S, H] OUT
    seed,  # [] int64 IN
    B,
    S,
    H,
    threshold,
    scale,
    op_id,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    blocks = tl.cdiv(H, C)
    left = tl.program_id(0) % blocks * C
    column = left + tl.arange(0, C)[None, :]
    s = ((tl.program_id(0) // blocks).to(tl.int64) * R + tl.arange(0, R))[:, None]
    inside = (s < S) & (column < H)
    k0, k1 = key_of(seed)
    total = tl.zeros([R, C], tl.float32)
    for n in range(B):
        first = ((tl.zeros([], tl.int64) + n) * S + s) * H
        value = tl.load(grad + first + column, mask=inside, other=0.0).to(tl.float32)
        keep = keep_tile(first + left, tl.cast(op_id, tl.uint32), k0, k1, tl.cast(threshold, tl.uint32), ALIGNED, R, C)
        value = tl.where(keep, value * scale, 0.0)
        tl.store(d + first + column, value.to(d.dtype.element_ty), mask=inside)
        total += value
    tl.store(over_batch + s * H + column, total.to(over_batch.dtype.element_ty), mask=inside)


def _strides(part: Part) -> tuple[int, int]:
    """Of the ids, or of the tensor itself, over batch and sequence; 0 where all of the batch have the same."""
    x = part.value if part.ids is None else part.ids
    return (0 if x.shape[0] == 1 else x.stride(0)), x.stride(1)


def embedding_sum(*args: Any) -> Tensor:
    operands, drawing = args[:6], args[7:]
    parts = parts_of(operands)
    seed, p, op_id, shard_dim, layout, axis = drawing
    check_parts(parts, seed, p, op_id)
    out = result_like(parts)
    if out.dtype == torch.float64:
        return reference.embedding_sum_reference(*args)
    if not out.numel():
        return out
    parts = [Part(part.value.contiguous(), part.ids) for part in parts]
    three = [*parts, parts[0]][:3]
    S, H = out.shape[1:]
    drop = philox.threshold(p) > 0
    key = parts[0].value if seed is None else seed.to(out.device)
    for grid in grids_of(runs_here(out.shape, shard_dim if drop else -1, layout, axis), H):
        C = columns_of_tile(grid.W)
        R = max(1, TILE // C)
        launch(
            _forward,
            (triton.cdiv(grid.rows, R) * triton.cdiv(grid.W, C),),
            out,
            *(x for part in three for x in (part.value, part.value if part.ids is None else part.ids)),
            out,
            key,
            *(part.value.shape[0] for part in three),
            *(stride for part in three for stride in _strides(part)),
            S,
            H,
            grid.rows,
            grid.W,
            *grid.numbers(),
            philox.threshold(p),
            factor_of(p),
            op_id,
            A_TABLE=three[0].ids is not None,
            B_TABLE=three[1].ids is not None,
            C_TABLE=three[2].ids is not None,
            THIRD=len(parts) == 3,
            DROP=drop,
            ALIGNED=grid.aligned,
            R=R,
            C=C,
            num_warps=4,
        )
    return out


def embedding_sum_backward(
    grad: Tensor,
    dtype: torch.dtype,
    seed: Tensor | None,
    p: float,
    op_id: int,
    shard_dim: int,
    layout: Sequence[int],
    axis: str,
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    B, S, H = grad.shape
    d = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    if shard_dim >= 0 or axes.batch_rank(axis) or not grad.numel() or seed is None:
        # A shard is not one range of elements from 0 on: the mask by runs, then the sum.
        d = torch.ops.megafx.dropout_add_backward(grad, dtype, seed, p, op_id, shard_dim, layout, axis)
        return d, d.sum(0, keepdim=True, dtype=torch.float32).to(dtype)
    over_batch = torch.empty((1, S, H), dtype=dtype, device=grad.device)
    C = columns_of_tile(H, 512)
    R = max(1, 1024 // C)
    launch(
        _backward,
        (triton.cdiv(S, R) * triton.cdiv(H, C),),
        grad,
        grad,
        d,
        over_batch,
        seed.to(grad.device),
        B,
        S,
        H,
        philox.threshold(p),
        factor_of(p),
        op_id,
        ALIGNED=H % 8 == 0,
        R=R,
        C=C,
        num_warps=4,
    )
    return d, over_batch
