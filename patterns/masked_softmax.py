"""Scale, mask, softmax and dropout of attention scores, in any of the usual spellings, to megafx.scale_mask_softmax.

    softmax(scores * scale + mask)                         Hugging Face's eager attention; the mask holds finfo.min or -inf
    softmax(masked_fill(scores * scale, mask, fill))       by hand (nanoGPT: tril buffer == 0, -inf), Megatron (-10000)
    softmax(where(visible, scores * scale, fill))          GPT-2 of old

with the softmax in fp32 and cast back or not, the scores cast before or not, and dropout or not; scores [b, n, s, t], or
[b*n, s, t] as in torch.nn.MultiheadAttention. What remains before the op then goes into it as well:

    scores * c                              into the scale (query-key layer scaling)
    scores + bias                           into the mask: relative positions, ALiBi, with gradient
    where(visible, scores, fill)            into the mask: a causal buffer under Hugging Face's own mask (GPT-Neo)

softmax_of_sinks.py finds softmax with one more score of each head (sink_softmax), of which the first two are the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megafx.analysis.masks import Leaf, MaskReader
from megafx.analysis.visible import masked_before, may_hide, read_visible
from megafx.ir.nodes import argument, aten_ops, op_name
from megafx.ir.program import Program
from megafx.kernels.attention.masked_softmax import FILLS, mask_floor  # registers the ops, too
from megafx.rewrite.match import Match
from megafx.rewrite.pattern import Pattern, register

ops = torch.ops.megafx

_CASTS = ("no", "dtype", "same", "late", "early")
_SPELLINGS = {"scaled": ("mul", "div", "no"), "cast": _CASTS, "dropped": (True, False)}
_OPS = {"add": "add", "fill": "masked_fill", "keep": "where"}


def _needs(scaled: str, cast: str, dropped: bool) -> tuple[str, ...]:
    wanted = {"softmax": True, scaled: scaled != "no", "dropout": dropped, "to": cast in ("dtype", "late", "early")}
    return tuple(op for op, here in wanted.items() if here)


def _scaled(scores: Tensor, scaled: str, cast: str, scale: float) -> Tensor:
    z = scores.float() if cast == "early" else scores
    return z * scale if scaled == "mul" else z / scale if scaled == "div" else z


def _weights(z: Tensor, dtype: torch.dtype, cast: str, dropped: bool, p: float) -> Tensor:
    if cast == "dtype":
        y = torch.softmax(z, -1, dtype=torch.float32).to(dtype)
    elif cast == "same":
        y = torch.softmax(z, -1, dtype=dtype)
    elif cast == "late":
        y = torch.softmax(z.float(), -1).to(dtype)
    else:
        y = torch.softmax(z, -1).to(dtype)
    return F.dropout(y, p, True) if dropped else y


def _narrows(m: Match) -> str | None:
    """Why a match is refused whose softmax has less precision than its scores: fp64 models with an fp32 softmax."""
    if m["scores"].dtype == torch.float64 and m["cast"] in ("dtype", "late", "early"):
        return "its scores are fp64, and its softmax is fp32: the op computes in fp64"
    return None


def _factor(scaled: str, scale: float) -> float:
    return scale if scaled == "mul" else 1.0 / scale if scaled == "div" else 1.0


_SCORES = {4: "b n s t", 3: "m s t"}
_MASKS = {4: "[1|b 1|n 1|s t]", 3: "[1|m 1|s t]"}


@register
class ScaleMaskSoftmax(Pattern):
    """dropout(softmax(mask(scale * scores))) -> scale_mask_softmax(scores, mask): one pass over the scores."""

    name = "scale_mask_softmax"
    knob = "masked_softmax_fusion"
    variants = {"rank": (4, 3), "mask_by": ("add", "fill", "keep"), "flat": (False, True), **_SPELLINGS}
    scalars = {"scale": float, "fill": float, "p": float}

    def tensors(rank, mask_by, flat, scaled, cast, dropped):
        dtype = "bool" if mask_by != "add" else "f32" if cast == "early" else "M" if cast == "no" else "D"
        return {"scores": f"D[{_SCORES[rank]}]", "mask": dtype + ("[s t]" if flat else _MASKS[rank])}

    def needs(rank, mask_by, flat, scaled, cast, dropped):
        three = () if rank == 4 else ("bmm",)
        return (_OPS[mask_by], *_needs(scaled, cast, dropped), *three)

    def match(scores, mask, *, mask_by, flat, scaled, cast, dropped, scale, fill, p):
        z = _scaled(scores, scaled, cast, scale)
        if mask_by == "add":
            z = z + mask
        elif mask_by == "fill":
            z = z.masked_fill(mask, fill)
        else:
            z = torch.where(mask, z, fill)
        return _weights(z, scores.dtype, cast, dropped, p)

    def where(m):
        scores, fill = m.node("scores"), _fill_before(m.node("scores"))
        if m["mask_by"] == "add" and m["scores"].dtype.itemsize == 2 and masked_before(m.program, scores):
            return (
                "its scores hold a mask: half precision rounds its sum with what is added, and a query may see no key"
            )
        if fill is None:
            return _narrows(m)
        if m["mask_by"] == "add" and _fill_of(m.program, fill) == -math.inf:  # it goes into the mask that is added
            return _narrows(m) if _no_row_is_blind(m, fill, m.node("mask")) else _BLIND
        if not _row_sees_a_key(m, fill, m["mask_by"]):
            return "its scores are filled before: a query may see no key, and its weights follow from both masks"
        return _narrows(m)

    def make(scores, mask, *, mask_by, scaled, scale, fill, drop):
        hidden = mask.logical_not() if mask_by == "keep" else mask
        fill = -math.inf if mask_by == "add" else fill
        return ops.scale_mask_softmax(scores, hidden, _factor(scaled, scale), False, 0, fill, *drop.args)


@register
class ScaleSoftmax(Pattern):
    """dropout(softmax(scale * scores)) -> scale_mask_softmax(scores, None)."""

    name = "scale_softmax"
    knob = "masked_softmax_fusion"
    variants = {"rank": (4, 3), **_SPELLINGS}
    scalars = {"scale": float, "p": float}

    def tensors(rank, scaled, cast, dropped):
        return {"scores": f"D[{_SCORES[rank]}]"}

    def needs(rank, scaled, cast, dropped):
        return (*_needs(scaled, cast, dropped), *(() if rank == 4 else ("bmm",)))

    def match(scores, *, scaled, cast, dropped, scale, p):
        return _weights(_scaled(scores, scaled, cast, scale), scores.dtype, cast, dropped, p)

    where = _narrows

    def make(scores, *, scaled, scale, drop):
        return ops.scale_mask_softmax(scores, None, _factor(scaled, scale), False, 0, -math.inf, *drop.args)


# -- what comes before the op


def mask_spec(mask_is: str) -> dict[str, str]:
    return {} if mask_is == "none" else {"mask": ("M" if mask_is == "added" else "bool") + _MASKS[4]}


def softmax_op(sunk: bool) -> str:
    return "sink_softmax" if sunk else "scale_mask_softmax"


def softmax_of(scores: Tensor, mask: Tensor | None, sink: Tensor | None, *rest: Any) -> Tensor:
    """scale_mask_softmax, or with a sink sink_softmax."""
    operands = (scores, mask) if sink is None else (scores, mask, sink)
    made: Tensor = getattr(ops, softmax_op(sink is not None))(*operands, *rest)
    return made


class _Before(Pattern):
    """softmax of scores on which something was done: it goes into the op's scale or mask."""

    knob = "masked_softmax_fusion"
    scalars = {"scale": float, "fill": float, "other": float}


