"""How the rows of the batch run through a graph of whole shapes: which values have a row for each of the batch's.

The sharding rules say it: an op that may be cut along the dim of the batch computes each row by itself. What data-parallel
ranks do with other ops is that pass's (passes/plan/place_batch.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch

from megafx.ir.sizes import Sizes
from megafx.placements.types import Layout, P, Placement, R, S
from megafx.rules.strategies import OpRule, factor_layouts, place, row

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
