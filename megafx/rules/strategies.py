"""Sharding rules of graph nodes: which placements an op takes and gives.

`rule_for` finds an op's rule (a user's, a fact of megafx's own op, the table's or a family's), binds it to the
node's shapes and operands; `strategies` lists its legal rows. Both are memoised by signature (op, shapes, scalar arguments):
layers repeat.

A row is one of
    I ... -> I   and  R ... -> R     the same work on every rank; exist for every op
    P            one group of operands that the op is linear in, all others R
    S            one factor sharded by one layout: operands that have it S, others R, '+' operands P if the factor is summed;
                 the result M where the op is the largest over the factor
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

import megafx.rules.families_dims
import megafx.rules.families_math  # noqa: F401  registers its families, as does the line above
from megafx.ir.facts import QUERY_HEADS, Localized, declare, facts_of
from megafx.ir.nodes import MASKS, argument, is_zero, op_name
from megafx.ir.program import VAL, Program
from megafx.ir.sizes import Sizes
from megafx.placements.data_axis import BATCH_AXIS, MICRO_AXIS, TENSOR_AXIS
from megafx.placements.types import I, Layout, P, Placement, R, S
from megafx.placements.views import flatten, map_view, refit, slice_layout
from megafx.rules.aten import RULES
from megafx.rules.families import FAMILIES, VIEWS, Arg, OpCall, Part, RuleText, Shape
from megafx.rules.families_rows import BY_ROWS, Rows
from megafx.rules.grammar import RuleError, bind, names, op_key, parse, registered_rule

Entries = tuple[str | None, ...]

declare("aten.embedding.default", localize=Localized("v", "P"))  # rows of the table: a masked lookup
declare("aten.scaled_dot_product_attention.default", localize=Localized(QUERY_HEADS, "S"))


@dataclass(frozen=True)
class Spec:
    """One operand of a template. slot: its place among the op's tensor arguments. zero: every rank may add it to summands."""

    slot: int
    factors: Entries
    role: str
    active: bool
    shape: Shape
    zero: bool = False


@dataclass(frozen=True, eq=False)
class Template:
    """A rule bound to shapes, shared by all nodes with the same signature (compared by identity).

    groups: operands that may be partial together, and what each result then is ('P' or 'R').
    """

    op: str
    kind: str
    operands: tuple[Spec, ...]
    results: tuple[Entries, ...]
    shapes: tuple[Shape, ...]
    several: bool
    sizes: dict[str, int] = field(default_factory=dict)
    forbidden: dict[str, str] = field(default_factory=dict)
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()
    parts: dict[int, Part] = field(default_factory=dict)
    localized: Localized | None = None  # its factor is cut in one block a rank
    reason: str = ""
    roles: tuple[str, ...] = ()  # of results: 'x', '~' never partial by linearity, '*' no tensor of interest
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)  # results made of some operands alone
    registered: bool = False  # the user's rule
    # what a result is from which a sharded factor is missing, if the rule says it for all: 'M' or 'P'
    reduces: str = ""

    @property
    def placed(self) -> int:
        """Of how many results the planner chooses placements. Those of megafx's own ops with several are not sharded."""
        return len(self.results) if self.registered or not self.several else 0

    def entries(self, i: int) -> Entries:
        """Factors by dim of operand i, or of a result: -1 for the first, -2 for the second."""
        return self.results[-1 - i] if i < 0 else self.operands[i].factors

    def summed(self, f: str, result: int = 0) -> bool:
        """True if sharding f leaves the result partial: f is not in it, and the op is linear in an operand that has f."""
        return not self.carries(-1 - result, f) and any(
            self.carries(i, f) for g, outs in self.groups if outs[result] == "P" for i in g
        )

    def untouched(self, f: str, result: int) -> bool:
        """True if a result does not depend on how f is sharded: only operands that it is independent of have f."""
        role = self.roles[result] if self.roles else "x"
        carriers = {i for i in range(len(self.operands)) if self.carries(i, f)}
        if result in self.reads and carriers.isdisjoint(self.reads[result]):
            return True
        return role == "*" or (role == "~" and carriers <= {i for g, _ in self.groups for i in g})

    def written_out(self, f: str) -> bool:
        """True if ranks that shard f compute the op by other ops (`Localized`)."""
        return self.localized is not None and f == self.localized.factor

    def carries(self, i: int, f: str) -> bool:
        return any(f in names(e) for e in self.entries(i))