@register
class ScaleOfScores(_Before):
    """scale_mask_softmax(scores * c, mask, scale) -> scale_mask_softmax(scores, mask, c * scale)."""

    name = "scale_of_scores"
    variants = {"by": ("mul", "div"), "mask_is": ("added", "hidden", "none"), "sunk": (False, True)}

    def tensors(by, mask_is, sunk):
        return {"scores": "D[b n s t]"} | mask_spec(mask_is) | ({"sink": "S[n]"} if sunk else {})

    def needs(by, mask_is, sunk):
        return (by, softmax_op(sunk))

    def match(scores, drop, mask=None, sink=None, *, by, scale, fill, other):
        z = scores * other if by == "mul" else scores / other
        return softmax_of(z, mask, sink, scale, False, 0, fill, *drop.args)

    def make(scores, drop, mask=None, sink=None, *, by, scale, fill, other):
        factor = scale * other if by == "mul" else scale / other
        return softmax_of(scores, mask, sink, factor, False, 0, fill, *drop.args)


@register
class BiasOfScores(_Before):
    """scale_mask_softmax(scores + bias, mask, scale) -> scale_mask_softmax(scores, scale * bias with mask, scale)."""

    name = "bias_of_scores"
    variants = {
        "mask_is": ("added", "hidden", "none"),
        "wide": (False, True),
        "flat": (False, True),
        "sunk": (False, True),
    }

    def tensors(mask_is, wide, flat, sunk):
        bias = ("f32" if wide else "B") + ("[1|n 1|s t]" if flat else "[1|b 1|n 1|s t]")
        return {"scores": "D[b n s t]", "bias": bias} | mask_spec(mask_is) | ({"sink": "S[n]"} if sunk else {})

    def needs(mask_is, wide, flat, sunk):
        return ("add", softmax_op(sunk))

    def match(scores, bias, drop, mask=None, sink=None, *, scale, fill):
        return softmax_of(scores + bias, mask, sink, scale, False, 0, fill, *drop.args)

    def where(m):
        scores = m.node("scores")
        while scores.target in ON_THE_WAY:
            scores = scores.args[0]
        if scores.target not in PRODUCTS:
            return ""
        if _rounds(m, m.node("scores")):
            return _ROUNDED
        if m["mask"] is not None and m["mask"].dtype == torch.bool:
            if not _hides(m["fill"], m["scores"].dtype):
                return f"its fill {m['fill']} is no mask: what is hidden still depends on the bias"
            return follows_from_both(m)
        return None

    def make(scores, bias, drop, mask=None, sink=None, *, scale, fill):
        wide = torch.promote_types(scores.dtype, bias.dtype)
        added = bias if scale == 1 else bias * scale
        added = added[None] if added.dim() == 3 else added
        if mask is not None:
            filled = mask.dtype == torch.bool
            added = added.masked_fill(mask, fill) if filled else added + mask
            fill = max(fill, FILLS) if filled else fill
        return softmax_of(scores.to(wide), added, sink, scale, False, 0, fill, *drop.args)


