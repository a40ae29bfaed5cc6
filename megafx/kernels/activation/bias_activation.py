"""megafx::bias_act: y = act(x + bias), one pass over memory in each direction.

    x [..., H], bias [H] or none -> y [..., H]      u = x + bias in fp32 (fp64 for fp64), y rounded once to x's dtype
    backward: dx = dy act'(u), dbias = sum over all rows of dx before it is rounded; in fp32, dbias in bias's dtype

    gelu        u Phi(u) = u/2 (1 + erf(u / sqrt 2))                                Hendrycks, Gimpel 2016 (1606.08415)
    gelu_tanh   u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))                       there, section 2
    gelu_quick  u sigmoid(1.702 u)                                                  there, section 2
    relu        max(u, 0)          relu2: max(u, 0)^2          silu: u sigmoid(u)

Only x is saved: u and the activation are recomputed. The result has the dtype of x; a bias of another dtype is read as it
is. CPU and fp64: the plain torch below. CUDA: bias_activation_triton.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megafx.ir.facts import real
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide

aten = torch.ops.aten

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_quick", "relu", "silu", "relu2")


def check_activation(act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{act}': it must be one of {', '.join(ACTIVATIONS)}")


def activation(u: Tensor, act: str) -> Tensor:
    """act(u), in u's dtype."""
    if act == "gelu":
        return F.gelu(u)
    if act == "gelu_tanh":
        return F.gelu(u, approximate="tanh")
    if act == "gelu_quick":
        return u * torch.sigmoid(1.702 * u)
    if act == "silu":
        return F.silu(u)
    positive = F.relu(u)
    return positive * positive if act == "relu2" else positive


def activation_gradient(grad: Tensor, u: Tensor, act: str) -> Tensor:
    """grad * act'(u), in u's dtype. At 0 the derivative of relu is 0."""
    if act == "gelu":
        return aten.gelu_backward(grad, u)
    if act == "gelu_tanh":
        return aten.gelu_backward(grad, u, approximate="tanh")
    if act == "gelu_quick":
        s = torch.sigmoid(1.702 * u)
        return grad * (s + 1.702 * u * s * (1 - s))
    if act == "silu":
        return aten.silu_backward(grad, u)
    return grad * (2 * F.relu(u) if act == "relu2" else (u > 0).to(u.dtype))


def check_bias_act(x: Tensor, bias: Tensor | None, act: str) -> None:
    check_activation(act)
    if not x.is_floating_point():
        raise TypeError(f"bias_act needs a floating-point tensor, got {x.dtype} {tuple(x.shape)}")
    if bias is not None and (x.dim() == 0 or bias.dim() != 1 or bias.shape[0] != x.shape[-1]):
        raise ValueError(f"bias_act: bias {tuple(bias.shape)} does not fit the last dim of x {tuple(x.shape)}")


def _preactivation(x: Tensor, bias: Tensor | None) -> Tensor:
    u = x.to(wide(x.dtype))
    return u if bias is None else u + bias.to(u.dtype)


def sum_rows(x: Tensor) -> Tensor:
    """[..., H] -> [H]."""
    return x.sum(list(range(x.dim() - 1))) if x.dim() > 1 else x


def bias_act_reference(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_bias_act(x, bias, act)
    return activation(_preactivation(x, bias), act).to(x.dtype).contiguous()


def act_backward_reference(grad: Tensor, x: Tensor, act: str) -> Tensor:
    du = activation_gradient(grad.to(wide(x.dtype)), _preactivation(x, None), act)
    return du.to(x.dtype).contiguous()


def bias_act_backward_reference(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    du = activation_gradient(grad.to(wide(x.dtype)), _preactivation(x, bias), act)
    return du.to(x.dtype).contiguous(), sum_rows(du).to(bias.dtype)


def act_backward_again_reference(grad: Tensor, x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return act_backward_reference(grad, x, act), bias_act_reference(x, None, act)


def bias_act_backward_again_reference(grad: Tensor, x: Tensor, bias: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    return *bias_act_backward_reference(grad, x, bias, act), bias_act_reference(x, bias, act)


def _fake(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_bias_act(x, bias, act)
    return new_like(x)


define_op(
    "bias_act(Tensor x, Tensor? bias, str act) -> Tensor",
    rule="nl: ... h, h -> ... h",
    samples=[(real(4, 6, 6), real(6), "gelu"), (real(4, 6), None, "relu2")],
    reference=bias_act_reference,
    triton="activation.bias_activation_triton:bias_act",
    fake=_fake,
)
define_op(
    "act_backward(Tensor grad, Tensor x, str act) -> Tensor",
    rule="nl[0]: ... h, ... h -> ... h",
    samples=[(real(4, 6), real(4, 6), "silu")],
    recompute="bias_act",
    reference=act_backward_reference,
    triton="activation.bias_activation_triton:act_backward",
    fake=lambda grad, x, act: new_like(x),
)
define_op(
    "bias_act_backward(Tensor grad, Tensor x, Tensor bias, str act) -> (Tensor, Tensor)",
    rule="nl[0]: ... h, ... h, h -> ... h; h",
    samples=[(real(4, 6), real(4, 6), real(6), "gelu_tanh")],
    recompute="bias_act",
    reference=bias_act_backward_reference,
    triton="activation.bias_activation_triton:bias_act_backward",
    fake=lambda grad, x, bias, act: (new_like(x), new_like(bias)),
)

define_op(
    "act_backward_again(Tensor grad, Tensor x, str act) -> (Tensor, Tensor)",
    reference=act_backward_again_reference,
    triton="activation.bias_activation_triton:act_backward_again",
    fake=lambda grad, x, act: (new_like(x), new_like(x)),
)
define_op(
    "bias_act_backward_again(Tensor grad, Tensor x, Tensor bias, str act) -> (Tensor, Tensor, Tensor)",
    reference=bias_act_backward_again_reference,
    triton="activation.bias_activation_triton:bias_act_backward_again",
    fake=lambda grad, x, bias, act: (new_like(x), new_like(bias), new_like(x)),
)


def _saves(ctx, inputs, output) -> None:
    x, bias, ctx.act = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, grad: Tensor):
    x, bias = ctx.saved_tensors
    if bias is None:
        return torch.ops.megafx.act_backward(grad, x, ctx.act), None, None
    dx, dbias = torch.ops.megafx.bias_act_backward(grad, x, bias, ctx.act)
    return dx, dbias, None


define_gradient("bias_act", _backward, _saves)
