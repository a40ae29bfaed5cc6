"""Residual add and normalisation in one kernel: h = residual + dropout(x + bias), y = norm(h), both results.

    megafx::bias_dropout_add_layer_norm, megafx::bias_dropout_add_rms_norm; without bias and with p = 0: plain add + norm

    x [..., H], bias [H] or none, residual [..., H], weight [H] or none, norm_bias [H] or none
    -> h [..., H] in the promoted dtype of x and residual, y [..., H] in h's dtype, mean and rstd [...] fp32

    formulas: bias_dropout_add.py and norms.py; y is the norm of h as rounded, as of the two ops one after the other
    backward, one kernel: d = dh + norm'(dy), where dh is what reaches h from elsewhere (the residual stream);
    dresidual = d, dx = keep(i) d scale, dbias = sum over rows of dx, dweight and dnorm_bias as in norms.py

Saved: h, the seed, one or two numbers a row. These ops have results of several kinds, which the planner does not place: they
appear after planning, on one rank's shapes, where the last dim is whole; shard_dim is a leading dim. What is not wanted, or
is the same as dresidual, is an empty tensor. CPU and fp64: the plain torch below. CUDA: add_norm_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import DRAWN, SEED, UNDRAWN, real
from megafx.kernels.common.draw import DRAW, Draw, check_draw, draws
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide
from megafx.kernels.dropout import bias_dropout_add as separate
from megafx.kernels.norm.norms import Norm, check_norm, fill, norm_gradients, norm_of, normalize, vector_like


def check_add_norm(x: Tensor, bias: Tensor | None, residual: Tensor, norm: Norm, draw: Draw) -> None:
    separate.check_sum("add + norm", x, bias, residual)
    check_norm("add + norm", x, norm.weight, norm.bias)
    check_draw("add + norm", draw)


def add_norm_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, norm: Norm, draw: Draw
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    check_add_norm(x, bias, residual, norm, draw)
    h = separate.sum_reference(x, bias, residual, draw).to(torch.promote_types(x.dtype, residual.dtype))
    y, mean, rstd = normalize(h.to(wide(h.dtype)), norm)
    return h, y.to(h.dtype), mean, rstd


def empty_gradients(
    h: Tensor, weight: Tensor | None, wanted: Sequence[bool], dtype: torch.dtype, bias_dtype: torch.dtype | None,
    draw: Draw,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Uninitialised dresidual, dx, dweight, dnorm_bias, dbias; [0] for what is not wanted."""
    dx = new_like(h, dtype) if draws(draw.p) or dtype != h.dtype else h.new_empty(0, dtype=dtype)
    dbias = h.new_empty(h.shape[-1:] if bias_dtype is not None else (0,), dtype=bias_dtype or h.dtype)
    return new_like(h), dx, vector_like(h, weight, wanted[0]), vector_like(h, weight, wanted[1]), dbias


