"""Values that differ by rank by intent: a lookup in a sharded vocabulary, and the loss over one.

A rank looks up the ids that lie in its rows of the table and contributes zeros for the others:

    index = ids - rank*rows        mine = index >= 0 and index < rows        safe = index where mine, else 0
    found = embedding(table S0, safe)                 a summand only once masked:
    where(mine, found, 0)                             partial
    backward: where(mine, grad, 0), then embedding_dense_backward(., safe, rows): shard S0 of the table

Each step is recognised by what it computes (a `Trait`), so a graph that leaves one out, or mixes the masks of two tables, is
refused. The loss: each rank has statistics of its own classes, which stacked on a new dim are a shard; gathered, they make
the loss whole, and its backward a shard, without a collective. What such ops take and give is a fact of theirs (`types`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.contracts import fail, is_transition, layout_of
from megafx.ir.facts import facts_of
from megafx.ir.nodes import is_zero, op_name
from megafx.ir.program import VAL, Program
from megafx.placements.types import Layout, P, Placement, R, S

Facts = tuple[Placement, ...]  # readings of one value, each of them true

STACKS = ("aten.unsqueeze.default", "aten.clone.default")  # between statistics and their gather
KEEPS_TRAIT = ("aten.clone.default", "aten.detach.default", "aten.alias.default", "aten._to_copy.default")


class Trait(NamedTuple):
    """A value that differs by rank. step: which of the steps above; key: (ids node, rows), or the operands of statistics."""

    step: str
    key: Any = None


class Lookups:
    """Recognises rank-dependent values while the checker walks the graph; facts: those of ordinary values."""

    def __init__(self, program: Program, facts: dict[fx.Node, Facts], t: int) -> None:
        self.program, self.facts, self.t = program, facts, t
        self.traits: dict[fx.Node, Trait] = {}
        self.tables: dict[Any, Layout] = {}  # (ids, rows) -> how the table is cut

    def show(self, node: fx.Node) -> str:
        return f"rank-dependent ({self.traits[node].step})" if node in self.traits else "untyped"

    def visit(self, node: fx.Node) -> tuple[Any, ...] | None:
        """Facts of a node whose value is an ordinary one again; () for one with a trait; None for a node that is neither.

        Several results have one reading: a tuple of them.
        """
        step = _typed if "stats" in facts_of(node.target).types else _STEPS.get(str(node.target))
        starts = step is _typed or str(node.target) == RANK or any(a in self.traits for a in node.all_input_nodes)
        if step is None or not starts:
            return None
        result = step(self, node)
        if isinstance(result, Trait):
            self.traits[node] = result
            return ()
        return None if result is None else (result,)

    def has(self, node: Any, step: str) -> bool:
        return isinstance(node, fx.Node) and node in self.traits and self.traits[node].step == step

    def trait(self, node: Any, step: str) -> Any:
        """The key of this trait, or None."""
        return self.traits[node].key if self.has(node, step) else None

    def whole(self, node: Any) -> bool:
        return not isinstance(node, fx.Node) or R in self.facts.get(node, ())

    def size(self, value: Any) -> int:
        """Structural integer of a size argument; -1 for anything else."""
        value = value.meta[VAL] if isinstance(value, fx.Node) else value
        return self.program.sizes.of(value) if isinstance(value, (int, torch.SymInt)) else -1

    def shard(self, node: Any, dim: int) -> list[Layout]:
        """Layouts by which the value is a shard of `dim`."""
        return [p.cut for p in self.facts.get(node, ()) if p.is_shard and p.dim == dim]


Found = Trait | Placement | None


def _index_step(state: Lookups, node: fx.Node) -> Found:
    """From the rank's coordinate to `index`, and from that to `mine`."""
    first, second = (*node.args, None)[:2]
    match op_name(node):
        case "axis_index":
            return Trait("rank")
        case "mul":
            return Trait("offset", state.size(second)) if state.has(first, "rank") else None
        case "sub":
            rows = state.trait(second, "offset")
            return Trait("index", (first, rows)) if rows is not None and state.whole(first) else None
        case "ge":
            key = state.trait(first, "index")
            return Trait("from below", key) if key is not None and second == 0 else None
        case "lt":
            key = state.trait(first, "index")
            return Trait("from above", key) if key is not None and state.size(second) == key[1] else None
    below = state.trait(first, "from below") or state.trait(second, "from below")
    above = state.trait(first, "from above") or state.trait(second, "from above")
    return Trait("mine", below) if below is not None and below == above else None