@register
class HiddenScores(_Before):
    """scale_mask_softmax(where(visible, scores, fill), mask) -> scale_mask_softmax(scores, mask, filled where hidden)."""

    name = "hidden_scores"
    variants = {"by": ("where", "where tensor", "masked_fill")}

    def tensors(by):
        found = {"scores": "D[b n s t]", "hidden": "bool[1|b 1|n 1|s t]"} | mask_spec("added")
        return found | ({"value": "D[]"} if by == "where tensor" else {})

    def needs(by):
        return (by.split()[0], "scale_mask_softmax")

    def match(scores, hidden, drop, mask, value=None, *, by, scale, other):
        if by == "masked_fill":
            z = scores.masked_fill(hidden, other)
        else:
            z = torch.where(hidden, scores, other if value is None else value)
        return ops.scale_mask_softmax(z, mask, scale, False, 0, -math.inf, *drop.args)

    def where(m):
        fill = m["other"] if m["value"] is None else _constant(m.program, m.node("value"))
        if fill is None or not _hides(fill * m["scale"], m["mask"].dtype):
            return f"its fill {fill} is not known to hide"
        if fill * m["scale"] == -math.inf and not _no_row_is_blind(m, m.roots[0].args[0], m.node("mask")):
            return _BLIND
        if fill * m["scale"] > -math.inf and not _row_sees_a_key(m, m.roots[0].args[0], "add"):
            return (
                f"a query may see no key, and its weights then follow from the fill {fill} and the mask that is added"
            )
        return None

    def make(scores, hidden, drop, mask, *, by, scale):
        unseen = hidden if by == "masked_fill" else hidden.logical_not()
        return ops.scale_mask_softmax(
            scores, mask.masked_fill(unseen, -math.inf), scale, False, 0, -math.inf, *drop.args
        )


def _fill_before(scores: fx.Node) -> fx.Node | None:
    """The node that fills scores before they are scaled or biased, if one does."""
    while scores.target in ON_THE_WAY and isinstance(scores.args[0], fx.Node):
        scores = scores.args[0]
    return scores if scores.target in FILLED_BY else None


