"""The attention chain, as Hugging Face's eager attention and nanoGPT write it, to megafx.attention.

    dropout(softmax(mask(cap(scale * q k^T) + bias))) v          k and v repeated for groups of query heads, or not

Found in steps: masked_softmax.py makes the middle one op (scale_mask_softmax, in any of its spellings, with biases and
causal buffers in its mask), which these patterns take with the products around it. So they need `masked_softmax_fusion` too.
passes/fuse/describe_masks.py then reads what the mask is: causal, window and padding masks are no tensors any more. The weights
must have no other user: a model that returns them keeps its chain. Legal because: softmax, mask and scale are those of the
op, and so is what becomes of rows that are masked throughout (`hidden`): uniform where a fill is finite, NaN where it is -inf;
scores that a fill replaces have no gradient, scores to which a mask is added have one. Dropout draws other bits than the
chain would: by (batch, head, query, key).
Scores that were computed in fp32 for bf16 operands (GPT-J) are no loss: the op's products accumulate in fp32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.attention.attention  # noqa: F401  registers the op
from megafx.ir.nodes import Draw
from megafx.ir.sizes import FIRST_PRIME
from megafx.kernels.attention.attention_reference import ADDED, FILLED, FILLED_NAN, ZEROS
from megafx.kernels.attention.masked_softmax import FILLS, HARD_FILL
from megafx.patterns.masked_softmax import follows_from_both
from megafx.rewrite.match import Match
from megafx.rewrite.pattern import Pattern, register

ops = torch.ops.megafx
_CAP_NEEDS = {"no": (), "mul, div": ("tanh", "mul", "div"), "div": ("tanh", "div"), "mul": ("tanh", "mul")}


class _Attention(Pattern):
    knob = "attention_fusion"
    redraws = True
    scalars = {"scale": float, "fill": float, "inner": float, "cap": float, "p": float, "hidden": int}


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, fill: float, cap: float, drop: Draw,
    sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """mask: scale_mask_softmax's (True: hidden); attention's has four dims, and True is visible."""
    hidden = ZEROS if mask is None else ADDED
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.dtype == torch.bool:
            mask, hidden = mask.logical_not(), FILLED_NAN if fill == -math.inf else FILLED
        elif fill > -math.inf:
            hidden = FILLED
    return _call(q, k, v, mask, drop, scale, cap, hidden if sink is None else ZEROS, sink=sink)


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Draw, scale: float, cap: float, hidden: int,
    causal: bool = False, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rest = (drop.seed, scale, causal, 0, cap, hidden, *drop.args[1:])
    made: Tensor = ops.attention(q, k, v, mask, None, None, sink, *rest)
    return made


def _scores(q: Tensor, k: Tensor, wide: str) -> Tensor:
    a, b = (q.float(), k.float()) if wide == "operands" else (q, k)
    scores = torch.matmul(a, b.transpose(2, 3))
    return scores.float() if wide == "scores" else scores


def _unfit(m: Match) -> str | None:
    """Why a softmax between two products is not the op's."""
    # hidden keys keep some weight
    if m["mask"] is not None and m["mask"].dtype == torch.bool and m["fill"] > HARD_FILL:
        return f"its fill {m['fill']} does not hide"
    if m["wide"] not in (False, "no") and m["q"].dtype == torch.float64:
        return "its operands are fp64, and its softmax is fp32: the op computes in fp64"
    return "k and v have different numbers of heads" if m["k"].shape[:-2] != m["v"].shape[:-2] else None


