"""Gather parameters again in backward: only those it needs, and each region's while the region before it computes.

Before:  %w = wait_tensor(gather_region([%a, %b], 2, 'dp_shard')); %dx = mm(%dy, view(%w[:n]))      # b is not needed
         %w2 = wait_tensor(gather_region([%c], 2, 'dp_shard')); %du = mm(%dx, view(%w2))
After:   %w = wait_tensor(gather_region([%a], 2, 'dp_shard')); %s2 = gather_region([%c], 2, 'dp_shard')
         %dx = mm(%dy, view(%w[:n])); %w2 = wait_tensor(%s2); %du = mm(%dx, view(%w2))
Legal because: shards are inputs, so a gather can start at any time, on every rank at the same place; shards that no view
shows are not read.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from megafx.analysis.communication import is_region_gather, is_wait
from megafx.ir.program import FQN, VAL, Phase, Program
from megafx.ops.gather_region import starts
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED


def regather(program: Program, planner: Planner) -> int:
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
    result = [*next(iter(regions.values()))]
    for node in order:
        if not is_region_gather(node):
            result.append(node)
        if is_wait(node):
            (start,) = node.all_input_nodes
            if is_region_gather(start):
                result += following.pop(start.meta.get(FQN), [])
    return result


def gather_what_is_read(graph: fx.Graph) -> int:
    """Leave out of each gather the shards that the graph does not read; returns their number."""
    dropped = 0
    for node in graph.nodes:
        if not is_region_gather(node):
            continue
        shards, ranks, axis = node.args
        places = starts([s.meta[VAL].shape for s in shards], ranks)
        (wait,) = node.users
        parts = [*wait.users]
        pairs = zip(shards, places, strict=False)
        kept = [(s, at) for s, at in pairs if any(p.args[2] <= at < p.args[3] for p in parts)]
        if len(kept) == len(shards):
            continue
        dropped += len(shards) - len(kept)
        moved = starts([s.meta[VAL].shape for s, _ in kept], ranks)
        place = {at: to for (_, at), to in zip(kept, moved, strict=False)}
        for part in parts:
            _, _, at, end = part.args
            part.args = (wait, 0, place[at], place[at] + end - at)
        node.args = ([s for s, _ in kept], ranks, axis)
        for made in (node, wait):
            made.meta[VAL] = made.meta[VAL].narrow(0, 0, moved[-1])
    return dropped
