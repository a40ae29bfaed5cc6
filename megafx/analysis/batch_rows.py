"""How the rows of the batch run through a graph of whole shapes: which values have a row for each of the batch's.

The sharding rules say it: an op that may be cut along the dim of the batch computes each row by itself. Two parts of the batch
serve as two ranks of an axis; what data-parallel ranks do with other ops is that pass's (passes/plan/place_batch.py).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from megafx.ir.nodes import draw_of, is_draw
from megafx.ir.program import VAL, Program
from megafx.ir.sizes import Sizes
from megafx.placements.types import I, Layout, P, Placement, R, S
from megafx.rules.strategies import OpRule, factor_layouts, place, row, rule_for

# A value made of no tensor has the same rows on every rank where all its elements are alike.
FILLS = frozenset(("full", "zeros", "ones", "empty", "scalar_tensor"))
LIKE = frozenset(name for what in ("zeros", "ones", "full", "empty") for name in (f"{what}_like", f"new_{what}"))
# Ops that repeat what they are given: the rows that they bring are alike.
REPEATS = ("aten.expand", "aten.repeat", "aten.broadcast_to")
PARTS = 2


class WholeSizes(Sizes):
    """Structural sizes of the batch of all ranks: where one rank has `batch`, they have `ranks * batch`."""

    def __init__(self, sizes: Sizes, symbol: sympy.Symbol, ranks: int) -> None:
        own = {"_prime_of": dict(sizes._prime_of), "_atom_of": dict(sizes._atom_of), "_memo": {}}
        self.__dict__.update(sizes.__dict__, **own)
        self.batch, self.ranks = symbol, ranks

    def _prime(self, atom: sympy.Expr) -> int:
        return super()._prime(atom) * (self.ranks if atom == self.batch else 1)


@dataclass(frozen=True)
class Row:
    """A way to run an op: what its operands have to be and what its results are."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


def cut(sizes: Sizes, value: torch.Tensor, batch: int, ranks: int) -> Placement | None:
    """S on the one dim that has the batch (structural); R where none has; None where it is in the shape in another way."""
    shape = sizes.shape(value)
    dims = [d for d, n in enumerate(shape) if n % batch == 0 and n]
    strange = [n for n in shape if n % batch and sizes.mentions(n, "batch")]
    if strange or len(dims) > 1:
        return None
    return S(dims[0], Layout.contiguous(shape[dims[0]], ranks)) if dims else R


def rows(rule: OpRule, held: list[Placement], ranks: int) -> Iterator[Row]:
    """The ways to run an op that operands which are held like this may fit."""
    template = rule.template
    count = len(template.results)
    yield Row((R,) * len(held), (R,) * count)
    for group, outs in template.groups:
        if group:
            ins = tuple(P if i in group else R for i in range(len(held)))
            yield Row(ins, tuple(P if kind == "P" else R for kind in outs) if template.kind != "view" else (P,))
    for i, have in enumerate(held):
        if not have.is_shard:
            continue
        if template.kind == "view":
            made = row(template, f"dim{have.dim}", have.cut, ranks)
            if made is not None:
                yield Row(made.ins, (made.out,))
            continue
        for factor, layout in factor_layouts(template, i, have.dim, have.cut, ranks):
            if template.written_out(factor):
                continue
            operands = [place(template, k, factor, layout, ranks) for k in range(len(held))]
            results = [place(template, -1 - k, factor, layout, ranks) for k in range(count)]
            if None not in operands and None not in results:
                yield Row(tuple(p for p in operands if p), tuple(p for p in results if p))