@register
class AttentionChain(_Attention):
    """softmax(mask(scale q k^T)) v -> attention(q, k, v): nothing of [s, t] is kept.

    capped   soft-capping: cap * tanh(scale * q k^T / cap), by its spelling
    wide     the operands, or their product, are cast to fp32, and the weights back; dropout after the cast, or in the op
    """

    name = "attention"
    variants = {
        "mask_is": ("added", "flat", "bool", "flat bool", "none"),
        "capped": tuple(_CAP_NEEDS),
        "wide": ("no", "operands", "scores"),
        "late_drop": (False, True),
    }

    def tensors(mask_is, capped, wide, late_drop):
        found = {"q": "D[b n s e]", "k": "D[b 1|n t e]", "v": "D[b 1|n t f]"}
        if mask_is != "none":
            dtype = "bool" if "bool" in mask_is else "M"
            found["mask"] = dtype + ("[s t]" if "flat" in mask_is else "[1|b 1|n 1|s t]")
        return found

    def needs(mask_is, capped, wide, late_drop):
        cast = () if wide == "no" else ("to",)
        return ("scale_mask_softmax", "matmul", *_CAP_NEEDS[capped], *cast, *(("dropout",) if late_drop else ()))

    def match(q, k, v, drop, mask=None, *, capped, wide, late_drop, scale, fill, inner, cap, p):
        scores = _scores(q, k, wide)
        if capped != "no":
            scores = scores * inner if "mul" in capped else scores
            scores = torch.tanh(scores / cap if "div" in capped else scores)
        drawn = Draw().args if late_drop else drop.args
        weights = ops.scale_mask_softmax(scores, mask, scale, False, 0, fill, *drawn)
        weights = weights if wide == "no" else weights.to(q.dtype)
        if late_drop:
            weights = F.dropout(weights, p, True)
        return torch.matmul(weights, v)

    def where(m):
        if reason := _unfit(m):
            return reason
        if m["q"].shape[2] == 1 and m["k"].shape[2] != 1:
            return ""
        if m["late_drop"] and m.drops[0].p:
            return "its weights are dropped twice"
        if "div" in m["capped"] and m["cap"] != m["scale"]:
            return f"the soft cap divides by {m['cap']} and multiplies by {m['scale']}"
        return None

    def make(q, k, v, drops, mask=None, *, capped, scale, fill, inner, cap):
        drop = drops[-1]
        if capped == "no":
            return _fused(q, k, v, mask, scale, fill, 0.0, drop)
        inside = {"mul, div": inner, "div": 1.0, "mul": inner * scale if capped == "mul" else 0.0}[capped]
        return _fused(q, k, v, mask, inside, fill, scale, drop)


@register
class AttentionOfSink(_Attention):
    """sink_softmax(scale q k^T, mask, sink) v -> attention(q, k, v, mask) with this sink.

    wide    the operands, the scores or the weights are fp32; at: whether dropout is in the op, before the cast or after it
    """

    name = "attention_of_sink"
    variants = {
        "mask_is": ("added", "flat", "bool", "flat bool", "none"),
        "wide": ("no", "operands", "scores", "weights"),
        "at": ("op", "before", "after"),
    }

    def tensors(mask_is, wide, at):
        return AttentionChain.tensors(mask_is, "no", wide, at != "op") | {"sink": "S[n]"}

    def needs(mask_is, wide, at):
        cast, drop = () if wide == "no" else ("to",), () if at == "op" else ("dropout",)
        return ("sink_softmax", "matmul", *cast, *drop)

    def match(q, k, v, sink, drop, mask=None, *, wide, at, scale, fill, p):
        scores = _scores(q, k, wide)
        drawn = drop.args if at == "op" else Draw().args
        weights = ops.sink_softmax(scores, mask, sink, scale, False, 0, fill, *drawn)
        weights = weights.float() if wide == "weights" else weights
        weights = F.dropout(weights, p, True) if at == "before" else weights
        weights = weights if wide == "no" else weights.to(q.dtype)
        return torch.matmul(F.dropout(weights, p, True) if at == "after" else weights, v)

    def where(m):
        if m["at"] != "op" and m.drops[0].p:
            return "its weights are dropped twice"
        return _unfit(m)

    def make(q, k, v, sink, drops, mask=None, *, scale, fill):
        return _fused(q, k, v, mask, scale, fill, 0.0, drops[-1], sink)


