"""Ops that ranks write out with others: the lookup in a sharded vocabulary, and what files of ops say of theirs (`Localized`).

The table is sharded on rows, one contiguous range a rank (rules/strategies.py proposes no other layout). A rank looks up the
ids in its range and contributes zero for the others. Source: Megatron-LM vocab_parallel_embedding.
"""

from __future__ import annotations

import torch
from torch import fx

from megafx.ir.facts import facts_of
from megafx.ir.program import VAL
from megafx.passes.localize.editor import Family, Localizer, replace
from megafx.placements.types import P
from megafx.planner.plan import OpChoice

aten, ops = torch.ops.aten, torch.ops.megafx


def localize_embedding(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """embedding(w, ids) with w sharded on rows -> rows of ids in this rank's range, zeros elsewhere: a partial."""
    if choice.out != P or not choice.ins[0].is_shard:
        return
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    rows = choice.ins[0].cut.local_size(local.t)
    emit = local.before(node)
    rank = emit(ops.axis_index.default, local.axis, ids.meta[VAL].device)
    index = emit(aten.sub.Tensor, ids, emit(aten.mul.Tensor, rank, rows))
    mine = emit(aten.bitwise_and.Tensor, emit(aten.ge.Scalar, index, 0), emit(aten.lt.Scalar, index, rows))
    zero = emit(aten.scalar_tensor.default, 0, dtype=index.meta[VAL].dtype, device=index.meta[VAL].device)
    safe = emit(aten.where.self, mine, index, zero)
    found = emit(aten.embedding.default, weight, safe)
    padding = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
    if isinstance(padding, int) and padding >= 0:
        # padding_idx: the row is read but gets no gradient; the index is global, rows are local
        is_padding = emit(aten.unsqueeze.default, emit(aten.eq.Scalar, ids, padding), -1)
        found = emit(aten.where.self, is_padding, emit(aten.detach.default, found), found)
    nothing = emit(aten.scalar_tensor.default, 0, dtype=found.meta[VAL].dtype, device=found.meta[VAL].device)
    inside = emit(aten.unsqueeze.default, mine, -1)
    replace(local, node, emit(aten.where.self, inside, found, nothing, placement=P))


def localize_by_facts(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """What the op's own file says (`Localized`): a cross entropy becomes local statistics, an all-gather, a loss."""
    localized = facts_of(node.target).localize
    if localized is None or localized.write is None or choice.factor != localized.factor:
        return
    layout = local.layout(next(p for p in choice.ins if p.is_shard))
    replace(local, node, localized.write(local.before(node), node, layout, local.t, local.axis))


FAMILIES: dict[str, Family] = {"aten.embedding.default": localize_embedding}
