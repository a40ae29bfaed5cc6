"""Results that may take the memory of an operand which nobody reads again.

Before:  %c = addmm(%a, %x, %w)              # %a is made by this graph, or kept for it alone, and used nowhere else
After:   %c = addmm_(%a, %x, %w)
Legal because: the op reads each element of the operand only to write the same element, and the operand has no other reader.

Runs on a graph that is executed as it stands; Inductor plans memory by itself. `declare_reuse` adds an op.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import fx

import megafx.kernels.loss.linear_cross_entropy  # noqa: F401  registers the ops
from megafx.analysis.overlap import is_wait
from megafx.ir.nodes import shows_operand, storage_of
from megafx.ir.program import VAL

aten, mfx = torch.ops.aten, torch.ops.megafx

_IN_PLACE: dict[Any, tuple[int, Callable[..., Any]]] = {
    aten.addmm.default: (0, aten.addmm_.default),
    mfx.cross_entropy_backward.default: (1, mfx.cross_entropy_backward_.default),
    mfx.ce_loss_backward.default: (1, mfx.ce_loss_backward_.default),
    mfx.linear_cross_entropy_backward.default: (0, mfx.linear_cross_entropy_backward_.default),
}


def declare_reuse(target: Any, operand: int, in_place: Callable[..., Any]) -> None:
    """`in_place`, called with the arguments of `target`, writes the result into argument `operand` and returns that."""
    _IN_PLACE[target] = (operand, in_place)


def reuse_buffers(gm: fx.GraphModule, given: Container[str] = ()) -> fx.GraphModule:
    """The same code with calls that write in place where that is legal; `gm` itself where there are none.

    given: names of placeholders whose memory is the graph's to overwrite, as values kept for one backward are.
    """
    if not any(node.target in _IN_PLACE for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    changes = 0
    for node in graph.nodes:
        if node.target in _IN_PLACE:
            index, in_place = _IN_PLACE[node.target]
            if _may_write(node, node.args[index], given):
                node.target = in_place
                changes += 1
    if not changes:
        return gm
    graph.set_codegen(gm.graph._codegen)
    return fx.GraphModule(gm, graph)


def _may_write(node: fx.Node, operand: Any, given: Container[str]) -> bool:
    if not isinstance(operand, fx.Node):
        return False
    base = storage_of(operand)
    old, new = operand.meta[VAL], node.meta[VAL]
    source: Any = base.args[0] if is_wait(base) else base  # what was waited for may be an input that others have too
    owned = source.name in given if source.op == "placeholder" else source.op == "call_function"
    alike = old.dtype == new.dtype and list(map(str, old.shape)) == list(map(str, new.shape))
    alike = alike and old.is_contiguous() and new.is_contiguous()
    others = [x for x in node.all_input_nodes if x is not operand and storage_of(x) is base]
    return owned and alike and not others and _readers(base) == {node}


def _readers(base: fx.Node) -> set[fx.Node]:
    """Nodes that read the memory of `base`, through whatever view."""
    found: set[fx.Node] = set()
    for user in base.users:
        found |= _readers(user) if shows_operand(user) else {user}
    return found
