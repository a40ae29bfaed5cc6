"""Leave out of one rank's graph the expert values that other ranks compute for all (ops/owners.py).

Before:  %1 = owner_input(%x, 1); %w1 = owner_parameter(%w, 1); %2 = linear(%1, %w1); %3 = owner_output(%2, 1); %4 = add(%y, %3)
         %5 = owner_input_gradient(%g, 1); %6 = add(%h, %5);    %7 = owner_parameter_gradient(%dw, 1)
         %8 = owner_stack([%a, %b, %c], 2, 'ep')
After:   rank 1: %2 = linear(%x, %w); %4 = add(%y, %2); %6 = add(%h, %g); %7 = %dw
         others: %4 = %y; %6 = %h; %7 = empty, of no rows; what only computes %2, %g and %dw is gone
         %8 = view(join_parameters([%a, %b]), [2, ..]) on rank 0; stack([%c, zeros]) on rank 1
Legal because: these are the ops' definitions, with the rank filled in; adding zeros changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.contracts import fail
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.ir.sizes import SizeEmitter
from megafx.kernels import join_parameters  # noqa: F401  registers the op
from megafx.ops.owners import OWNER_INPUT, OWNER_OPS, OWNER_PARAMETER, OWNER_PARAMETER_GRADIENT, OWNER_STACK
from megafx.placements.moves import same_sizes
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "drop_expert_values"
aten = torch.ops.aten


def drop_expert_values(program: Program, context: CompileContext) -> int:
    """Return the number of ops of owners.py that are gone."""
    axes = context.axes
    if axes is None:
        return 0
    found = [n for n in program.graph.nodes if n.op == "call_function" and n.target in OWNER_OPS]
    stacks = program.graph.find_nodes(op="call_function", target=OWNER_STACK)
    if not found and not stacks:
        return 0
    for node in stacks:
        _stack(program, node, axes[node.args[2]].rank)
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
    program.erase_unused()
    for node in program.graph.find_nodes(op="call_function", target=OWNER_PARAMETER):
        raise fail(node, f"rank {node.args[1]} holds it, and another computes with it")
    return len(found) + len(stacks)


def _stack(program: Program, node: fx.Node, rank: int) -> None:
    """This rank's parts: of parameters as they are stored, one memory."""
    parts = node.args[0]
    value = node.meta[VAL]
    here, shape = value.shape[0], [*map(int, value.shape[1:])]
    own, build = parts[here * rank :][:here], Builder(program, node, node, NAME)
    for part in parts:
        if part.op == "placeholder" and part not in own:
            with program.fake_mode:
                part.meta[VAL] = part.meta[VAL].new_empty([0, *part.meta[VAL].shape[1:]])
    if len(own) == here and all(part.op == "placeholder" for part in own):
        joined = build(torch.ops.megafx.join_parameters.default, own)
        made = build(aten.view.default, joined, [here, *shape])
    else:
        zeros = [_zeros_of(build, value, shape)] * (here - len(own))
        made = build(aten.stack.default, [*own, *zeros])
    _give(node, made)


def _zeros_of(build: Builder, like: Any, sizes: list[Any]) -> fx.Node:
    return build(aten.full.default, sizes, 0, dtype=like.dtype, device=like.device)


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
    return _zeros_of(Builder(program, node, node, NAME), node.meta[VAL], sizes)
