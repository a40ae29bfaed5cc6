"""What backward keeps of forward, and what it makes again: the rules that the cut follows, and the prices of both.

Handed over by reference: parameters, buffers, user inputs, joined parameters. Made again for nothing: views, sizes, casts of
parameters. All else that backward reads is kept, unless its node is tagged (ir.RECOMPUTE): it is then made again from what it
is made of, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import STARTS, is_region_gather, is_start, is_wait
from megafx.analysis.lazy import only_for_lazy
from megafx.ir.facts import ATTENTION, MATMUL, facts_of
from megafx.ir.nodes import argument, in_backward, op_name, shows_operand, storage_of
from megafx.ir.program import MADE_BY, RECOMPUTE, VAL, Program, ancestors, tensors_of
from megafx.ops.again import AGAIN, when_repeated
from megafx.ops.offload import is_on_host
from megafx.placements.types import ALL_GATHER, ALL_TO_ALL
from megafx.planner.cost import (
    DTYPE_OF_ITEMSIZE,
    collective_seconds,
    cost_kind,
    matmul_seconds,
    memory_seconds,
    op_bytes,
    op_flops,
)
from megafx.planner.hardware import Hardware

aten = torch.ops.aten
_LEFT = {"addmm": 1, "baddbmm": 1}  # position of the product's left operand, where it is not the first
# Ops of ours that run a user's code, or hold what one rank alone has.
_NOT_AGAIN = ("megafx.eager_call", "megafx.owner_", "megafx.batch_sum", "megafx.gather_region")
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")  # what torch's attention becomes
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


# -- the rules


def is_join(node: fx.Node) -> bool:
    """Whether the node is parameters that are inputs, joined, or gathered and kept."""
    if is_region_gather(node):
        return not node.meta.get(RECOMPUTE)
    if node.target is not torch.ops.megafx.join_parameters.default:
        return False
    return all(p.op == "placeholder" for p in node.args[0])  # type: ignore[union-attr]


def is_given(node: fx.Node) -> bool:
    """Whether backward gets the value by reference."""
    return node.op == "placeholder" or is_join(node)


def by_reference(program: Program) -> set[fx.Node]:
    """Parameters as graphs take them: inputs, and joins of them."""
    return {n for n, i in program.input_nodes() if i.kind == "param"} | {n for n in program.graph.nodes if is_join(n)}


def is_free(node: fx.Node, parameters: Container[fx.Node]) -> bool:
    """Whether to make the value again costs nothing, or less than to keep it, whatever the budget."""
    if node.target is AGAIN:
        return False
    if node.op == "get_attr" or shows_operand(node):
        return True
    if isinstance(node.meta.get(VAL), (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return node.target is not aten.sym_size.int
    if node.target is aten._to_copy.default:
        return storage_of(node.args[0]) in parameters  # type: ignore[arg-type]
    return False


def needed_in_backward(program: Program) -> set[fx.Node]:
    """The nodes of backward that gradients need, or other ranks (collectives that only they read), and what these read."""
    gradients = [r for r, o in zip(program.results(), program.outputs, strict=True) if o.kind == "gradient"]
    unread = [n for n in program.graph.nodes if is_wait(n) and not n.users and in_backward(n)]
    return ancestors([*gradients, *unread], stop=lambda n: not in_backward(n))


def is_gathered(node: fx.Node) -> bool:
    """Whether a node of forward puts shards together: part of a transition written out, from its gather on."""
    while node.op == "call_function" and node.meta.get(MADE_BY, ())[-1:] == ("expand_transitions",):
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default:
            return True
        node = node.all_input_nodes[0]
    return False


class Kept:
    """What the graph keeps, given what is tagged. saved: kept values, in the order found; again: nodes that are made again.

    readers: forward node -> the nodes that need its value then: of backward, of the lazy outputs' graph, or made again.
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


# -- what may be made again


