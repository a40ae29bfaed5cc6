"""The type checker of joint graphs, independent of the planner: it reads only the graph.

    check_types(program, storage, t)

What the ranks hold of each value (R: the same, S: shards, P: summands) is inferred from the graph's inputs (parameters at
their storage placements, all else whole) through every op, forward and backward (rules/inference.py). A transition must
start from the placement that its operand has. Outputs must be what they claim: a gradient as its parameter is stored, the
loss whole, nothing partial. A collective that is missing, doubled or of the wrong kind is therefore found: its operand
arrives partial at an op that is not linear, beside a whole operand, or at an output.

On local shapes one tensor can be read in several ways (a rank's [1, 64] may be one head of two, or half of one head). All
of them are true, so a value has a tuple of facts, and an op is right if one reading of its operands fits.

The loss of a sharded vocabulary: each rank has statistics of its own classes, which stacked on a new dim are a shard; gathered,
they make the loss whole, and its backward a shard, without a collective. Ops say in their facts (`types`) which statistics they
make and take, and the checker follows them. What pads hold is not typed; the numeric check (numbers.py) sees it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import fx

from megafx.errors import PlacementError
from megafx.ir.contracts import fail, is_transition, layout_of
from megafx.ir.facts import facts_of
from megafx.ir.nodes import argument, draw_of, in_backward, is_draw, is_zero
from megafx.ir.program import PLACEMENT, VAL, Program, tensors_of
from megafx.ops.axes import DrawAxis
from megafx.placements.data_axis import BATCH_AXIS, CONTEXT_AXIS, TENSOR_AXIS
from megafx.placements.types import I, Layout, P, Placement, R, S, dual
from megafx.placements.views import slice_layout, view_options
from megafx.rules.families import VIEWS, Shape
from megafx.rules.inference import infer, is_uniform, same_value
from megafx.rules.selected_rows import NotOwnRows, SelectedRows

Facts = tuple[Placement, ...]  # readings of one value, each of them true
SAME = ("aten.clone.default", "aten.detach.default", "aten.alias.default")
QUERIES = 2  # the dim of attention's first operand
MAX_READINGS = 64  # combinations of readings of an op's operands that are tried


class HasParams(Protocol):
    """A Plan: params maps FQNs to storage placements."""

    params: dict[str, Placement]


def check_types(
    program: Program, storage: Mapping[str, Placement] | HasParams, t: int, axis: str = TENSOR_AXIS
) -> None:
    """Raise PlacementError at the first value whose placement is not the one that its user, or an output, expects.

    storage: placement of each parameter by FQN, or a Plan. t: ranks of the axis. On an outer axis, whose ranks have parts of
    the inputs (`Program.batch`), other inputs may be in storage too; gradients are those before they are reduced.
    """
    params = storage if isinstance(storage, Mapping) else storage.params
    _Checker(program, params, t, axis).run()


def check_batch_types(program: Program) -> None:
    """`check_types` on the axes outside of the tensor-parallel one."""
    batch = program.batch
    if batch is not None and batch.whole and batch.ranks > 1:
        check_types(program, batch.inputs, batch.ranks, BATCH_AXIS)
    if batch is not None and batch.cp > 1:
        check_types(program, batch.context_inputs, batch.cp, CONTEXT_AXIS)


class _Checker:
    def __init__(self, program: Program, storage: Mapping[str, Placement], t: int, axis: str) -> None:
        self.program, self.storage, self.t, self.axis = program, storage, t, axis
        self.inner = axis == TENSOR_AXIS
        self.facts: dict[fx.Node, Facts] = {}
        self.several: dict[fx.Node, list[tuple[Placement, ...]]] = {}  # of ops with several results: each reading
        self.sliced: dict[Any, dict[Placement, None]] = {}  # (shape, dim, bounds) -> shards that were sliced so
        self.copies: set[tuple[Shape, Placement]] = set()  # local shapes of values expanded along a shard
        same = lambda node, dim: R in self.facts.get(node, (R,)) and is_uniform(node, dim, program.sizes)
        count = lambda node: t * program.sizes.shape(node.meta[VAL])[0]
        self.selected = SelectedRows(t, lambda node: self.facts.get(node, (R,)), self._whole, count, same)
        self.statistics: dict[fx.Node, dict[str, Any]] = {}  # of one rank -> what they are of: the op's arguments

    def run(self) -> None:
        for node, spec in self.program.input_nodes():
            self.facts[node] = (self._claimed_input(spec),)
        for node in self.program.graph.nodes:
            if node.op == "call_function" and tensors_of(node):
                self._visit(node)
        self._check_outputs()

    # -- ends of the graph

    def _claimed_input(self, spec: Any) -> Placement:
        if spec.kind == "tangent":
            results: Any = self.program.output_node().args[0]
            if not self.inner:
                return _value(dual(self._leaves(spec.name)))
            for output, node in zip(self.program.outputs, results, strict=True):
                if output.name == spec.name and output.kind != "gradient" and isinstance(node, fx.Node):
                    return _value(dual(node.meta.get(PLACEMENT, I)))
        elif spec.kind == "param" or spec.name in self.storage:
            return _value(self.storage.get(spec.name, R))
        return R

    def _leaves(self, name: str) -> Placement:
        """How an output leaves on an outer axis."""
        batch = self.program.batch
        assert batch is not None
        outputs = [spec.name for spec in self.program.outputs if spec.kind != "gradient"]
        held = batch.outputs if self.axis != CONTEXT_AXIS else batch.context_outputs or (I,) * len(outputs)
        return held[outputs.index(name)]

    def _check_outputs(self) -> None:
        inputs = {spec.name: spec for spec in self.program.inputs if spec.kind != "tangent"}
        results: Any = self.program.output_node().args[0]
        for spec, node in zip(self.program.outputs, results, strict=True):
            if not isinstance(node, fx.Node) or not tensors_of(node):
                continue
            if spec.kind == "gradient":
                what, wanted = f"gradient of '{spec.name}'", self._claimed_input(inputs[spec.name])
                received = inputs[spec.name].kind == "param" or spec.name in self.storage
                whole = self.inner or (self.axis == CONTEXT_AXIS and not received)
                wanted = wanted if whole else _value(dual(self.storage.get(spec.name, R)))
            elif not self.inner:
                what, wanted = f"output '{spec.name}'", _value(self._leaves(spec.name))
            else:
                what = "loss" if spec.loss else f"output '{spec.name}'"
                wanted = R if spec.loss else _value(node.meta.get(PLACEMENT, R))
            if not self._is(node, wanted):
                raise fail(
                    node,
                    f"is the {what}, which must be {_say(wanted)}; it is {self._show(node)}",
                    "a transition is missing on the way, or is of the wrong kind",
                )

    def _is(self, node: fx.Node, wanted: Placement) -> bool:
        facts = self.facts.get(node, ())
        if any(same_value(fact, wanted, self.t, self.program.sizes) for fact in facts):
            return True
        alike = R in facts and wanted.is_shard and is_uniform(node, wanted.dim, self.program.sizes, wanted.cut)
        return alike or (wanted == P and R in facts and is_zero(node))

    def _show(self, node: fx.Node) -> str:
        return " or ".join(map(_say, self.facts[node])) if node in self.facts else "statistics of one rank"

    # -- ops

    def _whole(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of what all ranks hold, which each cuts by its own number of rows."""
        shape, fact = self.program.sizes.shape(node.meta[VAL]), self.selected.fact(node)
        return tuple(n * self.t if fact.is_shard and fact.dim == d else n for d, n in enumerate(shape))

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args[:2]
            each = self.several[source]
            self.facts[node] = tuple(dict.fromkeys(results[index] for results in each))
            return
        try:
            selected = None if self.inner else self.selected.typed(node)
        except NotOwnRows as reason:
            raise fail(node, f"takes numbers of rows that a mask selects on one rank: {reason}") from None
        if selected is not None:
            self.facts[node] = (selected,)
            return
        strange = next((a for a in node.all_input_nodes if a in self.statistics), None)
        if strange is not None:
            self._stack(node, strange)
            return
        types = facts_of(node.target).types if self.inner else ""
        if "stats" in types:
            operands = _operands(node)
            _check_gathered(self, node, operands)
            if types.endswith("-> stats"):
                self._infer(node)
                self.statistics[node] = operands
                return
        check = _SPECIAL.get(str(node.target))
        if check is not None:
            check(self, node)
        readings = _READINGS.get(str(node.target))
        if is_draw(node) and facts_of(node.target).rule == "lin: ..., ~ -> ...":  # dropout and its gradients
            given = draw_of(node)
            readings = _drawn_readings if given.seed is not None and given.p else readings
        facts = readings(self, node) if readings is not None else ()
        if facts:
            self.facts[node] = self._also(node, facts)
            return
        found = self._infer(node)
        if is_draw(node):
            _check_draw(self, node, found)
        if isinstance(node.meta[VAL], torch.Tensor):
            self.facts[node] = self._also(node, tuple(dict.fromkeys(found)))
        else:
            self.several[node] = found

    def _also(self, node: fx.Node, facts: Facts) -> Facts:
        """Further readings of a value.

        Constant along a dim, it is a shard of it by any layout: also by that which the node is marked with. So are local
        copies of one element (an expand to [.., 1, ..] on each rank); the gradients of such copies are summands.
        """
        marked: Any = node.meta.get(PLACEMENT) if self.inner else None
        shape = self.program.sizes.shape(node.meta[VAL])
        asked = marked is not None and marked.is_shard and R in facts and marked not in facts
        if asked and is_uniform(node, marked.dim, self.program.sizes, marked.cut):
            facts = (*facts, marked)
            self.copies.add((shape, marked))
        copied = any(f.is_shard and shape[f.dim] == 1 and (shape, f) in self.copies for f in facts)
        if copied and P not in facts and in_backward(node):
            facts = (*facts, P)
        return facts

    def _infer(self, node: fx.Node) -> list[Any]:
        """What `infer` makes of each reading of the operands that it accepts; its refusal if it accepts none."""
        tensors = [a for a in node.all_input_nodes if a in self.facts]
        found: list[Any] = []
        refusal: PlacementError | None = None
        for reading in itertools.islice(itertools.product(*(self.facts[a] for a in tensors)), MAX_READINGS):
            try:
                result = infer(node, dict(zip(tensors, reading, strict=True)), self.t, self.program.sizes, self.axis)
            except PlacementError as error:
                refusal = error
                continue
            found.append(result)
        if not found:
            assert refusal is not None
            raise refusal
        return found

    def _stack(self, node: fx.Node, statistics: fx.Node) -> None:
        """Statistics of one rank may be stacked with those of the others, and nothing else."""
        if str(node.target) in SAME:
            self.statistics[node] = self.statistics[statistics]
        elif str(node.target) == "aten.unsqueeze.default" and node.args[1] == 0:
            self.facts[node] = (S(0, Layout.contiguous(self.t, self.t)),)
        else:
            raise fail(node, f"takes %{statistics.name}, which differs by rank: {self._show(statistics)}")


