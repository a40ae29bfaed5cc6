"""Value facts through ops: what the ranks hold of a result, given what they hold of the operands.

The joint graph's type checker is abstract interpretation with the sharding rules, on one rank's shapes, forward and backward
ops alike. I and R hold the same values, so the facts are

    R         the same value on every rank (I is read as R)
    S(d, L)   a shard
    P         summands
    M         candidates of which the largest is the value: nothing but their reduction may read them

Nothing here trusts the planner: a placement on a node's meta only decides between valid readings of a local view
([1, 64] of a rank: one head of two, or half a head). checks/types.py follows all readings.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from megafx.errors import PlacementError
from megafx.ir.contracts import TRANSITION, is_transition
from megafx.ir.facts import facts_of
from megafx.ir.nodes import FILLS, FILLS_BY_ARGUMENT, is_draw, is_zero, op_name
from megafx.ir.program import PLACEMENT, VAL, fqn_of, source_of
from megafx.ir.sizes import Sizes
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import TRANSITIONS, Layout, M, P, Placement, R, S, owned
from megafx.placements.views import concat_layouts, dim_groups, refit, slice_layout, view_options
from megafx.rules.families import Shape
from megafx.rules.families_rows import Rows
from megafx.rules.grammar import names
from megafx.rules.strategies import Template, around, outer_rule, place, template_of_node

Facts = Mapping[fx.Node, Any]
Result = Placement | tuple[Placement, ...]


def infer(node: fx.Node, facts: Facts, t: int, sizes: Sizes, axis: str = TENSOR_AXIS) -> Result:
    """What ranks hold of a call_function's result(s); PlacementError where the op must not take its operands as they are.

    facts: for each operand that is not the same on every rank (others may be left out), a placement, or a tuple of them.
    """
    if node.target is operator.getitem:
        source, index, *_ = _arguments(node)
        whole = facts.get(source, R)
        return whole[index] if isinstance(whole, tuple) else whole
    reader = _Inference(node, facts, t, sizes)
    if is_transition(node, axis):
        return _transition(reader)
    if str(node.target) == TRANSITION:
        return _of_another_axis(reader, outer=axis == TENSOR_AXIS)
    facts_of_op = facts_of(node.target)
    if facts_of_op.types and axis == TENSOR_AXIS:
        return _by_types(reader, facts_of_op.types)
    return reader.generic(outer_rule(node.target, axis))


class _Inference:
    """One node with the facts of its operands."""

    def __init__(self, node: fx.Node, facts: Facts, t: int, sizes: Sizes) -> None:
        self.node, self.facts, self.t, self.sizes = node, facts, t, sizes
        self.given = [self.fact(n) for n in node.all_input_nodes if _is_tensor(n)]

    def fact(self, n: Any) -> Placement:
        found = self.facts.get(n, R)
        assert isinstance(found, Placement)
        return R if found.kind == "I" else found

    def shape(self, n: fx.Node) -> tuple[int, ...]:
        return self.sizes.shape(n.meta[VAL])

    def error(self, found: str, fix: str = "") -> PlacementError:
        held = ", ".join(f"%{n.name} {self.fact(n)}" for n in self.node.all_input_nodes if _is_tensor(n))
        fix = fix or "a collective is missing or wrong before this op, or its rule is (megafx check-rules)"
        found = f"%{self.node.name} ({self.node.target}) of {held}: {found}"
        return PlacementError(found, fix=fix, module=fqn_of(self.node), source=source_of(self.node))

    def results(self, *placements: Placement) -> Result:
        value = self.node.meta.get(VAL)
        if not isinstance(value, (tuple, list)):
            return placements[0]
        return placements if len(placements) == len(value) else placements[:1] * len(value)

    def generic(self, own: str | Rows | None = None) -> Result:
        """own: a rule to use in place of the op's."""
        if all(p == R for p in self.given):
            return self.results(R)
        if M in self.given:
            raise self.error(
                "each rank has the largest of its part alone", "a reduction M -> R is missing before this op"
            )
        cuts = {n: self.fact(n).dim for n in self.node.all_input_nodes if _is_tensor(n) and self.fact(n).is_shard}
        template, tensors = template_of_node(self.node, self.sizes, set(self.node.all_input_nodes), cuts, own)
        if template.kind == "none":
            raise self.error(template.reason, "register a rule for the op (megafx.register_rule), or replicate it")
        nodes = [tensors[s.slot][1] for s in template.operands]
        facts = [self.fact(n) for n in nodes]
        if template.kind == "view":
            return self.view(nodes[0], facts[0])
        if not nodes:
            return self.results(R)  # zeros_like and the like: nothing is read
        if any(p.is_shard for p in facts):
            return self.sharded(template, nodes, facts)
        return self.partial(template, nodes, facts)

    def view(self, source: fx.Node, fact: Placement) -> Placement:
        if not fact.is_shard:
            return fact
        options = view_options(self.shape(source), self.shape(self.node), fact.dim, fact.cut, self.t)
        marked = self.node.meta.get(PLACEMENT)
        choices = [S(d, cut) for d, cut in options]
        if not choices:
            raise self.error(f"the view to {tuple(self.node.meta[VAL].shape)} cuts through the shard")
        return marked if marked in choices else choices[0]

    def partial(self, template: Template, nodes: list[fx.Node], facts: list[Placement]) -> Result:
        """Summands pass where the op is linear in them together; an additive operand that is 0 may be on all ranks."""
        partial = {i for i, p in enumerate(facts) if p == P}
        for group, outs in template.groups:
            if partial <= set(group) and all(i in partial or is_zero(nodes[i]) for i in group):
                return self.results(*(P if o == "P" else R for o in outs))
        raise self.error("the op is not linear in the operands that are partial")

    def sharded(self, template: Template, nodes: list[fx.Node], facts: list[Placement]) -> Result:
        first = next(i for i, p in enumerate(facts) if p.is_shard)
        why = ""
        for f, cut, results in self._readings(template, first, facts):
            why = f"'{f}' is sharded by {cut}"
            wrong = self._mismatch(template, nodes, facts, f, cut)
            if wrong:
                why += f", but {wrong}"
                continue
            placed = results or [
                place(template, -1 - k, f, cut, self.t)
                or (P if template.reduces == "P" else None)  # pads are not typed
                for k in range(len(template.results))
            ]
            if None not in placed:
                return self.results(*(p for p in placed if p is not None))
            why += ", over which the op is no sum"
        entry = template.entries(first)[facts[first].dim]
        reasons = [template.forbidden[f] for f in names(entry) if f in template.forbidden]
        raise self.error(why or (reasons[0] if reasons else f"dim {facts[first].dim} cannot be sharded"))

    def _readings(
        self, template: Template, i: int, facts: list[Placement]
    ) -> Iterator[tuple[str, Layout, list[Placement | None] | None]]:
        """The factor (with layout) that the shard of operand i may be; results where they are not `place`'s."""
        dim, cut, t = facts[i].dim, facts[i].cut, self.t
        entry = template.entries(i)[dim]
        for f in reversed(names(entry)):  # minor first: one local KV head that is whole would pass as a broadcast of n
            if f in template.forbidden:
                continue
            if any(part.factor == f for part in template.parts.values()):
                made = self._parts(template, facts, f, cut)
                if made is not None:
                    yield f, cut, [S(dim, made)]
                continue
            layout = cut if entry == f else refit(cut, *around(template, entry, f), t)
            if layout is not None:
                yield f, layout, None

    def _parts(self, template: Template, facts: list[Placement], f: str, cut: Layout) -> Layout | None:
        """The result's layout of a slice (of local bounds) or a concatenation along the sharded dim."""
        part = template.parts.get(-1)
        if part is not None:
            return slice_layout(cut, part.start, part.end, self.t, local=True)
        if not all(p.is_shard and template.entries(i)[p.dim] == f for i, p in enumerate(facts)):
            return None
        return concat_layouts((p.cut for p in facts), self.t)

    def _mismatch(
        self, template: Template, nodes: list[fx.Node], facts: list[Placement], f: str, cut: Layout
    ) -> str | None:
        """The first operand that is not as sharding f by this layout wants it."""
        for i, (n, have) in enumerate(zip(nodes, facts, strict=True)):
            part = template.parts.get(i)
            if part is not None and part.factor == f:
                continue  # a concatenation: _parts has checked
            want = place(template, i, f, cut, self.t)
            if want is None or same_value(have, want, self.t, self.sizes) or (want.kind == "I" and have == R):
                continue
            if want.is_shard and have == R and is_uniform(n, want.dim, self.sizes, want.cut):
                continue
            if want == P and have == R and is_zero(n):
                continue
            return f"%{n.name} is {have} and should be {want}"
        return None


