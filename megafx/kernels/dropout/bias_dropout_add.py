"""megafx::bias_dropout_add: y = residual + dropout(x + bias), one pass over memory in each direction; no mask is saved.

    x [..., H], bias [H] or none, residual [..., H] -> y [..., H]      y in the promoted dtype of x and residual
    y = residual + keep(i) (x + bias) scale       keep, scale: kernels/philox.py; i = index in the whole tensor
    backward: dresidual = dy itself; dx = keep(i) dy scale, in x's dtype; dbias = sum over all rows of dx before rounding

Arithmetic in fp32 (fp64 for fp64), rounded once: an fp32 residual with a bf16 branch gives fp32. The bits are those that
megafx.dropout draws with the same seed and op id, so the op is what it replaces; backward recomputes them from the seed.
p = 0 draws nothing. Saved: the seed. The arguments from seed on are those of megafx.dropout; shard_dim is a dim of y.

CPU and fp64: the plain torch below. CUDA: bias_dropout_add_triton.py.
Semantics: Megatron-LM, megatron/core/fusions/fused_bias_dropout.py (upcast to the residual's dtype).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafx.ir.facts import DRAWN, SEED, UNDRAWN, real
from megafx.kernels.common import philox
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide
from megafx.kernels.common.runs import Run, runs_of
from megafx.kernels.dropout import dropout
from megafx.ops import axes


def runs_here(shape: Sequence[int], shard_dim: int, layout: Sequence[int], axis: str) -> list[Run]:
    """Where the elements of this rank's tensor lie in the whole one."""
    rank, t = 0, 1
    if shard_dim >= 0:
        rank, t = axes.axis_rank(axis), axes.axis_size(axis)
    return runs_of(shape, shard_dim, layout, rank, t, axes.batch_rank(axis))


def check_draw(name: str, seed: Tensor | None, p: float, op_id: int) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}: dropout probability must be between 0 and 1, got {p}")
    if not 0 <= op_id <= philox.MASK:
        raise ValueError(f"{name}: op_id must be an unsigned 32-bit number, got {op_id}")
    if seed is None and draws(p):
        raise ValueError(f"{name}: dropout with p = {p} needs a seed")


