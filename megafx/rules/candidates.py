"""Which shards of which values are worth considering: the smallest set closed under the ops' rules.

Every active value starts with a contiguous cut of each dim, and of each factor of a merged dim. Each cut is carried through
the ops that make and use the value (factors, views, slices), forward and backward, until nothing new comes up: a head cut of
an attention value becomes a block cut of the fused projection before it, of its weight and of its bias. A cut of one
slice of a value becomes a cut of the whole, with one block for each interval between the bounds of all slices of that dim.

Each (value, dim, layout) is visited once, and what it implies at an op is memoised by the op's template, so that equal
layers cost dictionary lookups only. Nothing is pruned but duplicates: pruning loses optima.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from megafx.ir.program import VAL
from megafx.ir.sizes import FIRST_PRIME, Sizes
from megafx.placements.types import Layout
from megafx.placements.views import map_view, slice_layout, wholes_of_part
from megafx.rules.grammar import names
from megafx.rules.strategies import OpRule, Strategy, Template, factor_layouts, place, row, rows

Cut = tuple[int, Layout]
HEADS = 1  # the dim of attention's operands and results [b, heads, s, d]


class Candidates:
    """values: the shards (dim, layout) of each active value. Layouts of op factors: `layouts_of`."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, dict[Cut, None]] = {}
        self._layouts: dict[fx.Node, dict[tuple[str, Layout], None]] = {}

    def of(self, node: fx.Node) -> list[Cut]:
        return list(self.values.get(node, ()))

    def layouts_of(self, node: fx.Node) -> tuple[tuple[str, Layout], ...]:
        """(factor, layout) pairs of an op: one row each."""
        return tuple(self._layouts.get(node, ()))


def find_candidates(
    rules: Mapping[fx.Node, OpRule],
    params_and_inputs: Iterable[fx.Node],
    sizes: Sizes,
    t: int,
    only: Collection[str] = (),
    head_tail: bool = False,
    by_heads: Collection[fx.Node] = (),
) -> Candidates:
    """rules: of all active ops, in graph order; params_and_inputs: the active placeholders. only: names of sizes, where no
    dim may be cut but those that have one of them; head_tail: by such layouts. by_heads: attentions whose heads may be cut
    too, but no value around them."""
    found = Candidates()
    adjacent: dict[fx.Node, list[tuple[OpRule, int]]] = {}
    shapes: dict[fx.Node, tuple[int, ...]] = {}
    for node in params_and_inputs:
        value = node.meta[VAL]
        assert isinstance(value, torch.Tensor)
        shapes[node], adjacent[node] = sizes.shape(value), []
    made: dict[fx.Node, list[fx.Node | None]] = {}  # op -> its results
    for node, rule in rules.items():
        adjacent.setdefault(node, [])
        made[node] = results_of(node, rule)
        for k, value in enumerate(made[node]):
            if value is not None:
                shapes[value] = rule.template.shapes[k]
                adjacent.setdefault(value, []).append((rule, -1 - k))
        for i, operand in enumerate(rule.operands):
            if operand.active and rule.kind != "none":
                adjacent[operand.node].append((rule, i))
    bounds = _bounds(rules)
    work: deque[tuple[fx.Node, int, Layout]] = deque()

    def add(node: fx.Node, dim: int, layout: Layout) -> None:
        if (dim, layout) in found.values.get(node, ()):
            return
        if node in shapes and sizes.from_data(shapes[node][dim]):
            return  # rows that data selects: ranks cannot know one another's numbers of them
        if any(block.count >= FIRST_PRIME and sizes.shards_to_one(block.count, t) for block in layout.blocks):
            return
        found.values.setdefault(node, {})[dim, layout] = None
        work.append((node, dim, layout))

    for node, shape in shapes.items():
        for dim, n in enumerate(shape):
            if n >= 2 and (not only or sizes.is_one_of(n, only)):
                add(node, dim, Layout.of([(n, 1)], t, head_tail=head_tail))

    def side(rule: OpRule, i: int) -> fx.Node | None:
        return rule.operands[i].node if i >= 0 else made[rule.node][-1 - i]

    for rule in () if only else rules.values():
        for j, dim, layout in _inside_merged(rule.template, t):
            if (value := side(rule, j)) is not None:
                add(value, dim, layout)
    while work:
        node, dim, layout = work.popleft()
        for rule, i in adjacent[node]:
            part = rule.template.parts.get(i)
            cuts = bounds.get(_whole(rule), ()) if part else ()
            layouts, implied = _transfer(rule.template, i, dim, layout, cuts, t)
            if layouts:
                found._layouts.setdefault(rule.node, {}).update(layouts)
            for j, other, cut in implied:
                if (value := side(rule, j)) is not None:
                    add(value, other, cut)
    for node in by_heads:
        template = rules[node].template
        head = template.entries(1)[HEADS]  # of keys: whole groups of query heads
        if head is not None and head not in template.forbidden:
            found._layouts.setdefault(node, {})[head, Layout.contiguous(template.sizes[head], t)] = None
    return found


