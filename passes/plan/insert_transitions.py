"""Insert the transitions that the plan implies.

Before:  %2 = linear(%0, %1)                       # plan: P; its user wants I
         %3 = add(%2, %x)
After:   %2 = linear(%0, %1)                       # P@tp
         %3 = transition(%2, P, I)                 # I@tp ; forward all-reduce, backward nothing
         %4 = add(%3, %x)
Legal because: a transition does not change the value that the ranks hold together; here, before shapes are local, it is
written for an axis of size 1, where every transition is the identity, so the graph stays a correct program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

import megafx.ops.collectives  # noqa: F401  registers megafx::transition
from megafx.errors import PlanError
from megafx.ir.program import MADE_BY, PLACEMENT, VAL, Phase, Program, inherit, located, set_at
from megafx.ir.sizes import SizeEmitter
from megafx.placements.types import I, Placement
from megafx.planner.context import Accepts, CompileContext, accepts, output_placement
from megafx.planner.plan import Plan

REQUIRES, ENSURES = Phase.PLANNED, Phase.PLACED
NAME = "insert_transitions"


def insert_transitions(program: Program, context: CompileContext) -> int:
    """Insert transitions and set `placement` on every active node; returns the number of transitions."""
    plan, rules = context.solved, context.rules
    emitter = _TransitionEmitter(program, plan)
    stored = _storage(program, context)
    active = [n for n in program.graph.nodes if n in rules or n in stored]
    for node in active:
        node.meta[PLACEMENT] = plan.ops[node.name].out if node in rules else stored[node]
    for node in active:
        for transition in plan.transitions.get(node.name, ()):
            emitter.make(node, transition.src, transition.dst)
    for node, rule in rules.items():
        for operand, placement in zip(rule.operands, plan.ops[node.name].ins, strict=True):
            if operand.active or placement.is_shard:
                set_at(node, operand.path, emitter.at(operand.node, placement, operand.active))
    leaving = []
    for index, value in enumerate(program.results()):
        if isinstance(value, fx.Node) and PLACEMENT in value.meta:
            value = emitter.leaving(value, context.accepts[value])
            program.outputs[index] = replace(program.outputs[index], placement=value.meta[PLACEMENT])
        leaving.append(value)
    program.output_node().args = (tuple(leaving),)
    program.phase = Phase.PLACED
    return emitter.count


def _storage(program: Program, context: CompileContext) -> dict[fx.Node, Placement]:
    """Placement of each active input: parameters as the plan says, the user's tensors whole but for shards of caches."""
    stored = {}
    for node, spec in program.input_nodes():
        value = node.meta.get(VAL)
        if spec.kind == "param":
            stored[node] = context.solved.params[spec.name]
        elif spec.kind == "user" and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            stored[node] = context.fixed.get(spec.name, I)
    return stored


class _TransitionEmitter:
    """Makes each (value, placement) once and remembers it."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.count = program, plan, 0
        self.sizes = SizeEmitter(program.graph, program.sizes)
        self._made: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self._last: dict[fx.Node, fx.Node] = {}

    def make(self, value: fx.Node, src: Placement, dst: Placement) -> fx.Node:
        """The value at `dst`, made from the value at `src`."""
        if (value, dst) not in self._made:
            self._made[value, dst] = self._emit(value, self.at(value, src, True), src, dst)
        return self._made[value, dst]

    def at(self, value: fx.Node, placement: Placement, active: bool) -> fx.Node:
        """The value at a placement that it was produced at or has a transition to; a shard of an inactive value is sliced."""
        if not active:
            if (value, placement) not in self._made:
                self._made[value, placement] = self._emit(value, value, I, placement)
            return self._made[value, placement]
        if value.meta[PLACEMENT] == placement:
            return value
        if (value, placement) not in self._made:
            raise PlanError(
                f"the plan uses %{value.name} at {self.plan.text_of(placement)}, but it is "
                f"{self.plan.text_of(value.meta[PLACEMENT])} and has no transition to there",
                fix="give the plan a transition of this value, or plan again",
                **located(value),
            )
        return self._made[value, placement]

    def leaving(self, value: fx.Node, wanted: Accepts) -> fx.Node:
        """The value in a placement that the output accepts, I before R before a shard."""
        have = {value.meta[PLACEMENT]: value} | {p: n for (v, p), n in self._made.items() if v is value}
        for kind in ("I", "R", "S"):
            for placement, node in have.items():
                if placement.kind == kind and accepts(wanted, placement):
                    return node
        return self.make(value, value.meta[PLACEMENT], output_placement(wanted))

    def _emit(self, value: fx.Node, source: fx.Node, src: Placement, dst: Placement) -> fx.Node:
        layouts: list[Any] = [[self.sizes(n) for n in p.flat_layout] for p in (src, dst)]
        graph = self.program.graph
        args = (source, src.tag, dst.tag, *layouts, self.plan.axis, 1)
        # behind the sizes there; others behind the value and what was already made of it
        top = value.op == "placeholder"
        with graph.inserting_before(self.sizes.anchor) if top else graph.inserting_after(self._last.get(value, value)):
            node = graph.call_function(torch.ops.megafx.transition.default, args)
        inherit(node, value, NAME)
        node.meta.update({VAL: source.meta[VAL], PLACEMENT: dst, MADE_BY: (NAME,)})
        self._last[value] = node
        self.count += 1
        return node