def check_sum(name: str, x: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    if not (x.is_floating_point() and residual.is_floating_point()):
        raise TypeError(f"{name} needs floating-point tensors, got x {x.dtype} and residual {residual.dtype}")
    if x.shape != residual.shape:
        raise ValueError(f"{name}: x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape")
    if bias is not None and (x.dim() == 0 or bias.dim() != 1 or bias.shape[0] != x.shape[-1]):
        raise ValueError(f"{name}: bias {tuple(bias.shape)} does not fit the last dim of x {tuple(x.shape)}")


def draws(p: float) -> bool:
    """Whether any element is dropped at this probability."""
    return philox.threshold(p) > 0


def dropped_reference(
    u: Tensor, seed: Tensor | None, p: float, op_id: int, shard_dim: int, layout: Sequence[int], axis: str
) -> Tensor:
    """keep(i) u scale, in u's dtype."""
    if not draws(p):
        return u
    if philox.threshold(p) == philox.DRAWS:
        return torch.zeros_like(u)
    assert seed is not None
    return dropout.reference(u.contiguous(), seed, p, op_id, runs_here(u.shape, shard_dim, layout, axis))


def sum_reference(x: Tensor, bias: Tensor | None, residual: Tensor, *drawing) -> Tensor:
    """residual + dropout(x + bias), contiguous, not rounded."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    u = x.to(wide(dtype))
    if bias is not None:
        u = u + bias.to(u.dtype)
    return (dropped_reference(u, *drawing) + residual.to(u.dtype)).contiguous()


def bias_dropout_add_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    seed: Tensor | None,
    p: float,
    op_id: int,
    shard_dim: int,
    layout: Sequence[int],
    axis: str,
) -> Tensor:
    check_sum("bias_dropout_add", x, bias, residual)
    check_draw("bias_dropout_add", seed, p, op_id)
    total = sum_reference(x, bias, residual, seed, p, op_id, shard_dim, layout, axis)
    return total.to(torch.promote_types(x.dtype, residual.dtype))


def dropout_add_backward_reference(grad: Tensor, dtype: torch.dtype, *drawing) -> Tensor:
    return dropped_reference(grad.to(wide(grad.dtype)), *drawing).to(dtype).contiguous()


def bias_dropout_add_backward_reference(
    grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype, *drawing
) -> tuple[Tensor, Tensor]:
    d = dropped_reference(grad.to(wide(grad.dtype)), *drawing)
    return d.to(dtype, copy=True).contiguous(), column_sum_reference(d, bias_dtype)


def rows_summed(x: Tensor) -> Tensor:
    """[..., H] -> [H]."""
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


def column_sum_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    return rows_summed(x.to(wide(x.dtype))).to(dtype, copy=True)


def _fake(x, bias, residual, seed, p, op_id, *_):
    check_sum("bias_dropout_add", x, bias, residual)
    check_draw("bias_dropout_add", seed, p, op_id)
    return new_like(residual, torch.promote_types(x.dtype, residual.dtype))


_DRAWING = "Tensor? seed, float p, int op_id, int shard_dim, SymInt[] layout, str axis"

define_op(
    f"bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, {_DRAWING}) -> Tensor",
    rule="lin: ... h, +h, +... h, ~ -> ... h",
    samples=[(real(4, 6, 6), real(6), real(4, 6, 6), SEED, *DRAWN), (real(4, 6), None, real(4, 6), None, *UNDRAWN)],
    reference=bias_dropout_add_reference,
    triton="dropout.bias_dropout_add_triton:bias_dropout_add",
    fake=_fake,
)
define_op(
    f"dropout_add_backward(Tensor grad, ScalarType dtype, {_DRAWING}) -> Tensor",
    rule="lin: ..., ~ -> ...",
    samples=[(real(4, 6), torch.float64, SEED, *DRAWN)],
    reference=dropout_add_backward_reference,
    triton="dropout.bias_dropout_add_triton:dropout_add_backward",
    fake=lambda grad, dtype, *_: new_like(grad, dtype),
)
define_op(
    f"bias_dropout_add_backward(Tensor grad, ScalarType dtype, ScalarType bias_dtype, {_DRAWING}) -> (Tensor, Tensor)",
    rule="lin: ... h, ~ -> ... h; h",
    samples=[(real(4, 6), torch.float64, torch.float64, SEED, *DRAWN)],
    reference=bias_dropout_add_backward_reference,
    triton="dropout.bias_dropout_add_triton:bias_dropout_add_backward",
    fake=lambda grad, dtype, bias_dtype, *_: (
        new_like(grad, dtype),
        grad.new_empty(grad.shape[-1:], dtype=bias_dtype),
    ),
)
define_op(
    "column_sum(Tensor x, ScalarType dtype) -> Tensor",
    rule="lin: ... h -> h",
    samples=[(real(4, 6), torch.float64)],
    reference=column_sum_reference,
    triton="dropout.bias_dropout_add_triton:column_sum",
    fake=lambda x, dtype: x.new_empty(x.shape[-1:], dtype=dtype),
)


def _saves(ctx, inputs, output) -> None:
    x, bias, residual, seed, *ctx.rest = inputs
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype, residual.dtype
    ctx.save_for_backward(seed)


def branch_gradients(grad, seed, rest, dtype, bias_dtype):
    """Gradients of x and of the bias (None without a bias_dtype), from that of the sum."""
    drops, same = draws(rest[0]), grad.dtype == dtype
    ops = torch.ops.megafx
    if bias_dtype is None:
        dx = ops.dropout_add_backward(grad, dtype, seed, *rest) if drops else grad.to(dtype)
        return dx, None
    if not drops and same:
        return grad, ops.column_sum(grad, bias_dtype)
    return ops.bias_dropout_add_backward(grad, dtype, bias_dtype, seed, *rest)


def _backward(ctx, grad: Tensor):
    (seed,) = ctx.saved_tensors
    dtype, bias_dtype, residual_dtype = ctx.dtypes
    dx, dbias = branch_gradients(grad, seed, ctx.rest, dtype, bias_dtype if ctx.needs_input_grad[1] else None)
    return dx, dbias, grad.to(residual_dtype), None, None, None, None, None, None


define_gradient("bias_dropout_add", _backward, _saves)