def _value(p: Placement) -> Placement:
    """The fact of a placement: I and R are the same value."""
    return R if p.kind == "I" else p


def _say(p: Placement) -> str:
    return {"R": "whole", "P": "partial", "M": "the largest of a part"}.get(p.kind, f"shard {p}")


# -- checks before an op's rule is applied: rules speak of whole values, and a row of one may be wrong on shards


def _check_mean(checker: _Checker, node: fx.Node) -> None:
    """A mean over a shard may only be divided by the number of ranks, which makes a summand of it."""
    source = node.args[0]
    if all(u.target is torch.ops.aten.div.Scalar and u.args[1] == checker.t for u in node.users):
        return
    over = node.args[1] if len(node.args) > 1 else None
    n = source.meta[VAL].ndim
    dims = {d % n for d in over} if isinstance(over, (list, tuple)) and over else set(range(n))
    for fact in checker.facts.get(source, ()):
        if fact.is_shard and fact.dim in dims:
            raise fail(node, f"%{source.name} is {_say(fact)}: a mean over it divides by the local count")


def _check_embedding(checker: _Checker, node: fx.Node) -> None:
    """Ids are global and rows local, so a table that is cut by rows is looked up by `embedding_of_rank` only."""
    table = node.args[0]
    if any(f.is_shard and f.dim == 0 for f in checker.facts.get(table, ())):
        raise fail(node, f"looks up all ids in %{table.name}, of which a rank has some rows")


