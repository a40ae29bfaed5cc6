"""Make the graph of one rank: its coordinates become constants, its mesh axes process groups.

Before:  %1 = all_reduce(%0, 'sum', 'tp')   %2 = rank_select(%1, 'tp')    %3 = rank0_only(%2, 'tp')
After:   %1 = all_reduce(%0, 'sum', '7')    %2 = select.int(%1, 0, 1)     %3 = zeros_like(%2)
What only other ranks compute is removed (`drop_expert_values`).
Legal because: the ops' definitions with the rank filled in. Works on a copy: the program stays that of all ranks. Inductor
then sees plain ATen. Dropout and cross entropy keep their axis; they ask `axes.axis_rank` when they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import replace, shows_operand, storage_of
from megafx.ir.program import MADE_BY, RECOMPUTE, VAL, Builder, Phase, Program
from megafx.ops import embedding_of_rank, shared_heads
from megafx.ops.axes import AxisContext
from megafx.placements.moves import same_sizes
from megafx.placements.types import Layout
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.BOUND
NAME = "bind_mesh"
aten, mfx = torch.ops.aten, torch.ops.megafx


def bind_mesh(program: Program, context: CompileContext) -> int:
    """Return the number of ops changed: 0 with one rank and no process group."""
    program.phase, axes, changes = ENSURES, context.axes, 0
    if axes is None:
        return 0
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional":
            node.args = tuple(axes[a].group_name if isinstance(a, str) and a in axes else a for a in node.args)
            changes += 1
        elif node.target in _RULES:
            result = _RULES[node.target](Builder(program, node, node, NAME), node, axes)
            if result not in node.all_input_nodes:
                for key, value in node.meta.items():
                    result.meta.setdefault(key, value)
            replace(node, result)
            changes += 1
    _own_results(program)
    program.gm.recompile()
    return changes


def _select(build: Builder, node: fx.Node, axes: Mapping[str, AxisContext]) -> fx.Node:
    """A view if it is contiguous, as the op's result is, or only read by `cat`; else a copy."""
    x, axis = node.args
    part = build(aten.select.int, x, 0, axes[axis].rank)
    joined = all(user.target is aten.cat.default for user in node.users)
    if joined or same_sizes(part.meta[VAL].stride(), node.meta[VAL].stride()):
        return part
    return build(aten.clone.default, part, memory_format=torch.contiguous_format)


def _place(build: Builder, node: fx.Node, axes: Mapping[str, AxisContext]) -> fx.Node:
    x, size, axis = node.args
    part = build(aten.unsqueeze.default, x, 0)
    zeros = build(aten.zeros_like.default, part)
    mine = axes[axis].rank
    return build(aten.cat.default, [part if r == mine else zeros for r in range(size)], 0)


def _rank0(build: Builder, node: fx.Node, axes: Mapping[str, AxisContext]) -> fx.Node:
    x = node.args[0]
    if axes[str(node.args[1])].rank == 0:
        return x
    zeros = build(aten.zeros_like.default, x)
    if RECOMPUTE in x.meta:  # as on rank 0: else backward would gather fewer parameters here than there
        zeros.meta[RECOMPUTE] = True
    return zeros


def _computed(compute: Any) -> Any:
    """compute: of ops/shared_heads.py or ops/embedding_of_rank.py; a slice is copied: the op's result has memory of its own."""

    def bind(build: Builder, node: fx.Node, axes: Mapping[str, AxisContext]) -> fx.Node:
        *args, layout, axis, t = node.args
        made: fx.Node = compute(build, *args, Layout.from_flat(layout), axes[axis].rank, t)
        if made.target is not aten.slice.Tensor:
            return made
        return build(aten.clone.default, made, memory_format=torch.contiguous_format)

    return bind


_RULES: dict[Any, Any] = {
    shared_heads.HEADS_OF_RANK: _computed(shared_heads.take),
    shared_heads.HEADS_OF_RANK_GRADIENT: _computed(shared_heads.give_back),
    embedding_of_rank.EMBEDDING_OF_RANK: _computed(embedding_of_rank.look_up),
    embedding_of_rank.EMBEDDING_OF_RANK_GRADIENT: _computed(embedding_of_rank.give_back),
    mfx.rank_select.default: _select,
    mfx.rank_place.default: _place,
    mfx.rank0_only.default: _rank0,
}


def _own_results(program: Program) -> None:
    """A result that became a view of a rank's part is copied, so that it does not keep the parts of all ranks alive."""
    output = program.output_node()
    results: list[Any] = list(output.args[0])
    for i, node in enumerate(results):
        if isinstance(node, fx.Node) and _is_part(node):
            build = Builder(program, output, node, NAME)
            results[i] = build(aten.clone.default, node, memory_format=torch.contiguous_format)
    output.args = (tuple(results),)


def _is_part(node: fx.Node) -> bool:
    base = storage_of(node)
    while node is not base:
        if NAME in node.meta.get(MADE_BY, ()) and node.target is aten.select.int:
            return True
        assert shows_operand(node)
        node = node.args[0]
    return False