@dataclass(frozen=True)
class Operand:
    """A tensor operand of a node."""

    node: fx.Node
    path: tuple[int | str, ...]  # position in args, `(0,)`, `(0, 2)` inside a list, or `("attn_mask",)` in kwargs
    # one entry a dim: None (broadcast or not shardable), 'f', or '(n g)' for a merged dim (`rules.names` splits it)
    factors: Entries
    role: str
    active: bool


@dataclass(frozen=True)
class OpRule:
    """The rule of one node."""

    node: fx.Node
    # 'factors', 'view' (dims map by views.py), 'element' (placed as the user's op with several results makes it) or
    # 'none' (only I and R rows; see reason)
    kind: str
    operands: tuple[Operand, ...]
    result: tuple[Any, ...]  # entries of the result's dims; a tuple of them for an op with several results
    forbidden: dict[str, str]
    linear: tuple[tuple[int, ...], ...]  # groups of operands that may be partial together
    reason: str
    sizes: dict[str, int]  # structural length of each factor
    template: Template

    def weights(self, weights: Collection[fx.Node]) -> list[int]:
        """Which operands are weights with several dims: a bias has one."""
        return [i for i, o in enumerate(self.operands) if o.node in weights and len(o.factors) > 1]


@dataclass(frozen=True)
class Strategy:
    """One legal row."""

    # a placement for each operand of the rule (inactive operands: I whole, S sliced for free)
    ins: tuple[Placement, ...]
    out: Placement
    factor: str = ""  # the sharded factor; 'dim<d>' of the operand for views; '' for all-I, all-R and partial rows
    note: str = ""
    more: tuple[Placement, ...] = ()  # placements of results after the first

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.ins))} -> {'; '.join(map(str, (self.out, *self.more)))}"

    def result(self, index: int) -> Placement:
        """Of one result. Where `more` is empty all have one placement."""
        return (self.out, *self.more)[index] if self.more else self.out


# -- nodes -> calls


