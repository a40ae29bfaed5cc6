"""What backward keeps of forward, and what it recomputes: the rules that the cut follows.

Handed over by reference: parameters, buffers, user inputs, joined parameters, casts of weights that are kept. Recomputed for
nothing: views, sizes, other casts of parameters. All else that backward reads is kept, unless its node is tagged
(ir.RECOMPUTE): it is then recomputed from its operands, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch
from torch import fx

from megafx.analysis.communication import is_region_gather, is_start, is_wait
from megafx.analysis.lazy import only_for_lazy
from megafx.analysis.prices import bytes_of
from megafx.ir.nodes import argument, in_backward, shows_operand, storage_of
from megafx.ir.program import GIVEN, MADE_BY, RECOMPUTE, VAL, Program, ancestors
from megafx.ops.again import AGAIN, when_repeated

aten = torch.ops.aten
# Ops of ours that run a user's code, hold what one rank alone has, or choose a number.
_NOT_AGAIN = ("megafx.eager_call", "megafx.owner_", "megafx.gather_region", "megafx.room.")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


# -- the rules


def is_join(node: fx.Node) -> bool:
    """True if the node is parameters that are inputs, joined, or gathered and kept."""
    if is_region_gather(node):
        return not node.meta.get(RECOMPUTE)
    if node.target is not torch.ops.megafx.join_parameters.default:
        return False
    return all(p.op == "placeholder" for p in node.args[0])


def is_given(node: fx.Node) -> bool:
    """True if backward gets the value by reference."""
    return node.op == "placeholder" or GIVEN in node.meta or is_join(node)


def by_reference(program: Program) -> set[fx.Node]:
    """Parameters as graphs take them: inputs, and joins of them."""
    return {n for n, i in program.input_nodes() if i.kind == "param"} | {n for n in program.graph.nodes if is_join(n)}


def is_free(node: fx.Node, parameters: Container[fx.Node]) -> bool:
    """True if recomputing the value is free, or cheaper than keeping it, whatever the budget."""
    if node.target is AGAIN:
        return False
    if node.op == "get_attr" or shows_operand(node):
        return True
    if isinstance(node.meta.get(VAL), (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return node.target is not aten.sym_size.int
    if node.target is aten._to_copy.default:
        return storage_of(node.args[0]) in parameters
    return False


def needed_in_backward(program: Program) -> set[fx.Node]:
    """The nodes of backward that gradients need, or other ranks (collectives that only they read), and what these read."""
    gradients = [r for r, o in zip(program.results(), program.outputs, strict=True) if o.kind == "gradient"]
    unread = [n for n in program.graph.nodes if is_wait(n) and not n.users and in_backward(n)]
    return ancestors([*gradients, *unread], stop=lambda n: not in_backward(n))


def is_gathered(node: fx.Node) -> bool:
    """True if a node of forward puts shards together: part of a transition written out, from its gather on."""
    while node.op == "call_function" and node.meta.get(MADE_BY, ())[-1:] == ("expand_transitions",):
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default:
            return True
        node = node.all_input_nodes[0]
    return False


class Kept:
    """What the graph keeps, given what is tagged. saved: kept values, in the order found; again: nodes that are recomputed.

    readers: forward node -> the nodes that need its value then: of backward, of the lazy outputs' graph, or recomputed.
    """

    def __init__(self, program: Program, tagged: Callable[[fx.Node], bool]) -> None:
        self.parameters = by_reference(program)
        self.saved: dict[fx.Node, None] = {}
        self.again: dict[fx.Node, None] = {}
        self.readers: dict[fx.Node, dict[fx.Node, None]] = {}
        self.tagged = tagged
        needed, self.lazy = needed_in_backward(program), {*only_for_lazy(program)}
        for node in program.graph.nodes:
            if node in needed and in_backward(node):
                for operand in node.all_input_nodes:
                    self._require(operand, node)
        for node in ancestors(self.lazy, stop=lambda n: n not in self.lazy and not is_gathered(n)):
            if node in self.lazy or is_gathered(node):
                for operand in node.all_input_nodes:
                    if not is_gathered(operand):
                        self._require(operand, node)
        for result, output in zip(program.results(), program.outputs, strict=True):
            if output.kind == "gradient" and isinstance(result, fx.Node):
                self._require(result, program.output_node())

    def _require(self, node: fx.Node, reader: fx.Node) -> None:
        todo = [(node, reader)]
        while todo:
            node, reader = todo.pop()
            if in_backward(node) or node in self.lazy or is_given(node):
                continue
            self.readers.setdefault(node, {})[reader] = None
            if node in self.saved or node in self.again:
                continue
            if self.tagged(node) or is_free(node, self.parameters):
                self.again[node] = None
                todo += [(operand, node) for operand in when_repeated(node)]
            else:
                self.saved[node] = None


# -- what may be recomputed


def is_replayable(node: fx.Node, *axes: str) -> bool:
    """True if the op gives the same bits when it runs once more, has no effect, and may: users' ops may not.

    Dropout draws from a counter. Collectives of `axes` are called again by all of their ranks, in one order.
    """
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # getitem, and arithmetic of sizes
    if target.namespace == "_c10d_functional":
        return is_wait(node) or (is_start(node) and node.args[-1] in axes)
    if target.namespace not in ("aten", "prims", "megafx") or str(target).startswith(_NOT_AGAIN):
        return False
    tags = {tag for tag in _TAGS if tag in target.tags}
    if argument(node, "dropout_p") == 0:  # attention that may drop, and does not
        tags.discard(torch.Tag.nondeterministic_seeded)
    return not target._schema.is_mutable and not tags


def is_value(node: fx.Node) -> bool:
    """True if the node can be kept: a tensor that is there (a collective that has started is not)."""
    return isinstance(node.meta.get(VAL), torch.Tensor) and not is_start(node)


def total_bytes(program: Program, nodes: Iterable[fx.Node]) -> int:
    """Bytes of the values that are kept for backward, at the workload: those that it gets by reference not counted."""
    return sum(bytes_of(program, n) for n in nodes if not is_given(n))
