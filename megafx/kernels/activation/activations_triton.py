"""Activations and their derivatives for Triton kernels, on fp32 values; bias_activation.py has the formulas.

Arithmetic must fit in the shadow of memory traffic. On an H200 a kernel that moves 4 bytes an element has time for some 30
instructions an element; tl.erf and libdevice's tanh take more (measured: 0.65 of the bandwidth, against 0.97).

    gelu_tanh   tanh(z) = 2 sigmoid(2 z) - 1, so y = u sigmoid(2 z): one ex2, one reciprocal, and no cancellation for u < 0
    gelu        Phi(-a) = exp(-a^2/2) P(t), t = 1 / (1 + 0.38 a), a = |u|: P is a minimax fit (degree 5, no constant term) on
                a in [0, 13.3], where Phi leaves fp32; relative error 3.6e-5, half of fp16's rounding is 2.4e-4. PRECISE
                (fp32 tensors): tl.erf.

FAST takes the hardware's approximate reciprocal (1 ulp); off where there is no PTX (the interpreter, other vendors).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _reciprocal(z, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / z


@triton.jit
def _sigmoid(z, FAST: tl.constexpr):
    return _reciprocal(1.0 + tl.exp2(z * -1.4426950408889634), FAST)


@triton.jit
def _tail(u, FAST: tl.constexpr):
    """Phi(-|u|) and exp(-u^2 / 2)."""
    v = u * 0.8493218002880191  # sqrt(log2(e) / 2)
    e = tl.exp2(-v * v)
    t = _reciprocal(1.0 + 0.44741580855588037 * tl.abs(v), FAST)  # 0.38 |u|
    p = 0.0919822075 + t * (0.188873394 - t * 0.0899269939)
    return e * t * (0.151225233 + t * (0.157828651 + t * p)), e


@triton.jit
def _tanh_argument(u):
    """2 sqrt(2/pi) (u + 0.044715 u^3)."""
    return u * (1.5957691216057308 + 0.07135481627260025 * u * u)


@triton.jit
def activate(u, ACT: tl.constexpr, FAST: tl.constexpr, PRECISE: tl.constexpr):
    """act(u)."""
    if ACT == "gelu":
        if PRECISE:
            return u * (0.5 + 0.5 * tl.erf(u * 0.7071067811865476))
        tail, _ = _tail(u, FAST)
        return tl.where(u <= 0, 0.0, u) - tl.abs(u) * tail
    elif ACT == "gelu_tanh":
        return u * _sigmoid(_tanh_argument(u), FAST)
    elif ACT == "gelu_quick":
        return u * _sigmoid(1.702 * u, FAST)
    elif ACT == "silu":
        return u * _sigmoid(u, FAST)
    elif ACT == "relu2":
        positive = tl.where(u <= 0, 0.0, u)
        return positive * positive
    else:
        return tl.where(u <= 0, 0.0, u)  # nan stays nan


@triton.jit
def activate_both(u, ACT: tl.constexpr, FAST: tl.constexpr, PRECISE: tl.constexpr):
    """act(u) and act'(u)."""
    if ACT == "gelu":
        if PRECISE:
            phi = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
            e = tl.exp2(u * u * -0.7213475204444817)
        else:
            tail, e = _tail(u, FAST)
            phi = tl.where(u > 0, 1.0 - tail, tail)
        return u * phi, phi + u * 0.3989422804014327 * e
    elif ACT == "gelu_tanh":
        s = _sigmoid(_tanh_argument(u), FAST)
        slope = u * (1.5957691216057308 + 0.21406444881780073 * u * u)
        return u * s, s + _steep(s, slope)
    elif ACT == "gelu_quick":
        s = _sigmoid(1.702 * u, FAST)
        return u * s, s + _steep(s, 1.702 * u)
    elif ACT == "silu":
        s = _sigmoid(u, FAST)
        return u * s, s + _steep(s, u)
    elif ACT == "relu2":
        positive = tl.where(u <= 0, 0.0, u)
        return positive * positive, 2.0 * positive
    else:
        return tl.where(u <= 0, 0.0, u), tl.where(u > 0, 1.0, 0.0)


@triton.jit
def _steep(s, factor):
    """s (1 - s) factor; 0 where the sigmoid is saturated, though the factor may be infinite there."""
    product = s - s * s
    return tl.where(product == 0.0, 0.0, product * factor)