@cache
def _schema(target: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, default, holds tensors) of each argument."""
    return tuple(
        (a.name, a.default_value if a.has_default_value() else None, "Tensor" in str(a.type))
        for a in target._schema.arguments
    )


def schema_of(op: str) -> list[tuple[str, Any, bool, bool]]:
    """(name, default, holds tensors, keyword only) of each argument of 'namespace.name.overload'."""
    namespace, name, overload = op.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    keyword = [a.kwarg_only for a in target._schema.arguments]
    return [(*a, k) for a, k in zip(_schema(target), keyword, strict=True)]


Path = tuple[int | str, ...]


def template_of_node(
    node: fx.Node,
    sizes: Sizes,
    active: Container[fx.Node],
    cuts: Mapping[fx.Node, int] = MappingProxyType({}),
    own: str | Rows | None = None,
) -> tuple[Template, list[Any]]:
    """The rule of a node's call, and for each tensor argument its (path, node), or None where left out.

    cuts: the sharded dim of operands on local shapes. own: a rule to use in place of the op's.
    """
    tensors: list[Any] = []

    def read(a: Any, path: Path) -> Any:
        if isinstance(a, fx.Node):
            val = a.meta.get(VAL)
            if isinstance(val, torch.Tensor):
                tensors.append((path, a))
                return Arg(sizes.shape(val), a in active, cuts.get(a, -1), is_zero(a), val.dtype in MASKS)
            return sizes.of(val) if isinstance(val, (int, torch.SymInt)) else "symbolic"
        if isinstance(a, (list, tuple)):
            return tuple(read(x, (*path, i)) for i, x in enumerate(a))
        return a if isinstance(a, (int, float, bool, str, type(None))) else str(a)

    values = []
    schema = _schema(node.target) if isinstance(node.target, torch._ops.OpOverload) else ()
    for i, (name, default, tensor) in enumerate(schema):
        given, at = (node.args[i], i) if i < len(node.args) else (node.kwargs.get(name, default), name)
        before = len(tensors)
        values.append(read(given, (at,)))
        if tensor and len(tensors) == before and not isinstance(given, (list, tuple)):
            tensors.append(None)
    if not schema:
        values = [read(a, (i,)) for i, a in enumerate(node.args)] + [read(a, (k,)) for k, a in node.kwargs.items()]
    val: Any = node.meta.get(VAL)
    several = isinstance(val, (tuple, list))
    shapes = tuple(sizes.shape(v) if isinstance(v, torch.Tensor) else None for v in (val if several else (val,)))
    key = op_key(node.target) if schema else getattr(node.target, "__name__", str(node.target))
    call = OpCall(key, tuple(n for n, _, _ in schema), tuple(values), shapes, several)
    own = own(call) if callable(own) else own
    return template_of(call, tuple(x is not None for x in tensors), own or registered_rule(key)), tensors


def rule_for(node: fx.Node, program: Program, active: Container[fx.Node], axis: str = TENSOR_AXIS) -> OpRule:
    """The rule of an active call_function node on an axis; kind 'none' with a reason where there is none."""
    return rule_of(node, program.sizes, active, _outer_rule(node, axis))


def _outer_rule(node: fx.Node, axis: str) -> str | Rows | None:
    """The op's own rule on the axes outside of the tensor-parallel one, where it holds."""
    facts = facts_of(node.target)
    if facts.outer_if is None or axis == TENSOR_AXIS:
        return outer_rule(node.target, axis)
    name, maker = facts.outer_if
    return facts.outer if op_name(argument(node, name)) == maker else None


def outer_rule(target: Any, axis: str) -> str | Rows | None:
    """The rule that an op has on an axis in place of its own. Ranks that share a batch have whole rows, without padding."""
    if axis == TENSOR_AXIS:
        return None
    return facts_of(target).outer or (BY_ROWS.get(str(target)) if axis in (BATCH_AXIS, MICRO_AXIS) else None)


def rule_of(node: fx.Node, sizes: Sizes, active: Container[fx.Node], own: str | Rows | None = None) -> OpRule:
    """`rule_for` without a program. own: a rule to use in place of the op's."""
    template, tensors = template_of_node(node, sizes, active, own=own)
    operands = []
    for spec in template.operands:
        path, source = tensors[spec.slot]
        operands.append(Operand(source, path, spec.factors, spec.role, spec.active))
    result = template.results if template.several else template.results[0]
    linear, reason = tuple(g for g, _ in template.groups), template.reason
    kind = "element" if _is_element(node) else template.kind
    return OpRule(node, kind, tuple(operands), result, template.forbidden, linear, reason, template.sizes, template)


def _is_element(node: fx.Node) -> bool:
    source: Any = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(source, fx.Node)
        and source.op == "call_function"
        and registered_rule(op_key(source.target)) is not None
    )


# -- calls -> templates


def _args(values: Any) -> Iterator[Arg]:
    for v in values:
        if isinstance(v, Arg):
            yield v
        elif isinstance(v, tuple):
            yield from _args(v)


@lru_cache(maxsize=65536)
def template_of(call: OpCall, present: tuple[bool, ...], own: str | None) -> Template:
    """The rule of a call. present: which tensor arguments are given; own: the user's registered rule."""
    given = list(_args(call.values))
    args: list[Arg | None] = [given.pop(0) if p else None for p in present]
    if call.op in VIEWS and own is None:
        return _view(call, args)
    row = _row(call, own)
    if row is None:
        element = call.op == "getitem"
        return _none(call, args, "an element of an op with several results" if element else f"no rule for {call.op}")
    try:
        return _bound(call, args, row, own)
    except RuleError as e:
        return _none(call, args, str(e))