def is_replayable(node: fx.Node, axis: str) -> bool:
    """Whether the op gives the same bits when it runs once more, has no effect, and may: users' ops may not.

    Dropout draws from a counter. Collectives of the tensor-parallel axis are called again by all of its ranks, in one order.
    """
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # getitem, and arithmetic of sizes
    if target.namespace == "_c10d_functional":
        return is_wait(node) or (is_start(node) and node.args[-1] == axis)
    if target.namespace not in ("aten", "prims", "megafx") or str(target).startswith(_NOT_AGAIN):
        return False
    tags = {tag for tag in _TAGS if tag in target.tags}
    if argument(node, "dropout_p") == 0:  # attention that may drop, and does not
        tags.discard(torch.Tag.nondeterministic_seeded)
    return not target._schema.is_mutable and not tags


def is_value(node: fx.Node) -> bool:
    """Whether the node can be kept: a tensor that is there (a collective that has started is not)."""
    return isinstance(node.meta.get(VAL), torch.Tensor) and not is_start(node)


# -- prices


def bytes_of(program: Program, node: fx.Node) -> int:
    """Bytes of a node's tensors on the device, at the workload."""
    return 0 if is_on_host(node) else sum(map(program.sizes.bytes, tensors_of(node)))


def total_bytes(program: Program, nodes: Iterable[fx.Node]) -> int:
    return sum(bytes_of(program, n) for n in nodes if not is_given(n))


def seconds(program: Program, node: fx.Node, hardware: Hardware, t: int) -> float:
    """Modelled time of one forward run of a node on one rank, at the workload."""
    if node.op != "call_function" or is_wait(node):
        return 0.0
    results = tensors_of(node)
    if not results:
        return 0.0
    if is_start(node):
        kind = STARTS[node.target]
        sent = sum(program.sizes.numel(n.meta[VAL]) for n in node.all_input_nodes) * (
            t if kind in (ALL_GATHER, ALL_TO_ALL) else 1
        )
        return collective_seconds(kind, sent, results[0].element_size(), hardware, t)
    name = op_name(node)
    operands = [v for n in node.all_input_nodes for v in tensors_of(n)]
    if name == "getitem" or (shows_operand(node) and not copies(node)):
        return 0.0
    moved = op_bytes(name, bytes_of(program, node), [*map(program.sizes.bytes, operands)])
    name = "scaled_dot_product_attention" if name.startswith(_ATTENTION) else name
    terms = _terms(program, node, name, operands) if cost_kind(name) in (MATMUL, ATTENTION) else 0
    flops = op_flops(name, program.sizes.numel(results[0]), terms)
    # by an operand: a fused loss in fp32 has products of bf16 inside
    factor = next((v for v in operands if v.is_floating_point()), results[0])
    dtype = DTYPE_OF_ITEMSIZE.get(factor.element_size(), "float32")
    return max(matmul_seconds(flops, dtype, hardware), memory_seconds(moved, hardware))


def copies(node: fx.Node) -> bool:
    """Whether what its schema calls a view is a copy: of an operand that lies otherwise in memory."""
    if node.target is not aten.contiguous.default:
        return False
    operand: Any = node.args[0]
    return not operand.meta[VAL].is_contiguous()


def _terms(program: Program, node: fx.Node, name: str, operands: list[torch.Tensor]) -> int:
    """Terms summed for an element of a product; keys of attention."""
    work = lambda size: program.sizes.workload(program.sizes.of(size))  # noqa: E731
    terms = facts_of(node.target).terms
    if terms is not None:
        shapes = fx.map_arg(node.args, lambda n: tuple(map(work, n.meta[VAL].shape)))
        return int(terms(*shapes))
    if cost_kind(name) == ATTENTION:
        return work(operands[1].shape[-2])
    left: Any = node.args[_LEFT.get(name, 0)]
    return work(left.meta[VAL].shape[-1]) if isinstance(left, fx.Node) else 1
