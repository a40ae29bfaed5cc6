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

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafx.ir.facts import fixed, real
from megafx.kernels.common.op import define_gradient, define_op, wide
from megafx.rules.families import OpCall


class Tables(NamedTuple):
    """The ops' arguments after the tensors to be rotated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    per_pair: bool

    @property
    def rotated(self) -> int:
        return self.cos.shape[-1] * (2 if self.per_pair else 1)


def check_rope(x: Tensor, tables: Tables) -> None:
    cos, sin = tables[:2]
    if cos.shape != sin.shape:
        raise ValueError(f"rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    if tables.rotated > x.shape[-1] or tables.rotated % 2:
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


def rope_reference(x: Tensor, *given: Any, back: bool = False) -> Tensor:
    tables = Tables(*given)
    check_rope(x, tables)
    dtype, rotated = wide(x.dtype), tables.rotated
    a, b = _pairs(x.to(dtype), rotated, tables.interleaved)
    wide_tables = [t.to(dtype) for t in tables[:2]]
    (cos_a, cos_b), (sin_a, sin_b) = (
        (t, t) if tables.per_pair else _pairs(t, rotated, tables.interleaved) for t in wide_tables
    )
    if back:
        sin_a, sin_b = -sin_b, -sin_a
    turned = _join(a * cos_a - b * sin_a, b * cos_b + a * sin_b, tables.interleaved)
    return torch.empty_like(x).copy_(torch.cat((turned, x[..., rotated:].to(dtype)), -1))


def both_reference(q: Tensor, k: Tensor, *given: Any, back: bool = False) -> tuple[Tensor, Tensor]:
    return rope_reference(q, *given, back=back), rope_reference(k, *given, back=back)


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

for _name, _back in (("", False), ("_backward", True)):
    define_op(
        f"rope{_name}(Tensor x, {_TABLES}) -> Tensor",
        rule="lin[0]: ... d!, ~... r!, ~... r! -> ... d!",
        samples=[
            (real(2, 4, 6, 8), fixed(1, 1, 6, 6), fixed(1, 1, 6, 6), False, False),
            (real(4, 6, 6), fixed(6, 2), fixed(6, 2), True, True),
        ],
        reference=functools.partial(rope_reference, back=_back),
        triton=f"attention.rope_triton:rope{_name}",
        fake=lambda x, *_: torch.empty_like(x),
    )
    # Heads of q and k differ in number (grouped queries), and in place by layout.
    define_op(
        f"rope_qk{_name}(Tensor q, Tensor k, {_TABLES}) -> (Tensor, Tensor)",
        rule=_rule_of_both,
        samples=[
            (real(2, 8, 6, 4), real(2, 4, 6, 4), fixed(1, 1, 6, 4), fixed(1, 1, 6, 4), False, False),
            (real(2, 6, 4, 4), real(2, 6, 4, 4), fixed(6, 1, 2), fixed(6, 1, 2), True, True),
        ],
        reference=functools.partial(both_reference, back=_back),
        triton=f"attention.rope_triton:rope_qk{_name}",
        fake=lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
    )


def _table_gradients(grad: Tensor, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Of tables that are learned: sums of products over the dims in which they broadcast."""
    dtype = wide(x.dtype)
    a, b = _pairs(x.to(dtype), tables.rotated, tables.interleaved)
    da, db = _pairs(grad.to(dtype), tables.rotated, tables.interleaved)
    found = []
    for first, second, table in ((da * a, db * b, tables.cos), (-da * b, db * a, tables.sin)):
        whole = first + second if tables.per_pair else _join(first, second, tables.interleaved)
        found.append(whole.sum_to_size(table.shape).to(table.dtype))
    return found[0], found[1]


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *xs, cos, sin, interleaved, per_pair = inputs
    ctx.how = interleaved, per_pair
    learned = cos.requires_grad or sin.requires_grad
    ctx.save_for_backward(cos, sin, *(xs if learned else ()))


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    cos, sin, *xs = ctx.saved_tensors
    tables, dtables = Tables(cos, sin, *ctx.how), (None, None)
    if xs:
        each = [_table_gradients(grad, x, tables) for grad, x in zip(grads, xs, strict=True)]
        dtables = tuple(functools.reduce(operator.add, of) for of in zip(*each, strict=True))
    if len(grads) == 1:
        return torch.ops.megafx.rope_backward(*grads, *tables), *dtables, None, None
    return *torch.ops.megafx.rope_qk_backward(*grads, *tables), *dtables, None, None


define_gradient("rope", _backward, _saves)
define_gradient("rope_qk", _backward, _saves)