def _row(call: OpCall, own: str | None) -> RuleText | None:
    if own is not None:
        return RuleText(own)
    facts = facts_of(call.op)
    if isinstance(facts.rule, str):
        return RuleText(facts.rule, dict(facts.why), partials=facts.partials)
    family = facts.rule or FAMILIES.get(call.op)
    made = family(call) if family else RULES.get(call.op)
    return RuleText(made) if isinstance(made, str) else made


def _bound(call: OpCall, args: list[Arg | None], row: RuleText, own: str | None) -> Template:
    rule = parse(row.text)
    while len(args) > len(rule.operands) and args[-1] is None:
        args = args[:-1]
    free = [(i, part.factor) for i, part in row.parts.items()]
    shapes = [a and a.shape for a in args]
    bound = bind(rule, shapes, call.results, free=free, cut=[-1 if a is None else a.cut for a in args])
    slots = [i for i, factors in enumerate(bound.operands) if factors is not None]
    order = {slot: i for i, slot in enumerate(slots)}
    specs = []
    for slot in slots:
        arg = args[slot]
        assert arg is not None
        specs.append(Spec(slot, bound.operands[slot] or (), rule.operands[slot].role, arg.active, arg.shape, arg.zero))
    kept = "".join("R" if p.role in "~*" else "P" for p in rule.results[: len(call.results)])
    groups = [(g, kept) for g in rule.groups] + list(row.partials)
    return Template(
        call.op,
        "factors",
        tuple(specs),
        bound.results,
        tuple(s or () for s in call.results),
        call.several,
        bound.sizes,
        {**bound.forbidden, **{f: why for f, why in row.why.items() if f in bound.sizes}},
        tuple((tuple(order[i] for i in g if i in order), outs) for g, outs in groups if g[0] in order),
        {(i if i == -1 else order[i]): part for i, part in row.parts.items() if part.factor in bound.sizes},
        facts_of(call.op).localize,
        roles=tuple(p.role for p in rule.results[: len(call.results)]),
        reads={k: tuple(order[i] for i in read if i in order) for k, read in row.reads.items()},
        registered=own is not None,
        reduces=rule.reduces,
    )


def _view(call: OpCall, args: list[Arg | None]) -> Template:
    source = args[0]
    assert source is not None
    shape = call.results[0] or ()
    operand = Spec(0, tuple(f"dim{d}" for d in range(len(source.shape))), "x", source.active, source.shape)
    return Template(call.op, "view", (operand,), ((None,) * len(shape),), (shape,), False, groups=(((0,), "P"),))


def _none(call: OpCall, args: list[Arg | None], reason: str) -> Template:
    specs = tuple(Spec(i, (None,) * len(a.shape), "x", a.active, a.shape) for i, a in enumerate(args) if a is not None)
    shapes = tuple(s or () for s in call.results)
    results = tuple((None,) * len(s) for s in shapes)
    return Template(call.op, "none", specs, results, shapes, call.several, reason=reason)


# -- templates -> rows


def place(template: Template, i: int, f: str, layout: Layout, t: int) -> Placement | None:
    """Placement of operand i (or a result, i < 0) when factor f is sharded by `layout`; None where there is none.

    layout cuts the factor's whole length; a merged dim or a part of the factor is cut accordingly.
    """
    for d, entry in enumerate(template.entries(i)):
        if f != entry and f not in names(entry):
            continue
        cut: Layout | None = layout if entry == f else flatten(layout, *around(template, entry, f), t)
        part = template.parts.get(i)
        if part is not None and part.factor == f:
            cut = slice_layout(layout, part.start, part.end, t)
        return None if cut is None else S(d, cut)
    if i < 0:
        if template.reduces == "P" and layout.padded(t):  # what the op makes of pads would be summed too
            return None
        if template.reduces:
            return Placement(template.reduces)
        return P if template.summed(f, -1 - i) else R if template.untouched(f, -1 - i) else None
    spec = template.operands[i]
    if spec.role == "+" and template.summed(f):
        return P if spec.active else I if spec.zero else None
    return R if spec.active else I


