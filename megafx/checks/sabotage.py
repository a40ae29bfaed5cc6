"""Graphs that are wrong on purpose: a collective taken away, or another in its place, in the right shapes.

If such a graph went unnoticed, a comparison that finds the right one equal would prove nothing.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import COLLECTIVES, EXCHANGES, MOVES_TOKENS
from megafx.errors import PlacementError
from megafx.ir.program import VAL
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

aten, c10d, mfx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.megafx
Emit = Callable[..., fx.Node]
Change = Callable[[Emit, fx.Node, int], fx.Node]  # (emit, start of the collective, ranks) -> what is read instead


@contextlib.contextmanager
def changed_collective(graph: fx.Graph, start: fx.Node, t: int, change: Change) -> Iterator[None]:
    """The graph with change(...) read in place of the collective's result; put right again afterwards."""
    read = start if start.target in EXCHANGES else next(iter(start.users))
    with replaced(graph, read, lambda emit: change(emit, start, t)):
        yield


@contextlib.contextmanager
def without_transition(graph: fx.Graph, node: fx.Node) -> Iterator[None]:
    """The graph with a transition's operand read in its place; put right again afterwards."""
    with replaced(graph, node, lambda emit: node.args[0]):
        yield


@contextlib.contextmanager
def replaced(graph: fx.Graph, node: fx.Node, make: Callable[[Emit], Any]) -> Iterator[None]:
    """The graph with make(emit) read in place of `node`; put right again afterwards."""
    made: list[fx.Node] = []
    users = [(user, user.args, user.kwargs) for user in node.users]

    def emit(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_after(made[-1] if made else node):
            made.append(graph.call_function(target, args))
        made[-1].meta |= node.meta
        values = fx.node.map_arg(args, lambda n: n.meta[VAL])
        with node.meta[VAL].fake_mode:
            made[-1].meta[VAL] = target(*values)
        return made[-1]

    result = make(emit)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in made)
    try:
        yield
    finally:
        for user, args, kwargs in users:
            user.args, user.kwargs = args, kwargs
        for extra in reversed(made):
            graph.erase_node(extra)


def without(emit: Emit, start: fx.Node, t: int) -> fx.Node:
    """The rank's own contribution."""
    x = start.args[0]
    if start.target in EXCHANGES:
        return _alone(emit, start, t)
    match COLLECTIVES[start.target]:
        case collective if collective == ALL_REDUCE:
            return emit(aten.clone.default, x)
        case collective if collective == ALL_GATHER:
            return emit(aten.cat.default, [x] * t)
        case collective if collective == REDUCE_SCATTER:
            parts = emit(aten.unflatten.int, x, 0, [t, -1])
            return emit(mfx.rank_select.default, parts, start.args[-1])
        case collective if collective == ALL_TO_ALL:
            return emit(aten.clone.default, x)
    raise PlacementError(f"no sabotage is known for {start.target}", fix="leave it out")


def with_another(emit: Emit, start: fx.Node, t: int) -> fx.Node:
    """Another collective, or the same without its reduction."""
    x = start.args[0]
    axis = start.args[-1]
    if start.target in EXCHANGES:  # what arrives in the order of other rows
        return emit(aten.flip.default, emit(start.target, *start.args), [0])

    def arrived(target: Any, *args: Any) -> fx.Node:
        return emit(c10d.wait_tensor.default, emit(target, *args, axis))

    match COLLECTIVES[start.target]:
        case collective if collective == ALL_REDUCE:
            return arrived(c10d.all_reduce.default, x, "avg")
        case collective if collective == ALL_GATHER:
            return arrived(c10d.all_reduce.default, emit(aten.cat.default, [x] * t), "sum")
        case collective if collective == REDUCE_SCATTER:  # parts of all ranks arrive, of which only rank 0's is kept
            parts = arrived(c10d.all_to_all_single.default, emit(aten.unflatten.int, x, 0, [t, -1]), [1] * t, [1] * t)
            return emit(aten.select.int, parts, 0, 0)
        case collective if collective == ALL_TO_ALL:
            return arrived(c10d.all_reduce.default, x, "sum")
    raise PlacementError(f"no sabotage is known for {start.target}", fix="leave it out")


def _alone(emit: Emit, start: fx.Node, t: int) -> fx.Node:
    """What a rank would compute of its own tokens, were they those that arrive."""
    if start.target not in MOVES_TOKENS:  # which row is whose
        return emit(aten.zeros_like.default, emit(start.target, *start.args))
    x, places, _, rows, _, choices, entries, _ = start.args
    made = emit(start.target, *start.args)
    back = start.target is mfx.combine_rows.default
    tokens = emit(aten.sym_size.int, places, 0)
    row = rows if entries else emit(aten.floor_divide.default, rows, choices)
    own = emit(aten.remainder.Scalar, row, emit(operator.mul, tokens, choices) if entries else tokens)
    if back:
        return emit(aten.index_add.default, emit(aten.zeros_like.default, made), 0, own, x)
    return emit(aten.index_select.default, x, 0, own)