def _unsqueeze(state: Lookups, node: fx.Node) -> Found:
    x, dim = node.args[:2]
    if (key := state.trait(x, "mine")) is not None and int(dim) in (-1, node.meta[VAL].ndim - 1):  # type: ignore[arg-type]
        return Trait("mine, by row", key)
    if state.trait(x, "statistics") is not None and dim == 0:
        return S(0, Layout.contiguous(state.t, state.t))
    return None


def _where(state: Lookups, node: fx.Node) -> Found:
    mask, x, other = node.args[:3]
    if (key := state.trait(mask, "mine")) is not None:
        return Trait("safe", key) if state.trait(x, "index") == key and is_zero(other) else None
    if (key := state.trait(mask, "mine, by row")) is not None and is_zero(other):
        if state.trait(x, "found") == key:
            return P
        return Trait("masked", key) if x in state.facts and state.whole(x) else None
    if state.whole(mask):  # padding_idx: rows that are read but get no gradient
        for step in ("found", "masked"):
            keys = [state.trait(v, step) for v in (x, other)]
            if keys[0] is not None and (keys[1] == keys[0] or is_zero(other)):
                return Trait(step, keys[0])
            if keys[1] is not None and is_zero(x):
                return Trait(step, keys[1])
    return None


def _embedding(state: Lookups, node: fx.Node) -> Found:
    table, ids = node.args[:2]
    key = state.trait(ids, "safe")
    if key is None:
        return None
    rows = state.program.sizes.of(table.meta[VAL].shape[0])  # type: ignore[union-attr]
    cuts = [cut for cut in state.shard(table, 0) if cut.simple()]
    if not cuts or rows != key[1]:
        return None
    state.tables[key] = cuts[0]
    return Trait("found", key)


def _embedding_backward(state: Lookups, node: fx.Node) -> Found:
    grad, ids, rows = node.args[:3]
    key = state.trait(grad, "masked")
    if key is None or state.trait(ids, "safe") != key or state.size(rows) != key[1] or key not in state.tables:
        return None
    return S(0, state.tables[key])


def _same(state: Lookups, node: fx.Node) -> Found:
    return state.traits.get(node.args[0])  # type: ignore[arg-type]


# -- ops whose file says what they take and give (`OpFacts.types`): the vocabulary-parallel loss


def _typed(state: Lookups, node: fx.Node) -> Found | tuple[Placement, ...]:
    target: Any = node.target
    left, _, right = facts_of(target).types.partition("->")
    tensors = [(i, a.name) for i, a in enumerate(target._schema.arguments) if "Tensor" in str(a.type)]
    given = {name: _undetached(node.args[i]) for i, name in tensors}
    at = [a.name for a in target._schema.arguments].index("layout")
    layout = Layout.from_flat(layout_of(state.program, node.args[at]))
    for (name, value), wanted in zip(given.items(), left.replace(" ", "").split(","), strict=True):
        if wanted == "stats":
            _check_gathered(state, node, value, given, layout)
        elif wanted == "R" and not state.whole(value):
            raise fail(node, f"its operand '{name}' must be whole")
        elif wanted[0] == "S" and value is not None and layout not in state.shard(value, int(wanted[1:])):
            raise fail(node, f"its operand '{name}' must be shard {S(int(wanted[1:]), layout)}")
    if right.strip() == "stats":
        return Trait("statistics", (given, layout))
    made = tuple(S(int(r[1:]), layout) if r[0] == "S" else Placement(r) for r in right.replace(" ", "").split(";"))
    return made if len(made) > 1 else made[0]


def _check_gathered(state: Lookups, node: fx.Node, stats: Any, given: dict[str, Any], layout: Layout) -> None:
    """`stats` must be the statistics of the same operands, gathered."""
    if not state.whole(stats):
        raise fail(node, "its statistics must be whole: they are not gathered")
    while isinstance(stats, fx.Node) and (is_transition(stats) or str(stats.target) in STACKS):
        stats = stats.args[0]
    operands, cut = state.trait(stats, "statistics") or ({}, None)
    if cut != layout or any(given.get(name) is not value for name, value in operands.items()):
        raise fail(node, "its statistics are not those of its operands")


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and str(node.target) in KEEPS_TRAIT[1:3]:
        node = node.args[0]
    return node


RANK = "megafx.axis_index.default"
_INDEX = ("mul.Tensor", "sub.Tensor", "ge.Scalar", "lt.Scalar", "bitwise_and.Tensor", "logical_and.default")
_STEPS = {
    **dict.fromkeys((RANK, *(f"aten.{op}" for op in _INDEX)), _index_step),
    "aten.unsqueeze.default": _unsqueeze,
    "aten.where.self": _where,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    **dict.fromkeys(KEEPS_TRAIT, _same),
}
