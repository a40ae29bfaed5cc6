"""Residual add and normalisation in one kernel: h = residual + dropout(x + bias), y = norm(h), both results.

    megafx::bias_dropout_add_layer_norm, megafx::bias_dropout_add_rms_norm; without bias and with p = 0: plain add + norm

    x [..., H], bias [H] or none, residual [..., H], weight [H] or none, norm_bias [H] or none
    -> h [..., H] in the promoted dtype of x and residual, y [..., H] in h's dtype, mean and rstd [...] fp32

    formulas: bias_dropout_add.py and norms.py; y normalises h as rounded, as the two ops one after the other do
    backward, one kernel: d = dh + norm'(dy), where dh is what reaches h from elsewhere (the residual stream);
    dresidual = d, dx = keep(i) d scale, dbias = sum over rows of dx, dweight and dnorm_bias as in norms.py

Saved: h, the seed, one or two numbers a row. Results of several kinds: these ops appear after planning, on one rank's
shapes, where the last dim is whole; shard_dim is a leading dim. What is not wanted, or is the same as dresidual, is an
empty tensor. CPU and fp64: the plain torch below. CUDA: add_norm_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megafx.ir.facts import DRAWN, SEED, UNDRAWN, real
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide
from megafx.kernels.dropout.bias_dropout_add import (
    branch_gradients,
    check_draw,
    check_sum,
    draws,
    dropped_reference,
    rows_summed,
    sum_reference,
)
from megafx.kernels.norm.norms import check_norm, norm_gradients, normalize, vector_like


def check_add_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    vectors: Sequence[Tensor | None],
    seed: Tensor | None,
    p: float,
    op_id: int,
) -> None:
    check_sum("add + norm", x, bias, residual)
    check_norm("add + norm", x, *vectors)
    check_draw("add + norm", seed, p, op_id)


def add_norm_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    eps: float,
    offset: float,
    rms: bool,
    drawing: tuple,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    check_add_norm(x, bias, residual, vectors, *drawing[:3])
    h = sum_reference(x, bias, residual, *drawing).to(torch.promote_types(x.dtype, residual.dtype))
    y, mean, rstd = normalize(h.to(wide(h.dtype)), *vectors, eps, offset, rms)
    return h, y.to(h.dtype), mean, rstd


def add_norm_backward_reference(
    h: Tensor,
    grad_y: Tensor,
    grad_h: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    drawing: tuple,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    compute = wide(h.dtype)
    d, dweight, dnorm_bias = norm_gradients(grad_y.to(compute), h.to(compute), weight, mean, rstd, offset)
    if grad_h is not None:
        d = d + grad_h.to(compute)
    dx = dropped_reference(d, *drawing)
    outputs = empty_gradients(h, weight, wanted, dtype, bias_dtype, drawing[1])
    values = (d, dx, dweight, dnorm_bias, rows_summed(dx))
    for output, value in zip(outputs, values, strict=True):
        if output.shape == value.shape:
            output.copy_(value)
    return outputs


def empty_gradients(
    h: Tensor,
    weight: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised dresidual, dx, dweight, dnorm_bias, dbias; [0] for what is not wanted."""
    dx = new_like(h, dtype) if draws(p) or dtype != h.dtype else h.new_empty(0, dtype=dtype)
    dbias = h.new_empty(h.shape[-1:] if bias_dtype is not None else (0,), dtype=bias_dtype or h.dtype)
    return new_like(h), dx, vector_like(h, weight, wanted[0]), vector_like(h, weight, wanted[1]), dbias


_DRAWING = "Tensor? seed, float p, int op_id, int shard_dim, SymInt[] layout, str axis"


def _fake(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    vectors: Sequence[Tensor | None],
    drawing: Sequence,
    statistics: int,
) -> tuple[Tensor, ...]:
    check_add_norm(x, bias, residual, vectors, *drawing[:3])
    h = new_like(residual, torch.promote_types(x.dtype, residual.dtype))
    numbers = (h.new_empty(h.shape[:-1], dtype=wide(h.dtype)) for _ in range(statistics))
    return h, new_like(h), *numbers


# -- layer_norm


def _layer_norm_reference(x, bias, residual, weight, norm_bias, eps, *drawing):
    return add_norm_reference(x, bias, residual, (weight, norm_bias), eps, 0.0, False, drawing)


def _layer_norm_backward_reference(
    h, grad_y, grad_h, weight, mean, rstd, want_weight, want_norm_bias, dtype, bias_dtype, *drawing
):
    wanted = want_weight, want_norm_bias
    return add_norm_backward_reference(h, grad_y, grad_h, weight, mean, rstd, 0.0, wanted, dtype, bias_dtype, drawing)


define_op(
    "bias_dropout_add_layer_norm(Tensor x, Tensor? bias, Tensor residual, Tensor? weight, Tensor? norm_bias, float eps, "
    f"{_DRAWING}) -> (Tensor h, Tensor y, Tensor mean, Tensor rstd)",
    rule="nl: ... c!, c!, ... c!, c!, c!, ~ -> ... c!; ... c!; ~...; ~...",
    samples=[(real(4, 6), real(6), real(4, 6), real(6), real(6), 1e-05, SEED, *DRAWN)],
    reference=_layer_norm_reference,
    triton="norm.add_norm_triton:bias_dropout_add_layer_norm",
    fake=lambda x, b, r, w, nb, eps, *drawing: _fake(x, b, r, (w, nb), drawing, 2),
)
define_op(
    "bias_dropout_add_layer_norm_backward(Tensor h, Tensor grad_y, Tensor? grad_h, Tensor? weight, Tensor mean, Tensor rstd, "
    f"bool want_weight, bool want_norm_bias, ScalarType dtype, ScalarType? bias_dtype, {_DRAWING})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    rule="nl[1]: ... c!, ... c!, +... c!, c!, ..., ..., ~ -> ... c!; ... c!; c!; c!; c!",
    samples=[(*[real(4, 6)] * 3, real(6), real(4), real(4), True, True, torch.float64, torch.float64, SEED, *DRAWN)],
    reference=_layer_norm_backward_reference,
    triton="norm.add_norm_triton:bias_dropout_add_layer_norm_backward",
    fake=lambda h, gy, gh, w, m, r, ww, wb, dtype, bias_dtype, seed, p, *_: empty_gradients(
        h, w, (ww, wb), dtype, bias_dtype, p
    ),
)

