"""megafx::attention: softmax attention with counter-based dropout, grouped heads, causal, window, soft-cap and masks.

    s = scale q k^T;  s = c tanh(s / c) where c = softcap > 0;  s += masks, or -inf where a bool mask is False
    s = -inf where causal and key > query, or where |query - key| >= window > 0 (both counted from 0 in the whole sequence)
    s = -inf where segments of query and key differ
    w = softmax over keys, and over one more score, the head's sink, that has no value;  out = (w * keep / (1 - p)) v

What a row becomes that sees no key, by `hidden`, which says how a mask hides a score:

    0  ZEROS       the key is left out, as in scaled_dot_product_attention: zeros, and zero gradients
    1  ADDED       a finite number is added: all keys weigh the same; q and k have gradients
    2  FILLED      a finite number is put in its place: the same, but scores that are hidden have no gradient
    3  ADDED_NAN   -inf is added: NaN, and gradients that are NaN
    4  FILLED_NAN  -inf is put in its place: NaN; scores that are hidden have no gradient

A mask that is added has its own numbers: 1 and 3 are the same for it, and so are 2 and 4, where what it hides (-1e30 and
below) is what was put in place. Causal, window and segments leave keys out whatever `hidden` says; beside a boolean padding
mask [b, t] the rows that see nothing are filled so, by attention_rows (with segments and such a mask: ZEROS alone).

q [b, nq, s, e], k [b, n, t, e], v [b, n, t, f], nq a multiple of n: query heads i * nq / n onwards share KV head i, which is
not repeated. mask: [b, t] (key padding) or 4-D, broadcastable to [b, nq, s, t]; bool, or additive. key_mask: [b, t], a
padding mask beside a mask that all of the batch share (a relative bias, ALiBi): to join the two would take [b, nq, s, t]. It
gets no gradient. segments: integers [b or 1, t], the document of each token where several are packed in a row; queries are
as many as keys, and find theirs by their index in the whole sequence. Causal, window and document masks are never made.
sink: [nq], a score of each head that every query has beside its keys: it takes weight and gives nothing (GPT-OSS; zeros are
softmax off by one, exp(s) / (1 + sum exp(s))). No dropout is drawn for it. Each row sees it, so that `hidden` says nothing.
out [b, nq, s, f] lies in memory as [b, s, nq, f].

Arithmetic: products of the inputs' dtype accumulated in fp32, softmax in fp32 (fp64 for fp64), results rounded once.
Saved: q, k, v, out and one number a row; the weights and their dropout are computed again in backward.
Dropout: Philox4x32-7 at (key group, query, head, batch), all global (attention_reference.py): a shard of batch, heads or
queries (shard_dim 0, 1, 2 with its layout) draws its slice of the one-process mask. p > 0 without a seed: a seed is drawn
from torch's generator (calls outside of a megafx graph).

Without mask, segments, window, soft-cap and dropout the op is aten.scaled_dot_product_attention: the library's kernels. So
it is for the queries of a context-parallel rank under causality: attention_pieces.py.
Else: attention_forward, attention_backward, attention_mask_backward; Triton on CUDA (attention_triton.py), FlashAttention-2
(Dao 2023, arXiv 2307.08691) with separate kernels for dq and for dk, dv: deterministic. CPU and fp64: the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import ATTENTION, QUERY_HEADS, SEED, Localized, declare, fixed, ids, mask, real
from megafx.kernels.attention import attention_reference as reference
from megafx.kernels.attention.attention_reference import (
    Inputs,
    bytes_of_pieces,
    cudnn_backward_bytes,
    empty_results,
    heads_inside,
    kept_at_once,
)
from megafx.kernels.attention.attention_rows import seen_rows
from megafx.kernels.common.draw import DRAW, draws
from megafx.kernels.common.op import define_composite, define_gradient, define_op, runs_triton
from megafx.placements.data_axis import CONTEXT_AXIS
from megafx.rules.families import Arg, OpCall, RuleText

_SEED, _, _REST = DRAW.partition(", ")
_OPERANDS = f"Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_mask, Tensor? segments, Tensor? sink, {_SEED}"
_OPTIONS = f"float scale, bool causal, int window, float softcap, int hidden, {_REST}"


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_mask: Tensor | None, segments: Tensor | None,
    sink: Tensor | None, seed: Tensor | None, *rest: Any,
) -> Tensor:  # fmt: skip
    if sink is not None:
        rest = (*rest[:4], reference.ZEROS, *rest[5:])
    scale, causal, window, softcap, hidden, p = rest[:6]
    if mask is None:
        mask, key_mask = key_mask, None
    padding = next((m for m in (key_mask, mask) if _is_padding(m)), None)
    if hidden != reference.ZEROS and padding is not None and segments is not None:
        raise ValueError(
            f"attention with segments and a padding mask makes rows that see no key zeros: hidden {hidden} is not 0"
        )
    if hidden != reference.ZEROS and padding is not None and (causal or window):
        shown = (*rest[:4], reference.ZEROS, *rest[5:])
        out = _attention(q, k, v, mask, key_mask, None, None, seed, *shown)
        seen = seen_rows(padding, q.shape[2], window)
        return torch.ops.megafx.attention_rows(out, q, k, v, seen, scale, hidden)
    # some of the queries, whose places in the sequence the library does not know
    cut = rest[7] == 2 and (causal or window)
    if mask is None and segments is None and sink is None and not (window or softcap or p or cut):
        grouped = q.shape[1] != k.shape[1]
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    if p and seed is None:
        seed = torch.randint(2**63 - 1, (), device=q.device)
    return torch.ops.megafx.attention_forward(q, k, v, mask, key_mask, segments, sink, seed, *rest)[0]


def _is_padding(mask: Any) -> bool:
    """True if this is a boolean mask [b, t]."""
    return mask is not None and mask.dim() == 2 and mask.dtype == torch.bool


def _check(x: Inputs) -> None:
    q, k, v, mask, key_mask, segments, sink = x[:7]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"attention takes 4 dims, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    if not 0.0 <= x.draw.p <= 1.0:
        raise ValueError(f"dropout probability must be between 0 and 1, got {x.draw.p}")
    if x.draw.p and x.draw.seed is None:
        raise ValueError("attention_forward with dropout needs a seed")
    if not reference.ZEROS <= x.hidden <= reference.FILLED_NAN:
        raise ValueError(f"hidden must be between 0 and 4, got {x.hidden}")
    if x.window < 0 or x.softcap < 0:
        raise ValueError(f"window and softcap must not be negative, got {x.window} and {x.softcap}")
    if mask is not None:
        whole = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        wanted = whole if mask.dim() == 4 else (whole[0], whole[3])
        if mask.dim() not in (2, 4) or any(m not in (1, n) for m, n in zip(mask.shape, wanted, strict=True)):
            raise ValueError(f"mask {tuple(mask.shape)} is neither [b, t] nor broadcastable to {whole}")
    if key_mask is not None:
        if mask is None:
            raise ValueError("a key_mask without a mask is the mask")
        wanted = (q.shape[0], k.shape[2])
        if key_mask.dim() != 2 or any(m not in (1, n) for m, n in zip(key_mask.shape, wanted, strict=True)):
            raise ValueError(f"key_mask {tuple(key_mask.shape)} is not broadcastable to [b, t] {wanted}")
        if key_mask.requires_grad:
            raise ValueError("a key_mask gets no gradient: add it to the mask")
    if segments is not None:
        wanted = (q.shape[0], k.shape[2])
        if segments.is_floating_point() or segments.dim() != 2 or segments.shape[0] not in (1, wanted[0]):
            raise ValueError(f"segments {segments.dtype} {tuple(segments.shape)} are not integers [b, t] {wanted}")
        if segments.shape[1] != wanted[1] or (x.draw.shard_dim != 2 and q.shape[2] != wanted[1]):
            raise ValueError(
                f"segments {tuple(segments.shape)} are of {wanted[1]} keys and as many queries, got {q.shape[2]}"
            )

    if sink is not None and (not sink.is_floating_point() or sink.shape != q.shape[1:2]):
        raise ValueError(
            f"sink {sink.dtype} {tuple(sink.shape)} is not one number for each of {q.shape[1]} query heads"
        )


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x = Inputs.of(args[:8], args[8:])
    _check(x)
    if runs_triton(x.q):
        from megafx.kernels.attention import attention_pieces, attention_triton

        if (pieces := attention_pieces.pieces_of(x)) is not None and attention_pieces.takes_library(x):
            return attention_pieces.forward(x, pieces)
        return attention_triton.forward(x)
    return reference.forward(x)


def _backward(grad: Tensor, *args: Any, into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """args: operands, out, lse, options. into: memory for the gradients."""
    x = Inputs.of(args[:8], args[10:])
    if runs_triton(x.q):
        from megafx.kernels.attention import attention_backward_triton, attention_pieces

        if (pieces := attention_pieces.pieces_of(x)) is not None and attention_pieces.takes_library(x):
            return attention_pieces.backward(grad, x, args[8], args[9], pieces, into=into)
        return attention_backward_triton.backward(grad, x, *args[8:10], into=into)
    return reference.backward(grad, x, into)


def _backward_bytes(args: Sequence[Any], itemsize: int, options: int = 11) -> int:
    """options: where they start."""
    q, k, v = args[1:4]
    if itemsize == 2 and args[options + 1] and args[options + 7] == 2 and not _is_own(args, options):
        return bytes_of_pieces(q, k, v)
    kept = kept_at_once(q, k)[1] // 8 if draws(args[options + 5]) else 0
    return int(kept + 2 * 4 * q[0] * q[1] * -(-q[2] // 64) * 64)


def _is_own(args: Sequence[Any], options: int) -> bool:
    """True if attention of some of the queries has what the library's kernels have not. args: of a backward op."""
    window, softcap, p = (args[options + at] for at in (2, 3, 5))
    return any(x is not None for x in args[4:7]) or bool(window or softcap) or draws(p)


