"""megafx::layer_norm and megafx::rms_norm over the last dim, any length; one pass over memory in each direction.

    layer_norm   y = (x - mean) rstd w + b       mean = E[x], rstd = 1 / sqrt(E[(x - mean)^2] + eps)
    rms_norm     y = x rstd (w + offset)         rstd = 1 / sqrt(E[x^2] + eps); offset 1: a gamma centred on zero

    x [..., H], weight [H] or none, bias [H] or none -> y [..., H] in x's dtype; mean, rstd [...] fp32 (fp64 for fp64)

    backward, with u = normalised x and v = dy (w + offset):
    dx = rstd (v - E[v] - u E[u v])  (rms_norm: without E[v]);  dw = sum over rows of dy u;  db = sum over rows of dy

Arithmetic in fp32 (fp64 for fp64), rounded once. Saved: x and one or two numbers a row. A weight gradient that is not
wanted is an empty tensor. Sums over rows have a fixed order: the same bits every run.

layer_norm is layer_norm_forward with its statistics left out: the planner sees the one, the joint graph the other.
CPU and fp64: the plain torch below. CUDA: norms_launch.py.
Ba, Kiros, Hinton 2016 (1607.06450); Zhang, Sennrich 2019 (1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafx.ir.facts import real
from megafx.kernels.common.op import define_composite, define_gradient, define_op, new_like, wide
from megafx.kernels.dropout.bias_dropout_add import rows_summed


class Norm(NamedTuple):
    """A layer_norm, or an rms_norm, which has no bias."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float
    rms: bool


def norm_of(rms: bool, weight: Tensor | None, first: Any, second: Any) -> Norm:
    """Of the ops' arguments: (bias, eps) of layer_norm, (eps, offset) of rms_norm."""
    return Norm(weight, None, first, second, True) if rms else Norm(weight, first, second, 0.0, False)


def check_norm(name: str, x: Tensor, *vectors: Tensor | None) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} needs a floating-point tensor, got {x.dtype} {tuple(x.shape)}")
    if x.dim() == 0:
        raise ValueError(f"{name} needs a tensor with a last dim, got a scalar")
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"{name}: a weight of {tuple(vector.shape)} does not fit the last dim of {tuple(x.shape)}")


