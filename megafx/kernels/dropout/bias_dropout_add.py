"""megafx::bias_dropout_add: y = residual + dropout(x + bias), one pass over memory in each direction; no mask is saved.

    x [..., H], bias [H] or none, residual [..., H] -> y [..., H]      y in the promoted dtype of x and residual
    y = residual + keep(i) (x + bias) scale       keep, scale: kernels/common/philox.py; i = index in the whole tensor
    backward: dresidual = dy itself; dx = keep(i) dy scale, in x's dtype; dbias = sum over all rows of dx before rounding

Arithmetic in fp32 (fp64 for fp64), rounded once: an fp32 residual with a bf16 branch gives fp32. The bits are those that
megafx.dropout draws with the same seed and op id, so the op is what it replaces; backward recomputes them from the seed.
p = 0 draws nothing. Saved: the seed. The arguments from seed on are those of megafx.dropout; shard_dim is a dim of y.

CPU and fp64: the plain torch below. CUDA: bias_dropout_add_triton.py.
Semantics: Megatron-LM, megatron/core/fusions/fused_bias_dropout.py (upcast to the residual's dtype).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import DRAWN, SEED, UNDRAWN, real
from megafx.kernels.common import philox
from megafx.kernels.common.draw import DRAW, Draw, check_draw, draws, runs_here
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide
from megafx.kernels.dropout import dropout


def check_bias(name: str, x: Tensor, bias: Tensor | None) -> None:
    if bias is not None and (x.dim() == 0 or bias.dim() != 1 or bias.shape[0] != x.shape[-1]):
        raise ValueError(f"{name}: bias {tuple(bias.shape)} does not fit the last dim of x {tuple(x.shape)}")


def check_sum(name: str, x: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    if not (x.is_floating_point() and residual.is_floating_point()):
        raise TypeError(f"{name} needs floating-point tensors, got x {x.dtype} and residual {residual.dtype}")
    if x.shape != residual.shape:
        raise ValueError(f"{name}: x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape")
    check_bias(name, x, bias)


def dropped_reference(u: Tensor, draw: Draw) -> Tensor:
    """keep(i) u scale, in u's dtype."""
    if not draws(draw.p):
        return u
    if philox.threshold(draw.p) == philox.DRAWS:
        return torch.zeros_like(u)
    return dropout.reference(u.contiguous(), draw.seed, draw.p, draw.op_id, runs_here(u.shape, draw))


def sum_reference(x: Tensor, bias: Tensor | None, residual: Tensor, draw: Draw) -> Tensor:
    """residual + dropout(x + bias), contiguous, not rounded."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    u = x.to(wide(dtype))
    if bias is not None:
        u = u + bias.to(u.dtype)
    return (dropped_reference(u, draw) + residual.to(u.dtype)).contiguous()


def bias_dropout_add_reference(x: Tensor, bias: Tensor | None, residual: Tensor, *drawing: Any) -> Tensor:
    check_sum("bias_dropout_add", x, bias, residual)
    check_draw("bias_dropout_add", draw := Draw(*drawing))
    return sum_reference(x, bias, residual, draw).to(torch.promote_types(x.dtype, residual.dtype))


def bias_dropout_add_backward_reference(
    grad: Tensor, dtype: torch.dtype | None, bias_dtype: torch.dtype | None, *drawing: Any
) -> tuple[Tensor, Tensor]:
    d, none = dropped_reference(grad.to(wide(grad.dtype)), Draw(*drawing)), grad.new_empty(0)
    dx = none if dtype is None else d.to(dtype, copy=True).contiguous()
    return dx, none.clone() if bias_dtype is None else rows_summed(d).to(bias_dtype, copy=True)


def rows_summed(x: Tensor) -> Tensor:
    """[..., H] -> [H]."""
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


def _fake(x: Tensor, bias: Tensor | None, residual: Tensor, *drawing: Any) -> Tensor:
    check_sum("bias_dropout_add", x, bias, residual)
    check_draw("bias_dropout_add", Draw(*drawing))
    return new_like(residual, torch.promote_types(x.dtype, residual.dtype))


define_op(
    f"bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, {DRAW}) -> Tensor",
    rule="lin: ... h, +h, +... h, ~ -> ... h",
    samples=[(real(4, 6, 6), real(6), real(4, 6, 6), SEED, *DRAWN), (real(4, 6), None, real(4, 6), None, *UNDRAWN)],
    reference=bias_dropout_add_reference,
    triton="dropout.bias_dropout_add_triton:bias_dropout_add",
    fake=_fake,
)
define_op(
    f"bias_dropout_add_backward(Tensor grad, ScalarType? dtype, ScalarType? bias_dtype, {DRAW})"
    " -> (Tensor dx, Tensor dbias)",  # in these dtypes; [0] where there is none
    rule=lambda call: (
        f"lin: ... h, ~ -> {'*' if call.get('dtype') is None else '... h'}; "
        f"{'*' if call.get('bias_dtype') is None else 'h'}"
    ),
    samples=[
        *((real(4, 6), torch.float64, of, SEED, *DRAWN) for of in (torch.float64, None)),
        (real(4, 6), None, torch.float64, None, *UNDRAWN),
    ],
    reference=bias_dropout_add_backward_reference,
    triton="dropout.bias_dropout_add_triton:bias_dropout_add_backward",
    fake=lambda grad, dtype, bias_dtype, *_: (
        grad.new_empty(0) if dtype is None else new_like(grad, dtype),
        grad.new_empty(0 if bias_dtype is None else grad.shape[-1:], dtype=bias_dtype),
    ),
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, residual, seed, *ctx.rest = inputs
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype, residual.dtype
    ctx.save_for_backward(seed)


def branch_gradients(
    grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None, draw: Draw
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the bias (None without a bias_dtype), from that of the sum."""
    op, dbias = torch.ops.megafx.bias_dropout_add_backward, None
    if not draws(draw.p) and (bias_dtype is None or grad.dtype == dtype):
        dx = grad.to(dtype)
        dbias = None if bias_dtype is None else op(grad, None, bias_dtype, *Draw().args)[1]
    else:
        dx, dbias = op(grad, dtype, bias_dtype, *draw)
    return dx, None if bias_dtype is None else dbias


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    draw = Draw(*ctx.saved_tensors, *ctx.rest)
    dtype, bias_dtype, residual_dtype = ctx.dtypes
    dx, dbias = branch_gradients(grad, dtype, bias_dtype if ctx.needs_input_grad[1] else None, draw)
    return dx, dbias, grad.to(residual_dtype), None, None, None, None, None, None


define_gradient("bias_dropout_add", _backward, _saves)
