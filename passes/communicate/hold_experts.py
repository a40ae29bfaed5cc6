"""Parameters of experts become this rank's experts alone, where the plan says so.

Before:  %w [8, k, n]; %e = transition(%w, R -> S0, 'ep', 2); %h = grouped_mm(%r, %e, %ends)
         %d = grouped_mm_weight(%r, %g, %ends); %dw = transition(%d, S0 -> P, 'ep', 2); return ..., %dw
After:   %w [4, k, n]; %h = grouped_mm(%r, %w, %ends)
         %d = grouped_mm_weight(%r, %g, %ends); return ..., %d
Legal because: ranks store what the transition gives them. The others add zeros to the gradient of a rank's experts: what it
has of it is all that the ranks of this axis have.

Of experts of a list each parameter has one rank, its owner (ops/owners.py):

Before:  %s = stack([%w0, %w1, ..]); %e = transition(%s, R -> S0, 'ep', 2)
         %d = ..; %ds = transition(%d, S0 -> P, 'ep', 2); return ..., select(%ds, 0, 0), select(%ds, 0, 1), ..
After:   %e = owner_stack([%w0, %w1, ..], 2, 'ep')
         %d = ..; return ..., owner_parameter_gradient(select(%d, 0, 0), 0, 'ep', 2), ..

A graph that reads a stack in another way gathers it: %e = transition(%w, S0 -> R, 'ep', 2), whose gradient is
transition(%dw, P -> S0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megafx.errors import PlanError
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import behind, mark
from megafx.ir.program import PHASE, PLACEMENT, VAL, Builder, Phase, Program, located
from megafx.ops.owners import OWNER_PARAMETER_GRADIENT, OWNER_STACK
from megafx.placements.data_axis import EXPERT_AXIS
from megafx.placements.types import Layout, S
from megafx.planner.context import CompileContext

REQUIRES = (Phase.LOCAL, Phase.JOINT)
NAME = "hold_experts"
aten, ops = torch.ops.aten, torch.ops.megafx
_MOVED = {ops.transition.default}


def hold_experts(program: Program, context: CompileContext) -> int:
    """Return the number of parameters of which a rank holds its experts."""
    owners = {name: rank for name, rank in context.solved.experts.items() if rank >= 0}
    count = _hold_lists(program, context, owners) if owners else 0
    names = {*context.solved.experts} - {*owners}
    held = {node: spec.name for node, spec in program.input_nodes() if spec.name in names and spec.kind == "param"}
    if not held:
        return count
    assert program.batch is not None and context.data is not None
    gathered = {name for node, name in held.items() if _hold(program, node, context.data.experts)}
    results = list(program.results())
    for i, (node, spec) in enumerate(zip(results, program.outputs, strict=True)):
        if spec.kind == "gradient" and spec.name in names and isinstance(node, fx.Node):
            results[i] = _own(program, node, context.data.experts, "P" if spec.name in gathered else "R")
    program.output_node().args = (tuple(results),)
    program.erase_unused()
    program.batch = replace(program.batch, experts=program.batch.experts | dict.fromkeys(sorted(held.values()), -1))
    return count + len(held)


def _hold_lists(program: Program, context: CompileContext, owners: Mapping[str, int]) -> int:
    """Parameters of single experts become their owners'."""
    held = {node: spec.name for node, spec in program.input_nodes() if spec.name in owners and spec.kind == "param"}
    if not held:
        return 0
    assert program.batch is not None and context.data is not None
    ranks = context.data.experts
    for stack in program.graph.find_nodes(op="call_function", target=aten.stack.default):
        parts = stack.args[0]
        for cut in [u for u in stack.users if is_transition(u, EXPERT_AXIS) and u.args[1:3] == ("R", "S0")]:
            own = [owners.get(held.get(behind(part, _MOVED), "")) for part in parts]
            if own == [j // int(cut.meta[VAL].shape[0]) for j in range(len(parts))]:
                cut.replace_all_uses_with(Builder(program, cut, cut, NAME)(OWNER_STACK, parts, ranks, EXPERT_AXIS))
                program.graph.erase_node(cut)
    program.erase_unused()
    for node, name in held.items():
        for user in node.users:
            if any(n.target is not OWNER_STACK for n in (user.users if is_transition(user) else [user])):
                raise PlanError(
                    f"'{name}' is held by the rank of its expert alone, and this call reads it in another way",
                    fix="set expert_model_parallel_size to 1, or let all calls compute the experts of this list alike",
                    **located(user),
                )
    results = list(program.results())
    for i, (node, spec) in enumerate(zip(results, program.outputs, strict=True)):
        if spec.kind == "gradient" and spec.name in owners and isinstance(node, fx.Node):
            _take_own(program, node)
            build = Builder(program, node.next, node, NAME)
            results[i] = build(OWNER_PARAMETER_GRADIENT, node, owners[spec.name], EXPERT_AXIS, ranks)
    program.output_node().args = (tuple(results),)
    program.erase_unused()
    program.batch = replace(
        program.batch, experts=program.batch.experts | {name: owners[name] for name in held.values()}
    )
    return len(held)


def _take_own(program: Program, gradient: fx.Node) -> None:
    """A gradient of one expert -> the same, of the gradients of this rank's experts."""
    node = gradient
    while not is_transition(node, EXPERT_AXIS):
        node, last = node.all_input_nodes[0], node
        if is_transition(node, EXPERT_AXIS):
            expert = last.args[2] if last.target is aten.select.int else None
        elif node.target is aten.unbind.int and is_transition(node.all_input_nodes[0], EXPERT_AXIS):
            node, expert = node.all_input_nodes[0], last.args[1]
        else:
            continue
        own = node.all_input_nodes[0]
        assert isinstance(expert, int) and node.args[1:3] == ("S0", "P"), (
            f"%{gradient.name} is no gradient of one expert"
        )
        part = Builder(program, last, last, NAME)(aten.select.int, own, 0, expert % int(own.meta[VAL].shape[0]))
        last.replace_all_uses_with(part)
        return


def _hold(program: Program, node: fx.Node, ranks: int) -> bool:
    """The parameter becomes this rank's part. True if some of its readers need all of it."""
    value = node.meta[VAL]
    part = S(0, Layout.contiguous(value.shape[0], ranks))
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
        mark(whole, node.meta.get(PLACEMENT))
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
    part = S(0, Layout.contiguous(gradient.meta[VAL].shape[0], ranks))
    return build(ops.transition.default, gradient, held, part.tag, [], list(part.flat_layout), EXPERT_AXIS, ranks)