def normalize(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    """x in the dtype to compute in -> y in that dtype, mean [...] (None for rms_norm), rstd [...]."""
    mean = None
    if not norm.rms:
        mean = x.mean(-1)
        x = x - mean[..., None]
    rstd = (x.square().mean(-1) + norm.eps).rsqrt()
    y = x * rstd[..., None]
    if norm.weight is not None:
        weight = norm.weight.to(x.dtype)
        y = y * (weight + norm.offset if norm.offset else weight)
    if norm.bias is not None:
        y = y + norm.bias.to(x.dtype)
    return y.contiguous(), mean, rstd


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """grad, x in the dtype to compute in -> dx, dweight [H], dbias [H] in that dtype."""
    unit = (x if mean is None else x - mean[..., None]) * rstd[..., None]
    v = grad if weight is None else grad * (weight.to(x.dtype) + offset)
    dx = v - unit * (unit * v).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - v.mean(-1, keepdim=True)
    return dx * rstd[..., None], rows_summed(grad * unit), rows_summed(grad)


def vector_like(x: Tensor, weight: Tensor | None, wanted: bool) -> Tensor:
    """An empty gradient of a vector [H]; [0] where it is not wanted. Its dtype: the weight's; without one, statistics'."""
    dtype = wide(x.dtype) if weight is None else weight.dtype
    return torch.empty(x.shape[-1:] if wanted else (0,), dtype=dtype, device=x.device)


def fill(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Round values to the dtypes of the outputs; [0] is left as it is."""
    for output, value in zip(outputs, values, strict=True):
        if output.shape == value.shape:
            output.copy_(value)


def forward_reference(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    y, mean, rstd = normalize(x.to(wide(x.dtype)), norm)
    return y.to(x.dtype), mean, rstd


def backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, offset: float,
    outputs: Sequence[Tensor],
) -> None:  # fmt: skip
    """Fills dx, dweight, dbias."""
    dtype = wide(x.dtype)
    fill(outputs, norm_gradients(grad.to(dtype), x.to(dtype), weight, mean, rstd, offset))


# -- the arguments of the two ops, and of their backward, for one function that serves both


def call_forward(rms: bool, run: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Tensor, ...]:
    """run: as `forward_reference`. args: of the op. -> y, mean (of layer_norm), rstd."""
    x, weight, first, second = args
    norm = norm_of(rms, weight, first, second)
    check_norm("rms_norm" if rms else "layer_norm", x, weight, norm.bias)
    return tuple(t for t in run(x, norm) if t is not None)


def call_backward(rms: bool, run: Callable[..., None], *args: Any) -> tuple[Tensor, ...]:
    """run: as `backward_reference`. args: of the op. -> dx, dweight, dbias (of layer_norm)."""
    grad, x, weight, *rest = args
    mean, rstd, offset, *wanted = (None, *rest, False) if rms else (*rest[:2], 0.0, *rest[2:])
    outputs = new_like(x), *(vector_like(x, weight, w) for w in wanted)
    run(grad, x, weight, mean, rstd, offset, outputs)
    return outputs[:2] if rms else outputs


layer_norm_reference = partial(call_forward, False, forward_reference)
layer_norm_backward_reference = partial(call_backward, False, backward_reference)
rms_norm_reference = partial(call_forward, True, forward_reference)
rms_norm_backward_reference = partial(call_backward, True, backward_reference)


def _fake(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide(x.dtype)) for _ in range(2))
    return new_like(x), None if norm.rms else mean, rstd


def _backward_fake(*_: Any) -> None:
    pass


define_composite(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    rule="nl[1]: ... c!, c!, +c! -> ... c!",
    samples=[(real(4, 6, 6), real(6), real(6), 1e-05), (real(4, 6), None, None, 1e-05)],
    why={"c": "the norm runs over the dim"},
    body=lambda x, weight, bias, eps: torch.ops.megafx.layer_norm_forward(x, weight, bias, eps)[0],
)
define_op(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    rule="nl[1]: ... c!, c!, +c! -> ... c!; ~...; ~...",
    samples=[(real(4, 6, 6), real(6), real(6), 1e-05)],
    reference=layer_norm_reference,
    triton="norm.norms_launch:layer_norm_forward",
    largest=(0,),
    fake=partial(call_forward, False, _fake),
)
define_op(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool want_weight, bool want_bias)"
    " -> (Tensor, Tensor, Tensor)",
    rule="nl[0]: ... c!, ... c!, c!, ..., ... -> ... c!; c!; c!",
    samples=[(real(4, 6), real(4, 6), real(6), real(4), real(4), True, True)],
    partials=(((2,), "PRR"),),  # the gradient of x alone depends on the weight
    reference=layer_norm_backward_reference,
    triton="norm.norms_launch:layer_norm_backward",
    largest=(0,),
    fake=partial(call_backward, False, _backward_fake),
)
define_composite(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset) -> Tensor",
    rule="nl: ... c!, c! -> ... c!",
    samples=[(real(4, 6, 6), real(6), 1e-05, 1.0)],
    why={"c": "the norm runs over the dim"},
    body=lambda x, weight, eps, offset: torch.ops.megafx.rms_norm_forward(x, weight, eps, offset)[0],
)
define_op(
    "rms_norm_forward(Tensor x, Tensor? weight, float eps, float offset) -> (Tensor y, Tensor rstd)",
    rule="nl: ... c!, c! -> ... c!; ~...",
    samples=[(real(4, 6, 6), real(6), 1e-05, 1.0)],
    reference=rms_norm_reference,
    triton="norm.norms_launch:rms_norm_forward",
    largest=(0,),
    fake=partial(call_forward, True, _fake),
)
define_op(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, float offset, bool want_weight)"
    " -> (Tensor, Tensor)",
    rule="nl[0]: ... c!, ... c!, c!, ... -> ... c!; c!",
    samples=[(real(4, 6), real(4, 6), real(6), real(4), 1.0, True)],
    reference=rms_norm_backward_reference,
    triton="norm.norms_launch:rms_norm_backward",
    largest=(0,),
    fake=partial(call_backward, True, _backward_fake),
)


def _saves(rms: bool, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, first, second = inputs
    norm = norm_of(rms, weight, first, second)
    ctx.offset, ctx.bias_dtype = norm.offset, None if norm.bias is None else norm.bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, *output[1:])


def _gradient(rms: bool, ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None
    want_weight, want_bias = ctx.needs_input_grad[1], not rms and ctx.needs_input_grad[2]
    ops, given = torch.ops.megafx, (grad, *ctx.saved_tensors)
    db: Any = None
    if rms:
        dx, dw = ops.rms_norm_backward(*given, ctx.offset, want_weight)
    else:
        dx, dw, db = ops.layer_norm_backward(*given, want_weight, want_bias)
    return dx, dw if want_weight else None, db.to(ctx.bias_dtype) if want_bias else None, None


define_gradient("layer_norm_forward", partial(_gradient, False), partial(_saves, False))
define_gradient("rms_norm_forward", partial(_gradient, True), partial(_saves, True))
