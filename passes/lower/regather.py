"""Gather parameters again in backward: only those it needs, and each region's while the region before it computes.

Before:  %w = wait_tensor(gather_region([%a, %b], 2, 'dp_shard')); %dx = mm(%dy, view(%w[:n]))      # b is not needed
         %w2 = wait_tensor(gather_region([%c], 2, 'dp_shard')); %du = mm(%dx, view(%w2))
After:   %w = wait_tensor(gather_region([%a], 2, 'dp_shard')); %s2 = gather_region([%c], 2, 'dp_shard')
         %dx = mm(%dy, view(%w[:n])); %w2 = wait_tensor(%s2); %du = mm(%dx, view(%w2))
Legal because: shards are inputs, or casts of these (`gather_casts`), so a gather can start at any time, on every rank at the
same place; shards that no view shows are not read.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from megafx.analysis.communication import is_region_gather, is_wait
from megafx.ir.program import FQN, Phase, Program
from megafx.passes.communicate.read_shards import gather_what_is_read
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED


def regather(program: Program, context: CompileContext) -> int:
    """Change the backward graph, and that of lazy outputs; return the number of gathers that moved, and of shards left out."""
    parts, changes = program.partition, 0
    for gm in () if parts is None else (parts.backward, parts.lazy_graph):
        if gm is None or not any(map(is_region_gather, gm.graph.nodes)):
            continue
        nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        order = start_next_region(nodes)
        for node in order:
            gm.graph.output_node().prepend(node)
        changes += sum(a is not b and is_region_gather(b) for a, b in zip(nodes, order, strict=True))
        changes += gather_what_is_read(gm.graph)
        gm.graph.lint()
        gm.recompile()
    return changes


def start_next_region(order: list[fx.Node]) -> list[fx.Node]:
    """The order with the gathers of each region right after the first wait for those of the region before it; the gathers of
    the first region come first."""
    regions: dict[Any, list[fx.Node]] = {}
    for node in order:
        if is_region_gather(node):
            regions.setdefault(node.meta.get(FQN), []).append(node)
    if not regions:
        return order
    following = dict(zip(regions, [*regions.values()][1:], strict=False))
    shards = {n: _made_of_inputs(n, order) for gathers in regions.values() for n in gathers}
    result: dict[fx.Node, None] = {}

    def begin(gathers: list[fx.Node]) -> None:
        for gather in gathers:
            result.update(dict.fromkeys([*shards[gather], gather]))

    begin(next(iter(regions.values())))
    for node in order:
        if not is_region_gather(node):
            result[node] = None
        if is_wait(node):
            (start,) = node.all_input_nodes
            if is_region_gather(start):
                begin(following.pop(start.meta.get(FQN), []))
    return [*result]


def _made_of_inputs(gather: fx.Node, order: list[fx.Node]) -> list[fx.Node]:
    """What the shards are made by, in order."""
    made, todo = set[fx.Node](), [gather]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand.op not in ("placeholder", "get_attr") and operand not in made:
                made.add(operand)
                todo.append(operand)
    return [n for n in order if n in made]
