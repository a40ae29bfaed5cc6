"""Parameters of experts become this rank's experts alone, where the plan says so.

Before:  %w [8, k, n]; %e = transition(%w, R -> S0, 'ep', 2); %h = grouped_mm(%r, %e, %ends)
         %d = grouped_mm_weight(%r, %g, %ends); %dw = transition(%d, S0 -> P, 'ep', 2); return ..., %dw
After:   %w [4, k, n]; %h = grouped_mm(%r, %w, %ends)
         %d = grouped_mm_weight(%r, %g, %ends); return ..., %d
Legal because: ranks store what the transition gives them. The others add zeros to the gradient of a rank's experts: what it
has of it is all that the ranks of this axis have.

A graph that reads such a parameter in another way gathers it: %e = transition(%w, S0 -> R, 'ep', 2), whose gradient is
transition(%dw, P -> S0).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megafx.ir.contracts import is_transition
from megafx.ir.program import PHASE, PLACEMENT, VAL, Builder, Phase, Program
from megafx.placements.data_axis import EXPERT_AXIS
from megafx.placements.types import R, experts_held
from megafx.planner.context import Planner

REQUIRES = (Phase.LOCAL, Phase.JOINT)
NAME = "hold_experts"
aten, ops = torch.ops.aten, torch.ops.megafx


def hold_experts(program: Program, planner: Planner) -> int:
    """Return the number of parameters of which a rank holds its experts."""
    names = {*planner.solved.experts}
    held = {node: spec.name for node, spec in program.input_nodes() if spec.name in names and spec.kind == "param"}
    if not held:
        return 0
    assert program.batch is not None and planner.data is not None
    gathered = {name for node, name in held.items() if _hold(program, node, planner.data.experts)}
    results = list(program.results())
    for i, (node, spec) in enumerate(zip(results, program.outputs, strict=True)):
        if spec.kind == "gradient" and spec.name in names and isinstance(node, fx.Node):
            results[i] = _own(program, node, planner.data.experts, "P" if spec.name in gathered else "R")
    program.output_node().args = (tuple(results),)
    program.graph.eliminate_dead_code()
    program.batch = replace(program.batch, experts=tuple(sorted(held.values())))
    return len(held)


def _hold(program: Program, node: fx.Node, ranks: int) -> bool:
    """The parameter becomes this rank's part. True if some of its readers need all of it."""
    value = node.meta[VAL]
    part = experts_held(R, value.shape, 1, ranks)
    users = [*node.users]
    cuts = [u for u in users if is_transition(u, EXPERT_AXIS) and u.args[1:3] == ("R", "S0")]
    with program.fake_mode:
        node.meta[VAL] = value.new_empty([part.cut.local_size(ranks), *value.shape[1:]])
    for cut in cuts:
        cut.replace_all_uses_with(node)
        program.graph.erase_node(cut)
    others = [u for u in users if u not in cuts and u.op != "output"]
    if others:
        ends: Any = (part.tag, "R", list(part.flat_layout), [], EXPERT_AXIS, ranks)
        whole = Builder(program, min(others), others[0], NAME)(ops.transition.default, node, *ends)
        whole.meta.pop(PHASE, None)
        if PLACEMENT in node.meta:
            whole.meta[PLACEMENT] = node.meta[PLACEMENT]
        for user in others:
            user.replace_input_with(node, whole)
    return bool(others)


def _own(program: Program, gradient: fx.Node, ranks: int, held: str) -> fx.Node:
    """A gradient of all experts -> that of this rank's. held: P, or R where the ranks have zeros for each other's experts."""
    if held == "R" and is_transition(gradient, EXPERT_AXIS) and gradient.args[1:3] == ("S0", "P"):
        return gradient.all_input_nodes[0]
    build = Builder(program, gradient.next, gradient, NAME)
    if held == "R" and gradient.target is aten.add.Tensor and len(gradient.all_input_nodes) == 2:
        return build(aten.add.Tensor, *(_own(program, a, ranks, held) for a in gradient.all_input_nodes))
    part = experts_held(R, gradient.meta[VAL].shape, 1, ranks)
    return build(ops.transition.default, gradient, held, part.tag, [], list(part.flat_layout), EXPERT_AXIS, ranks)
