"""Products of bf16 or fp16 matrices whose result is fp32: gradients of weights that are never rounded.

    mm_fp32(a [m, k], b [k, n]) -> [m, n]
    addmm_fp32(total [m, n], a [m, k], b [k, n]) -> total + a b; its form in place is Megatron's gradient accumulation fusion

Sums of products are fp32 in the library's kernels anyway: these write them out as they are (`out_dtype=`, CUDA only). Elsewhere
operands are cast, and every product of two of them is exact. fp32 and fp64 operands keep their dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import MATMUL, fixed
from megafx.kernels.common.op import InPlace, define_op, wide

LOW = (torch.bfloat16, torch.float16)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a: [m, k], b: [k, n] of one dtype -> [m, n] in fp32, of fp64 in fp64."""
    if _has_kernel(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.to(wide(a.dtype)), b.to(wide(b.dtype)))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total: [m, n] in fp32 (fp64) -> total + a b."""
    if _has_kernel(a):
        return torch.addmm(total, a, b, out_dtype=torch.float32)
    return torch.addmm(total, a.to(total.dtype), b.to(total.dtype))


def add_product_(total: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """total <- beta total + alpha a b."""
    if _has_kernel(a):
        return torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=alpha)


def _has_kernel(a: Tensor) -> bool:
    return a.device.type == "cuda" and a.dtype in LOW


mm_fp32 = define_op(
    "mm_fp32(Tensor a, Tensor b) -> Tensor",
    rule="lin: m k, k n -> m n",
    samples=[(fixed(4, 6), fixed(6, 4))],
    cost=MATMUL,
    terms=lambda a, b: a[1],
    reference=product,
    fake=lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=wide(a.dtype)),
)
addmm_fp32 = define_op(
    "addmm_fp32(Tensor total, Tensor a, Tensor b) -> Tensor",
    rule="lin: +m n, m k, k n -> m n",
    samples=[(fixed(4, 4), fixed(4, 6), fixed(6, 4))],
    cost=MATMUL,
    terms=lambda total, a, b: a[1],
    reference=add_product,
    fake=lambda total, a, b: total.new_empty(total.shape),
    inplace=InPlace("total", add_product_),
)
# product -> the op that adds it to a matrix
SUMS: dict[Any, Any] = {torch.ops.aten.mm.default: torch.ops.aten.addmm.default, mm_fp32: addmm_fp32}
