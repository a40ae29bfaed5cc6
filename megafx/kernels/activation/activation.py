"""Activations and gated linear units, one pass over memory in each direction.

    bias_act    x [..., H], bias [H] or none -> y [..., H]         y = act(u), u = x + bias
    glu         gate, up [..., H] -> y [..., H]                    y = act(gate) up, of two weights (Shazeer 2020, 2002.05202)
    glu_packed  x [..., 2H], bias [2H] or none -> y [..., H]       the same; x + bias = gate | up, of one fused weight

    backward    dx = dy act'(u);  dgate = dy up act'(gate), dup = dy act(gate);  dbias = sums over all rows of these

    gelu        u Phi(u) = u/2 (1 + erf(u / sqrt 2))                                Hendrycks, Gimpel 2016 (1606.08415)
    gelu_tanh   u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))                       there, section 2
    gelu_quick  u sigmoid(1.702 u)                                                  there, section 2
    relu        max(u, 0)          relu2: max(u, 0)^2          silu: u sigmoid(u)

H: features of the result; silu gates make SwiGLU, gelu and gelu_tanh GeGLU, relu ReGLU. Arithmetic in fp32 (fp64 for fp64),
each result rounded once: y and gradients to the dtype of their operand, dbias summed before it is rounded. A bias of another
dtype is read as it is. Saved: the operands; u and the activation are computed again. Gate and up may be halves of one tensor:
rows with a stride are read as they lie.

Backward gives y once more, bit for bit, if `want_output`: then y need not be kept for the weight gradient of the linear that
reads it (passes/backward/recompute_activations.py); or, of a largest magnitude that is known from forward, its cast to e4m3 and
the scale (`*_backward_cast`, fp8/quantize.py). Results that are not wanted, and dbias without a bias, are empty tensors.
CPU and fp64: the plain torch below. CUDA: activation_triton.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import SampleTensor, real
from megafx.kernels.common.op import define_gradient, define_op, new_like, wide
from megafx.kernels.dropout.bias_dropout_add import check_bias, rows_summed
from megafx.kernels.fp8.quantize import quantize_reference
from megafx.rules.families import OpCall, RuleText

aten = torch.ops.aten

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_quick", "relu", "silu", "relu2")


def activation(u: Tensor, act: str) -> Tensor:
    """act(u), in u's dtype."""
    if act == "gelu":
        return aten.gelu(u)
    if act == "gelu_tanh":
        return aten.gelu(u, approximate="tanh")
    if act == "gelu_quick":
        return u * torch.sigmoid(1.702 * u)
    if act == "silu":
        return aten.silu(u)
    positive = aten.relu(u)
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
    return grad * (2 * aten.relu(u) if act == "relu2" else (u > 0).to(u.dtype))


# -- checks