def _packed_views(packed: Tensor, q: Tensor, k: Tensor, v: Tensor, order: Sequence[int]) -> list[Tensor]:
    """Parts of [b, s, all widths], in `order` (0: q, 1: k, 2: v) side by side, as gradients of q, k and v."""
    operands, start = (q, k, v), 0
    views: list[Tensor] = [packed] * 3
    for i in order:
        _, heads, _, width = operands[i].shape
        views[i] = packed.narrow(-1, start, heads * width).unflatten(-1, (heads, width)).transpose(1, 2)
        start += heads * width
    return views


def _packed_shape(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], sum(x.shape[1] * x.shape[3] for x in (q, k, v)))


def _backward_packed(grad: Tensor, *args: Any) -> Tensor:
    """args: operands, out, lse, order, options."""
    packed = _packed_shape(grad, *args)
    q, k, v = args[:3]
    _backward(grad, *args[:10], *args[11:], into=_packed_views(packed, q, k, v, args[10]))
    return packed


def _sink_backward(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    if runs_triton(out) and out.numel():
        from megafx.kernels.attention import attention_sink_triton

        return attention_sink_triton.sink_backward(grad, out, lse, sink)
    return reference.sink_backward(grad, out, lse, sink)


def _mask_backward(grad: Tensor, *args: Any) -> Tensor:
    x = Inputs.of(args[:8], args[10:])
    if runs_triton(x.q):
        from megafx.kernels.attention import attention_mask_triton

        return attention_mask_triton.mask_backward(grad, x, *args[8:10])
    return reference.mask_backward(grad, x)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, mask, key_mask, segments, sink, seed, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, key_mask, segments, sink, seed, *output)