class BatchRows:
    """facts: S(d) of a value whose dim d has a row for each of the batch's, computed from that row of the inputs; R of one that
    does not depend on the batch. mixed: the other values, with why ('' where they stem from mixed ones)."""

    def __init__(self, program: Program, symbol: sympy.Symbol) -> None:
        self.symbol, self.sizes = symbol, WholeSizes(program.sizes, symbol, PARTS)
        self.batch, self.view = self.sizes.of_expr(symbol), replace(program, sizes=self.sizes)
        self.facts: dict[fx.Node, Any] = {}
        self.mixed: dict[fx.Node, str] = {}
        inputs = dict(program.input_nodes())
        for node in program.graph.nodes:
            found: Any = R
            if node.op == "placeholder":
                given = inputs[node].kind in ("user", "constant") and isinstance(node.meta[VAL], torch.Tensor)
                found = self._shaped(node) if given else R
            elif node.op == "call_function" and has_tensor(node):
                found = self._typed(node)
            else:
                continue
            if isinstance(found, str):
                self.mixed[node] = found
            else:
                self.facts[node] = found

    def dim(self, node: fx.Node) -> int | None:
        """The dim of a value's rows."""
        fact = self.facts.get(node)
        return fact.dim if isinstance(fact, Placement) and fact.is_shard else None

    def splits(self, node: fx.Node) -> bool:
        """Whether the op's results have the batch's rows, one of them at least."""
        fact = self.facts.get(node, R)
        return any(f.is_shard for f in (fact if isinstance(fact, tuple) else (fact,)))

    def _shaped(self, node: fx.Node) -> Placement | str:
        found = cut(self.sizes, node.meta[VAL], self.batch, PARTS)
        return "has the batch in its shape in a way that cannot be cut" if found is None else found

    def _typed(self, node: fx.Node) -> Any:
        """Facts of the results, or why they are mixed."""
        args: Any = node.args
        if any(a in self.mixed for a in node.all_input_nodes):
            return ""
        if node.target is operator.getitem:
            return self.facts[args[0]][args[1]]
        if node.target is torch.ops.megafx.transition.default:
            return self.facts[args[0]]
        name = str(node.target).split(".")[1]
        operands = [a for a in node.all_input_nodes if a in self.facts]
        if any(self._counts(node, a) for a in node.all_input_nodes):
            return "computes with the number of rows"
        several = isinstance(node.meta[VAL], (tuple, list))
        alike = name in LIKE or name in FILLS or str(node.target).startswith(REPEATS)
        if not operands or name in LIKE:
            found = R if several else self._shaped(node)
            return found if found == R or alike or isinstance(found, str) else "numbers the rows"
        rule = rule_for(node, self.view, self.facts)
        held = [self.facts[o.node] for o in rule.operands]
        if all(h == R for h in held):
            found = R if several else self._shaped(node)
            if found != R and not isinstance(found, str) and not alike:
                return "gives values that need not be alike for all rows a dim for them"
            return tuple(R for _ in node.meta[VAL]) if several else found
        fits = (r for r in rows(rule, held, PARTS) if all(h == w or w == I for h, w in zip(held, r.ins, strict=True)))
        outs = next((r.outs for r in fits if P not in r.outs), None)
        if outs is None:
            return rule.reason or "computes with several rows at a time"
        drawn = is_draw(node) and draw_of(node).p and draw_of(node).seed is not None
        if drawn and outs[0].is_shard and not (outs[0].dim == 0 and outs[0].cut.contiguous_shards(PARTS)):
            return "draws random numbers for a value whose first dim is not the batch's"
        return outs if several else outs[0]

    def _counts(self, node: fx.Node, given: fx.Node) -> bool:
        """Whether the op takes a number that depends on the size of the batch, other than in a list of sizes."""
        expr = getattr(getattr(given.meta.get(VAL), "node", None), "expr", None)
        return expr is not None and self.symbol in expr.free_symbols and any(a is given for a in node.args)


def limit_sizes(program: Program, symbol: sympy.Symbol, least: int, greatest: int | None = None) -> None:
    """Let the program serve calls alone whose batch is of these sizes. greatest: None: as it is."""
    if program.call is not None:
        known, most = program.call.ranges.get(symbol, (0, sys.maxsize))
        bounds = max(known, least), most if greatest is None else greatest
        program.call = replace(program.call, ranges={**program.call.ranges, symbol: bounds}, _verdicts={})


def has_tensor(node: fx.Node) -> bool:
    value = node.meta.get(VAL)
    return any(isinstance(v, torch.Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,)))
