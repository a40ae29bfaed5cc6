"""layer_norm and rms_norm on CUDA, alone or after bias + dropout + add: how rows are cut, and the launchers.

norms.py and add_norm.py have the formulas, norms_triton.py the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megafx.kernels.common import philox
from megafx.kernels.common.draw import Draw, draws, factor_of
from megafx.kernels.common.maxima_triton import asked
from megafx.kernels.common.op import launch, new_like
from megafx.kernels.common.tiles_triton import power_of_2
from megafx.kernels.dropout.bias_dropout_add_triton import column_sums
from megafx.kernels.norm.norms import Norm, call_backward, call_forward
from megafx.kernels.norm.norms_triton import norm_backward, norm_forward


class Shape(NamedTuple):
    """How a kernel cuts rows: tiles of R rows, K * split parts of C columns."""

    R: int
    K: int
    C: int
    warps: int
    reload: bool = False  # forward
    split: int = 1  # backward: programs that share a row
    programs: int = 132  # backward: persistent programs; an H100 or H200 has 132 SMs
    stages: int = 3  # backward: tiles in flight, plus one


SCRATCH = 8 * 1024  # bytes of shared memory left for sums over warps
# Columns of a part where another number than the rule's was faster.
FORWARD_COLUMNS = {1024: 512, 4096: 2048, 12288: 2048}


def columns_of_part(H: int) -> int:
    """The power of two from 256 to 4096 that leaves the fewest columns of at most 8 parts empty; of these, about 4 parts."""
    if H <= 256:
        return power_of_2(H)
    if H in FORWARD_COLUMNS:
        return FORWARD_COLUMNS[H]

    def cost(C: int) -> tuple[bool, int, int]:
        K = triton.cdiv(H, C)
        return K > 8, K * C, abs(K - 4)

    return min((256, 512, 1024, 2048, 4096), key=cost)


def forward_shape(H: int, rms: bool, add: bool, drop: bool) -> Shape:
    """Each thread has 8 elements of a part, 4 where that was faster. Drawing takes registers that long rows do not leave: those
    are read again."""
    if drop and 5120 < H <= 12288:
        return Shape(1, triton.cdiv(H, 4096), 4096, 16 if H <= 8192 else 8)
    C = columns_of_part(H)
    K = triton.cdiv(H, C)
    warps = 16 if H == 8192 and rms and not add else max(1, C // 256)
    return Shape(1, K, C, warps, reload=K > 8 or (drop and K > 5) or (add and H > 8192))


def backward_shape(H: int, rms: bool, add: bool) -> Shape:
    """As many columns as leave the sums in registers; rows that are short, several at a time. Measured: H200, bf16."""
    split = triton.cdiv(H, 8192 if add or rms else 12288)
    own = triton.cdiv(H, split)
    if own > 5120 or split > 1:
        deep = not add and ((H > 8192) == rms) and H <= 12288
        return Shape(1, triton.cdiv(own, 2048), 2048, 8, False, split, 132 // split * split, 4 if deep else 3)
    if own > 2560:
        C = 2048 if own == 4096 and not add else 1024
        return Shape(2, triton.cdiv(own, C), C, 8)
    if own > 2048:
        R, C = (1, 1024) if add else (2, 512)
        return Shape(R, triton.cdiv(own, C), C, 4, programs=264)
    if own > 1024:
        if add and own % 512 == 0:
            return Shape(4, own // 512, 512, 8)
        return Shape(2, 1, 2048, 4, programs=264, stages=3 if add or own % 512 == 0 else 4)
    C = min(256, power_of_2(own))
    return Shape(4, triton.cdiv(own, C), C, 4, programs=264, stages=4 if own <= 768 else 3)


def stages_that_fit(shape: Shape, row_bytes: int, own_bytes: int, device: torch.device) -> int:
    """Tiles in flight lie in shared memory: fewer where rows are wide. Bytes: of an element, of what is read of whole rows
    and of the program's own columns."""
    tile = shape.R * shape.K * shape.C * (shape.split * row_bytes + own_bytes)
    return max(1, min(shape.stages, 1 + (shared_memory(device) - SCRATCH) // tile))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


class Rows(NamedTuple):
    """Where the rows of a shard lie in the whole tensor; see norm_forward."""

    inner: int
    first_row: int
    row_stride: int
    aligned: bool


WHOLE, NO_DRAW = Rows(1, 0, 1, True), Draw()


def _drawing(draw: Draw, where: Rows) -> tuple[Any, ...]:
    """The kernels' arguments from `threshold` to `row_stride`."""
    return philox.threshold(draw.p), factor_of(draw.p), draw.op_id, *where[:3]


def run_forward(
    x: Tensor, norm: Norm, bias: Tensor | None = None, residual: Tensor | None = None, draw: Draw = NO_DRAW,
    where: Rows = WHOLE,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """-> h (x itself without a residual), y, mean, rstd."""
    add = residual is not None
    x = x.contiguous()
    h = new_like(residual, torch.promote_types(x.dtype, residual.dtype)) if residual is not None else x
    y = new_like(h)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = None if norm.rms else torch.empty_like(rstd)
    H = int(x.shape[-1])  # a kernel is compiled for it
    rows = rstd.numel()
    if rows == 0 or H == 0:
        return h, y, mean, rstd
    drop = draws(draw.p)
    shape = forward_shape(H, norm.rms, add, drop)
    programs = triton.cdiv(rows, shape.R)
    largest = asked(1 if add else 0, programs, y)
    launch(
        norm_forward, (programs,), x,
        x, x if bias is None else bias.contiguous(), x if residual is None else residual.contiguous(),
        x if draw.seed is None else draw.seed.to(x.device), x if norm.weight is None else norm.weight.contiguous(),
        x if norm.bias is None else norm.bias.contiguous(), h, y, rstd if mean is None else mean, rstd,
        x if largest is None else largest,
        rows, H, norm.eps, norm.offset, *_drawing(draw, where),
        RMS=norm.rms, ADD=add, BIAS=bias is not None, DROP=drop, ALIGNED=where.aligned,
        WEIGHT=norm.weight is not None, NORM_BIAS=norm.bias is not None, RELOAD=shape.reload,
        LARGEST=largest is not None, EVEN=H == shape.K * shape.C, R=shape.R, K=shape.K, C=shape.C,
        num_warps=shape.warps,
    )  # fmt: skip
    return h, y, mean, rstd


def run_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, offset: float,
    outputs: Sequence[Tensor], grad_h: Tensor | None = None, draw: Draw = NO_DRAW, where: Rows = WHOLE,
) -> None:  # fmt: skip
    """outputs: dx, dbranch, dweight, dnorm_bias, dbias to be filled; empty ones are left out."""
    dx, dbranch, *vectors = outputs
    H = int(x.shape[-1])  # a kernel is compiled for it
    rows = rstd.numel()
    sums = [v for v in vectors if v.numel()]
    if rows == 0 or H == 0:
        for v in sums:
            v.zero_()
        return
    shape = backward_shape(H, mean is None, grad_h is not None or len(sums) > 2)
    programs = min(shape.programs, triton.cdiv(rows, shape.R) * shape.split)
    partial = torch.empty(len(sums), programs // shape.split, H, dtype=torch.float32, device=x.device)
    x, grad = x.contiguous(), grad.contiguous()
    own_bytes = 0 if grad_h is None else grad_h.element_size()
    of_dx, of_dbranch = asked(0, programs, x), asked(1, programs, x)
    largest = of_dbranch if of_dx is None else of_dx
    launch(
        norm_backward, (programs,), x,
        grad, x, x if grad_h is None else grad_h.contiguous(), x if draw.seed is None else draw.seed.to(x.device),
        x if weight is None else weight.contiguous(), rstd if mean is None else mean.contiguous(), rstd.contiguous(),
        dx, dbranch if dbranch.numel() else dx, partial, x if largest is None else largest,
        rows, H, offset, *_drawing(draw, where),
        RMS=mean is None, GRAD_H=grad_h is not None, BRANCH=dbranch.numel() > 0, DROP=draws(draw.p),
        ALIGNED=where.aligned, WEIGHT=weight is not None, SUM_WEIGHT=vectors[0].numel() > 0,
        SUM_NORM_BIAS=vectors[1].numel() > 0, SUM_BIAS=vectors[2].numel() > 0,
        LARGEST=0 if largest is None else 2 if of_dx is None else 1,
        STAGES=stages_that_fit(shape, x.element_size() + grad.element_size(), own_bytes, x.device), SPLIT=shape.split,
        EVEN=shape.K * shape.C * shape.split == H, R=shape.R, K=shape.K, C=shape.C, num_warps=shape.warps,
    )  # fmt: skip
    if sums:
        column_sums(partial, sums)


def _forward(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    return run_forward(x, norm)[1:]


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, offset: float,
    outputs: Sequence[Tensor],
) -> None:  # fmt: skip
    dx, dweight, dbias = outputs
    none = x.new_empty(0)
    run_backward(grad, x, weight, mean, rstd, offset, (dx, none, dweight, dbias, none))


layer_norm_forward = functools.partial(call_forward, False, _forward)
rms_norm_forward = functools.partial(call_forward, True, _forward)
layer_norm_backward = functools.partial(call_backward, False, _backward)
rms_norm_backward = functools.partial(call_backward, True, _backward)
