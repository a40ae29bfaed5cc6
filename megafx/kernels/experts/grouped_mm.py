"""megafx::grouped_mm: a product with one weight for each group of rows, as mixtures of experts compute it.

    x [S, K], weight [E, K, N], ends int [E] -> y [S, N]

    y_s = x_s weight_e   for rows s of group e: ends[e-1] <= s < ends[e] (ends[-1] taken as 0); rows after the last end are 0

Gradients: dx is the same op with the weights transposed; dweight is megafx::grouped_mm_weight, x [S, K], grad [S, N] ->
dweight_e = x_e^T grad_e [E, K, N]. Arithmetic and result: x's dtype, accumulated as the library's matmuls do.
Sharded on N it is a column-parallel linear for every expert at once, on K a row-parallel one. Rows stay whole: `ends` counts
them all. Source: Gale et al. 2022 (2211.15841).

CUDA: the library's grouped matmul where it takes dtype and strides (16-byte rows). Else one matmul a group, for which the
ends are read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafx.ir.facts import MATMUL, ids, real
from megafx.kernels.common.op import define_gradient, define_op, runs_triton

_LIBRARY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes


def check_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or ends.dim() != 1 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"grouped_mm needs x [S, K] and weight [E, K, N], got {tuple(x.shape)}, {tuple(weight.shape)}")
    if ends.shape[0] != weight.shape[0]:
        raise ValueError(f"grouped_mm: {ends.shape[0]} ends of groups for {weight.shape[0]} weights")


def _library_takes(columns: int, *operands: Tensor) -> bool:
    """CUDA, a dtype it has, and one unit stride with all others multiples of 16 bytes. columns: of the result."""
    if columns * operands[0].element_size() % _ALIGNMENT:
        return False
    for a in operands:
        strides = sorted(a.stride())
        aligned = strides[0] == 1 and all(s * a.element_size() % _ALIGNMENT == 0 for s in strides[1:])
        if not (a.is_cuda and a.dtype in _LIBRARY_DTYPES and aligned and a.data_ptr() % _ALIGNMENT == 0):
            return False
    return True


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    last = [int(n) for n in ends.tolist()]
    return list(zip([0, *last], last, strict=False))


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    check_grouped_mm(x, weight, ends)
    if x.shape[0] and _library_takes(weight.shape[2], x, weight):
        return _without_tail(torch._grouped_mm(x, weight, ends.to(torch.int32)), ends)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for e, (start, end) in enumerate(_groups(ends)):
        y[start:end] = x[start:end] @ weight[e]
    return y


def _without_tail(y: Tensor, ends: Tensor) -> Tensor:
    """The library leaves rows after the last end as they were in memory: write zeros there. In place."""
    if runs_triton(y):
        from megafx.kernels.experts.zero_tail_triton import zero_tail

        zero_tail(y, ends)
        return y
    return torch.where((torch.arange(y.shape[0], device=y.device) < ends[-1])[:, None], y, 0)


def grouped_mm_weight(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] and _library_takes(grad.shape[1], x, grad):
        return torch._grouped_mm(x.t(), grad, ends.to(torch.int32))
    dweight = x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
    for e, (start, end) in enumerate(_groups(ends)):
        dweight[e] = x[start:end].t() @ grad[start:end]
    return dweight


define_op(
    "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    rule="lin: s! k, e! k n, ~e! -> s! n",
    outer="lin: s k, e! k n, * -> s n",  # of rows that each rank has grouped by itself
    outer_if=("ends", "group_ends"),
    samples=[(real(6, 4), real(4, 4, 6), ids(7, 4))],
    cost=MATMUL,
    groups=1,
    reference=grouped_mm,
    fake=lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]),
)
define_op(
    "grouped_mm_weight(Tensor x, Tensor grad, Tensor ends) -> Tensor",
    rule="lin: s! k, s! n, ~e! -> e! k n",
    outer="lin: s k, s n, * -> e! k n",
    outer_if=("ends", "group_ends"),
    samples=[(real(6, 4), real(6, 6), ids(7, 4))],
    cost=MATMUL,
    terms=lambda x, grad, ends: x[0] // ends[0],  # of an expert's rows, which are an equal share
    groups=2,
    reference=grouped_mm_weight,
    fake=lambda x, grad, ends: x.new_empty(ends.shape[0], x.shape[1], grad.shape[1]),
)


def _backward(ctx, grad: Tensor):
    x, weight, ends = ctx.saved_tensors
    dx, dweight = ctx.needs_input_grad[:2]
    ops = torch.ops.megafx
    turned = weight.stride(2) != 1  # [N, K] in memory, as linears have it: so has its gradient
    return (
        ops.grouped_mm(grad, weight.transpose(1, 2), ends) if dx else None,
        (ops.grouped_mm_weight(grad, x, ends).transpose(1, 2) if turned else ops.grouped_mm_weight(x, grad, ends))
        if dweight
        else None,
        None,
    )


def _backward_of_weight(ctx, grad: Tensor):
    x, dy, ends = ctx.saved_tensors
    return torch.ops.megafx.grouped_mm(dy, grad.transpose(1, 2), ends), torch.ops.megafx.grouped_mm(x, grad, ends), None


define_gradient("grouped_mm", _backward, slice(0, 3))
define_gradient("grouped_mm_weight", _backward_of_weight, slice(0, 3))