def _gradient(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * (8 + len(ctx.rest))
    arguments = (grad, *ctx.saved_tensors, *ctx.rest)
    dq, dk, dv = torch.ops.megafx.attention_backward(*arguments)
    dmask = torch.ops.megafx.attention_mask_backward(*arguments) if ctx.needs_input_grad[3] else None
    sink, _, out, lse = ctx.saved_tensors[6:]
    dsink = torch.ops.megafx.attention_sink_backward(grad, out, lse, sink) if ctx.needs_input_grad[6] else None
    return dq, dk, dv, dmask, None, None, dsink, None, *[None] * len(ctx.rest)


def _is_boolean_padding(mask: Any) -> bool:
    """True if `attention_rows` makes the rows that see nothing of this mask: it counts queries from 0."""
    return isinstance(mask, Arg) and len(mask.shape) == 2


# -- sharding: the dims depend on the mask's and on causality


def _forward_rule(call: OpCall) -> RuleText:
    """Batch, KV heads n, query heads g of each (with k and v whole), v's width f; queries t where rows need no position."""
    statistics = "" if call.op == "megafx.attention.default" else "; ~b (n g) t"
    text = f"nl[2]: {_operand_dims(call)}, b s!, b s!, (n g), ~ -> b (n g) t f{statistics}"
    return _row(call, text)


def _backward_rule(call: OpCall) -> RuleText:
    """Linear in the gradient; also where v is partial, and with it the output: so are the gradients of q and k.

    They are sums over v's width f: of the products of gradient and v, and of gradient and output.
    """
    operands = f"b (n g) t f, {_operand_dims(call)}, b s!, b s!, (n g), ~, b (n g) t f, b (n g) t"
    if call.op == "megafx.attention_mask_backward.default":
        # A dim that the mask broadcasts over is summed: a rank with some of the batch has a part of the sum.
        mask: Arg = call.get("mask")
        dims = zip(mask.shape, ("b", "(n g)", "t", "s!"), strict=True)
        found = " ".join("1" if n == 1 and mask.cut != i else name for i, (n, name) in enumerate(dims))
        return _row(call, f"nl[0]: {operands} -> {found}", partials=(((3, 9), "P"),))
    results = "b (n g) t e!; b n s! e!; b n s! f"
    return _row(call, f"nl[0]: {operands} -> {results}", partials=(((3, 9), "PPR"),))


def _operand_dims(call: OpCall) -> str:
    mask = call.get("mask")
    dims = "b s!" if isinstance(mask, Arg) and len(mask.shape) == 2 else "b (n g) t s!"
    return f"b (n g) t e!, b n s! e!, b n s! f, {dims}"


def _row(call: OpCall, text: str, partials: tuple[tuple[tuple[int, ...], str], ...] = ()) -> RuleText:
    by_place = call.get("causal") or call.get("window") or call.get("segments") is not None
    of_axis = str(call.get("axis")).endswith(CONTEXT_AXIS)  # an argument of the op says which queries a rank has
    whole = of_axis and call.get("hidden") and any(_is_boolean_padding(call.get(name)) for name in ("mask", "key_mask"))
    if not by_place or (of_axis and not whole):
        return RuleText(text, partials=partials)
    text = text.replace(" t ", " t! ").replace(" t,", " t!,").replace(" t;", " t!;")
    text = text + "!" if text.endswith(" t") else text
    why = {"t": "causal and window masks and segments need the row's index in the whole sequence"}
    return RuleText(text, why, partials=partials)


# -- the ops

_Q, _K, _V = real(2, 4, 6, 6), real(2, 4, 4, 6), real(2, 4, 4, 6)
_G = real(2, 6, 4, 2)  # each head for four of queries
_SEGMENTS = ids(3, 2, 4)
_PLAIN: Any = (0.4, False, 0, 2.0, 0, 0.0, 3, -1, [], "tp")
_DROPPED: Any = (0.4, False, 0, 0.0, 0, 0.5, 3, -1, [], "tp")
_CAUSAL: Any = (0.4, True, 2, 0.0, 0, 0.5, 3, -1, [], "tp")
_GRADIENT, _LSE = real(2, 4, 6, 6), fixed(2, 4, 6)

define_composite(
    f"attention({_OPERANDS}, {_OPTIONS}) -> Tensor",
    rule=_forward_rule,
    cost=ATTENTION,
    localize=Localized(QUERY_HEADS, "S"),
    samples=[
        (_Q, _K, _V, real(1, 4, 6, 4), None, None, None, None, *_PLAIN),
        (real(2, 24, 4, 2), _G, _G, mask(2, 4), None, None, None, SEED, *_DROPPED),
        (_K, _K, _V, None, None, None, None, SEED, *_CAUSAL),
        (_Q, _K, _V, None, None, None, real(4), None, *_PLAIN),
        (_K, _K, _V, None, None, _SEGMENTS, None, None, *_PLAIN),
    ],
    body=_attention,
)
define_op(
    f"attention_forward({_OPERANDS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    rule=_forward_rule,
    cost=ATTENTION,
    localize=Localized(QUERY_HEADS, "S"),
    samples=[
        (_Q, _K, _V, None, None, None, None, None, *_PLAIN),
        (_Q, _K, _V, fixed(1, 4, 6, 4), mask(2, 4), None, real(4), None, *_PLAIN),
        (_K, _K, _V, None, None, _SEGMENTS, None, None, *_PLAIN),
    ],
    reference=_forward,
    fake=lambda q, k, v, *_: empty_results(q, v),
    launches=True,
)
define_op(
    f"attention_backward(Tensor grad, {_OPERANDS}, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    rule=_backward_rule,
    samples=[(_GRADIENT, _Q, _K, _V, fixed(2, 1, 6, 4), mask(2, 4), None, fixed(4), None, _GRADIENT, _LSE, *_PLAIN)],
    reference=_backward,
    fake=lambda grad, q, k, v, *_: (heads_inside(q), heads_inside(k), heads_inside(v)),
    workspace=_backward_bytes,
    launches=True,
)
# Gradients side by side in one tensor, as a fused q, k, v projection reads them: passes/backward/pack_attention_gradients.py
define_op(
    f"attention_backward_packed(Tensor grad, {_OPERANDS}, Tensor out, Tensor lse, int[] order, {_OPTIONS}) -> Tensor",
    reference=_backward_packed,
    fake=_packed_shape,
    workspace=lambda args, itemsize: _backward_bytes(args, itemsize, options=12),
    launches=True,
)
define_op(
    f"attention_mask_backward(Tensor grad, {_OPERANDS}, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor",
    rule=_backward_rule,
    samples=[(_GRADIENT, _Q, _K, _V, real(2, 4, 6, 4), None, None, None, None, _GRADIENT, _LSE, *_PLAIN)],
    reference=_mask_backward,
    fake=lambda grad, q, k, v, mask, *_: mask.new_empty(mask.shape),
    launches=True,
)
define_op(
    "attention_sink_backward(Tensor grad, Tensor out, Tensor lse, Tensor sink) -> Tensor",
    rule="nl[0]: b n t f, b n t f, b n t, n -> n",
    partials=(((1,), "P"),),
    samples=[(_GRADIENT, _GRADIENT, _LSE, fixed(4))],
    reference=_sink_backward,
    fake=lambda grad, out, lse, sink: torch.empty_like(sink),
    launches=True,
)
define_gradient("attention_forward", _gradient, _saves)

# The library's backward, as plans on CPU or meta tensors find it; on CUDA it is cuDNN's (FlashAttention takes less).
for _name in ("cudnn_attention", "flash_attention_for_cpu"):
    declare(
        f"aten._scaled_dot_product_{_name}_backward.default",
        workspace=lambda args, itemsize: cudnn_backward_bytes(*args[1:4]) if itemsize == 2 else 0,
    )
