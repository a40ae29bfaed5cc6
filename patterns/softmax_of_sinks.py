"""Softmax with a sink, in its usual spellings, to megafx.sink_softmax: one more score of each head, whose weight is dropped.

    softmax(cat(scores, sinks))[..., :-1]                  GPT-OSS and its like, with the maximum subtracted before or not
    softmax(pad(scores, (0, 1)))[..., :-1]                 off by one: a score of 0; cat with zeros is the same
    exp(scores) / (1 + sum exp(scores))                    off by one, by hand; with the maximum m subtracted: exp(-m) for 1
    softmax(scores) v * sigmoid(logsumexp(scores) - sink)  the same weights, as a factor of the output

patterns/masked_softmax.py then puts scale and mask into it, and patterns/attention.py makes it attention, which has a sink.
Legal because: the softmax of scores and one more is exp(scores) / (sum exp(scores) + exp(sink)), which each of them writes;
a maximum that is subtracted from all scores changes no weight, and has no gradient. A sink that depends on the token stays.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megafx.ir.nodes import Draw, op_name
from megafx.kernels.attention.masked_softmax import HARD_FILL  # registers the ops, too
from megafx.patterns.masked_softmax import FILLED_BY, ON_THE_WAY, PRODUCTS, softmax_of
from megafx.rewrite.pattern import Pattern, register

ops = torch.ops.megafx
_PLAIN = (1.0, False, 0, -math.inf)  # scale, causal, window, fill
_SINKS = {"four": "S[1 n 1 1]", "three": "S[n 1 1]"}


class _Sunk(Pattern):
    knob = "masked_softmax_fusion"


def _largest(z: Tensor, by: str) -> Tensor:
    return z.max(-1, keepdim=True).values if by == "max" else z.amax(-1, keepdim=True)


def _softmax_op(wide: bool) -> str:
    return "softmax" if wide else "scale_mask_softmax"


def _weights(z: Tensor, drop: Draw, wide: bool) -> Tensor:
    """wide: a softmax in fp32 whose result stays fp32."""
    if wide:
        return torch.softmax(z, -1, dtype=torch.float32)
    made: Tensor = ops.scale_mask_softmax(z, None, *_PLAIN, *drop.args)
    return made


def _zeros(scores: Tensor, n: int) -> Tensor:
    return torch.zeros(n, dtype=scores.dtype, device=scores.device)


@register
class ShiftOfScores(_Sunk):
    """scale_mask_softmax(scores - max(scores)) -> scale_mask_softmax(scores), which subtracts it itself; so does softmax."""

    name = "shift_of_scores"
    variants = {"by": ("max", "amax"), "wide": (False, True)}
    tensors = {"scores": "D[b n s t]"}

    def needs(by, wide):
        return (_softmax_op(wide), "sub", by)

    def match(scores, drop, *, by, wide):
        return _weights(scores - _largest(scores, by), drop, wide)

    def make(scores, drop, *, wide):
        return _weights(scores, drop, wide)


@register
class SinkOfScores(_Sunk):
    """scale_mask_softmax(cat(scores, sink))[..., :-1] -> sink_softmax(scores, sink).

    by  what the sink is made of: a tensor with a number for each head, of four dims or three; zeros; padding with zeros
    of  whether the sink is fp32 beside other scores, or the softmax makes fp32 of them: then the weights are fp32
    """

    name = "sink_of_scores"
    redraws = True
    variants = {"by": ("four", "three", "zeros", "pad"), "of": ("plain", "fp32 sink", "fp32 softmax")}

    def tensors(by, of):
        sink = {"sink": _SINKS[by].replace("S", "f32" if of == "fp32 sink" else "D")} if by in _SINKS else {}
        return {"scores": "D[b n s t]"} | sink

    def needs(by, of):
        return (_softmax_op(of == "fp32 softmax"), "slice", "constant_pad_nd" if by == "pad" else "cat")

    def match(scores, drop, sink=None, *, by, of):
        if by == "pad":
            z = F.pad(scores, (0, 1))
        else:
            column = scores.new_zeros(*scores.shape[:-1], 1) if by == "zeros" else sink.expand(*scores.shape[:-1], 1)
            z = torch.cat((scores, column), -1)
        return _weights(z, drop, of == "fp32 softmax")[..., :-1]

    def where(m):
        narrows = m["of"] == "fp32 softmax" and m["scores"].dtype == torch.float64
        return "its scores are fp64, and its softmax is fp32: the op computes in fp64" if narrows else None

    def make(scores, drop, sink=None, *, of, n):
        sink = _zeros(scores, n) if sink is None else sink.reshape(n)
        weights = softmax_of(scores, None, sink, *_PLAIN, *drop.args)
        return weights.to(torch.promote_types(scores.dtype, sink.dtype) if of != "fp32 softmax" else torch.float32)


@register
class OffByOne(_Sunk):
    """exp(scores) / (1 + sum exp(scores)) -> sink_softmax(scores, zeros)."""

    name = "softmax_off_by_one"
    variants = {"by": ("no", "max", "amax")}
    tensors = {"scores": "D[b n s t]"}

    def needs(by):
        return ("exp", "sum", "div", *(() if by == "no" else (by, "neg")))

    def match(scores, *, by):
        if by == "no":
            powers = scores.exp()
            return powers / (1 + powers.sum(-1, keepdim=True))
        high = _largest(scores, by)
        powers = (scores - high).exp()
        return powers / (powers.sum(-1, keepdim=True) + (-high).exp())

    def where(m):
        scores = m.node("scores")
        while scores.target in (*ON_THE_WAY, *FILLED_BY):
            scores = scores.args[1 if op_name(scores) == "where" else 0]
        return None if scores.target in PRODUCTS else ""

    def make(scores, drop, *, by, n):
        return softmax_of(scores, None, _zeros(scores, n), *_PLAIN, *drop.args)


@register
class SinkAsFactor(_Sunk):
    """scale_mask_softmax(scores) v * sigmoid(logsumexp(scores) - sink) -> sink_softmax(scores, sink) v.

    keep   logsumexp keeps the dim of keys, or the factor has it again; wide: the factor is made in fp32
    """

    name = "sink_as_factor"
    redraws = True
    variants = {"keep": (True, False), "dims": (4, 3), "wide": (False, True), "late_drop": (False, True)}
    scalars = {"p": float}

    def tensors(keep, dims, wide, late_drop):
        last = " 1" if keep else ""
        sink = f"S[1 n 1{last}]" if dims == 4 else f"S[n 1{last}]"
        return {"scores": "D[b n s t]", "v": "V[b n t f]", "sink": sink}

    def needs(keep, dims, wide, late_drop):
        return ("scale_mask_softmax", "logsumexp", "sigmoid", "mul", *(("dropout",) if late_drop else ()))

    def match(scores, v, sink, drop, *, keep, wide, late_drop, p):
        weights = ops.scale_mask_softmax(scores, None, *_PLAIN, *drop.args)
        weights = F.dropout(weights, p, True) if late_drop else weights
        factor = scores.logsumexp(-1, keepdim=keep) - sink
        factor = factor.float().sigmoid() if wide else factor.sigmoid()
        factor = factor if keep else factor.unsqueeze(-1)
        return torch.matmul(weights, v) * factor.to(v.dtype)

    def make(scores, v, sink, drops, *, keep, n):
        return torch.matmul(softmax_of(scores, None, sink.reshape(n), *_PLAIN, *drops[-1].args), v)


@register
class FillOfScores(_Sunk):
    """sink_softmax(masked_fill(scores, hidden, fill), sink) -> sink_softmax(scores, hidden, sink, fill)."""

    name = "fill_of_scores"
    variants = {"by": ("masked_fill", "where"), "flat": (False, True)}
    scalars = {"scale": float, "other": float}

    def tensors(by, flat):
        return {"scores": "D[b n s t]", "mask": "bool[s t]" if flat else "bool[1|b 1|n 1|s t]", "sink": "S[n]"}

    def needs(by, flat):
        return (by, "sink_softmax")

    def match(scores, mask, sink, drop, *, by, scale, other):
        z = scores.masked_fill(mask, other) if by == "masked_fill" else torch.where(mask, scores, other)
        return ops.sink_softmax(z, None, sink, scale, *_PLAIN[1:], *drop.args)

    def where(m):
        hides = m["scale"] > 0 and m["scale"] * m["other"] <= HARD_FILL
        return None if hides else f"its fill {m['other']} is not known to hide"

    def make(scores, mask, sink, drop, *, by, scale, other):
        hidden = mask if by == "masked_fill" else mask.logical_not()
        hidden = hidden[(None,) * (4 - hidden.dim())]
        return ops.sink_softmax(scores, hidden, sink, scale, *_PLAIN[1:3], scale * other, *drop.args)
