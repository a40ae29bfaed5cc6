"""Reductions over a sharded dim: means divide by the count of the whole dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.passes.localize_common import Family, Localizer, replace
from megafx.placements import P
from megafx.plan import OpChoice

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
