"""megafx::rope: rotary position embedding, one pass over memory in each direction; rope_qk: q and k in one kernel.

    x [..., d], tables cos, sin -> y like x; the first r elements of the last dim are rotated, the others pass through:

    halves (interleaved = False):  pairs (x_i, x_{i + r/2})      interleaved:  pairs (x_{2i}, x_{2i+1})
    (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b)             i in [0, r/2)

cos and sin broadcast against x in all dims but the last, which has one column for each rotated element (r: cos_a and cos_b
are read apart, as Hugging Face's duplicated tables have them), or with per_pair one for each pair (r/2: cos_a = cos_b).
Backward is the transposed map: the rotation by the negative angle where the tables are those of a rotation. Arithmetic:
fp32 (fp64 for fp64), rounded once to x's dtype. Saved: the tables; x too only where a table needs a gradient.
y is laid out in memory as x is. Source: Su et al. 2021 (2104.09864); halves as in GPT-NeoX, interleaved as in GPT-J.

CPU and fp64: the plain torch below. CUDA: rope_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafx.ir.facts import fixed, real
from megafx.kernels.common.op import define_gradient, define_op, wide
from megafx.rules.families import OpCall


def check_rope(x: Tensor, cos: Tensor, sin: Tensor, per_pair: bool) -> None:
    rotated = cos.shape[-1] * (2 if per_pair else 1)
    if cos.shape != sin.shape:
        raise ValueError(f"rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    if rotated > x.shape[-1] or rotated % 2:
        raise ValueError(f"rope: tables {tuple(cos.shape)} do not fit the last dim of x {tuple(x.shape)}")
    if cos.dim() > x.dim():
        raise ValueError(f"rope: tables {tuple(cos.shape)} have more dims than x {tuple(x.shape)}")


def _pairs(x: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    half = rotated // 2
    if interleaved:
        return x[..., 0:rotated:2], x[..., 1:rotated:2]
    return x[..., :half], x[..., half:rotated]


def _join(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def _table(table: Tensor, dtype: torch.dtype, interleaved: bool, per_pair: bool) -> tuple[Tensor, Tensor]:
    table = table.to(dtype)
    return (table, table) if per_pair else _pairs(table, table.shape[-1], interleaved)


def rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool, back: bool = False
) -> Tensor:
    check_rope(x, cos, sin, per_pair)
    dtype = wide(x.dtype)
    rotated = cos.shape[-1] * (2 if per_pair else 1)
    a, b = _pairs(x.to(dtype), rotated, interleaved)
    cos_a, cos_b = _table(cos, dtype, interleaved, per_pair)
    sin_a, sin_b = _table(sin, dtype, interleaved, per_pair)
    if back:
        sin_a, sin_b = -sin_b, -sin_a
    turned = _join(a * cos_a - b * sin_a, b * cos_b + a * sin_b, interleaved)
    return torch.empty_like(x).copy_(torch.cat((turned, x[..., rotated:].to(dtype)), -1))


def rope_backward_reference(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool) -> Tensor:
    return rope_reference(grad, cos, sin, interleaved, per_pair, back=True)


def rope_qk_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool
) -> tuple[Tensor, Tensor]:
    return rope_reference(q, cos, sin, interleaved, per_pair), rope_reference(k, cos, sin, interleaved, per_pair)


def rope_qk_backward_reference(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool
) -> tuple[Tensor, Tensor]:
    tables = (cos, sin, interleaved, per_pair, True)
    return rope_reference(dq, *tables), rope_reference(dk, *tables)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool) -> Tensor:
    return torch.empty_like(x)


def _fake_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _rule_of_both(call: OpCall) -> str | None:
    """(n g) heads of q on n heads of k; the head dim is the one in which they differ, else where the tables broadcast."""
    q, k, cos = (v.shape for v in call.values[:3])
    if len(q) != len(k):
        return None
    table = (1,) * (len(q) - len(cos)) + cos
    lead = range(len(q) - 1)
    heads = [d for d in lead if q[d] != k[d]] or [d for d in lead if table[d] == 1 != q[d]][-1:]
    if len(heads) > 1:
        return None
    names = [f"f{d}" for d in lead]
    of_q = " ".join("(n g)" if [d] == heads else x for d, x in enumerate(names))
    of_k = " ".join("n" if [d] == heads else x for d, x in enumerate(names))
    of_table = " ".join(["1" if [d] == heads else x for d, x in enumerate(names)][len(q) - len(cos) :])
    return f"nl: {of_q} d!, {of_k} d!, ~{of_table} r!, ~{of_table} r! -> {of_q} d!; {of_k} d!"


_TABLES = "Tensor cos, Tensor sin, bool interleaved, bool per_pair"

define_op(
    f"rope(Tensor x, {_TABLES}) -> Tensor",
    rule="lin[0]: ... d!, ~... r!, ~... r! -> ... d!",
    samples=[
        (real(2, 4, 6, 8), fixed(1, 1, 6, 6), fixed(1, 1, 6, 6), False, False),
        (real(4, 6, 6), fixed(6, 2), fixed(6, 2), True, True),
    ],
    reference=rope_reference,
    triton="attention.rope_triton:rope",
    fake=_fake,
)
define_op(
    f"rope_backward(Tensor grad, {_TABLES}) -> Tensor",
    rule="lin[0]: ... d!, ~... r!, ~... r! -> ... d!",
    samples=[(real(2, 4, 6, 8), fixed(1, 1, 6, 6), fixed(1, 1, 6, 6), False, False)],
    reference=rope_backward_reference,
    triton="attention.rope_triton:rope_backward",
    fake=_fake,
)
# Heads of q and k differ in number (grouped queries), and in place by layout.
define_op(
    f"rope_qk(Tensor q, Tensor k, {_TABLES}) -> (Tensor, Tensor)",
    rule=_rule_of_both,
    samples=[(real(2, 8, 6, 4), real(2, 4, 6, 4), fixed(1, 1, 6, 4), fixed(1, 1, 6, 4), False, False)],
    reference=rope_qk_reference,
    triton="attention.rope_triton:rope_qk",
    fake=_fake_qk,
)
define_op(
    f"rope_qk_backward(Tensor dq, Tensor dk, {_TABLES}) -> (Tensor, Tensor)",
    rule=_rule_of_both,
    samples=[(real(2, 6, 4, 4), real(2, 6, 4, 4), fixed(6, 1, 2), fixed(6, 1, 2), True, True)],
    reference=rope_qk_backward_reference,
    triton="attention.rope_triton:rope_qk_backward",
    fake=_fake_qk,
)


def _table_gradients(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool
) -> tuple[Tensor, Tensor]:
    """Of tables that are learned: sums of products over the dims in which they broadcast."""
    dtype = wide(x.dtype)
    rotated = cos.shape[-1] * (2 if per_pair else 1)
    a, b = _pairs(x.to(dtype), rotated, interleaved)
    da, db = _pairs(grad.to(dtype), rotated, interleaved)
    found = []
    for first, second, table in ((da * a, db * b, cos), (-da * b, db * a, sin)):
        whole = first + second if per_pair else _join(first, second, interleaved)
        found.append(whole.sum_to_size(table.shape).to(table.dtype))
    return found[0], found[1]


def _saves(ctx, inputs, output) -> None:
    *xs, cos, sin, ctx.interleaved, ctx.per_pair = inputs
    ctx.learned = cos.requires_grad or sin.requires_grad
    ctx.save_for_backward(cos, sin, *(xs if ctx.learned else ()))


def _backward(ctx, grad: Tensor):
    cos, sin, *x = ctx.saved_tensors
    how = (ctx.interleaved, ctx.per_pair)
    tables = _table_gradients(grad, x[0], cos, sin, *how) if x else (None, None)
    return torch.ops.megafx.rope_backward(grad, cos, sin, *how), *tables, None, None


def _backward_qk(ctx, dq: Tensor, dk: Tensor):
    cos, sin, *x = ctx.saved_tensors
    how = (ctx.interleaved, ctx.per_pair)
    dcos, dsin = None, None
    if x:
        of_q, of_k = (_table_gradients(d, y, cos, sin, *how) for d, y in zip((dq, dk), x, strict=True))
        dcos, dsin = of_q[0] + of_k[0], of_q[1] + of_k[1]
    return *torch.ops.megafx.rope_qk_backward(dq, dk, cos, sin, *how), dcos, dsin, None, None


define_gradient("rope", _backward, _saves)
define_gradient("rope_qk", _backward_qk, _saves)
