"""Write each transition out as local ops and a collective, started and waited for.

Before:  %2 = transition(%1, P -> S1)                      # bf16[4 16] P@tp -> bf16[4 8] S1@tp
After:   %2 = view(%1, [4, 2, 8])
         %3 = permute(%2, [1, 0, 2])
         %4 = contiguous(%3)
         %5 = view(%4, [8, 8])
         %6 = reduce_scatter_tensor(%5, 'sum', 2, 'tp')    # the group is named by the mesh axis until bind_mesh
         %7 = wait_tensor(%6)
Legal because: `apply_transition` is what the transition op itself runs; here its calls become nodes. Identities vanish, unless
the value's strides change (an expanded gradient), which later views were traced without: those are copied.
"""

from __future__ import annotations

import torch
from torch import fx

import megafx.ops.collectives  # noqa: F401  registers the ops that expansions use
from megafx.ir.nodes import own_gradients
from megafx.ir.program import VAL, Phase, Program
from megafx.ir.sizes import SizeEmitter
from megafx.passes.communicate.emit import NodeOps, same_strides
from megafx.placements.moves import apply_transition
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = (Phase.LOCAL, Phase.JOINT), Phase.LOWERED
NAME = "expand_transitions"
aten, mfx = torch.ops.aten, torch.ops.megafx


def expand_transitions(program: Program, context: CompileContext) -> int:
    """Return the number of transitions expanded."""
    graph = program.graph
    sizes = SizeEmitter(graph, program.sizes)
    transitions = graph.find_nodes(op="call_function", target=mfx.transition.default)
    for node in transitions:
        _expand(program, node, sizes)
        if sizes.anchor is node:
            sizes.anchor = node.next
    for node in reversed(transitions):
        graph.erase_node(node)
    for node in reversed(graph.nodes):  # sizes of views that merged into others
        if node.op == "call_function" and not node.users and isinstance(node.meta[VAL], torch.SymInt):
            graph.erase_node(node)
    own_gradients(program, NAME)  # identities that vanished left some in the memory of another value
    program.phase = ENSURES
    return len(transitions)


def _expand(program: Program, node: fx.Node, sizes: SizeEmitter) -> None:
    source, src, dst, src_layout, dst_layout, axis, t = node.args
    ops = NodeOps(program, node, sizes, axis, NAME)
    flats = [[n.meta[VAL] if isinstance(n, fx.Node) else n for n in flat] for flat in (src_layout, dst_layout)]
    result = apply_transition(source, str(src), str(dst), flats[0], flats[1], int(t), ops)
    if not same_strides(result.meta[VAL], node.meta[VAL]):
        result = ops.call(aten.clone.default, result)
    if result in ops.emitted:
        for key, value in node.meta.items():
            if key != VAL:
                result.meta.setdefault(key, value)
    node.replace_all_uses_with(result)
    for made in reversed(ops.emitted):
        if not made.users and made is not result:
            if sizes.anchor is made:
                sizes.anchor = made.next
            program.graph.erase_node(made)