def results_of(node: fx.Node, rule: OpRule) -> list[fx.Node | None]:
    """The values that the rule places: the node, or the elements of its tuple (None: unused, or no tensor of interest)."""
    if not rule.template.several:
        return [node]
    found: list[fx.Node | None] = [None] * rule.template.placed
    for user in node.users:
        index: Any = user.args[1] if user.target is operator.getitem else len(found)
        if index < len(found) and rule.template.shapes[index]:
            found[index] = user
    return found


def _whole(rule: OpRule) -> tuple[fx.Node, int]:
    """The (value, dim) that the parts of a rule are parts of: a slice's operand, a concatenation's result."""
    sliced = -1 in rule.template.parts
    return rule.operands[0].node if sliced else rule.node, _part_dim(rule.template, 0 if sliced else -1)


def _part_dim(template: Template, i: int) -> int:
    factor = next(iter(template.parts.values())).factor
    return next((d for d, e in enumerate(template.entries(i)) if factor in names(e)), -1)


def _bounds(rules: Mapping[fx.Node, OpRule]) -> dict[tuple[fx.Node, int], tuple[int, ...]]:
    """Where each dim of each value is cut by its slices or made of parts, both ends included."""
    found: dict[tuple[fx.Node, int], set[int]] = {}
    for rule in rules.values():
        parts = rule.template.parts
        if parts:
            points = found.setdefault(_whole(rule), set())
            points.update((0, rule.sizes[next(iter(parts.values())).factor]))
            points.update(x for part in parts.values() for x in (part.start, part.end))
    return {k: tuple(sorted(v)) for k, v in found.items()}


def _results(template: Template) -> list[int]:
    return [-1 - k for k in range(template.placed)][::-1]


@lru_cache(maxsize=65536)
def _inside_merged(template: Template, t: int) -> tuple[tuple[int, int, Layout], ...]:
    """Contiguous cuts of the factors of merged dims, such as the query heads inside each group: no dim starts as one."""
    if template.kind != "factors" or not template.placed:
        return ()
    sides = [*_results(template), *(i for i, s in enumerate(template.operands) if s.active)]
    merged = {f for i in sides for e in template.entries(i) if len(names(e)) > 1 for f in names(e)}
    found: dict[tuple[int, int, Layout], None] = {}
    for f in sorted(merged - set(template.forbidden)):
        for i in sides:
            placed = place(template, i, f, Layout.contiguous(template.sizes[f], t), t)
            if placed is not None and placed.is_shard:
                found[i, placed.dim, placed.cut] = None
    return tuple(found)


@lru_cache(maxsize=262144)
def _transfer(
    template: Template, i: int, dim: int, layout: Layout, bounds: tuple[int, ...], t: int
) -> tuple[dict[tuple[str, Layout], None], tuple[tuple[int, int, Layout], ...]]:
    """What a shard of one dim of operand i (or a result, < 0) implies: the op's factor layouts, and shards elsewhere."""
    if template.kind == "view":
        source, made = template.operands[0].shape, template.shapes[0]
        if i == 0:
            forward = map_view(source, made, dim, layout, t)
            return ({(f"dim{dim}", layout): None}, ((-1, *forward),)) if forward else ({}, ())
        back = map_view(made, source, dim, layout, t)
        return ({(f"dim{back[0]}", back[1]): None}, ((0, *back),)) if back else ({}, ())
    options = factor_layouts(template, i, dim, layout, t)
    part = template.parts.get(i)
    if part is not None and _part_dim(template, i) == dim:
        wholes = wholes_of_part(layout, part.start, bounds, t) if bounds[-1] < FIRST_PRIME else []
        fitting = [w for w in wholes if slice_layout(w, part.start, part.end, t) == layout]
        options = iter([(part.factor, whole) for whole in fitting])
    layouts: dict[tuple[str, Layout], None] = {}
    implied: dict[tuple[int, int, Layout], None] = {}
    for f, cut in options:
        if row(template, f, cut, t) is not None:
            layouts[f, cut] = None
        for j in (*_results(template), *range(len(template.operands))):
            placed = place(template, j, f, cut, t) if j < 0 or template.operands[j].active else None
            if placed is not None and placed.is_shard and (j, placed.dim, placed.cut) != (i, dim, layout):
                implied[j, placed.dim, placed.cut] = None
    return layouts, tuple(implied)


def strategies(rule: OpRule, candidates: Candidates, t: int) -> list[Strategy]:
    """Every legal row of a node's rule, for the layouts that `candidates` found for its factors."""
    return list(rows(rule.template, candidates.layouts_of(rule.node), t))
