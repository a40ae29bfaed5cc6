"""Gated linear units: y = act(gate) * up, one pass over memory in each direction (Shazeer 2020, 2002.05202).

    glu         gate, up [..., H] -> y [..., H]                                    gate and up from separate weights
    glu_packed  x [..., 2H], bias [2H] or none -> y [..., H]                       x + bias = gate | up, one fused weight
    backward    dgate = dy up act'(gate), dup = dy act(gate); dbias = sums over all rows of both before they are rounded

act: as bias_activation.py: silu is SwiGLU, gelu and gelu_tanh are GeGLU, relu is ReGLU. fp32 arithmetic (fp64 for fp64), each
result rounded once. Only gate and up (or x and bias) are saved; act(gate) is recomputed. Gate and up may be halves of one
tensor: rows with a stride are read as they lie. CPU and fp64: the plain torch below. CUDA: glu_triton.py.

*_backward_again: the same and y once more, bit for bit, so that y need not be kept for the weight gradient of what reads it:
one more write. passes/backward/recompute_activations.py puts them into graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafx.ir.facts import real
from megafx.kernels.activation.bias_activation import activation, activation_gradient, check_activation, sum_rows
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide


def check_glu(gate: Tensor, up: Tensor, act: str) -> None:
    check_activation(act)
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.is_floating_point():
        raise ValueError(
            f"glu needs gate and up of one shape and floating dtype, got {gate.dtype} {tuple(gate.shape)} and "
            f"{up.dtype} {tuple(up.shape)}"
        )


def check_glu_packed(x: Tensor, bias: Tensor | None, act: str) -> None:
    check_activation(act)
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"glu_packed needs a floating-point x [..., 2h], got {x.dtype} {tuple(x.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != x.shape[-1]):
        raise ValueError(f"glu_packed: bias {tuple(bias.shape)} does not fit the last dim of x {tuple(x.shape)}")


def _gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return activation(gate, act) * up


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return activation_gradient(grad * up, gate, act), grad * activation(gate, act)


def _halves(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    u = x.to(wide(x.dtype))
    u = u if bias is None else u + bias.to(u.dtype)
    h = x.shape[-1] // 2
    return u.narrow(-1, 0, h), u.narrow(-1, h, h)


def glu_reference(gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_glu(gate, up, act)
    dtype = wide(gate.dtype)
    return _gated(gate.to(dtype), up.to(dtype), act).to(gate.dtype).contiguous()


def glu_backward_reference(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    dtype = wide(gate.dtype)
    dgate, dup = _gradients(grad.to(dtype), gate.to(dtype), up.to(dtype), act)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def glu_packed_reference(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_glu_packed(x, bias, act)
    return _gated(*_halves(x, bias), act).to(x.dtype).contiguous()


def _packed_gradient(grad: Tensor, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return torch.cat(_gradients(grad.to(wide(x.dtype)), *_halves(x, bias), act), -1)


def glu_packed_backward_reference(grad: Tensor, x: Tensor, act: str) -> Tensor:
    return _packed_gradient(grad, x, None, act).to(x.dtype)


def glu_packed_bias_backward_reference(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    dx = _packed_gradient(grad, x, bias, act)
    return dx.to(x.dtype), sum_rows(dx).to(bias.dtype)


def glu_backward_again_reference(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    return *glu_backward_reference(grad, gate, up, act), glu_reference(gate, up, act)


def glu_packed_backward_again_reference(grad: Tensor, x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return glu_packed_backward_reference(grad, x, act), glu_packed_reference(x, None, act)


def glu_packed_bias_backward_again_reference(
    grad: Tensor, x: Tensor, bias: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    return *glu_packed_bias_backward_reference(grad, x, bias, act), glu_packed_reference(x, bias, act)


def _glu_fake(gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_glu(gate, up, act)
    return new_like(gate)


def _glu_packed_fake(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_glu_packed(x, bias, act)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


define_op(
    "glu(Tensor gate, Tensor up, str act) -> Tensor",
    rule="nl[1]: ..., ... -> ...",
    samples=[(real(4, 6), real(4, 6), "silu")],
    reference=glu_reference,
    triton="activation.glu_triton:glu",
    fake=_glu_fake,
)
define_op(
    "glu_backward(Tensor grad, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)",
    rule="nl[0]: ..., ..., ... -> ...; ...",
    samples=[(real(4, 6), real(4, 6), real(4, 6), "gelu")],
    recompute="glu",
    partials=(((2,), "PR"),),  # the gate's gradient alone depends on up
    reference=glu_backward_reference,
    triton="activation.glu_triton:glu_backward",
    fake=lambda grad, gate, up, act: (new_like(gate), new_like(up)),
)
define_op(
    "glu_packed(Tensor x, Tensor? bias, str act) -> Tensor",
    rule="nl: ... (two h), (two h) -> ... h",
    samples=[(real(4, 6, 12), real(12), "silu"), (real(4, 12), None, "gelu_tanh")],
    reference=glu_packed_reference,
    triton="activation.glu_triton:glu_packed",
    fake=_glu_packed_fake,
)
define_op(
    "glu_packed_backward(Tensor grad, Tensor x, str act) -> Tensor",
    rule="nl[0]: ... h, ... (two h) -> ... (two h)",
    why={"two": "gate and up are read together"},
    samples=[(real(4, 6), real(4, 12), "silu")],
    recompute="glu_packed",
    reference=glu_packed_backward_reference,
    triton="activation.glu_triton:glu_packed_backward",
    fake=lambda grad, x, act: new_like(x),
)
define_op(
    "glu_packed_bias_backward(Tensor grad, Tensor x, Tensor bias, str act) -> (Tensor, Tensor)",
    rule="nl[0]: ... h, ... (two h), (two h) -> ... (two h); (two h)",
    why={"two": "gate and up are read together"},
    samples=[(real(4, 6), real(4, 12), real(12), "gelu_quick")],
    recompute="glu_packed",
    reference=glu_packed_bias_backward_reference,
    triton="activation.glu_triton:glu_packed_bias_backward",
    fake=lambda grad, x, bias, act: (new_like(x), new_like(bias)),
)

define_op(
    "glu_backward_again(Tensor grad, Tensor gate, Tensor up, str act) -> (Tensor, Tensor, Tensor)",
    reference=glu_backward_again_reference,
    triton="activation.glu_triton:glu_backward_again",
    fake=lambda grad, gate, up, act: (new_like(gate), new_like(up), new_like(gate)),
)
define_op(
    "glu_packed_backward_again(Tensor grad, Tensor x, str act) -> (Tensor, Tensor)",
    reference=glu_packed_backward_again_reference,
    triton="activation.glu_triton:glu_packed_backward_again",
    fake=lambda grad, x, act: (new_like(x), _glu_packed_fake(x, None, act)),
)
define_op(
    "glu_packed_bias_backward_again(Tensor grad, Tensor x, Tensor bias, str act) -> (Tensor, Tensor, Tensor)",
    reference=glu_packed_bias_backward_again_reference,
    triton="activation.glu_triton:glu_packed_bias_backward_again",
    fake=lambda grad, x, bias, act: (new_like(x), new_like(bias), _glu_packed_fake(x, bias, act)),
)


def _glu_saves(ctx, inputs, output) -> None:
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _glu_backward(ctx, grad: Tensor):
    return *torch.ops.megafx.glu_backward(grad, *ctx.saved_tensors, ctx.act), None


def _packed_saves(ctx, inputs, output) -> None:
    x, bias, ctx.act = inputs
    ctx.save_for_backward(x, bias)


def _packed_backward(ctx, grad: Tensor):
    x, bias = ctx.saved_tensors
    if bias is None:
        return torch.ops.megafx.glu_packed_backward(grad, x, ctx.act), None, None
    return *torch.ops.megafx.glu_packed_bias_backward(grad, x, bias, ctx.act), None


define_gradient("glu", _glu_backward, _glu_saves)
define_gradient("glu_packed", _packed_backward, _packed_saves)
