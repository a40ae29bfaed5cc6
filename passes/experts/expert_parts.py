"""What a rank has of the weights of experts that ranks share out: OwnExperts, for the passes that share them out.

own = OwnExperts(program, ranks, same); own.part(%up, %h)    # [experts, ..] -> [experts here, ..], for %h to read
own.held_alone()                                             # the parameters of which a rank needs its experts alone
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import PASS_ON, op_name
from megafx.ir.program import VAL, Builder, Program
from megafx.placements.data_axis import EXPERT_AXIS
from megafx.placements.types import Layout, R, S

NAME = "dispatch_experts"  # of the pass that makes the nodes
aten, ops = torch.ops.aten, torch.ops.megafx


class OwnExperts:
    """This rank's part of weights. same: ranks that have the same experts, and cut their rows. made: the weight -> its part;
    stored: the parameter -> the transition that cuts it; listed: the parameter of one expert -> the rank that has it."""

    def __init__(self, program: Program, ranks: int, same: int) -> None:
        self.program, self.ranks, self.same = program, ranks, same
        self.listed: dict[fx.Node, int] = {}
        self.params = {node: spec.name for node, spec in program.input_nodes() if spec.kind == "param"}
        self.made: dict[fx.Node, fx.Node] = {}
        self.stored: dict[fx.Node, fx.Node] = {}

    def here(self, experts: int) -> int:
        """How many experts a rank has, at most."""
        return Layout.contiguous(experts, self.ranks).local_size(self.ranks)

    def part(self, weight: fx.Node, user: fx.Node) -> fx.Node:
        """[experts, ...] -> [experts here, ...], for a node to read: of the parameter that it is a view or a cast of."""
        if weight not in self.made:
            if weight not in self.params and keeps_experts(weight):
                source, *others = weight.args
                target = weight.target
                build = Builder(self.program, weight, weight, NAME)
                self.made[weight] = build(target, self.part(source, weight), *others, **weight.kwargs)
            else:
                self.made[weight] = self._cut(weight, user)
        return self.made[weight]

    def _cut(self, weight: fx.Node, user: fx.Node) -> fx.Node:
        where = min(weight.users) if weight in self.params else weight.next
        experts = S(0, Layout.contiguous(weight.meta[VAL].shape[0], self.ranks))
        ends: Any = (R.tag, experts.tag, [], list(experts.flat_layout), EXPERT_AXIS, self.ranks)
        made = Builder(self.program, where, user, NAME)(ops.transition.default, weight, *ends)
        if weight in self.params:
            self.stored[weight] = made
        elif weight.target is aten.stack.default:
            self._hold_parts(weight)
        else:
            what = (
                f"{op_name(weight)} computes weights of experts, so each rank holds and computes those of all experts"
            )
            self.program.note("experts", what, weight)
        return made

    def _hold_parts(self, stack: fx.Node) -> None:
        """Of experts of a list: parameters that nothing else reads are held by the rank of their expert."""
        parts = stack.args[0]
        here, tied = self.here(len(parts)), {n for n, spec in self.program.input_nodes() if spec.aliases}
        others = [p for p in parts if p not in self.params or p in tied or [*p.users] != [stack] or parts.count(p) > 1]
        if others:
            name = self.params.get(others[0], f"%{others[0].name}")
            why = f"'{name}' is computed, tied or read elsewhere too"
        elif self.same > 1:
            why = f"{self.same} ranks that have the same experts hold shards of parameters"
        else:
            self.listed |= {part: j // here for j, part in enumerate(parts)}
            return
        what = f"{why}, so each rank holds of all {len(parts)} experts what it holds of other parameters"
        self.program.note("experts", what, stack)

    def held_alone(self) -> dict[str, int]:
        """The parameters of which a rank needs its experts alone (Plan.experts)."""
        for param, cut in self.stored.items():
            others = [user for user in param.users if user is not cut]
            if others:
                what = (
                    f"'{self.params[param]}' is read by {op_name(others[0])} too, so each rank holds all experts of it"
                )
                self.program.note("experts", what, others[0])
        stacks = {self.params[param]: -1 for param, cut in self.stored.items() if [*param.users] == [cut]}
        return stacks | {self.params[param]: rank for param, rank in self.listed.items()}


def keeps_experts(node: fx.Node) -> bool:
    """True if a node is a view or a cast of its operand with the same first dim."""
    if node.op != "call_function" or not node.args:
        return False
    args = node.args
    if node.target is aten.transpose.int:
        n = node.meta[VAL].dim()
        return 0 not in (args[1] % n, args[2] % n)
    if node.target is aten.permute.default:
        return bool(args[1][0] == 0)
    return node.target in PASS_ON and isinstance(args[0], fx.Node)