def _check_transition(checker: _Checker, node: fx.Node) -> None:
    if is_transition(node, checker.axis) and node.args[6] != checker.t:
        raise fail(node, f"is for {node.args[6]} ranks, the axis has {checker.t}")


# -- statistics of the classes that a rank has


def _operands(node: fx.Node) -> dict[str, Any]:
    """Tensor operands by name, and the layout; what only detaches a value is left out."""
    found: dict[str, Any] = {}
    for given, value in zip(node.target._schema.arguments, node.args, strict=True):
        while isinstance(value, fx.Node) and str(value.target) in SAME[1:]:
            value = value.args[0]
        if "Tensor" in str(given.type) or given.name == "layout":
            found[given.name] = value
    return found


def _check_gathered(checker: _Checker, node: fx.Node, operands: dict[str, Any]) -> None:
    """Statistics that the op takes must be those of the same operands, gathered."""
    for text, value in zip(facts_of(node.target).types.partition("->")[0].split(","), operands.values(), strict=False):
        if text.strip() != "stats":
            continue
        if not checker._is(value, R):
            raise fail(node, "its statistics must be whole: they are not gathered")
        while isinstance(value, fx.Node) and value not in checker.statistics and _passes_on(value):
            value = value.args[0]
        made = checker.statistics.get(value)
        if made is None or any(operands.get(name) != of for name, of in made.items()):
            raise fail(node, "its statistics are not those of its operands")


