"""Ops with a pole, or an infinite slope, at some finite number: pads hold what is far from it.

A pad's gradient is zero, and zero times an infinite slope is no number: it would reach the gradient of everything that the
pads are summed with. Pads are mostly zeros, where x / y, rsqrt and log are worst.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import draw_of, set_arguments
from megafx.ir.program import get_at, set_at
from megafx.ops.axes import with_axis
from megafx.passes.localize.editor import Family, Localizer, replace
from megafx.placements.types import P
from megafx.placements.views import local_offset
from megafx.planner.plan import OpChoice

# op -> {position of an argument: what its pads hold}
POLES: dict[str, dict[int, float]] = {
    "aten.acos.default": {0: 0.0},
    "aten.acosh.default": {0: 2.0},
    "aten.asin.default": {0: 0.0},
    "aten.atanh.default": {0: 0.0},
    "aten.digamma.default": {0: 1.0},
    "aten.div.Tensor": {1: 1.0},
    "aten.div.Tensor_mode": {1: 1.0},
    "aten.erfinv.default": {0: 0.0},
    "aten.fmod.Tensor": {1: 1.0},
    "aten.hypot.default": {1: 1.0},
    "aten.lgamma.default": {0: 1.0},
    "aten.log.default": {0: 1.0},
    "aten.log10.default": {0: 1.0},
    "aten.log1p.default": {0: 1.0},
    "aten.log2.default": {0: 1.0},
    "aten.logit.default": {0: 0.5},
    "aten.pow.Tensor_Scalar": {0: 1.0},
    "aten.pow.Tensor_Tensor": {0: 1.0},
    "aten.reciprocal.default": {0: 1.0},
    "aten.remainder.Tensor": {1: 1.0},
    "aten.rsqrt.default": {0: 1.0},
    "aten.sqrt.default": {0: 1.0},
    "aten.addcdiv.default": {2: 1.0},
    "aten.xlogy.Tensor": {1: 1.0},
}


def keep_pads_off_poles(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """Fill the pads of the operands that `POLES` names. A power with a whole exponent from 1 on has no pole."""
    poles = POLES.get(str(node.target), {})
    if str(node.target) == "aten.pow.Tensor_Scalar" and float(node.args[1]) >= 1 and float(node.args[1]).is_integer():  # type: ignore[arg-type]
        return
    for operand, placement in zip(local.rules[node].operands, choice.ins, strict=True):
        fill = poles.get(operand.path[0]) if isinstance(operand.path[0], int) else None
        if fill is not None and placement.is_shard and placement.cut.padded(local.t):
            set_at(node, operand.path, local.mask_pads(node, get_at(node, operand.path), placement, fill))


# -- localize views
#
# Views and slices on local shapes: size arguments become the local sizes of the placed result.


def localize_sizes(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """reshape(x, [b, s, 768]) with dim 2 sharded over 2 -> reshape(x, [b, s, 384])."""
    node.update_arg(1, local.local_dims(local.global_shape[node], choice.out))


def localize_slice(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """A slice that takes whole blocks of a blocked layout (one part of a fused q|k|v) takes their local sizes."""
    source = choice.ins[0]
    arg = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(arg, int)
    dim = arg % len(local.global_shape[node])
    if source.dim != dim:
        return
    n = source.cut.size
    start = _bound(node, 2, 0, n)
    local_start = local_offset(source.cut, start, local.t)
    local_end = local_offset(source.cut, start + local.global_shape[node][dim], local.t)
    node.args = (node.args[0], dim, local_start, local_end)


def _bound(node: fx.Node, index: int, default: int, n: int) -> int:
    value = node.args[index] if len(node.args) > index else None
    if value is None:
        return default
    assert isinstance(value, int), "a sharded dim is sliced at static bounds only (op_rules)"
    return max(value + n, 0) if value < 0 else min(value, n)


VIEWS: dict[str, Family] = {
    "aten.view.default": localize_sizes,
    "aten.reshape.default": localize_sizes,
    "aten._unsafe_view.default": localize_sizes,
    "aten.expand.default": localize_sizes,
    "aten.slice.Tensor": localize_slice,
}


# -- localize reductions
#
# Reductions over a sharded dim: means divide by the count of the whole dim.

aten = torch.ops.aten


def localize_mean(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """mean over a sharded dim -> local sum / global count, a partial."""
    if choice.out != P:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = local.global_shape[local.rules[node].operands[0].node]
    given: Any = node.args[1] if len(node.args) > 1 else None
    dims = list(range(len(shape))) if not given else [int(d) % len(shape) for d in given]
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    emit = local.before(node)
    total = emit(aten.sum.dim_IntList, source, dims, keepdim, dtype=node.kwargs.get("dtype"), placement=P)
    count: int | fx.Node = 1
    for d in dims:
        count = local.sizes.mul(count, local.sizes(shape[d]))
    replace(local, node, emit(aten.div.Scalar, total, count, placement=P))


REDUCTIONS: dict[str, Family] = {
    "aten.mean.dim": localize_mean,
    "aten.mean.default": localize_mean,
}


# -- localize random
#
# What draws on a shard draws its slice of the one-process bits: the op is told how its result is cut.


def localize_draw(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """dropout(x, seed, p, op_id, -1, [], tp) -> dropout(x, seed, p, op_id, dim, layout, tp); so any op of ir/nodes.py."""
    if choice.out.is_shard:
        set_arguments(
            node,
            shard_dim=choice.out.dim,
            layout=local.layout(choice.out),
            axis=with_axis(draw_of(node).axis, local.axis),
        )
