"""The collectives of an expanded graph: the bytes that they move, and what they may run beside."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

import megafx.kernels.experts.dispatch_rows  # registers the ops
import megafx.ops.gather_region  # noqa: F401  registers the op; collectives, which it imports, gives _c10d_functional its fakes
from megafx.ir.nodes import argument, aten_ops, in_backward
from megafx.ir.program import VAL, Program, fqn_of
from megafx.kernels.fp8.scaled_mm import mm as scaled_mm
from megafx.kernels.products_fp32 import addmm_fp32, mm_fp32
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, payload

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = aten_ops("mm addmm bmm baddbmm") | {scaled_mm, mm_fp32, addmm_fp32}

# Starts of collectives: target -> name in placements.TRANSITIONS. Those that passes move about, and all.
STARTS: dict[Any, str] = {
    c10d.all_reduce.default: ALL_REDUCE,
    c10d.all_gather_into_tensor.default: ALL_GATHER,
    c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
    c10d.all_to_all_single.default: ALL_TO_ALL,
    torch.ops.megafx.gather_region.default: ALL_GATHER,
}
COLLECTIVES = STARTS | {
    c10d.all_reduce_.default: ALL_REDUCE,
    c10d.all_reduce_coalesced.default: ALL_REDUCE,
    c10d.all_gather_into_tensor_coalesced.default: ALL_GATHER,
    c10d.reduce_scatter_tensor_coalesced.default: REDUCE_SCATTER,
}
# Ops that are exchanges as they are, each with its wait: tokens that travel to the ranks of their experts, and how many.
mfx = torch.ops.megafx
MOVES_TOKENS = {mfx.dispatch_rows.default, mfx.combine_rows.default}
EXCHANGES = MOVES_TOKENS | {mfx.room_needed.default, mfx.experts_received.default}
COLLECTIVES |= dict.fromkeys(EXCHANGES, ALL_TO_ALL)


@dataclass(frozen=True)
class Communication:
    """One collective."""

    collective: str
    direction: str  # 'forward' or 'backward'
    fqn: str
    bytes_moved: int  # what one rank sends (placements.payload) at the workload that the planner prices
    node: str
    axis: str = ""  # the mesh axis


def collective_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that start a collective, in graph order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in COLLECTIVES]


def meets_others(program: Program, axis: str) -> bool:
    """True if forward of a LOWERED program has a collective on another axis than this one."""
    return any(node.args[-1] != axis for node in collective_nodes(program.graph) if not in_backward(node))


def communication(program: Program, t: int, sizes: Mapping[str, int] = MappingProxyType({})) -> list[Communication]:
    """Every collective of a LOWERED program, in graph order, on axes of t ranks, or of `sizes` (by name)."""
    found = []
    for node in collective_nodes(program.graph):
        name = COLLECTIVES[node.target]
        tensors = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        values = [x.meta[VAL] for x in tensors]
        axis = str(node.args[-1])
        n = sizes.get(axis, t)
        ranks = n if name in (ALL_GATHER, ALL_TO_ALL) else 1  # operands that are a rank's share of the tensor moved
        bytes_moved = sum(payload(name, ranks * program.sizes.numel(v), n) * v.dtype.itemsize for v in values)
        if node.target in MOVES_TOKENS:
            bytes_moved = exchanged_bytes(program, node, n)
        direction = "backward" if in_backward(node) else "forward"
        found.append(Communication(name, direction, fqn_of(node), bytes_moved, node.name, axis))
    return found


def exchanged_bytes(program: Program, node: fx.Node, ranks: int) -> int:
    """What one rank sends of tokens that travel, or of their sums. A token goes to the ranks that have one of its experts: to
    ranks (1 - (1 - 1/ranks)^choices) of them where its choices fall anywhere."""
    places, choices = argument(node, "places"), argument(node, "choices")
    value = node.meta[VAL] if node.target is mfx.combine_rows.default else node.args[0].meta[VAL]
    tokens = program.sizes.workload(program.sizes.of(places.meta[VAL].shape[0]))
    row = program.sizes.bytes(value) // max(tokens, 1)  # of a token; with its entries, all of them
    distinct = ranks * (1 - (1 - 1 / ranks) ** choices)
    return int(tokens * distinct * row * (ranks - 1) / ranks)


def schedule(program: Program, axes: Collection[str]) -> list[tuple[str, list[str]]]:
    """The collectives of a LOWERED program on these axes, in order: what each is, and the parameters whose values or
    gradients it moves. Sizes that vary between calls are left out, as ranks may differ in them."""
    inputs = {node: spec.name for node, spec in program.input_nodes() if spec.kind == "param"}
    moved: dict[fx.Node, list[str]] = {}
    for _, result, name in program.parameter_gradients():
        node: fx.Node | None = result
        while node is not None and not is_wait(node):
            operands = node.all_input_nodes
            node = operands[0] if len(operands) == 1 else None
        if node is not None:
            moved.setdefault(node.all_input_nodes[0], []).append(name)
    found = []
    for node in collective_nodes(program.graph):
        if node.args[-1] not in axes:
            continue
        values = [x.meta[VAL] for x in node.all_input_nodes]
        sizes = [[n if isinstance(n, int) else "*" for n in value.shape] for value in values]
        names = [inputs[x] for x in node.all_input_nodes if x in inputs] or moved.get(node, [])
        direction = "backward" if in_backward(node) else "forward"
        found.append((f"{direction} {COLLECTIVES[node.target]} on {node.args[-1]} of {sizes} {values[0].dtype}", names))
    return found


# -- what runs at the same time


def is_start(node: fx.Node) -> bool:
    """True if the node starts a collective, which a wait_tensor ends."""
    return node.target in STARTS


def is_region_gather(node: fx.Node) -> bool:
    """True if it starts the gather of the parameters of a region (passes/communicate/gather_parameters.py)."""
    return node.target is torch.ops.megafx.gather_region.default


def is_wait(node: fx.Node) -> bool:
    return node.target is c10d.wait_tensor.default


def is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS


def start_earlier(order: list[fx.Node], start: fx.Node) -> list[fx.Node]:
    """The order with one start, and what it alone waits for, moved before a product, so that it runs while that does.

    Collectives run one after another: where another one is under way at the start's place, the product is the last before
    that one. Nothing moves where there is no such product. What the start depends on must be made for it alone.
    """
    index = {n: i for i, n in enumerate(order)}
    place = index[start]
    under_way = [i for i in range(place) if is_start(order[i]) and max(index.get(u, 0) for u in order[i].users) > place]
    products = [i for i in range(min(under_way, default=place)) if is_product(order[i])]
    if not products:
        return order
    moved: set[fx.Node] = set()
    todo = [start]
    while todo:
        node = todo.pop()
        if index.get(node, -1) >= products[-1] and node not in moved:
            moved.add(node)
            todo += node.all_input_nodes
    if order[products[-1]] in moved:
        return order
    rest = [n for n in order if n not in moved]
    at = rest.index(order[products[-1]])
    return [*rest[:at], *sorted(moved, key=index.__getitem__), *rest[at:]]
