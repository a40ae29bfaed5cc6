"""Causal attention of a context-parallel rank's queries by the library's kernels.

A rank has few ranges of the queries (`Layout.pieces`). Those of a range [start, end) see the keys before it throughout, and
its own causally: two calls of the library without a mask, joined by their log-sum-exp. The gradients of each call are the
library's, given the joined output and statistic: that is all FlashAttention-2's backward reads of the other keys (Dao 2023,
arXiv 2307.08691), as ring attention uses it (Liu 2023, arXiv 2310.01889). Keys behind the range cost nothing. So it is with a
sink: one more score, without a value, in the statistic; its own gradient is read off output and statistic (attention.py).

On CUDA the library is cuDNN, where torch prefers it (measured, H100, 32k tokens: 2.1 times as fast as attention_triton.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend

from megafx.kernels.attention.attention_reference import Inputs, empty_results, heads_inside
from megafx.kernels.common.draw import draws
from megafx.kernels.common.op import launch, tracing
from megafx.kernels.common.tiles_triton import power_of_2
from megafx.ops import axes
from megafx.placements.types import Layout, Piece

SHORTEST = 128  # queries: below, a call of the library takes longer than the tiles that it leaves out
aten = torch.ops.aten


class Library(NamedTuple):
    """forward(q, k, v, causal, scale) -> (out, lse); backward(grad, q, k, v, out, lse, causal, scale) -> gradients of q, k, v.

    q, grad, out [b, h, s, d], k, v [b, n, t, d], lse [b, h, s] fp32, natural logarithm.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Sequence[Tensor]]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Sequence[Tensor]:
    state = torch.empty(2, dtype=torch.int64, device=q.device)  # of the dropout, which is off
    found: Sequence[Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.unsqueeze(-1), state[0], state[1], None, None, None, q.shape[2], k.shape[2],
        0.0, causal, scale=scale,
    )  # fmt: skip
    return found


CUDNN = Library(_cudnn_forward, _cudnn_backward)


class Call(NamedTuple):
    """Queries [at, at + length) of this rank with keys [first, last) of the whole sequence."""

    at: int
    length: int
    first: int
    last: int
    causal: bool


def pieces_of(x: Inputs) -> list[Piece] | None:
    """The ranges of this rank's queries, where the library can take them; None: no such attention."""
    extra = (x.mask, x.key_mask, x.segments)
    if (
        any(y is not None for y in extra)
        or x.window
        or x.softcap
        or not x.causal
        or x.draw.shard_dim != 2
        or draws(x.draw.p)
        or tracing()
    ):
        return None
    cut = Layout.from_flat(x.draw.layout)
    if cut.size != x.k.shape[2]:
        return None
    pieces = [*cut.pieces(axes.axis_rank(x.draw.axis), axes.axis_size(x.draw.axis))]
    return pieces if pieces and min(piece.length for piece in pieces) >= SHORTEST else None


def takes_library(x: Inputs) -> bool:
    """True if torch would take cuDNN for these operands."""
    if x.q.device.type != "cuda" or x.q.dtype not in (torch.bfloat16, torch.float16):
        return False
    grouped = x.q.shape[1] != x.k.shape[1]
    choice = torch._fused_sdp_choice(x.q, x.k, x.v, None, 0.0, False, scale=x.scale, enable_gqa=grouped)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def forward(x: Inputs, pieces: Sequence[Piece], library: Library = CUDNN) -> tuple[Tensor, Tensor]:
    """-> out [b, h, s, f], lse [b, h, s]; pads: zeros and inf."""
    out, lse = empty_results(x.q, x.v)
    if sum(piece.length for piece in pieces) < x.q.shape[2]:
        out.zero_()
        lse.fill_(torch.inf)
    for at, calls in _calls(pieces):
        found = [library.forward(*_operands(x, call), call.causal, x.scale) for call in calls]
        here = out.narrow(2, at, calls[0].length), lse.narrow(2, at, calls[0].length)
        _join(found, *here)
        if x.sink is not None:
            _with_sink(*here, x.sink)
    return out, lse