def around(template: Template, entry: str | None, f: str) -> tuple[int, int]:
    """Lengths of the factors before and after f in a merged dim."""
    parts = names(entry)
    at = parts.index(f)
    return math.prod(template.sizes[x] for x in parts[:at]), math.prod(template.sizes[x] for x in parts[at + 1 :])


def factor_layouts(template: Template, i: int, dim: int, layout: Layout, t: int) -> Iterator[tuple[str, Layout]]:
    """The factors (with layouts) that a shard of a dim of operand i (or the result, -1) can be; not for parts."""
    entry = template.entries(i)[dim]
    for f in names(entry):
        if f in template.forbidden:
            continue
        cut = layout if entry == f else refit(layout, *around(template, entry, f), t)
        if cut is not None and (cut.simple() or not template.written_out(f)):
            yield f, cut
    if entry is not None and entry[0] == "(" and template.written_out(entry):
        groups_end = refit(layout, *around(template, entry, names(entry)[0]), t)
        if groups_end is None and layout.simple() and layout.local_size(t) == -(-layout.size // t):
            yield entry, layout


def row(template: Template, f: str, layout: Layout, t: int) -> Strategy | None:
    """The row that shards factor f by `layout`, if every operand and the result can be placed."""
    if template.kind == "view":
        mapped = map_view(template.operands[0].shape, template.shapes[0], int(f[3:]), layout, t)
        return mapped and Strategy((S(int(f[3:]), layout),), S(*mapped), f)
    localized = template.localized
    if localized is not None and f == localized.factor:
        ins = [S(s.factors.index(f), layout) if f in s.factors else (R if s.active else I) for s in template.operands]
        out = S(template.entries(-1).index(f), layout) if localized.gives == "S" else Placement(localized.gives)
        return Strategy(tuple(ins), out, f, "vocab-parallel" if f == "v" else "")
    sides = (*range(len(template.operands)), *(-1 - k for k in range(max(template.placed, 1))))
    placed = [p for i in sides if (p := place(template, i, f, layout, t)) is not None]
    if len(placed) < len(sides):
        return None
    n = len(template.operands)
    return Strategy(tuple(placed[:n]), placed[n], f, more=tuple(placed[n + 1 :]))


# Ops whose backward is the user's code, which may compute anything of the whole gradient (clip it, print it): at R, each rank
# would get a partial sum.
_ANY_BACKWARD = ("megafx.eager_call.default",)


@lru_cache(maxsize=65536)
def rows(template: Template, layouts: tuple[tuple[str, Layout], ...], t: int) -> tuple[Strategy, ...]:
    specs = template.operands
    if template.op in _ANY_BACKWARD:
        return (Strategy(tuple(I for _ in specs), I),)
    rows = [Strategy(tuple(I for _ in specs), I), Strategy(tuple(R if s.active else I for s in specs), R)]
    if template.kind == "none" or not template.placed:
        return tuple(rows)
    for group, results in template.groups:
        added = [i for i in group if specs[i].active]
        if added and all(specs[i].active or specs[i].zero for i in group):
            ins = tuple(P if i in added else R if s.active else I for i, s in enumerate(specs))
            out, *more = (P if kind == "P" else R for kind in results)
            rows.append(Strategy(ins, out, note="linear", more=tuple(more)))
    rows += [made for f, layout in layouts if (made := row(template, f, layout, t)) is not None]
    return tuple({(s.ins, s.out): s for s in reversed(rows)}.values())[::-1]