def _passes_on(node: fx.Node) -> bool:
    return is_transition(node) or str(node.target) in (*SAME, "aten.unsqueeze.default")


# -- ops whose result can be read in several ways


def _view_readings(checker: _Checker, node: fx.Node) -> Facts:
    source = node.args[0]
    before, after = (checker.program.sizes.shape(n.meta[VAL]) for n in (source, node))
    found: list[Placement] = []
    for fact in checker.facts[source]:
        if not fact.is_shard:
            found.append(fact)
        elif str(node.target) == "aten.unsqueeze.default":
            new = int(node.args[1]) % len(after)
            found.append(S(fact.dim + (fact.dim >= new), fact.cut))
        elif str(node.target) == "aten.squeeze.dim":
            gone = int(node.args[1]) % len(before)
            if before[gone] != 1 or fact.dim != gone:
                found.append(S(fact.dim - (before[gone] == 1 and fact.dim > gone), fact.cut))
        else:
            found += [S(*o) for o in view_options(before, after, fact.dim, fact.cut, checker.t)]
    return tuple(dict.fromkeys(found))


def _part_readings(checker: _Checker, node: fx.Node) -> Facts:
    """The gradient of one part of a blocked shard is a shard by each layout of which a forward slice took that part."""
    grad, _, dim, start, end, step = (*node.args, 1)[:6]
    shape, t = checker.program.sizes.shape(node.meta[VAL]), checker.t
    dim, parts = int(dim) % len(shape), checker.facts.get(grad, ())
    low, high = _bounds(start, end, shape[dim])
    found: list[Placement] = []
    for whole in checker.sliced.get((shape, dim, low, high), ()) if step == 1 else ():
        cut = slice_layout(whole.cut, low, high, t, local=True)
        if cut is not None and S(dim, cut) in parts:
            found.append(whole)
    return tuple(found)