def backward(
    grad: Tensor, x: Inputs, out: Tensor, lse: Tensor, pieces: Sequence[Piece], library: Library = CUDNN,
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """into: memory for the results."""
    made = into or (heads_inside(x.q), heads_inside(x.k), heads_inside(x.v))
    if sum(piece.length for piece in pieces) < x.q.shape[2]:
        made[0].zero_()
    behind = max(piece.global_start + piece.length for piece in pieces)
    for of_keys in made[1:]:
        of_keys[:, :, behind:].zero_()
    # The last range of queries comes first: together its calls see all keys that any other call sees.
    for number, (at, calls) in enumerate(reversed([*_calls(pieces)])):
        of_out, joined, statistic = (y.narrow(2, at, calls[0].length) for y in (grad, out, lse))
        statistic = statistic.contiguous()
        for call in calls:
            found = library.backward(of_out, *_operands(x, call), joined, statistic, call.causal, x.scale)
            keys = call.first, call.last - call.first, number > 0
            ranges = ((call.at, call.length, call is not calls[0]), keys, keys)
            for total, part, (start, length, more) in zip(made, found, ranges, strict=True):
                here = total.narrow(2, start, length)
                here.add_(part) if more else here.copy_(part)
    return made[0], made[1], made[2]


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """out [b, h, s, f], lse [b, h, s], in place; sink [h]."""
    total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    out.mul_((lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


def _calls(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Call]]]:
    """For each range of queries: where it starts on this rank, the calls that its keys take."""
    for start, at, length in pieces:
        own = Call(at, length, start, start + length, True)
        yield at, [own, Call(at, length, 0, start, False)] if start else [own]


def _operands(x: Inputs, call: Call) -> list[Tensor]:
    keys = call.last - call.first
    return [x.q.narrow(2, call.at, call.length), *(y.narrow(2, call.first, keys) for y in (x.k, x.v))]


@triton.jit
def _joined(
    A, B, LSE_A, LSE_B, OUT, LSE, ab, ah, ar, bb, bh, br, ob, oh, orow, lb, lh, H, S,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Softmax over two sets of keys: A, B, OUT [b, H, S, D] by strides; LSE_A, LSE_B [b, H, S], LSE by strides."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    inside = row < S
    one = tl.load(LSE_A + head * S + row, mask=inside, other=0.0)
    other = tl.load(LSE_B + head * S + row, mask=inside, other=0.0)
    high = tl.maximum(one, other)
    total = high + tl.log(tl.exp(one - high) + tl.exp(other - high))
    tl.store(LSE + b * lb + h * lh + row, total, mask=inside)
    column = tl.arange(0, DP)[None, :]
    rows = row.to(tl.int64)[:, None]
    mask = inside[:, None] & (column < D)
    x = tl.load(A + b * ab + h * ah + rows * ar + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(B + b * bb + h * bh + rows * br + column, mask=mask, other=0.0).to(tl.float32)
    z = x * tl.exp(one - total)[:, None] + y * tl.exp(other - total)[:, None]
    tl.store(OUT + b * ob + h * oh + rows * orow + column, z.to(OUT.dtype.element_ty), mask=mask)


def _join(found: Sequence[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """One or two (out, lse) of the same queries over different keys -> out, lse in place."""
    (a, lse_a), *rest = found
    if not rest:
        out.copy_(a)
        lse.copy_(lse_a)
        return
    ((b, lse_b),) = rest
    batch, heads, s, d = out.shape
    parts: list[Any] = [x if x.stride(-1) == 1 else x.contiguous() for x in (a, b)]
    launch(
        _joined, (triton.cdiv(s, 16), batch * heads), out, *parts, lse_a.contiguous(), lse_b.contiguous(), out, lse,
        *parts[0].stride()[:3], *parts[1].stride()[:3], *out.stride()[:3], *lse.stride()[:2], heads, s,
        D=d, DP=max(16, power_of_2(d)), BM=16,
    )  # fmt: skip