def add_norm_backward_reference(
    h: Tensor, grad_y: Tensor, grad_h: Tensor | None, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    offset: float, outputs: tuple[Tensor, ...], draw: Draw,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Fills the outputs of `empty_gradients`."""
    compute = wide(h.dtype)
    d, dweight, dnorm_bias = norm_gradients(grad_y.to(compute), h.to(compute), weight, mean, rstd, offset)
    if grad_h is not None:
        d = d + grad_h.to(compute)
    dx = separate.dropped_reference(d, draw)
    fill(outputs, (d, dx, dweight, dnorm_bias, separate.rows_summed(dx)))
    return outputs


# -- the arguments of the two ops, and of their backward, for one function that serves both

Forward = Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor]]


def call_forward(rms: bool, run: Forward, *args: Any) -> tuple[Tensor, ...]:
    """run: as `add_norm_reference`. args: of the op. -> h, y, mean (of layer_norm), rstd."""
    x, bias, residual, weight, first, second, *drawing = args
    found = run(x, bias, residual, norm_of(rms, weight, first, second), Draw(*drawing))
    return tuple(t for t in found if t is not None)


def call_backward(rms: bool, run: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """run: as `add_norm_backward_reference`. args: of the op. -> dresidual, dx, dweight, dnorm_bias (of layer_norm), dbias."""
    if rms:
        h, grad_y, grad_h, weight, rstd, offset, want_weight, dtype, bias_dtype, *drawing = args
        mean, wanted = None, [want_weight, False]
    else:
        h, grad_y, grad_h, weight, mean, rstd, *wanted, dtype, bias_dtype = args[:10]
        offset, drawing = 0.0, list(args[10:])
    draw = Draw(*drawing)
    outputs = empty_gradients(h, weight, wanted, dtype, bias_dtype, draw)
    outputs = run(h, grad_y, grad_h, weight, mean, rstd, offset, outputs, draw)
    return (*outputs[:3], outputs[4]) if rms else outputs


def _fake(rms: bool, *args: Any) -> tuple[Tensor, ...]:
    x, bias, residual, weight, first, second, *drawing = args
    check_add_norm(x, bias, residual, norm_of(rms, weight, first, second), Draw(*drawing))
    h = new_like(residual, torch.promote_types(x.dtype, residual.dtype))
    return h, new_like(h), *(h.new_empty(h.shape[:-1], dtype=wide(h.dtype)) for _ in range(1 if rms else 2))


def _backward_fake(rms: bool, *args: Any) -> tuple[Tensor, ...]:
    return call_backward(rms, lambda *given: given[7], *args)


define_op(
    "bias_dropout_add_layer_norm(Tensor x, Tensor? bias, Tensor residual, Tensor? weight, Tensor? norm_bias, float eps, "
    f"{DRAW}) -> (Tensor h, Tensor y, Tensor mean, Tensor rstd)",
    rule="nl: ... c!, c!, ... c!, c!, c!, ~ -> ... c!; ... c!; ~...; ~...",
    samples=[(real(4, 6), real(6), real(4, 6), real(6), real(6), 1e-05, SEED, *DRAWN)],
    reference=partial(call_forward, False, add_norm_reference),
    triton="norm.add_norm_triton:bias_dropout_add_layer_norm",
    largest=(1,),
    fake=partial(_fake, False),
)
define_op(
    "bias_dropout_add_layer_norm_backward(Tensor h, Tensor grad_y, Tensor? grad_h, Tensor? weight, Tensor mean, Tensor rstd, "
    f"bool want_weight, bool want_norm_bias, ScalarType dtype, ScalarType? bias_dtype, {DRAW})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    rule="nl[1]: ... c!, ... c!, +... c!, c!, ..., ..., ~ -> ... c!; ... c!; c!; c!; c!",
    samples=[(*[real(4, 6)] * 3, real(6), real(4), real(4), True, True, torch.float64, torch.float64, SEED, *DRAWN)],
    reference=partial(call_backward, False, add_norm_backward_reference),
    triton="norm.add_norm_triton:bias_dropout_add_layer_norm_backward",
    largest=(0, 1),
    fake=partial(_backward_fake, False),
)
define_op(
    "bias_dropout_add_rms_norm(Tensor x, Tensor? bias, Tensor residual, Tensor? weight, float eps, float offset, "
    f"{DRAW}) -> (Tensor h, Tensor y, Tensor rstd)",
    rule="nl: ... c!, c!, ... c!, c!, ~ -> ... c!; ... c!; ~...",
    samples=[(real(4, 6), None, real(4, 6), real(6), 1e-05, 1.0, None, *UNDRAWN)],
    reference=partial(call_forward, True, add_norm_reference),
    triton="norm.add_norm_triton:bias_dropout_add_rms_norm",
    largest=(1,),
    fake=partial(_fake, True),
)
define_op(
    "bias_dropout_add_rms_norm_backward(Tensor h, Tensor grad_y, Tensor? grad_h, Tensor? weight, Tensor rstd, float offset, "
    f"bool want_weight, ScalarType dtype, ScalarType? bias_dtype, {DRAW}) -> (Tensor, Tensor, Tensor, Tensor)",
    rule="nl[1]: ... c!, ... c!, +... c!, c!, ..., ~ -> ... c!; ... c!; c!; c!",
    samples=[(*[real(4, 6)] * 3, real(6), real(4), 1.0, True, torch.float64, torch.float64, SEED, *DRAWN)],
    reference=partial(call_backward, True, add_norm_backward_reference),
    triton="norm.add_norm_triton:bias_dropout_add_rms_norm_backward",
    largest=(0, 1),
    fake=partial(_backward_fake, True),
)


def _saves(rms: bool, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, bias, residual, weight, first, second, seed, *ctx.rest = inputs
    norm = norm_of(rms, weight, first, second)
    ctx.offset, ctx.dtypes = norm.offset, (x.dtype, residual.dtype)
    ctx.vector_dtypes = [None if v is None else v.dtype for v in (bias, norm.bias)]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], weight, seed, *output[2:])


def _gradient(rms: bool, ctx: Any, grad_h: Tensor | None, grad_y: Tensor | None, *_: Any) -> tuple[Any, ...]:
    h, weight, seed, *statistics = ctx.saved_tensors
    draw, (dtype, residual_dtype) = Draw(seed, *ctx.rest), ctx.dtypes
    bias_dtype = ctx.vector_dtypes[0] if ctx.needs_input_grad[1] else None
    want_weight, want_norm_bias = ctx.needs_input_grad[3], not rms and ctx.needs_input_grad[4]
    nothing = [None] * (len(ctx.needs_input_grad) - 5)
    if grad_y is None:
        if grad_h is None:
            return (*[None] * 5, *nothing)
        dx, dbias = separate.branch_gradients(grad_h, dtype, bias_dtype, draw)
        return dx, dbias, grad_h.to(residual_dtype), None, None, *nothing
    given, ops = (h, grad_y, grad_h, weight, *statistics), torch.ops.megafx
    dnorm_bias: Any = None
    if rms:
        found = ops.bias_dropout_add_rms_norm_backward(*given, ctx.offset, want_weight, dtype, bias_dtype, *draw)
        d, dx, dweight, dbias = found
    else:
        flags = want_weight, want_norm_bias, dtype, bias_dtype
        d, dx, dweight, dnorm_bias, dbias = ops.bias_dropout_add_layer_norm_backward(*given, *flags, *draw)
    return (
        d if not draws(draw.p) and dtype == h.dtype else dx,
        None if bias_dtype is None else dbias,
        d.to(residual_dtype),
        dweight if want_weight else None,
        dnorm_bias.to(ctx.vector_dtypes[1]) if want_norm_bias else None,
        *nothing,
    )


define_gradient("bias_dropout_add_layer_norm", partial(_gradient, False), partial(_saves, False))
define_gradient("bias_dropout_add_rms_norm", partial(_gradient, True), partial(_saves, True))
