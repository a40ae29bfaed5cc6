"""Ops that need more than their own call on local operands.

Sizes in arguments, means, draws, pads near poles, the lookup in a sharded vocabulary, and ops with a `Localized` fact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.facts import facts_of
from megafx.ir.nodes import argument, draw_of, is_draw, set_arguments
from megafx.ir.program import VAL, get_at, set_at
from megafx.ops.axes import DrawAxis
from megafx.ops.embedding_of_rank import EMBEDDING_OF_RANK
from megafx.ops.shared_heads import repeats_for
from megafx.passes.localize.editor import Family, Localizer, replace
from megafx.placements.data_axis import CONTEXT_AXIS
from megafx.placements.types import Layout, P, S
from megafx.placements.views import local_offset
from megafx.planner.plan import OpChoice
from megafx.rules.candidates import HEADS

aten, ops = torch.ops.aten, torch.ops.megafx

# -- poles
#
# Ops with a pole, or an infinite slope, at some finite number: their pads hold a number far from it. A pad's gradient is zero,
# but zero times an infinite slope is NaN, which would reach the gradient of everything that is summed with the pads. Most
# pads are zeros, where x / y, rsqrt and log are worst.

_POLES = {  # (position of the operand, what its pads hold) -> ops
    (0, 0.0): "acos asin atanh erfinv",
    (0, 2.0): "acosh",
    (0, 1.0): "digamma lgamma log log10 log1p log2 pow.Tensor_Scalar pow.Tensor_Tensor reciprocal rsqrt sqrt",
    (1, 1.0): "div.Tensor div.Tensor_mode fmod.Tensor hypot remainder.Tensor xlogy.Tensor",
    (0, 0.5): "logit",
    (2, 1.0): "addcdiv",
}
POLES = {
    (f"aten.{op}" if "." in op else f"aten.{op}.default"): place
    for place, some in _POLES.items()
    for op in some.split()
}


SMALL_EPS = 1e-12  # below it norms of zero pads are unsafe: fp32 gradients cube 1 / sqrt(eps)


def keep_pads_off_poles(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """Fill the pads of the operand that `POLES` names, and those of a norm without an eps with rows 1, 2, 3, ...

    A power with a whole exponent from 1 on has no pole.
    """
    name, power = str(node.target), node.args[1] if node.target is aten.pow.Tensor_Scalar else None
    eps = argument(node, "eps") if "norm" in name else None
    bare = isinstance(eps, (int, float)) and eps < SMALL_EPS
    if isinstance(power, (int, float)) and power >= 1 and float(power).is_integer():
        return
    at, fill = POLES.get(name, (-1, 0.0))
    for operand, placement in zip(local.rules[node].operands, choice.ins, strict=True):
        padded = placement.is_shard and placement.cut.padded(local.t)
        if padded and operand.path[0] == at:
            set_at(node, operand.path, local.mask_pads(node, get_at(node, operand.path), placement, fill))
        elif padded and bare and len(operand.factors) > 1:
            set_at(node, operand.path, local.mask_pads(node, get_at(node, operand.path), placement, "row"))


# -- sizes in arguments


def localize_sizes(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """reshape(x, [b, s, 768]) with dim 2 sharded over 2 -> reshape(x, [b, s, 384])."""
    node.update_arg(1, local.local_dims(local.global_shape[node], choice.out))


def localize_slice(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """A slice that takes whole blocks of a blocked layout (one part of a fused q|k|v) takes their local sizes."""
    source, shape = choice.ins[0], local.global_shape[node]
    dim = argument(node, "dim") % len(shape)
    if source.dim != dim:
        return
    start, whole = argument(node, "start") or 0, source.cut.size
    assert isinstance(start, int), "a sharded dim is sliced at static bounds only (rules/families_dims.py)"
    start = max(start + whole, 0) if start < 0 else min(start, whole)
    bounds = (local_offset(source.cut, at, local.t) for at in (start, start + shape[dim]))
    node.args = (node.args[0], dim, *bounds)


# -- means


def localize_mean(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """mean over a sharded dim -> a partial: local mean / ranks, or where ranks hold pads local sum / global count."""
    if choice.out != P:
        return
    source = node.args[0]
    if not any(p.is_shard and p.cut.padded(local.t) for p in choice.ins):
        mean = local.before(node)(node.target, *node.args, placement=P, **node.kwargs)
        replace(local, node, local.before(node)(aten.div.Scalar, mean, local.t, placement=P))
        return
    shape = local.global_shape[local.rules[node].operands[0].node]
    given: Any = argument(node, "dim")
    dims = [int(d) % len(shape) for d in given] if given else list(range(len(shape)))
    keepdim = bool(argument(node, "keepdim"))
    emit = local.before(node)
    total = emit(aten.sum.dim_IntList, source, dims, keepdim, dtype=argument(node, "dtype"), placement=P)
    count: int | fx.Node = 1
    for d in dims:
        count = local.sizes.mul(count, local.sizes(shape[d]))
    replace(local, node, emit(aten.div.Scalar, total, count, placement=P))


# -- draws


def localize_draw(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """dropout(x, seed, p, op_id, -1, [], tp) -> dropout(x, seed, p, op_id, dim, layout, tp); so any op that draws.

    On a shard it draws its slice of the bits that one process would draw: the op gets the cut of its result. What does not
    draw has a cut only of an outer axis (the queries of attention), which stays; heads that such an axis cuts are whole to the
    op, and cut once more on the next.
    """
    drop = draw_of(node)
    draws = bool(drop.p and drop.seed is not None)
    if choice.out.is_shard and not draws and local.axis == CONTEXT_AXIS and choice.out.dim == HEADS:
        return
    if choice.out.is_shard and (drop.shard_dim < 0 or draws):
        axis = str(DrawAxis.parse(argument(node, "axis"))._replace(axis=local.axis))
        set_arguments(node, shard_dim=choice.out.dim, layout=local.layout(choice.out), axis=axis)


# -- heads that ranks of an outer axis exchange


def localize_transition(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """transition(x, S2 -> S1) of an outer axis, [1, c, h]: where the h heads that it gives a rank are cut -> [1, c, h / t]."""
    for tag, layout, placement in ((1, 3, choice.ins[0]), (2, 4, choice.out)):
        if placement.is_shard and node.args[tag] == placement.tag:
            left = local.local_dims((placement.cut.size,), S(0, placement.cut))[0]
            node.update_arg(layout, [1, node.args[6], left])


# -- key-value heads that ranks share


def localize_heads(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """attention(q, k, v) with q cut wherever groups end -> attention(q, heads_of_rank(k), heads_of_rank(v)).

    q is a shard, k and v are whole: the rank takes the heads that its query heads need (ops/shared_heads.py).
    """
    if is_draw(node):
        localize_draw(local, node, choice)
    q, k, v = node.args[:3]
    heads, kv_heads = choice.out.cut.size, k.meta[VAL].shape[-3]
    repeats = repeats_for(heads, kv_heads, local.t)
    layout = Layout.contiguous(kv_heads * repeats, local.t)
    emit, placement = local.before(node), S(choice.out.dim, layout)
    part = (repeats, [*layout.flat()], local.axis, local.t)
    own = {x: emit(ops.heads_of_rank.default, x, *part, placement=placement) for x in (k, v)}
    node.args = (q, own[k], own[v], *node.args[3:])


# -- what ranks write out together


def localize_embedding(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """embedding(w, ids) with w sharded on rows -> rows of ids in this rank's range, zeros elsewhere: a partial."""
    if choice.out == P and choice.ins[0].is_shard:
        padding = argument(node, "padding_idx")
        args: Any = (*node.args[:2], padding, local.layout(choice.ins[0]), local.axis, local.t)
        replace(local, node, local.before(node)(EMBEDDING_OF_RANK, *args, placement=P))


def localize_by_facts(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """What the op's own file says (`Localized`): a cross entropy becomes local statistics, an all-gather, a loss."""
    localized = facts_of(node.target).localize
    if localized is None or localized.write is None or choice.factor != localized.factor:
        return
    layout = local.layout(next(p for p in choice.ins if p.is_shard))
    replace(local, node, localized.write(local.before(node), node, layout, local.t, local.axis))


REWRITES: dict[str, Family] = {
    "aten.embedding.default": localize_embedding,
    "aten.view.default": localize_sizes,
    "aten.reshape.default": localize_sizes,
    "aten._unsafe_view.default": localize_sizes,
    "aten.expand.default": localize_sizes,
    "aten.slice.Tensor": localize_slice,
    "megafx.transition.default": localize_transition,
    "aten.mean.dim": localize_mean,
    "aten.mean.default": localize_mean,
}