def _check_activation(act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{act}': it must be one of {', '.join(ACTIVATIONS)}")


def check_bias_act(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """-> x; so do the checks below, of what the result is like."""
    _check_activation(act)
    if not x.is_floating_point():
        raise TypeError(f"bias_act needs a floating-point tensor, got {x.dtype} {tuple(x.shape)}")
    check_bias("bias_act", x, bias)
    return x


def check_glu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    _check_activation(act)
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.is_floating_point():
        raise ValueError(
            f"glu needs gate and up of one shape and floating dtype, got {gate.dtype} {tuple(gate.shape)} and "
            f"{up.dtype} {tuple(up.shape)}"
        )
    return gate


def check_glu_packed(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    _check_activation(act)
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"glu_packed needs a floating-point x [..., 2h], got {x.dtype} {tuple(x.shape)}")
    check_bias("glu_packed", x, bias)
    return x


# -- plain torch


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    u = x.to(wide(x.dtype))
    return u if bias is None else u + bias.to(u.dtype)


def _glu_gradients(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return activation_gradient(grad * up, gate, act), grad * activation(gate, act)


def like(packed: bool, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty result of bias_act, or of glu_packed: contiguous [..., H], of x's dtype or another."""
    shape = (*x.shape[:-1], x.shape[-1] // 2) if packed else x.shape
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def check_x(packed: bool, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Check a call of bias_act, or of glu_packed; -> x."""
    return (check_glu_packed if packed else check_bias_act)(x, bias, act)


def x_reference(packed: bool, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """bias_act, or glu_packed."""
    u = _sum(check_x(packed, x, bias, act), bias)
    gate, *up = u.chunk(2, -1) if packed else (u,)
    y = activation(gate, act)
    return (y * up[0] if packed else y).to(x.dtype).contiguous()


def x_backward_reference(
    packed: bool, grad: Tensor, x: Tensor, bias: Tensor | None, act: str, want_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d, u = grad.to(wide(x.dtype)), _sum(x, bias)
    gate, *up = u.chunk(2, -1) if packed else (u,)
    dx = torch.cat(_glu_gradients(d, gate, up[0], act), -1) if packed else activation_gradient(d, u, act)
    dbias = x.new_empty(0) if bias is None else rows_summed(dx).to(bias.dtype)
    y = x_reference(packed, x, bias, act) if want_output else x.new_empty(0)
    return dx.to(x.dtype).contiguous(), dbias, y


def glu_reference(gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_glu(gate, up, act)
    dtype = wide(gate.dtype)
    return (activation(gate.to(dtype), act) * up.to(dtype)).to(gate.dtype).contiguous()


def glu_backward_reference(
    grad: Tensor, gate: Tensor, up: Tensor, act: str, want_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = wide(gate.dtype)
    dgate, dup = _glu_gradients(grad.to(dtype), gate.to(dtype), up.to(dtype), act)
    y = glu_reference(gate, up, act) if want_output else gate.new_empty(0)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous(), y


def x_cast_reference(
    packed: bool, grad: Tensor, x: Tensor, bias: Tensor | None, act: str, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward whose last result is cast."""
    dx, dbias, y = x_backward_reference(packed, grad, x, bias, act, True)
    q, _, scale = quantize_reference(y.reshape(-1, y.shape[-1]), largest, -1, "e4m3", False, True, False)
    return dx, dbias, q.view(y.shape), scale


# -- ops


def bias_like(x: Tensor, bias: Tensor | None) -> Tensor:
    """An empty gradient of the bias; [0] without one."""
    return x.new_empty(0) if bias is None else new_like(bias)


def _backward_rule(call: OpCall) -> RuleText:
    """Linear in the gradient, on which y does not depend. Results that are not wanted take part in no row."""
    want, bias = call.get("want_output"), call.get("bias") is not None
    if call.op == "megafx.glu_backward.default":
        # dgate alone depends on up, and y on both
        return RuleText(
            f"nl[0]: ..., ..., ... -> ...; ...; {'~...' if want else '*'}", partials=(((2,), "PRP" if want else "PRR"),)
        )
    wide, why = ("(two h)", {"two": "gate and up are read together"}) if "packed" in call.op else ("h", {})
    results = f"... {wide}; {wide if bias else '*'}; {'~... h' if want else '*'}"
    return RuleText(f"nl[0]: ... h, ... {wide}, {wide} -> {results}", why=why)


def _cast_rule(call: OpCall) -> RuleText:
    bias = call.get("bias") is not None
    wide, why = ("(two h)", {"two": "gate and up are read together"}) if "packed" in call.op else ("h", {})
    results = f"... {wide}; {wide if bias else '*'}; ~... h; ~"
    return RuleText(f"nl[0]: ... h, ... {wide}, {wide}, ~ -> {results}", why=why, reads={2: (1, 2, 3), 3: (3,)})


def _backward_fake(
    packed: bool, grad: Tensor, x: Tensor, bias: Tensor | None, act: str, want_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return new_like(x), bias_like(x, bias), like(packed, x) if want_output else x.new_empty(0)


def _cast_fake(
    packed: bool, grad: Tensor, x: Tensor, bias: Tensor | None, act: str, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return new_like(x), bias_like(x, bias), like(packed, x, torch.uint8), torch.empty_like(largest)


def _gradient(name: str, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias, _ = getattr(torch.ops.megafx, f"{name}_backward")(grad, x, bias, *ctx.rest, False)
    return dx, None if bias is None else dbias, None


def _glu_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dgate, dup, _ = torch.ops.megafx.glu_backward(grad, *ctx.saved_tensors, *ctx.rest, False)
    return dgate, dup, None


_LARGEST = SampleTensor((), "n", low=1)
for _name, _packed, _wide, _n in (("bias_act", False, "h", 6), ("glu_packed", True, "(two h)", 12)):
    _launcher = f"activation.activation_triton:{_name}"
    define_op(
        f"{_name}(Tensor x, Tensor? bias, str act) -> Tensor",
        rule=f"nl: ... {_wide}, {_wide} -> ... h",
        samples=[(real(4, 6, _n), real(_n), "gelu"), (real(4, _n), None, "relu2")],
        reference=partial(x_reference, _packed),
        triton=_launcher,
        largest=(0,),
        fake=lambda *args, packed=_packed: like(packed, check_x(packed, *args)),
    )
    define_op(
        f"{_name}_backward(Tensor grad, Tensor x, Tensor? bias, str act, bool want_output)"
        " -> (Tensor dx, Tensor dbias, Tensor y)",
        rule=_backward_rule,
        samples=[
            (real(4, 6), real(4, _n), None, "silu", False),
            (real(4, 6), real(4, _n), real(_n), "gelu_tanh", True),
        ],
        recompute=_name,
        reference=partial(x_backward_reference, _packed),
        triton=f"{_launcher}_backward",
        largest=(0,),
        fake=partial(_backward_fake, _packed),
    )
    define_op(
        f"{_name}_backward_cast(Tensor grad, Tensor x, Tensor? bias, str act, Tensor largest)"
        " -> (Tensor dx, Tensor dbias, Tensor q, Tensor scale)",
        rule=_cast_rule,
        samples=[(real(4, 6), real(4, _n), bias, "gelu_quick", _LARGEST) for bias in (None, real(_n))],
        reference=partial(x_cast_reference, _packed),
        triton=f"{_launcher}_backward_cast",
        largest=(0,),
        ends=True,
        fake=partial(_cast_fake, _packed),
    )
    define_gradient(_name, partial(_gradient, _name), slice(0, 2))

define_op(
    "glu(Tensor gate, Tensor up, str act) -> Tensor",
    rule="nl[1]: ..., ... -> ...",
    samples=[(real(4, 6), real(4, 6), "silu")],
    reference=glu_reference,
    triton="activation.activation_triton:glu",
    largest=(0,),
    fake=lambda *args: new_like(check_glu(*args)),
)
define_op(
    "glu_backward(Tensor grad, Tensor gate, Tensor up, str act, bool want_output)"
    " -> (Tensor dgate, Tensor dup, Tensor y)",
    rule=_backward_rule,
    samples=[(real(4, 6), real(4, 6), real(4, 6), "gelu", True)],
    recompute="glu",
    reference=glu_backward_reference,
    triton="activation.activation_triton:glu_backward",
    fake=lambda grad, gate, up, *how: (new_like(gate), new_like(up), new_like(gate) if how[1] else gate.new_empty(0)),
)
define_gradient("glu", _glu_gradient, slice(0, 2))
