"""megafx::attention_rows: rows of attention that see no key, beside causal and window masks that are flags.

attention.py has `hidden`.

    out = attention's where the query sees a key, else what softmax makes of scores that are all hidden:
    ADDED, FILLED: the mean of v over all keys (weights 1 / t);  ADDED_NAN, FILLED_NAN: NaN

out [b, nq, s, f], q [b, nq, s, e], k [b, n, t, e], v [b, n, t, f], seen bool [b or 1, 1, s, 1]: True
where the query sees a key.

The weights of such a row depend on no score, so that its gradient needs none: with g = grad where not seen, u = v - mean of v

    dv = sum of g over rows / t;   ADDED: dq = scale / t g (u^T k);  dk = scale / t u (g^T q)

Two products of [e, f] for each head, in place of [s, t] for these rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import mask, real
from megafx.kernels.attention.attention_reference import ADDED, ADDED_NAN, FILLED_NAN, heads_inside
from megafx.kernels.common.op import define_gradient, define_op
from megafx.rules.families import RuleText


def seen_rows(padding: Tensor, s: int, window: int) -> Tensor:
    """bool [b or 1, t], True where a key is visible -> bool [b or 1, 1, s, 1]: whether query i sees one of keys 0 to i.

    window > 0: one of the last `window` of them.
    """
    count = padding.cumsum(1, dtype=torch.int64)
    if window:
        count = count - torch.constant_pad_nd(count, [window, -window], 0)
    return (count > 0)[:, None, :s, None]


def _check(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> None:
    rows = seen.shape[0] in (1, q.shape[0]) and seen.shape[1:] == (1, q.shape[2], 1)
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1] or not rows:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, seen))
        raise ValueError(f"attention_rows: q, k, v and seen do not fit together: {shapes}")


def _forward(out: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, hidden: int) -> Tensor:
    _check(q, k, v, seen)
    if hidden in (ADDED_NAN, FILLED_NAN):
        rows = out.new_full((), math.nan)
    else:
        rows = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return _inside(torch.where(seen, out, rows))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, hidden: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> gradients of out, q, k, v."""
    _check(q, k, v, seen)
    b, n, t, f = v.shape
    rows = grad.masked_fill(seen, 0)
    dout = grad.masked_fill(~seen, 0)
    split = rows.unflatten(1, (n, -1))
    dv = (split.sum((2, 3)) / t)[:, :, None].expand(b, n, t, f)
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    if hidden == ADDED:
        u, factor = v - v.mean(2, keepdim=True), scale / t
        crossed = (u.transpose(2, 3) @ k)[:, :, None]  # [b, n, 1, f, e]
        dq = ((split @ crossed) * factor).flatten(1, 2)
        gathered = (split.transpose(3, 4) @ q.unflatten(1, (n, -1))).sum(2)  # [b, n, f, e]
        dk = (u @ gathered) * factor
    elif hidden in (ADDED_NAN, FILLED_NAN):
        some = ~seen.all(2, keepdim=True)  # [b or 1, 1, 1, 1]
        dv = torch.zeros_like(v).masked_fill(some, math.nan)
        if hidden == ADDED_NAN:
            dq, dk = dq.masked_fill(~seen, math.nan), dk.masked_fill(some, math.nan)
    return _inside(dout), _inside(dq), _inside(dk), _inside(dv)


def _inside(x: Tensor) -> Tensor:
    """In memory as `heads_inside` has it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


_DIMS = "b (n g) s f, b (n g) s e!, b n t! e!, b n t! f, b 1 s 1"
_OPERANDS = (real(2, 4, 6, 6), real(2, 4, 6, 4), real(2, 2, 6, 4), real(2, 2, 6, 6))

define_op(
    "attention_rows(Tensor out, Tensor q, Tensor k, Tensor v, Tensor seen, float scale, int hidden) -> Tensor",
    rule=lambda call: RuleText(f"nl: {_DIMS} -> b (n g) s f", partials=(((0, 3), "P"),)),
    samples=[(*_OPERANDS, mask(2, 1, 6, 1), 0.5, ADDED)],
    reference=_forward,
    fake=lambda out, *_: heads_inside(out),
)
define_op(
    "attention_rows_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor seen, float scale, int hidden)"
    " -> (Tensor dout, Tensor dq, Tensor dk, Tensor dv)",
    rule=lambda call: RuleText(
        f"nl[0]: {_DIMS} -> b (n g) s f; b (n g) s e!; b n t! e!; b n t! f", partials=(((3,), "RPPR"),)
    ),
    samples=[(*_OPERANDS, mask(2, 1, 6, 1), 0.5, ADDED)],
    reference=_backward,
    fake=lambda grad, q, k, v, *_: tuple(map(heads_inside, (grad, q, k, v))),
)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.megafx.attention_rows_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*found, None, None, None)


define_gradient("attention_rows", _gradient, slice(1, 5))
