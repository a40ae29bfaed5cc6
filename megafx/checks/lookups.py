"""Facts of lookups in a sharded vocabulary, in which ranks compute with their own coordinate.

A rank looks up the ids that lie in its rows of the table and contributes zeros for the others:

    index = ids - rank*rows        mine = index >= 0 and index < rows        safe = index where mine, else 0
    found = embedding(table S0, safe)                 a summand only once masked:
    where(mine, found, 0)                             partial
    backward: where(mine, grad, 0), then embedding_dense_backward(., safe, rows): shard S0 of the table

Every step is recognised by what it computes (a `Trait`), so leaving one out, or mixing two tables' masks, is no lookup.
The vocabulary-parallel loss: ce_stats gives each rank statistics of its classes, which stacked on a new dim are a shard;
gathered, they make ce_loss whole, and its backward a shard, without a collective. Behind a linear layer whose logits are never
made, linear_ce_stats and linear_ce_loss do the same; backward gives the gradient of its input as summands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.contracts import fail, is_transition, layout_of
from megafx.ir.nodes import is_zero
from megafx.ir.program import VAL, Program
from megafx.placements.types import Layout, P, Placement, R, S

Facts = tuple[Placement, ...]  # readings of one value, each of them true

STACKS = ("aten.unsqueeze.default", "aten.clone.default")  # between statistics and their gather
KEEPS_TRAIT = ("aten.clone.default", "aten.detach.default", "aten.alias.default", "aten._to_copy.default")


class Trait(NamedTuple):
    """A value that differs by rank. step: which of the steps above; key: (ids node, rows), or what the step is of."""

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
        """Facts of a node that leads back to ordinary values; () for one with a trait; None for no business of ours.

        Of several results there is one reading: a tuple of them.
        """
        step = _STEPS.get(str(node.target))
        involved = any(a in self.traits for a in node.all_input_nodes)
        if step is None or not (involved or str(node.target) in _ENTRIES):
            return None
        result = step(self, node)
        if isinstance(result, Trait):
            self.traits[node] = result
            return ()
        return None if result is None else (result,)

    # -- what the methods above share

    def trait(self, node: Any, step: str) -> Any:
        """The key of this trait, or None."""
        found = self.traits.get(node) if isinstance(node, fx.Node) else None
        return found.key if found is not None and found.step == step else None

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


def _rank(state: Lookups, node: fx.Node) -> Found:
    return Trait("rank")


def _mul(state: Lookups, node: fx.Node) -> Found:
    rank, rows = node.args[:2]
    return Trait("offset", state.size(rows)) if state.traits.get(rank) == Trait("rank") else None  # type: ignore[arg-type]


def _sub(state: Lookups, node: fx.Node) -> Found:
    ids, offset = node.args[:2]
    rows = state.trait(offset, "offset")
    return Trait("index", (ids, rows)) if rows is not None and state.whole(ids) else None


def _ge(state: Lookups, node: fx.Node) -> Found:
    key = state.trait(node.args[0], "index")
    return Trait("from below", key) if key is not None and node.args[1] == 0 else None


def _lt(state: Lookups, node: fx.Node) -> Found:
    key = state.trait(node.args[0], "index")
    return Trait("from above", key) if key is not None and state.size(node.args[1]) == key[1] else None


def _and(state: Lookups, node: fx.Node) -> Found:
    a, b = node.args[:2]
    below = state.trait(a, "from below") or state.trait(b, "from below")
    above = state.trait(a, "from above") or state.trait(b, "from above")
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


# -- the vocabulary-parallel loss


def _stats(state: Lookups, node: fx.Node) -> Found:
    logits, target, flat = node.args[:3]
    layout = Layout.from_flat(layout_of(state.program, flat))
    _check_logits(state, node, logits, target, layout)
    return Trait("statistics", (logits, target, layout))


def _check_logits(state: Lookups, node: fx.Node, logits: Any, target: Any, layout: Layout) -> None:
    if layout not in state.shard(logits, 1):
        raise fail(node, f"its logits must be shard {S(1, layout)}")
    if not state.whole(target):
        raise fail(node, "its targets must be whole")


def _of_all_ranks(state: Lookups, node: fx.Node, everyone: Any, key: Any) -> None:
    """`everyone` must be the statistics of these logits, gathered."""
    if not state.whole(everyone):
        raise fail(node, "its statistics must be whole: they are not gathered")
    source = everyone
    while isinstance(source, fx.Node) and (is_transition(source) or str(source.target) in STACKS):
        source = source.args[0]
    if state.trait(source, "statistics") != key:
        raise fail(node, "its statistics are not those of its logits and targets")


def _ce_loss(state: Lookups, node: fx.Node) -> Found:
    logits, target, everyone, _, _, flat = node.args[:6]
    layout = Layout.from_flat(layout_of(state.program, flat))
    _check_logits(state, node, logits, target, layout)
    _of_all_ranks(state, node, everyone, (logits, target, layout))
    return R


def _ce_loss_backward(state: Lookups, node: fx.Node) -> Found:
    grad, logits, target, everyone, _, _, _, flat = node.args[:8]
    layout = Layout.from_flat(layout_of(state.program, flat))
    _check_logits(state, node, logits, target, layout)
    _of_all_ranks(state, node, everyone, (logits, target, layout))
    if not state.whole(grad):
        raise fail(node, "the gradient of the loss must be whole")
    return S(1, layout)


# -- the same behind a linear layer, without its logits


def _linear_stats(state: Lookups, node: fx.Node) -> Found:
    x, weight, bias, target, flat = node.args[:5]
    layout = Layout.from_flat(layout_of(state.program, flat))
    _check_layer(state, node, (x, weight, bias, target), layout)
    return Trait("statistics", (_undetached(x), _undetached(weight), _undetached(bias), target, layout))


def _linear_loss(state: Lookups, node: fx.Node) -> Found:
    x, weight, bias, target, everyone, _, _, flat = node.args[:8]
    _of_layer(state, node, x, weight, bias, target, everyone, flat)
    return R


def _linear_loss_backward(state: Lookups, node: fx.Node) -> Found | tuple[Placement, ...]:
    grad, x, weight, bias, target, everyone, _, _, _, flat = node.args[:10]
    layout = _of_layer(state, node, x, weight, bias, target, everyone, flat)
    if not state.whole(grad):
        raise fail(node, "the gradient of the loss must be whole")
    return P, S(0, layout), S(0, layout)


def _of_layer(
    state: Lookups, node: fx.Node, x: Any, weight: Any, bias: Any, target: Any, everyone: Any, flat: Any
) -> Layout:
    layout = Layout.from_flat(layout_of(state.program, flat))
    _check_layer(state, node, (x, weight, bias, target), layout)
    key = (_undetached(x), _undetached(weight), _undetached(bias), target, layout)
    _of_all_ranks(state, node, everyone, key)
    return layout


def _check_layer(state: Lookups, node: fx.Node, operands: tuple[Any, ...], layout: Layout) -> None:
    x, weight, bias, target = operands
    for value in (weight, bias):
        if value is not None and layout not in state.shard(value, 0):
            raise fail(node, f"its weight and bias must be shard {S(0, layout)}")
    if not (state.whole(x) and state.whole(target)):
        raise fail(node, "its hidden states and targets must be whole")


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and str(node.target) in KEEPS_TRAIT[1:3]:
        node = node.args[0]
    return node


_STEPS = {
    "megafx.axis_index.default": _rank,
    "aten.mul.Tensor": _mul,
    "aten.sub.Tensor": _sub,
    "aten.ge.Scalar": _ge,
    "aten.lt.Scalar": _lt,
    "aten.bitwise_and.Tensor": _and,
    "aten.logical_and.default": _and,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.where.self": _where,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "megafx.ce_stats.default": _stats,
    "megafx.ce_loss.default": _ce_loss,
    "megafx.ce_loss_lse.default": _ce_loss,
    "megafx.ce_loss_backward.default": _ce_loss_backward,
    "megafx.linear_ce_stats.default": _linear_stats,
    "megafx.linear_ce_loss.default": _linear_loss,
    "megafx.linear_ce_loss_lse.default": _linear_loss,
    "megafx.linear_ce_loss_backward.default": _linear_loss_backward,
    **dict.fromkeys(KEEPS_TRAIT, _same),
}
_ENTRIES = (
    "megafx.axis_index.default",
    "megafx.ce_stats.default",
    "megafx.ce_loss.default",
    "megafx.ce_loss_lse.default",
    "megafx.ce_loss_backward.default",
    "megafx.linear_ce_stats.default",
    "megafx.linear_ce_loss.default",
    "megafx.linear_ce_loss_lse.default",
    "megafx.linear_ce_loss_backward.default",
)