@register
class AttentionOfMatrices(_Attention):
    """The chain on [b*n, s, e], as Bloom and torch.nn.MultiheadAttention have it -> attention(q, k, v).

    between  the softmax sees [b, n, s, t], or the b*n of the products (heads of one)
    by       how the scores are made: a scale before the view; baddbmm adds a bias (ALiBi) or a mask
    """

    name = "attention_of_matrices"
    variants = {
        "between": ("four", "three"),
        "by": ("bmm", "scaled bmm", "matmul", "baddbmm"),
        "mask_is": ("added", "bool", "none"),
        "wide": (False, True),
    }
    scalars = _Attention.scalars | {"b": int, "n": int, "beta": float}

    def tensors(between, by, mask_is, wide):
        many = "b*n" if between == "four" else "m"
        found = {"q": f"D[{many} s e]", "k": f"D[{many} t e]", "v": f"D[{many} t f]"}
        if by == "baddbmm":
            found["bias"] = f"D[1|{many} 1|s t]" if between == "three" else f"D[{many} 1|s t]"
        if mask_is != "none":
            dims = "[1|b 1|n 1|s t]" if between == "four" else "[1|m 1|s t]"
            found["mask"] = ("M" if mask_is == "added" else "bool") + dims
        return found

    def needs(between, by, mask_is, wide):
        scores = ("bmm", "mul") if by == "scaled bmm" else (by, "bmm")
        return ("scale_mask_softmax", *scores, *(("to",) if wide else ()))

    def match(q, k, v, drop, mask=None, bias=None, *, between, by, wide, scale, fill, inner, b, n, beta):
        turned = k.transpose(1, 2)
        if by == "baddbmm":
            scores = torch.baddbmm(bias, q, turned, beta=beta, alpha=inner)
        else:
            scores = torch.matmul(q, turned) if by == "matmul" else torch.bmm(q, turned)
        if by == "scaled bmm":
            scores = scores * inner
        if between == "four":
            scores = scores.view(b, n, q.shape[1], k.shape[1])
        scores = scores.float() if wide else scores
        weights = ops.scale_mask_softmax(scores, mask, scale, False, 0, fill, *drop.args).to(q.dtype)
        if between == "four":
            weights = weights.view(b * n, q.shape[1], k.shape[1])
        return torch.matmul(weights, v) if by == "matmul" else torch.bmm(weights, v)

    def where(m):
        if reason := _unfit(m):
            return reason
        hidden = m["mask"] is not None and m["mask"].dtype == torch.bool
        if m["between"] == "four" and m["n"] >= FIRST_PRIME:
            return "the number of heads is not known"
        if hidden and m["by"] == "baddbmm" and m["fill"] > -1e30:
            return f"its fill {m['fill']} is no mask: what is hidden still depends on the bias"
        return follows_from_both(m) if hidden and m["by"] == "baddbmm" else None

    def make(q, k, v, drop, mask=None, bias=None, *, between, by, scale, fill, inner, n, beta):
        def four(x):
            return x.reshape(x.shape[0] // n, n, *x.shape[1:]) if between == "four" else x[:, None]

        if mask is not None and between == "three":
            mask = mask[:, None]
        if by == "baddbmm":
            factor = scale * beta
            added = four(bias) if factor == 1 else four(bias) * factor
            if mask is not None:
                filled = mask.dtype == torch.bool
                added = added.masked_fill(mask, fill) if filled else added + mask
                fill = max(fill, FILLS) if filled else fill
            mask = added
        scale = scale * inner if by in ("baddbmm", "scaled bmm") else scale
        out = _fused(four(q), four(k), four(v), mask, scale, fill, 0.0, drop)
        return out.reshape(q.shape[0], q.shape[1], v.shape[2])


# -- heads that are repeated for groups of query heads: the ops share them

_REPEATS = {
    "heads": lambda x, n, g, t, d: x[:, :, None].expand(x.shape[0], n, g, t, d).reshape(x.shape[0], n * g, t, d),
    "interleave": lambda x, n, g, t, d: x.repeat_interleave(g, dim=1),
    "tokens": lambda x, n, g, t, d: (
        x[:, :, :, None].expand(x.shape[0], t, n, g, d).reshape(x.shape[0], t, n * g, d).transpose(1, 2)
    ),
    "interleave tokens": lambda x, n, g, t, d: x.repeat_interleave(g, dim=2).transpose(1, 2),
}


class _Groups(_Attention):
    """k and v repeated before an attention op: it takes them as they are."""

    variants = {"repeat": tuple(_REPEATS), "masked": ("no", "yes", "causal")}

    def tensors(repeat, masked):
        k, v = ("b t n e", "b t n f") if "tokens" in repeat else ("b n t e", "b n t f")
        found = {"q": "D[b n*g s e]", "k": f"D[{k}]", "v": f"D[{v}]"}
        if masked in ("yes", "bool"):
            found["mask"] = f"{'M' if masked == 'yes' else masked}[1|b 1|n*g 1|s t]"
        return found

    def where(m):
        tokens = "tokens" in m["repeat"]
        n, heads = m["k"].shape[2 if tokens else 1], m["q"].shape[1]
        return None if isinstance(n, int) and isinstance(heads, int) and heads % n == 0 else "heads are no multiple"


def _repeated(x: Tensor, q: Tensor, repeat: str) -> Tensor:
    n, t = (x.shape[2], x.shape[1]) if "tokens" in repeat else (x.shape[1], x.shape[2])
    return _REPEATS[repeat](x, n, q.shape[1] // n, t, x.shape[-1])


def _of_heads(x: Tensor, repeat: str) -> Tensor:
    return x.transpose(1, 2) if "tokens" in repeat else x


@register
class AttentionOfGroups(_Groups):
    """attention(q, repeated k, repeated v) -> attention(q, k, v)."""

    name = "attention_groups"
    variants = {"repeat": tuple(_REPEATS), "masked": ("no", "yes", "bool", "causal"), "sunk": (False, True)}

    def tensors(repeat, masked, sunk):
        return _Groups.tensors(repeat, masked) | ({"sink": "S[n*g]"} if sunk else {})

    def needs(repeat, masked, sunk):
        return ("attention", "repeat_interleave" if "interleave" in repeat else "expand")

    def match(q, k, v, drop, mask=None, sink=None, *, repeat, masked, scale, cap, p, hidden):
        k, v = _repeated(k, q, repeat), _repeated(v, q, repeat)
        return _call(q, k, v, mask, drop, scale, cap, hidden, masked == "causal", sink)

    def make(q, k, v, drop, mask=None, sink=None, *, repeat, masked, scale, cap, hidden):
        k, v = _of_heads(k, repeat), _of_heads(v, repeat)
        return _call(q, k, v, mask, drop, scale, cap, hidden, masked == "causal", sink)


@register
class LibraryAttentionOfGroups(_Groups):
    """scaled_dot_product_attention(q, repeated k, repeated v) -> the same with enable_gqa."""

    name = "sdpa_groups"
    redraws = False

    def needs(repeat, masked):
        return ("scaled_dot_product_attention", "repeat_interleave" if "interleave" in repeat else "expand")

    def match(q, k, v, mask=None, *, repeat, masked, scale):
        k, v = _repeated(k, q, repeat), _repeated(v, q, repeat)
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, mask, 0.0, masked == "causal", scale=scale)

    def make(q, k, v, mask=None, *, repeat, masked, scale):
        k, v = _of_heads(k, repeat), _of_heads(v, repeat)
        causal = masked == "causal"
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True)


