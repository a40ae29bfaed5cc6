"""Turn the placed graph into one rank's: local shapes, real axis size.

Before:  %1 = transition(%0, I, S1, ..., size=1)   # [b s 768] S1@tp, a graph on global shapes
         %2 = reshape(%1, [b, s, 12, 64])
After:   %1 = transition(%0, I, S1, ..., size=2)   # [b ceil(s/2) 768]
         %2 = reshape(%1, [b, (s+1)//2, 12, 64])
Legal because: every op's strategy is a row of its sharding rule, so applying the op to the shards gives the shard of the
result. Ops that need more than that (a mean, a masked lookup, a vocabulary-parallel loss, a dropout that must draw its slice of
one mask) are rewritten, by rewrites.py and the facts of megafx's own ops. Every value's shape is checked against its placement.

Padding: if t does not divide a dim, shards carry pads (placements/types.py). Forward pads hold anything finite. A reduction
over a padded dim masks them first (a sum of losses: by labels that are ignored), which also keeps their gradients zero; ops
with poles (rewrites.py) get pads far from them.
"""

from __future__ import annotations

import torch
from torch import fx

from megafx.ir.contracts import is_transition
from megafx.ir.facts import QUERY_HEADS
from megafx.ir.nodes import argument, is_draw
from megafx.ir.program import PLACEMENT, VAL, Phase, Program, get_at, recompute_val, set_at
from megafx.ops.owners import OWNER_OPS
from megafx.passes.localize.editor import Localizer, check_shape
from megafx.passes.localize.rewrites import (
    REWRITES,
    keep_pads_off_poles,
    localize_by_facts,
    localize_draw,
    localize_heads,
)
from megafx.placements.types import P
from megafx.planner.context import CompileContext
from megafx.planner.plan import OpChoice

REQUIRES, ENSURES = Phase.PLACED, Phase.LOCAL
CROSS_ENTROPY = "megafx.cross_entropy.default"


def localize_shapes(program: Program, context: CompileContext) -> int:
    """Rewrite the graph to one rank's; returns the number of values whose shape changed."""
    plan = context.solved
    local = Localizer(program, plan.axis, plan.t, context.rules, context.weights)
    changed = 0
    for node in program.placeholders():
        placement = node.meta.get(PLACEMENT)
        if placement is not None and placement.is_shard:
            shape = list(node.meta[VAL].shape)
            shape[placement.dim] = placement.cut.local_size(local.t)
            with program.fake_mode:
                node.meta[VAL] = node.meta[VAL].new_empty(shape)
            local.changed.add(node)
    for node in list(program.graph.nodes):
        if node.op != "call_function" or PLACEMENT not in node.meta:
            continue
        before = local.global_shape.get(node)
        if is_transition(node, plan.axis):
            node.args = (*node.args[:6], plan.t)
            recompute_val(program, node)
            local.changed.add(node)
        else:
            _localize(local, node, plan.ops[node.name])
        value = node.meta[VAL]
        changed += isinstance(value, torch.Tensor) and program.sizes.shape(value) != before
    program.erase_unused()
    program.phase = Phase.LOCAL
    return changed


def _localize(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    arguments = node.args, node.kwargs
    if node.target in OWNER_OPS:
        node.args = (*node.args[:3], local.t)
    if choice.out == P:
        _mask_reduced_pads(local, node, choice)
    keep_pads_off_poles(local, node, choice)
    family = REWRITES.get(str(node.target)) or (localize_draw if is_draw(node) else localize_by_facts)
    if choice.factor == QUERY_HEADS:
        family = localize_heads
    if choice.out.is_shard or any(p.is_shard for p in choice.ins):
        family(local, node, choice)
    if node.users:  # else the family put another node in its place
        if (node.args, node.kwargs) != arguments or not local.changed.isdisjoint(node.all_input_nodes):
            recompute_val(local.program, node)
            local.changed.add(node)
        check_shape(local, node, choice.out)


def _ignore_pads(local: Localizer, loss: fx.Node) -> bool:
    """Where the operand is the loss of each token: pads get labels that it ignores, so that their losses are zeros. The head's
    product and the loss can then be fused. True if they have."""
    if str(loss.target) != CROSS_ENTROPY or argument(loss, "lse"):
        return False
    labels: fx.Node = argument(loss, "target")
    placement = labels.meta.get(PLACEMENT)
    if placement is None or not placement.is_shard:
        return False
    loss.replace_input_with(labels, local.mask_pads(loss, labels, placement, argument(loss, "ignore_index")))
    return True


def _mask_reduced_pads(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """Zero the pads of activations along a sharded dim that the op sums over. Weights' pads are zero already."""
    rule = local.rules[node]
    for operand, placement in zip(rule.operands, choice.ins, strict=True):
        padded = placement.is_shard and placement.cut.padded(local.t)
        if padded and operand.active and operand.node not in local.weights and not _ignore_pads(local, operand.node):
            set_at(node, operand.path, local.mask_pads(node, get_at(node, operand.path), placement))