def _arguments(node: Any) -> tuple[Any, ...]:
    return tuple(node.args)


def _is_tensor(n: fx.Node) -> bool:
    return isinstance(n.meta.get(VAL), torch.Tensor)


# -- what a value is, apart from who holds it


def same_value(a: Placement, b: Placement, t: int, sizes: Sizes) -> bool:
    """True if the two say the same of a value: equal, or shards whose layouts differ by units alone."""
    if a == b:
        return True
    shards = a.is_shard and b.is_shard and a.dim == b.dim
    return shards and sizes.is_static(a.cut.size) and a.cut.cuts_alike(b.cut, t)


def is_uniform(node: fx.Node, dim: int, sizes: Sizes, cut: Layout | None = None) -> bool:
    """True if a value is constant along a dim by construction: a piece of it is then a shard, whichever piece it is.

    Gradients of sums are: expand(g) to a rank's local shape holds the same on every rank. cut: how the dim is to be cut; in a
    merged dim [batch, heads] that is cut within each batch, being constant along the heads is enough.
    """
    if node.op != "call_function" or not _is_tensor(node) or is_draw(node):
        return False
    if str(node.target) == TRANSITION:  # what it cuts from such a value is such a value
        return is_uniform(_arguments(node)[0], dim, sizes, cut)
    template, tensors = template_of_node(node, sizes, set(node.all_input_nodes), own=facts_of(node.target).outer)
    if template.kind == "none" or template.several:
        return not tensors and op_name(node) in {*FILLS, *FILLS_BY_ARGUMENT, "ones"}
    nodes = [tensors[s.slot][1] for s in template.operands]
    if template.kind == "view":
        before, after = template.operands[0].shape, template.shapes[0]
        into = [a for a, b in dim_groups(before, after) if dim in b]
        return bool(into) and all(is_uniform(nodes[0], d, sizes) for d in _cut_dims(into[0], before, cut))
    wanted = names(template.results[0][dim])
    if any(f in template.forbidden for f in wanted):
        return False
    return all(
        is_uniform(n, d, sizes, cut if entry == template.results[0][dim] else None)
        for n, spec in zip(nodes, template.operands, strict=True)
        for d, entry in enumerate(spec.factors)
        if any(f in names(entry) for f in wanted)
    )


