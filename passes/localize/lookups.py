"""Lookups in a sharded vocabulary: the embedding and the cross entropy.

Both are sharded on rows of one contiguous range per rank (op_rules proposes no other layout for them). A rank looks up the
ids in its range and contributes zero for the others. The loss exchanges four statistics a token (max, sum of exponentials,
picked logit, sum of logits) in one all-gather, and its backward needs no collective: the global log-sum-exp suffices.
Source: Megatron-LM vocab_parallel_embedding and vocab_parallel_cross_entropy, which use 1 and 3 all-reduces.
"""

from __future__ import annotations

import torch
from torch import fx

import megafx.kernels.loss.cross_entropy  # noqa: F401  registers the ops
from megafx.ir.program import PLACEMENT, VAL
from megafx.passes.localize.editor import Family, Localizer, replace
from megafx.placements.types import I, Layout, P, S
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


def localize_cross_entropy(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """cross_entropy(logits S1, target) -> local statistics, one all-gather of [t, T, 4], local loss: invariant."""
    if choice.factor != "v":
        return
    logits, target, ignore_index, smoothing = node.args
    layout = local.layout(choice.ins[0])
    emit = local.before(node)
    fixed = emit(aten.detach.default, logits)  # ce_loss knows the whole derivative
    stats = emit(ops.ce_stats.default, fixed, target, layout, local.t, local.axis)
    stacked = emit(aten.unsqueeze.default, stats, 0)
    one_each = Layout.contiguous(local.t, local.t)
    stacked.meta[PLACEMENT] = S(0, one_each)
    flat = list(one_each.flat())
    everyone = emit(ops.transition.default, stacked, "S0", "I", flat, [], local.axis, local.t, placement=I)
    args = (logits, target, everyone, ignore_index, smoothing, layout, local.t, local.axis)
    loss = ops.ce_loss_lse if node.target is ops.cross_entropy_lse.default else ops.ce_loss
    replace(local, node, emit(loss.default, *args, placement=I))


FAMILIES: dict[str, Family] = {
    "aten.embedding.default": localize_embedding,
    "megafx.cross_entropy.default": localize_cross_entropy,
    "megafx.cross_entropy_lse.default": localize_cross_entropy,
}