# -- rms_norm


def _rms_norm_reference(x, bias, residual, weight, eps, offset, *drawing):
    h, y, _, rstd = add_norm_reference(x, bias, residual, (weight, None), eps, offset, True, drawing)
    return h, y, rstd


def _rms_norm_backward_reference(h, grad_y, grad_h, weight, rstd, offset, want_weight, dtype, bias_dtype, *drawing):
    wanted = want_weight, False
    outputs = add_norm_backward_reference(
        h, grad_y, grad_h, weight, None, rstd, offset, wanted, dtype, bias_dtype, drawing
    )
    return (*outputs[:3], outputs[4])


define_op(
    "bias_dropout_add_rms_norm(Tensor x, Tensor? bias, Tensor residual, Tensor? weight, float eps, float offset, "
    f"{_DRAWING}) -> (Tensor h, Tensor y, Tensor rstd)",
    rule="nl: ... c!, c!, ... c!, c!, ~ -> ... c!; ... c!; ~...",
    samples=[(real(4, 6), None, real(4, 6), real(6), 1e-05, 1.0, None, *UNDRAWN)],
    reference=_rms_norm_reference,
    triton="norm.add_norm_triton:bias_dropout_add_rms_norm",
    fake=lambda x, b, r, w, eps, offset, *drawing: _fake(x, b, r, (w,), drawing, 1),
)
define_op(
    "bias_dropout_add_rms_norm_backward(Tensor h, Tensor grad_y, Tensor? grad_h, Tensor? weight, Tensor rstd, float offset, "
    f"bool want_weight, ScalarType dtype, ScalarType? bias_dtype, {_DRAWING}) -> (Tensor, Tensor, Tensor, Tensor)",
    rule="nl[1]: ... c!, ... c!, +... c!, c!, ..., ~ -> ... c!; ... c!; c!; c!",
    samples=[(*[real(4, 6)] * 3, real(6), real(4), 1.0, True, torch.float64, torch.float64, SEED, *DRAWN)],
    reference=_rms_norm_backward_reference,
    triton="norm.add_norm_triton:bias_dropout_add_rms_norm_backward",
    fake=lambda h, gy, gh, w, r, offset, ww, dtype, bias_dtype, seed, p, *_: (lambda g: (*g[:3], g[4]))(
        empty_gradients(h, w, (ww, False), dtype, bias_dtype, p)
    ),
)


# -- gradients


def _saves(layer: bool) -> Callable[..., None]:
    def saves(ctx, inputs, output) -> None:
        x, bias, residual, weight, norm_bias_or_eps, eps_or_offset, seed, *ctx.rest = inputs
        ctx.offset = 0.0 if layer else eps_or_offset
        norm_bias = norm_bias_or_eps if layer else None
        ctx.dtypes = x.dtype, residual.dtype
        ctx.vector_dtypes = [None if v is None else v.dtype for v in (bias, norm_bias)]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0], weight, seed, *output[2:])

    return saves


def _gradient(layer: bool) -> Callable[..., tuple[Tensor | None, ...]]:
    ops = torch.ops.megafx

    def gradient(ctx, grad_h, grad_y, *_):
        h, weight, seed, *statistics = ctx.saved_tensors
        dtype, residual_dtype = ctx.dtypes
        bias_dtype = ctx.vector_dtypes[0] if ctx.needs_input_grad[1] else None
        want_weight, want_norm_bias = ctx.needs_input_grad[3], layer and ctx.needs_input_grad[4]
        nothing = [None] * (len(ctx.needs_input_grad) - 5)
        if grad_y is None:
            if grad_h is None:
                return (*[None] * 5, *nothing)
            dx, dbias = branch_gradients(grad_h, seed, ctx.rest, dtype, bias_dtype)
            return dx, dbias, grad_h.to(residual_dtype), None, None, *nothing
        ends = dtype, bias_dtype, seed, *ctx.rest
        if layer:
            d, dx, dweight, dnorm_bias, dbias = ops.bias_dropout_add_layer_norm_backward(
                h, grad_y, grad_h, weight, *statistics, want_weight, want_norm_bias, *ends
            )
        else:
            d, dx, dweight, dbias = ops.bias_dropout_add_rms_norm_backward(
                h, grad_y, grad_h, weight, *statistics, ctx.offset, want_weight, *ends
            )
        if not draws(ctx.rest[0]) and dtype == h.dtype:
            dx = d
        return (
            dx,
            None if bias_dtype is None else dbias,
            d.to(residual_dtype),
            dweight if want_weight else None,
            dnorm_bias.to(ctx.vector_dtypes[1]) if want_norm_bias else None,
            *nothing,
        )

    return gradient


for _kind, _layer in (("layer", True), ("rms", False)):
    define_gradient(f"bias_dropout_add_{_kind}_norm", _gradient(_layer), _saves(_layer))