def _cut_dims(merged: Sequence[int], shape: Shape, cut: Layout | None) -> list[int]:
    """Of dims that a view merges, those that a cut of the merged dim runs through: not the ones that it repeats over, nor
    those of which a rank, whose shape this is, has all in one range."""
    dims = [d for d in merged if shape[d] != 1]
    if cut is not None and cut.simple():
        return dims[:1]
    repeats = 1
    while dims and cut is not None and repeats < cut.rep:
        repeats *= shape[dims[0]]
        if repeats > cut.rep:
            break
        dims = dims[1:]
    return dims if cut is None or repeats == cut.rep else [d for d in merged if shape[d] != 1]


# -- ops that are more than their rule


def _transition(at: _Inference) -> Placement:
    """The operand must be what the transition starts from; R and I hold the same values."""
    source, src_tag, dst_tag, *layouts = _arguments(at.node)[:5]
    flats = [[at.sizes.of(n.meta[VAL] if isinstance(n, fx.Node) else n) for n in flat] for flat in layouts]
    src, dst = (Placement.parse(str(tag), flat) for tag, flat in zip((src_tag, dst_tag), flats, strict=True))
    have, want = at.fact(source), R if src.kind == "I" else src
    uniform = src.is_shard and have == R and is_uniform(source, src.dim, at.sizes, src.cut)
    held = same_value(have, want, at.t, at.sizes) or (want == M and have == R)  # the largest of equal values
    if not held and not uniform and not (want == P and is_zero(source)):
        raise at.error(f"the transition starts from {src}")
    if src != dst and (src.kind, dst.kind) not in TRANSITIONS:
        raise at.error(f"{src} -> {dst} is no transition")
    return R if dst.kind == "I" else dst


def _of_another_axis(at: _Inference, outer: bool) -> Result:
    """Ranks of an outer axis hold what they held, however inner axes move what is within a part. outer: the transition is of
    one, so that what it exchanges is cut again here."""
    fact = at.given[0]
    moved = {Placement.parse(str(tag), (1,)).dim for tag in at.node.args[1:3]}
    if outer and fact.is_shard and fact.dim in moved and -1 not in moved and len(moved) == 2:
        return at.generic()
    if fact.is_shard and fact.dim in moved and fact.cut.contiguous_shards(at.t):  # one part after the other
        return S(fact.dim, Layout.contiguous(at.t * at.shape(at.node)[fact.dim], at.t))
    return fact


def _by_types(at: _Inference, types: str) -> Result:
    """What the op's file says (`OpFacts.types`); () for statistics, which no placement describes."""
    target: Any = at.node.target
    names_of = [a.name for a in target._schema.arguments]
    tensors = [i for i, a in enumerate(target._schema.arguments) if "Tensor" in str(a.type)]
    wanted, _, made = (part.strip() for part in types.partition("->"))
    meant = {"R": R, "P": P, "stats": R}
    if "S" in types:
        flat = _arguments(at.node)[names_of.index("layout")]
        cut = Layout.from_flat([at.sizes.of(n.meta[VAL] if isinstance(n, fx.Node) else n) for n in flat])
    if "O" in types:
        meant["O"] = owned(int(at.node.meta[VAL].shape[0]), _arguments(at.node)[1])

    def placement(text: str, ndim: int) -> Placement:
        if text[0] == "S":  # of a number, which has nothing to cut: whole
            return S(int(text[1:]) % ndim, cut) if ndim else R
        return meant[text]

    for i, text in zip(tensors, wanted.split(", "), strict=True):
        value = _arguments(at.node)[i]
        want = placement(text, value.meta[VAL].ndim) if value is not None else R
        if value is None or same_value(at.fact(value), want, at.t, at.sizes) or (want == P and is_zero(value)):
            continue
        held = {"R": "the same on every rank", "P": "summands"}.get(want.kind, f"{want}")
        raise at.error(f"its operand '{names_of[i]}' must be {held}")
    if made == "stats":
        return ()
    results = at.node.meta[VAL] if isinstance(at.node.meta[VAL], (tuple, list)) else [at.node.meta[VAL]]
    return at.results(*(placement(text, r.ndim) for text, r in zip(made.split("; "), results, strict=True)))
