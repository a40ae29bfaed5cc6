"""Leave out of one rank's graph the expert values that other ranks compute for all (ops/owners.py).

Before:  %1 = owner_input(%x, 1); %w1 = owner_parameter(%w, 1); %2 = linear(%1, %w1); %3 = owner_output(%2, 1); %4 = add(%y, %3)
         %5 = owner_input_gradient(%g, 1); %6 = add(%h, %5);    %7 = owner_parameter_gradient(%dw, 1)
After:   rank 1: %2 = linear(%x, %w); %4 = add(%y, %2); %6 = add(%h, %g); %7 = %dw
         others: %4 = %y; %6 = %h; %7 = empty, of no rows; what only computes %2, %g and %dw is gone
Legal because: these are the ops' definitions, with the rank filled in; adding zeros changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.contracts import fail
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.ir.sizes import SizeEmitter
from megafx.ops.owners import OWNER_INPUT, OWNER_OPS, OWNER_PARAMETER, OWNER_PARAMETER_GRADIENT
from megafx.placements.moves import same_sizes
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "drop_expert_values"
aten = torch.ops.aten


def drop_expert_values(program: Program, planner: Planner) -> int:
    """Return the number of ops of owners.py that are gone."""
    axes = planner.axes
    if axes is None:
        return 0
    found = [n for n in program.graph.nodes if n.op == "call_function" and n.target in OWNER_OPS]
    if not found:
        return 0
    zeros: list[fx.Node] = []
    for node in found:
        x, owner, axis, _ = node.args
        if axes[axis].rank == owner or node.target is OWNER_INPUT:
            _give(node, _strided(program, node, x))
        elif node.target is OWNER_PARAMETER_GRADIENT:
            _give(node, _zeros(program, node, [0, *node.meta[VAL].shape[1:]]))
        elif node.target is not OWNER_PARAMETER:
            zeros.append(node)
    for node in zeros:
        _add_nothing(program, node)
    used = [node for node in zeros if node.users]
    if used:
        # Backward may have been the first to ask for sizes that data decides: they move right behind what they are sizes of.
        for node in [*program.graph.nodes]:
            if node.op == "call_function" and isinstance(node.meta[VAL], torch.SymInt):
                max(node.all_input_nodes).append(node)
        emitter = SizeEmitter(program.graph, program.sizes)
        for node in used:
            _give(node, _zeros(program, node, [emitter(program.sizes.of(n)) for n in node.meta[VAL].shape]))
    program.graph.eliminate_dead_code()
    for node in program.graph.find_nodes(op="call_function", target=OWNER_PARAMETER):
        raise fail(node, f"rank {node.args[1]} holds it, and another computes with it")
    return len(found)


def _give(node: fx.Node, value: Any) -> None:
    for key, kept in node.meta.items():
        value.meta.setdefault(key, kept)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _add_nothing(program: Program, node: fx.Node) -> None:
    """What adds zeros to a value is that value."""
    for user in [*node.users]:
        if user._erased or user.target not in (aten.add.Tensor, aten.sub.Tensor):
            continue
        a, b = user.args[:2]
        other = a if b is node else b
        negated = user.target is aten.sub.Tensor and a is node
        if not isinstance(other, fx.Node) or other.op == "placeholder" or negated:
            continue
        have, wanted = other.meta[VAL], user.meta[VAL]
        if have.dtype != wanted.dtype or not same_sizes(have.shape, wanted.shape) or (a is node and len(user.kwargs)):
            continue
        _give(user, _strided(program, user, other))


def _strided(program: Program, node: fx.Node, value: Any) -> fx.Node:
    """`value` with the strides that users of `node` were traced with; results may have any."""
    only_results = all(user.op == "output" for user in node.users)
    if only_results or same_sizes(value.meta[VAL].stride(), node.meta[VAL].stride()):
        return value
    return Builder(program, node, node, NAME)(aten.clone.default, value, memory_format=torch.contiguous_format)


def _zeros(program: Program, node: fx.Node, sizes: list[Any]) -> fx.Node:
    value = node.meta[VAL]
    return Builder(program, node, node, NAME)(aten.full.default, sizes, 0, dtype=value.dtype, device=value.device)