def _remember_slice(checker: _Checker, node: fx.Node) -> None:
    source, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])[:5]
    shape = checker.program.sizes.shape(source.meta[VAL])
    dim = int(dim) % len(shape)
    if step == 1:
        wholes = checker.sliced.setdefault((shape, dim, *_bounds(start, end, shape[dim])), {})
        facts = checker.facts.get(source, ())
        wholes.update({fact: None for fact in facts if fact.is_shard and fact.dim == dim})


def _drawn_readings(checker: _Checker, node: fx.Node) -> Facts:
    """Bits are drawn by global index, so the op must know how its operand is cut; its result is cut in the same way."""
    x, declared = node.args[0], _declared(checker, node)
    if checker._is(x, declared):
        return (declared,)
    if declared == R and checker._is(x, P):
        return (P,)
    raise fail(node, f"draws the mask of a value that is {_say(declared)}; %{x.name} is {checker._show(x)}")


def _declared(checker: _Checker, node: fx.Node) -> Placement:
    """How the result of an op that draws is cut, by the op's arguments."""
    given = draw_of(node)
    axis, of_batch = DrawAxis.parse(given.axis)
    if checker.axis not in (axis, BATCH_AXIS):
        return R  # it is cut on another axis
    if checker.axis == BATCH_AXIS:
        shape = checker.program.sizes.shape(node.all_input_nodes[0].meta[VAL])
        dim = next(d for d, n in enumerate((*shape, 0)) if n != 1)
        cut = Layout.contiguous(checker.t * shape[dim], checker.t) if dim < len(shape) else None
        return S(dim, cut) if cut is not None and of_batch else R
    dim, flat = int(given.shard_dim), given.layout
    return R if dim == -1 else S(dim, Layout.from_flat(layout_of(checker.program, flat)))


def _check_draw(checker: _Checker, node: fx.Node, found: list[Any]) -> None:
    """An op draws for its result; its backward for the gradient of that, the first operand."""
    given, declared = draw_of(node), _declared(checker, node)
    if given.seed is None or not given.p:
        return
    first = node.all_input_nodes[0]
    results = {r[0] if isinstance(r, tuple) else r for r in found}
    if declared in results or (declared == R and P in results) or checker._is(first, declared):
        return
    held = " or ".join(map(_say, sorted(results, key=str)))
    raise fail(node, f"draws for a value that is {_say(declared)}; it is {held}")


def _check_queries(checker: _Checker, node: fx.Node) -> None:
    """Attention that counts its queries (a causal mask, a window, segments) must know which of them a rank has."""
    declared, q = _declared(checker, node), argument(node, "q")
    if not any(argument(node, name) for name in ("causal", "window", "segments")):
        return
    if declared.is_shard and declared.dim == QUERIES:
        right = checker._is(q, declared)
    else:
        right = any(not fact.is_shard or fact.dim != QUERIES for fact in checker.facts.get(q, (R,)))
    if not right:
        raise fail(node, f"counts queries that are {_say(declared)}; %{q.name} is {checker._show(q)}")


def _bounds(start: Any, end: Any, n: int) -> tuple[int, int]:
    """Static bounds of a slice of a dim of n elements; (-1, -1) for others."""
    start, end = 0 if start is None else start, n if end is None else end
    if not isinstance(start, int) or not isinstance(end, int):
        return -1, -1
    return (max(start + n, 0) if start < 0 else min(start, n)), (end + n if end < 0 else min(end, n))


_SPECIAL: dict[str, Callable[[_Checker, fx.Node], None]] = {
    "aten.mean.default": _check_mean,
    "aten.mean.dim": _check_mean,
    "aten.slice.Tensor": _remember_slice,
    "aten.embedding.default": _check_embedding,
    "megafx.transition.default": _check_transition,
    "megafx.attention_forward.default": _check_queries,
    "megafx.attention_backward.default": _check_queries,
    "megafx.attention_mask_backward.default": _check_queries,
}

_READINGS: dict[str, Callable[[_Checker, fx.Node], Facts]] = {
    **dict.fromkeys(VIEWS, _view_readings),
    "aten.slice_backward.default": _part_readings,
}
