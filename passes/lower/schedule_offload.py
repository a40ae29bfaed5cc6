"""Overlap offload copies with compute: wait for those to the host a layer later, start those back a layer earlier.

Before:  forward:  %h = offload(%y); ...; return %h
         backward: %b = reload(%h); %y = reloaded(%b); %dw = mm(t(%dz), %y)
After:   forward:  %h = offload(%y); ...(the layer and the next); %d = offloaded(%h, %y); return %d
         backward: %b = reload(%h); ...(the layer behind it); %y = reloaded(%b); %dw = mm(t(%dz), %y)
Legal because: `offloaded` only waits, and until then reads the value, so its memory is not reused; `reload` reads an input.

So the copies of one layer run while the next one computes, and memory holds the values of two layers at most.
"""

from __future__ import annotations

import sys

import torch
from torch import fx

from megafx.ir.program import LAYER, VAL, Phase, Program, inherit
from megafx.ops.offload import OFFLOAD, OFFLOADED, RELOAD
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "schedule_offload"


def schedule_offload(program: Program, context: CompileContext) -> int:
    """Return the number of copies."""
    parts, changes = program.partition, 0
    if parts is None:
        return 0
    starts = parts.forward.graph.find_nodes(op="call_function", target=OFFLOAD)
    for node in starts:
        place = _first(node.next, range(node.meta[LAYER] + 2, sys.maxsize))
        graph = parts.forward.graph
        with graph.inserting_before(place):
            done = graph.call_function(OFFLOADED, (node, node.args[0]))
        done.meta = dict(node.meta)
        inherit(done, node, NAME)
        graph.output_node().replace_input_with(node, done)
        changes += 1
    for gm in {id(g): g for g in (parts.backward, parts.lazy_graph) if g is not None}.values():
        for node in gm.graph.find_nodes(op="call_function", target=RELOAD):
            first = next(n for n in gm.graph.nodes if n.op != "placeholder")
            place = _first(first, range(node.meta[LAYER], node.meta[LAYER] + 2))
            if place < node:
                place.prepend(node)
            changes += 1
    for graph_module in (parts.forward, parts.backward, parts.lazy_graph):
        if changes and graph_module is not None:
            graph_module.graph.lint()
            graph_module.recompile()
    return changes


def _first(node: fx.Node, layers: range) -> fx.Node:
    """The first node from `node` on, other than copies, of one of these layers; else the output."""
    while node.op != "output":
        tensor = isinstance(node.meta.get(VAL), torch.Tensor)
        if tensor and node.target not in (OFFLOAD, OFFLOADED, RELOAD) and node.meta.get(LAYER) in layers:
            return node
        node = node.next
    return node
