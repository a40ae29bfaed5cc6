"""Give each expert of a list to one rank, whole (expert parallelism of experts that are modules).

Before:  %1 = index(%x, [%rows]); %2 = linear(%1, %w); %3 = index_add(%out, 0, %rows, %2)         # experts.1, of rank 1
After:   %x1 = owner_input(%x, 1); %w1 = owner_parameter(%w, 1)
         %1 = index(%x1, [%rows]); %2 = linear(%1, %w1); %3 = index_add(%zeros, 0, %rows, %2)
         %4 = add(%out, owner_output(%3, 1))
Legal because: on one rank the new ops are identities. On several, the planner computes what lies between them whole, and the
sum of what the ranks then add is what all experts add (ops/owners.py).

The other ranks' graphs leave out what an expert's module does (`drop_expert_values`). Sums into rows are first rewritten as
sums of values (analysis/experts.py). Expert number j of E belongs to rank j t // E, so that a rank has at most ceil(E / t).

Where: the user's override says 'expert' of the list. Given plans, and graphs after a model's first one, keep their owners.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.analysis.experts import ExpertList, expert_lists, expert_values, refuse_between
from megafx.errors import PlanError
from megafx.ir.program import VAL, Builder, Phase, Program, active_nodes, located
from megafx.ir.sizes import SizeEmitter
from megafx.ops.owners import OWNER_INPUT, OWNER_OUTPUT, OWNER_PARAMETER
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import Owned
from megafx.planner.context import CompileContext
from megafx.planner.overrides import Overrides

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "own_experts"


def own_experts(program: Program, context: CompileContext) -> int:
    """Returns the number of experts that are one rank's. Raises PlanError where the list's modules are no such experts."""
    if context.t == 1 or "expert" not in context.config.overrides.values():
        return 0
    overrides = Overrides(program, context.config.overrides, set(), context.t)
    count = 0
    settled = context.given.params if context.given is not None else context.fixed
    names = {node: spec.name for node, spec in program.input_nodes()}
    for lst in expert_lists(program, overrides, settled):
        owners = {}  # key of each expert -> its rank
        for j, (key, parameters) in enumerate(lst.experts.items()):
            stored = settled.get(names[parameters[0]])
            owners[key] = stored.owner if isinstance(stored, Owned) else j * context.t // len(lst.experts)
        if context.data is not None:
            raise PlanError(
                f"override '{lst.pattern}' is expert, but experts that are modules of a list cannot be given to ranks where "
                "data-parallel ranks share parameters or gradients",
                fix="drop the override (each expert is then column- and row-parallel), or use tensor parallelism alone",
                module=lst.path,
            )
        _Owning(program, lst, owners).run()
        most = max([*owners.values()].count(rank) for rank in range(context.t))
        program.note("experts", f"experts of '{lst.path}' are split over the ranks, each whole: at most {most} a rank")
        count += len(owners)
    return count


class _Owning:
    def __init__(self, program: Program, lst: ExpertList, owners: dict[str, int]) -> None:
        self.program, self.lst, self.owners = program, lst, owners
        self.values = expert_values(program, lst)
        self.active = active_nodes(program)
        self.key_of = {p: key for key, parameters in lst.experts.items() for p in parameters}
        self.top = SizeEmitter(program.graph, program.sizes).anchor
        self.entered: dict[tuple[fx.Node, str], fx.Node] = {}

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                refuse_between(self.lst, node, node.all_input_nodes, self.values)
        held: dict[fx.Node, fx.Node] = {}  # made at the top, as parameters are: later passes may use them earlier
        for parameter, key in self.key_of.items():
            if users := list(parameter.users):
                held[parameter] = self._emit(OWNER_PARAMETER, parameter, key, self.top, min(users))
                for user in users:
                    user.replace_input_with(parameter, held[parameter])
        for node, key in [*self.values.items()]:
            for operand in node.all_input_nodes:
                if self.values.get(operand) != key and operand in self.active and operand not in held.values():
                    node.replace_input_with(operand, self._enter(operand, key))
            self._leave(node, key)
        for parameter, whole in held.items():
            self._leave(whole, self.key_of[parameter])
        self.program.erase_unused()
        self.program.graph.lint()

    def _emit(self, target: Any, value: fx.Node, key: str, before: fx.Node, origin: fx.Node) -> fx.Node:
        return Builder(self.program, before, origin, NAME)(target, value, self.owners[key], TENSOR_AXIS, 1)

    def _enter(self, value: fx.Node, key: str) -> fx.Node:
        """`value` for the owner to compute with, made before the expert's first use of it."""
        if (value, key) not in self.entered:
            first = min(user for user in value.users if self.values.get(user) == key)
            self.entered[value, key] = self._emit(OWNER_INPUT, value, key, first, first)
        return self.entered[value, key]

    def _leave(self, node: fx.Node, key: str) -> None:
        """What others read of the expert's values is a summand."""
        users = [u for u in node.users if self.values.get(u) != key]
        if not users:
            return
        value = node.meta[VAL]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise PlanError(
                f"override '{self.lst.pattern}' is expert, but what '{self.lst.module(key)}' gives by {node.target} is no "
                "number to be summed over the ranks, and is used outside of this expert",
                fix="drop the override, or use only floating-point results of experts",
                **located(node),
            )
        left = self._emit(OWNER_OUTPUT, node, key, node.next, node)
        for user in users:
            user.replace_input_with(node, left)