@register
class AttentionOfScaledQuery(_Attention):
    """attention(q * c, k, v, scale) -> attention(q, k, v, c * scale); OPT scales before it parts the heads."""

    name = "attention_scale"
    kinds = {"shape": ("flat", "heads"), "by": ("mul", "div")}
    variants = kinds | {"causal": (False, True), "masked": ("no", "four", "two")}
    scalars = _Attention.scalars | {"n": int}

    def tensors(shape, by, causal, masked):
        q = "D[b s n*e]" if shape == "flat" else "D[b n s e]"
        mask = {"no": {}, "four": {"mask": "M[1|b 1|n 1|s t]"}, "two": {"mask": "bool[b t]"}}[masked]
        return {"q": q, "k": "D[b 1|m t e]", "v": "D[b 1|m t f]"} | mask

    def needs(shape, by, causal, masked):
        return ("attention", by)

    def match(q, k, v, drop, mask=None, *, shape, by, causal, scale, inner, cap, n, hidden):
        q = q * inner if by == "mul" else q / inner
        q = q.view(q.shape[0], q.shape[1], n, -1).transpose(1, 2) if shape == "flat" else q
        return _call(q, k, v, mask, drop, scale, cap, hidden, causal)

    def where(m):
        return "the number of heads is not known" if m["shape"] == "flat" and m["n"] >= FIRST_PRIME else None

    def make(q, k, v, drop, mask=None, *, shape, by, causal, scale, inner, cap, n, hidden):
        q = q.view(q.shape[0], q.shape[1], n, q.shape[2] // n).transpose(1, 2) if shape == "flat" else q
        factor = scale * inner if by == "mul" else scale / inner
        return _call(q, k, v, mask, drop, factor, cap, hidden, causal)
