"""What can run at the same time: collectives from start to wait, and matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # defines _c10d_functional
from torch import fx

import megafx.ops.gather_region  # noqa: F401  registers the op
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
STARTS: dict[Any, str] = {
    c10d.all_reduce.default: ALL_REDUCE,
    c10d.all_gather_into_tensor.default: ALL_GATHER,
    c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
    c10d.all_to_all_single.default: ALL_TO_ALL,
    torch.ops.megafx.gather_region.default: ALL_GATHER,
}


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective, which a wait_tensor ends."""
    return node.target in STARTS


def is_region_gather(node: fx.Node) -> bool:
    """Whether it starts the gather of the parameters of a region (passes/communicate/gather_parameters.py)."""
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
