"""Transitions move values as they lie in memory, and transpositions follow them.

Before:  %k = transpose(%x, 1, 2); %y = transition(%k, S2 -> R)      # %x [b, s, heads, d], as a projection writes it
After:   %z = transition(%x, S1 -> R); %y = transpose(%z, 1, 2)
Legal because: a transition moves along the dims that it names, whatever their order. What is sent is contiguous: a view that is
transposed would be copied first, and its gradient after it.

Attention's result lies in memory as [b, s, heads, d], too: where a user transposes it, that transposition comes first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from megafx.ir.contracts import is_transition
from megafx.ir.program import PLACEMENT, VAL, Builder, Phase, Program, recompute_val
from megafx.passes.communicate.emit import same_strides
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "turn_transitions"
transpose = torch.ops.aten.transpose.int


def turn_transitions(program: Program, context: CompileContext) -> int:
    """Return the number of transitions of the context's axis that were moved."""
    changed, stale = 0, set[fx.Node]()
    for node in list(program.graph.nodes):
        if node.op == "call_function" and not stale.isdisjoint(node.all_input_nodes):
            before = node.meta[VAL]
            recompute_val(program, node)
            if isinstance(before, torch.Tensor) and not same_strides(node.meta[VAL], before):
                stale.add(node)
        if is_transition(node, context.axis) and (found := _in_order_of_memory(program, node)):
            stale |= _turn(program, node, *found)
            changed += 1
    return changed


def _in_order_of_memory(program: Program, node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """The operand of a transition as it lies in memory, and the dims that are swapped for it; None: as it is."""
    operand = node.args[0]
    shown = operand.meta[VAL]
    if operand.target is transpose and not same_strides(shown, None):
        a, b = (dim % shown.dim() for dim in operand.args[1:])
        return operand.args[0], a, b
    read_turned = any(user.target is transpose for user in node.users)
    if read_turned and shown.dim() == 4 and same_strides(shown.transpose(1, 2), None):
        return Builder(program, node, operand, NAME)(transpose, operand, 1, 2), 1, 2
    return None


def _turn(program: Program, node: fx.Node, value: fx.Node, a: int, b: int) -> set[fx.Node]:
    """Return the nodes that lie in memory otherwise than what they replace."""
    build, swapped = Builder(program, node, node, NAME), {f"S{a}": f"S{b}", f"S{b}": f"S{a}"}
    ends = (swapped.get(str(end), end) for end in node.args[1:3])
    moved = build(node.target, value, *ends, *node.args[3:])
    result = build(transpose, moved, a, b)
    placement = result.meta[PLACEMENT] = node.meta[PLACEMENT]
    moved.meta[PLACEMENT] = replace(placement, dim={a: b, b: a}.get(placement.dim, placement.dim))
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)
    dims = result.meta[VAL].dim()
    for user in list(result.users):
        if user.target is transpose and {dim % dims for dim in user.args[1:]} == {a, b}:
            user.replace_all_uses_with(moved)
            program.graph.erase_node(user)
    return {moved, result}
