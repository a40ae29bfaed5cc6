"""The collectives of an expanded graph and the bytes that they move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

import megafx.ops.gather_region  # noqa: F401  registers the op; collectives, which it imports, gives _c10d_functional its fakes
from megafx.ir.nodes import in_backward
from megafx.ir.program import VAL, Program, fqn_of
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, payload

c10d = torch.ops._c10d_functional

# Starts of collectives: target -> name in placements.TRANSITIONS.
COLLECTIVES: dict[Any, str] = {
    c10d.all_reduce.default: ALL_REDUCE,
    c10d.all_reduce_.default: ALL_REDUCE,
    c10d.all_reduce_coalesced.default: ALL_REDUCE,
    c10d.all_gather_into_tensor.default: ALL_GATHER,
    c10d.all_gather_into_tensor_coalesced.default: ALL_GATHER,
    c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
    c10d.reduce_scatter_tensor_coalesced.default: REDUCE_SCATTER,
    c10d.all_to_all_single.default: ALL_TO_ALL,
    torch.ops.megafx.gather_region.default: ALL_GATHER,
}


@dataclass(frozen=True)
class Communication:
    """One collective. bytes_moved: what one rank sends (placements.payload) at the workload that the planner prices. axis: the
    mesh axis."""

    collective: str
    direction: str  # 'forward' or 'backward'
    fqn: str
    bytes_moved: int
    node: str
    axis: str = ""


def collective_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that start a collective, in graph order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in COLLECTIVES]


def communication(program: Program, t: int, sizes: Mapping[str, int] = MappingProxyType({})) -> list[Communication]:
    """Every collective of a LOWERED program, in graph order, on axes of t ranks, or of `sizes` (by name)."""
    found = []
    for node in collective_nodes(program.graph):
        name = COLLECTIVES[node.target]
        tensors = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        values = [x.meta[VAL] for x in tensors]  # type: ignore[union-attr]
        axis = str(node.args[-1])
        n = sizes.get(axis, t)
        ranks = n if name in (ALL_GATHER, ALL_TO_ALL) else 1  # operands that are a rank's share of the tensor moved
        bytes_moved = sum(payload(name, ranks * _numel(program, v), n) * v.dtype.itemsize for v in values)
        direction = "backward" if in_backward(node) else "forward"
        found.append(Communication(name, direction, fqn_of(node), bytes_moved, node.name, axis))
    return found


def _numel(program: Program, value: torch.Tensor) -> int:
    sizes = program.sizes
    return math.prod(sizes.workload(n) for n in sizes.shape(value))