def _fill_of(program: Program, node: fx.Node) -> float | None:
    """The number that masked_fill, or where(visible, scores, number), puts in the place of scores; None if it is not known."""
    value = node.args[2]
    return _constant(program, value) if isinstance(value, fx.Node) else float(value)


def _filled(reader: MaskReader, fill: fx.Node) -> Any:
    """The mask of what a node leaves visible that fills scores."""
    by_fill = op_name(fill) == "masked_fill"
    return read_visible(reader, fill.args[1 if by_fill else 0], visible=not by_fill, symmetric=True)


def _row_sees_a_key(m: Match, fill: fx.Node, mask_by: str) -> bool:
    """True if a key of each query is hidden by one of two masks at most, and all that neither shows have no weight.

    fill: a node that fills scores; mask_by: how the match's own mask is spelled.
    """
    reader = MaskReader(m.program)
    filled = _filled(reader, fill)
    own = read_visible(reader, m.node("mask"), visible=mask_by != "fill", symmetric=True)
    if filled is None or own is None or filled.padding or own.rest:
        return False
    m.program.assumed |= {name: m.program.table(name) for name in reader.used}
    return not own.padding or (mask_by == "add" and set(filled.parts) <= set(own.parts))


_BLIND = "a query may see no key: the NaN in its gradients reaches what is added, and not what is filled"


def _no_row_is_blind(m: Match, fill: fx.Node, added: fx.Node) -> bool:
    """True if each query sees a key, where a node fills scores with -inf, and a mask or bias is added to the result."""
    reader = MaskReader(m.program)
    filled = _filled(reader, fill)
    if filled is None or filled.padding:
        return False
    own = read_visible(reader, added, visible=True, symmetric=True)
    hides = _may_hide(m, added)
    if own is not None:
        hides = bool(own.padding and own.fill == -math.inf) or may_hide(m.program, own.rest)
    m.program.assumed |= {name: m.program.table(name) for name in reader.used}
    return not hides


def follows_from_both(m: Match) -> str | None:
    """Why a boolean mask that fills scores does not go into the bias that was added to them: the bias hides keys too, or may,
    and a query may see none."""
    if m["fill"] == -math.inf:
        return _BLIND if _may_hide(m, m.node("bias")) else None
    reader = MaskReader(m.program)
    own = read_visible(reader, m.node("bias"), visible=True, symmetric=True)
    if own is None or not own.parts:
        blind = _may_hide(m, m.node("bias"))
    else:
        filled = read_visible(reader, m.node("mask"), visible=False, symmetric=True)
        blind = filled is None or bool(filled.padding or own.padding) or may_hide(m.program, own.rest)
        m.program.assumed |= {name: m.program.table(name) for name in reader.used}
    return (
        "a query may see no key: there scores that the bias hides have a gradient, and filled ones none"
        if blind
        else None
    )


_ROUNDED = "its scores hold a mask: half precision rounds their sum with what is added, and a query may see no key"


def _rounds(m: Match, scores: fx.Node) -> bool:
    """True if what is added to scores of half precision is lost beside a mask that they hold already."""
    return m["scores"].dtype.itemsize == 2 and masked_before(m.program, scores)


def _may_hide(m: Match, added: fx.Node) -> bool:
    """True if what is added to scores may be a mask, and not a bias alone."""
    return may_hide(m.program, (Leaf(added, ()),))


def _hides(fill: float, dtype: torch.dtype) -> bool:
    """True if an additive mask of this value hides altogether, as the op has it."""
    return fill <= mask_floor(dtype)


FILLED_BY = aten_ops("masked_fill.Scalar masked_fill.Tensor where.self where.ScalarOther where.ScalarSelf where.Scalar")
ON_THE_WAY, PRODUCTS = aten_ops("mul.Tensor div.Tensor to.dtype reshape add.Tensor"), aten_ops("matmul bmm baddbmm")


def _constant(program: Program, node: fx.Node) -> float | None:
    """The number that a tensor of one number is, where the program knows it."""
    given = dict(program.input_nodes()).get(node)
    if given is not None and given.kind == "constant" and program.constants[given.name].numel() == 1:
        return float(program.constants[given.name])
    if str(node.target) in _FULL:
        value = argument(node, "s" if "scalar" in str(node.target) else "fill_value")
        return float(value) if isinstance(value, (int, float)) else None
    return None


_FULL = ("aten.full.default", "aten.full_like.default", "aten.scalar_tensor.default")
