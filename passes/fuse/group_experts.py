"""Experts that are called one by one, each on its own tokens, become grouped products where that is modelled to be faster.

Before:  %at0 = rows(%mask0, 'u0'); %rows0 = select(%at0, 1, 1); %x0 = index(%x, [%rows0])
         %y0 = mul(linear(%x0, %w0), %p0); %o0 = index_add(%out, 0, %rows0, %y0)
         %at1 = rows(%mask1, 'u1'); ..                              ; %o1 = index_add(%o0, 0, %rows1, %y1)
After:   %at = rows(%masks, 'rows2'); %rows = select(%at, 1, 2)     # masks: [experts, ..], of one op where they are made alike
         %ends = group_ends(select(%at, 1, 0), 2); %w = transpose(view(join_parameters([%w0, %w1]), [2, n, k]), 1, 2)
         %h = grouped_mm(index(%x, [%rows]), %w, %ends); %o = index_add(%out, 0, %rows, mul(%h, index(%p, [..])))
Legal because: all ops between compute each row by itself, so that rows of all experts may stand one below the other, as the
places in masks one below the other do.

The experts are walked in step, from what they add backward; each op is then done once, on all rows. Each rank groups its own
shards, after planning. Weights are read as one tensor, as by `merge_linears`, which has run before: parameters and gradients
lie in one memory. Library: torch's grouped product (CUDA).

`moe_grouped_gemm` 'auto': by the price of the ops that go and of those that come (analysis/prices.py), none of which takes less
than its launch. Grouped products of small groups are slower than as many single ones of a weight each, and of all experts'
rows more is held at once (RESULTS.md): one by one is the better where experts are few and large. True: always.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from megafx.analysis.experts import rows_added
from megafx.analysis.joined_parameters import leaves_gaps, mark, placed_together, stored_parameters, why_not_one
from megafx.analysis.prices import seconds
from megafx.ir.nodes import CASTS, COPIES, argument, behind, is_draw, op_name
from megafx.ir.program import PLACEMENT, VAL, Builder, Fusion, Phase, Program, fqn_of, source_of
from megafx.ir.sizes import RowCount, SizeEmitter, row_sources
from megafx.kernels import join_parameters, nonzero  # noqa: F401  registers the ops
from megafx.kernels.activation import activation  # noqa: F401  registers the ops
from megafx.kernels.experts import group_rows, grouped_mm  # noqa: F401  registers the ops
from megafx.placements.types import I, Placement, S
from megafx.planner.context import Planner
from megafx.planner.cost import TRAINING_PASSES
from megafx.rules.families import VIEWS

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "group_experts"
ops, aten = torch.ops.megafx, torch.ops.aten
# Of the price, what grouping has to save: it holds up to twice as much (0.79 and 1.47 GiB, 0.94 and 1.84; RESULTS.md).
LEAST_GAIN = 0.1
# Which operand of a fused activation is a bias: it is then each expert's own.
BIASED = {ops.glu_packed.default: 1, ops.bias_act.default: 1}
BY_ROW = {*BIASED, ops.glu.default, aten.to.dtype}


def group_experts(program: Program, planner: Planner) -> int:
    """Return the number of products that others took over."""
    if planner.config.moe_grouped_gemm is False:
        return 0
    changes, before = 0, len(program.notes)
    for chain in _chains(program.graph):
        changes += _Grouping(program, planner, chain).run()
    program.graph.eliminate_dead_code()
    known = row_sources(program.graph)
    left = [
        n for n in program.graph.find_nodes(op="call_function", target=aten.linear.default) if _rows(n.args[0]) in known
    ]
    if len({_rows(n.args[0]) for n in left}) > 1 and len(program.notes) == before:
        how = "their results are not all put back by index_add, or their experts do not do the same"
        program.note(
            "merge", f"{len(left)} products of experts, each on its own tokens, are not grouped: {how}", left[0]
        )
    return changes


class _Added(NamedTuple):
    """What an expert adds: y, to the rows of `out` of these numbers."""

    node: fx.Node
    out: fx.Node
    rows: fx.Node
    y: fx.Node


def _chains(graph: fx.Graph) -> list[list[_Added]]:
    """Sums into rows, each of the one before, of which nobody else knows: of two experts or more."""
    chains: list[list[_Added]] = []
    last: dict[fx.Node, list[_Added]] = {}
    sums = [
        n for op in (aten.index_add, aten.index_put) for n in graph.find_nodes(op="call_function", target=op.default)
    ]
    for node in sorted(sums):
        added = _added(node)
        if added is None:
            continue
        chain = last.pop(added.out, None) if all(_is_of(user, node) for user in added.out.users) else None
        if chain is None:
            chains.append(chain := [])
        chain.append(added)
        last[node] = chain
    return [chain for chain in chains if len(chain) > 1]


def _is_of(user: fx.Node, node: fx.Node) -> bool:
    """True if the node is this one, or reads for it alone: `out[rows] += y` is a sum of out[rows] and y."""
    return user is node or (len(user.users) == 1 and _is_of(next(iter(user.users)), node))


def _added(node: fx.Node) -> _Added | None:
    found = rows_added(node)
    if found is None:
        return None
    out, y, _ = found
    arguments: Any = node.args
    if node.target is aten.index_add.default:
        plain = arguments[1] == 0 and argument(node, "alpha") == 1
        return _Added(node, out, arguments[2], y) if plain else None
    indices = arguments[1]
    if len(indices) != 1 or indices[0] is None or indices[0].meta[VAL].dim() != 1:
        return None
    return _Added(node, out, indices[0], y) if argument(node, "accumulate") or _are_apart(indices[0]) else None


def _are_apart(numbers: fx.Node) -> bool:
    """True if no row is named twice, which would count once: a mask has one place for each, or a choice of topk, whose experts
    differ."""
    places: Any = numbers.args[0] if numbers.args else None
    if not isinstance(places, fx.Node) or places.target is not ops.rows.default:
        return False
    mask: Any = places.args[0]
    of_tokens = numbers.target is aten.select.int and numbers.args[1:] == (1, 0)
    return mask.meta[VAL].dim() == 1 or (of_tokens and _chosen_once(mask))


def _chosen_once(mask: fx.Node) -> bool:
    """True if a row of the mask [rows, choices] has at most one place: where topk has chosen one expert."""
    if mask.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return any(map(_chosen_once, mask.all_input_nodes))
    ids: Any = behind(mask.args[0], COPIES | CASTS | {aten.detach.default}) if mask.target is aten.eq.Scalar else None
    if ids is None or ids.target is not operator.getitem or ids.args[1] != 1 or ids.meta[VAL].dim() != 2:
        return False
    return op_name(ids.args[0]) == "topk" and argument(ids.args[0], "dim") in (-1, 1)


class _Refused(Exception):
    """Says why."""


class _Grouping:
    """Of one mixture. chain: what its experts add. places: of each, where its mask is true."""

    def __init__(self, program: Program, planner: Planner, chain: list[_Added]) -> None:
        self.program, self.planner, self.chain = program, planner, chain
        self.last = chain[-1].node
        self.build = Builder(program, self.last, self.last, NAME)
        self.parameters = stored_parameters(program)
        self.places: tuple[fx.Node, ...] = ()
        self.grouped: list[tuple[fx.Node, ...]] = []
        self.known: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.at: fx.Node | None = None
        self.ends: fx.Node | None = None

    def run(self) -> int:
        """Number of products that are gone."""
        added = tuple(each.y for each in self.chain)
        sizes = [_rows(value) for value in added]
        linears = self._linears(added)
        if None in sizes or not linears:
            return 0
        before = self.last.prev
        try:
            found = row_sources(self.program.graph)
            if len({*sizes}) < len(sizes) or not all(
                s in found and found[s][0].target is ops.rows.default for s in sizes
            ):
                raise _Refused("their rows are not selected by a mask each")
            self.places = tuple(found[s][0] for s in sizes)  # type: ignore[index]  # none is None
            if self.planner.config.fp8 is not None and self._by_price:
                raise _Refused("single products run in FP8, and grouped ones do not")
            for products in linears:
                self._check(products)
            whole, rows = self.batch(added), self.batch(tuple(each.rows for each in self.chain))
            new = self.build(aten.index_add.default, self.chain[0].out, 0, rows, whole)
        except _Refused as reason:
            return self._leave(linears[0], f"{reason}")
        mark(new, self.last.meta.get(PLACEMENT))
        if self._by_price:
            come = self._microseconds(_between(before, self.last))
            gone = self._microseconds(_read_by_none_but(self.last))
            text = f"modelled at {gone:.0f} us one by one, at {come:.0f} grouped"
            if come > (1 - LEAST_GAIN) * gone:
                self.program.graph.erase_node(new)
                return self._leave(linears[0], text)
        self.last.replace_all_uses_with(new)
        for products in self.grouped:
            shape = self.program.sizes.shape(products[0].meta[VAL])
            elements = shape[0] * shape[1] * len(products)
            self.program.fusions.append(Fusion(NAME, fqn_of(products[0]), source_of(products[0]), NAME, elements))
        self._say(self.grouped[0], "grouped: their products are one" + (f" ({text})" if self._by_price else ""))
        return sum(len(products) - 1 for products in self.grouped)

    def _leave(self, products: tuple[fx.Node, ...], why: str) -> int:
        if self.at is not None:  # a size that nothing has
            self.program.sizes.row_counts.pop(self.at.meta[VAL].shape[0].node.expr)
        self._say(products, f"not grouped: {why}")
        return 0

    @property
    def _by_price(self) -> bool:
        return self.planner.config.moe_grouped_gemm == "auto"

    def _microseconds(self, nodes: list[fx.Node]) -> float:
        """Of a step; an op has to be launched."""
        total, hardware = 0.0, self.planner.hardware
        for node in nodes:
            once = seconds(self.program, node, hardware, self.planner.t)
            value = node.meta[VAL]
            has_gradient = self.planner.training and isinstance(value, torch.Tensor) and value.is_floating_point()
            passes = TRAINING_PASSES if has_gradient else 1
            total += passes * max(once, hardware.launch_seconds) if once else 0.0
        return 1e6 * total

    # -- what is alike

    def _linears(self, values: tuple[Any, ...]) -> list[tuple[fx.Node, ...]]:
        """Products of the experts that are reached in step from what they add."""
        found, todo, seen = [], [values], set()
        while todo:
            at = todo.pop()
            if at in seen or not self._alike(at):
                continue
            seen.add(at)
            if at[0].target is aten.linear.default:
                found.append(at)
            todo += [each for each in self._operands(at) if isinstance(each[0], fx.Node)]
        return found

    def _alike(self, values: tuple[Any, ...]) -> bool:
        """Whether one op on all rows can do what these do."""
        first = values[0]
        if not _one_op(values) or len({*values}) < len(values):
            return False
        if first.target is aten.linear.default:
            return first.meta[VAL].dim() == 2 or (first.meta[VAL].dim() == 3 and first.meta[VAL].shape[0] == 1)
        if first.target is aten.index.Tensor:
            if any(None in v.args[1] for v in values) and not _is_one(tuple(v.args[0] for v in values)):
                return False
            return len({len(v.args[1]) for v in values}) == 1
        if str(first.target) in VIEWS:
            return self._keep_rows(values)
        return (first.target in BY_ROW or _is_pointwise(first)) and all(_numbers(v) == _numbers(first) for v in values)

    def _keep_rows(self, values: tuple[fx.Node, ...]) -> bool:
        """True if each view has a row for each of its operand's, which may have a dim of 1 before them."""
        tails = set()
        for v in values:
            shape, given = (self.program.sizes.shape(x.meta[VAL]) for x in (v, v.args[0]))  # type: ignore[union-attr]
            given = given[1:] if given[:1] == (1,) else given
            if _rows(v) is None or given[:1] != shape[:1]:
                return False
            tails.add((shape[1:], given[1:]))
        return len(tails) == 1

    def _operands(self, values: tuple[fx.Node, ...]) -> list[tuple[Any, ...]]:
        """The experts' operands, one tuple for each place."""
        if values[0].target is aten.index.Tensor:
            return [*zip(*(v.args[1] for v in values), strict=True)]  # type: ignore[arg-type]
        if str(values[0].target) in VIEWS:
            return [tuple(v.args[0] for v in values)]
        return [*zip(*(v.args for v in values), strict=True)]

    def _check(self, products: tuple[fx.Node, ...]) -> None:
        """Raises _Refused where weights or biases cannot be read as one tensor."""
        for place in range(1, len(products[0].args)):
            given = [p.args[place] for p in products]
            if all(x is None for x in given):
                continue
            parts = self._parts(given)
            if len({tuple(x.meta[VAL].shape) for x in given}) > 1:  # type: ignore[union-attr]
                raise _Refused("their shapes differ")
            if len({(x.meta[VAL].dtype, x.meta[VAL].device) for x in parts}) > 1:
                raise _Refused("their dtypes or devices differ")
            if reason := why_not_one(parts, self.parameters, self.planner.wants_grad):
                raise _Refused(reason)
            if leaves_gaps(parts, self.planner.data, self.planner.t):
                raise _Refused("their rows do not divide by the data-parallel ranks")

    def _parts(self, given: Sequence[Any]) -> list[Any]:
        """Parameters, those of which `merge_linears` has made one tensor each by itself."""
        joined = ops.join_parameters.default
        return [p for x in given for p in (x.args[0] if x is not None and x.target is joined else [x])]

    # -- doing it once

    def batch(self, values: tuple[Any, ...]) -> fx.Node:
        """What gives the rows of all experts, one below the other."""
        if values not in self.known:
            column = self._column(values)
            if column is not None:
                self.known[values] = self._column_of_all(column + 1)
            elif self._alike(values):
                self.known[values] = self._do(values)
            else:
                raise _Refused(f"{op_name(values[0])} has no form that does the rows of all experts")
        return self.known[values]

    def _do(self, values: tuple[fx.Node, ...]) -> fx.Node:
        first, places = values[0], self._operands(values)
        if first.target is aten.linear.default:
            self.grouped.append(values)
            x, weight, *bias = places
            turned = self.build(aten.transpose.int, self._stacked(weight), 1, 2)
            rows, apart = self.batch(x), first.meta[VAL].dim() == 3  # x[None, rows]: [1, rows, k]
            if apart:
                rows = mark(self._shaped(rows, rows.meta[VAL].shape[2:]), _of_rows(x[0]))
            made = mark(self.build(ops.grouped_mm.default, rows, turned, self._ends()), _of_rows(first))
            if bias and bias[0][0] is not None:
                made = self.build(aten.add.Tensor, made, self._of_each_row(bias[0]))
            if apart:
                made = self.build(aten.unsqueeze.default, made, 0)
        elif first.target is aten.index.Tensor:
            sources = tuple(v.args[0] for v in values)
            where = [None if each[0] is None else self.batch(each) for each in places]
            if _is_one(sources):
                made = self.build(aten.index.Tensor, sources[0], where)
            else:
                made = self.build(aten.index.Tensor, self._of_all(sources), [self._column_of_all(0), *where])
        elif str(first.target) in VIEWS:
            made = self._shaped(self.batch(places[0]), first.meta[VAL].shape[1:])
        else:
            own = BIASED.get(first.target)  # type: ignore[call-overload]
            args = [self._operand(each, first) for each in places]
            if own is not None and args[own] is not None:
                args[0], args[own] = self.build(aten.add.Tensor, args[0], self._of_each_row(places[own])), None
            made = self.build(first.target, *args, **first.kwargs)  # type: ignore[arg-type]
        return mark(made, first.meta.get(PLACEMENT))

    def _shaped(self, x: fx.Node, tail: Sequence[Any]) -> fx.Node:
        """The rows of all experts as [rows, *tail]."""
        count, sizes = self._all_places().meta[VAL].shape[0], self.program.sizes
        rows = SizeEmitter(self.program.graph, sizes)(sizes.of(count))
        return self.build(aten.reshape.default, x, [rows, *map(int, tail)])

    def _operand(self, each: tuple[Any, ...], user: fx.Node) -> Any:
        """A number, a tensor without rows that all experts share, or the rows of all."""
        if not isinstance(each[0], fx.Node) or (user.target in BIASED and not _rows(each[0])):
            return each[0]
        if _is_one(each) and not _has_rows(each[0], user):
            return each[0]
        return self.batch(each)

    def _stacked(self, parameters: tuple[Any, ...]) -> fx.Node:
        """Weights [n, k] -> [experts, n, k], biases [n] -> [experts, n], in one memory."""
        parts, shape = self._parts(parameters), map(int, parameters[0].meta[VAL].shape)
        whole = self.build(ops.join_parameters.default, parts)
        mark(whole, placed_together(parts, 0, self.planner.t))
        return self.build(aten.view.default, whole, [len(parameters), *shape])

    def _of_each_row(self, biases: tuple[Any, ...]) -> fx.Node:
        """[n] of each expert -> [rows, n]."""
        return self.build(aten.index_select.default, self._stacked(biases), 0, self._column_of_all(0))

    # -- whose rows

    def _column(self, values: tuple[Any, ...]) -> int | None:
        """Which column of each expert's places these are."""
        first = values[0]
        if not _one_op(values) or not all(
            v.args and _is_one((v.args[0], p)) for v, p in zip(values, self.places, strict=True)
        ):
            return None
        if all(v.target is aten.select.int and v.args[1:] == (1, first.args[2]) for v in values):
            return int(first.args[2]) % int(self.places[0].meta[VAL].shape[1])
        alone = self.places[0].meta[VAL].shape[1] == 1
        return 0 if alone and all(str(v.target) in VIEWS and v.meta[VAL].dim() == 1 for v in values) else None

    def _column_of_all(self, column: int) -> fx.Node:
        """Of each row of all experts: its expert, then its place in the mask."""
        key: tuple[Any, ...] = ("column", column)
        if key not in self.known:
            made = self.build(aten.select.int, self._all_places(), 1, column)
            self.known[key] = mark(made, self.places[0].meta.get(PLACEMENT))
        return self.known[key]

    def _all_places(self) -> fx.Node:
        if self.at is None:
            masks = self._of_all(tuple(p.args[0] for p in self.places))
            sizes, known = self.program.sizes, self.program.fake_mode.shape_env.row_counts  # type: ignore[union-attr]
            name = next(n for i in itertools.count(len(known)) if (n := f"rows{i}") not in known)
            self.at = mark(self.build(ops.rows.default, masks, name), self.places[0].meta.get(PLACEMENT))
            one = sizes.row_counts[self.places[0].meta[VAL].shape[0].node.expr]
            all_ = RowCount(name, one.among * len(self.places), one.shares)
            sizes.row_counts[self.at.meta[VAL].shape[0].node.expr] = all_
        return self.at

    def _ends(self) -> fx.Node:
        """int64 [experts]: where the rows of each end."""
        if self.ends is None:
            self.ends = self.build(ops.group_ends.default, self._column_of_all(0), len(self.chain))
        return self.ends

    def _of_all(self, values: tuple[Any, ...]) -> fx.Node:
        """[experts, ..] of a value of each, by one op where they are parts of one value, or made alike of such parts."""
        key = ("all", *values)
        if key not in self.known:
            first = values[0]
            made = None
            if _one_op(values) and not any(v.meta.get(PLACEMENT, I).is_shard for v in values):
                forms = (self._parts_of_one, self._compared, self._reduced, self._pointwise)
                made = next((m for form in forms if (m := form(values)) is not None), None)
            if made is None:
                made = self.build(aten.stack.default, [*values], 0)
            self.known[key] = mark(made, None if self._is_cut(first) else first.meta.get(PLACEMENT))
        return self.known[key]

    def _is_cut(self, value: fx.Node) -> bool:
        return bool(value.meta.get(PLACEMENT, I).is_shard)

    def _parts_of_one(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        """x of x[0], x[1], ..; the dim that is taken apart comes first."""
        first: Any = values[0]
        if first.target is not aten.select.int or not _is_one(tuple(v.args[0] for v in values)):
            return None
        source, dim = first.args[0], first.args[1] % first.args[0].meta[VAL].dim()
        if source.meta[VAL].shape[dim] != len(values) or self._is_cut(source):
            return None
        if any(v.args[1] != first.args[1] or v.args[2] != i for i, v in enumerate(values)):
            return None
        for at in range(dim, 0, -1):
            source = self.build(aten.transpose.int, source, at - 1, at)
        return source

    def _compared(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        """x == 0, x == 1, .."""
        first: Any = values[0]
        x = tuple(v.args[0] for v in values)
        if first.target is not aten.eq.Scalar or not _is_one(x) or [v.args[1] for v in values] != [*range(len(values))]:
            return None
        device = first.meta[VAL].device
        numbers = self.build(aten.arange.default, len(values), dtype=torch.int64, device=device, pin_memory=False)
        return self.build(aten.eq.Tensor, x[0], self._below(numbers, first.meta[VAL].dim()))

    def _reduced(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        """x.any(-1), of dims that are counted from the last."""
        first: Any = values[0]
        if first.target not in (aten.any.dim, aten.sum.dim_IntList) or any(
            _numbers(v) != _numbers(first) for v in values
        ):
            return None
        dims = first.args[1] if isinstance(first.args[1], (list, tuple)) else [first.args[1]]
        if any(d >= 0 for d in dims):
            return None
        return self.build(first.target, self._of_all(tuple(v.args[0] for v in values)), *first.args[1:], **first.kwargs)

    def _pointwise(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        first = values[0]
        if not _is_pointwise(first) or any(_numbers(v) != _numbers(first) for v in values):
            return None
        args: list[Any] = []
        for each in zip(*(v.args for v in values), strict=True):
            if not isinstance(each[0], fx.Node) or _is_one(each):
                args.append(each[0])
            else:
                dims = first.meta[VAL].dim() - each[0].meta[VAL].dim()
                args.append(self._below(self._of_all(each), dims))
        return self.build(first.target, *args, **first.kwargs)  # type: ignore[arg-type]

    def _below(self, value: fx.Node, dims: int) -> fx.Node:
        """[experts, ..] -> [experts, 1, .., 1, ..] with so many more dims."""
        for _ in range(dims):
            value = self.build(aten.unsqueeze.default, value, 1)
        return value

    def _say(self, products: tuple[fx.Node, ...], what: str) -> None:
        name = fqn_of(products[0]).rpartition(".")[0]
        self.program.note("merge", f"{len(self.chain)} experts, of which {name} is the first, {what}", products[0])


def _one_op(values: tuple[Any, ...]) -> bool:
    """True if all are results of the same op."""
    first = values[0]
    same = all(isinstance(v, fx.Node) and v.op == "call_function" and v.target is first.target for v in values)
    return same and all(len(v.args) == len(first.args) for v in values)


def _is_one(values: Sequence[Any]) -> bool:
    """True if all are the same value, also where each is computed anew."""
    first = values[0]
    if all(v is first for v in values):
        return True
    if not _one_op(tuple(values)) or is_draw(first):
        return False
    if first.target is ops.rows.default:  # sizes of one mask may have several names
        return _is_one([v.args[0] for v in values])
    if any(_numbers(v) != _numbers(first) for v in values):
        return False
    operands = [v.all_input_nodes for v in values]
    return len({len(each) for each in operands}) == 1 and all(_is_one(each) for each in zip(*operands, strict=True))


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_draw(node)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    found = []
    while (first := first.next) is not last:
        found.append(first)
    return found


def _read_by_none_but(last: fx.Node) -> list[fx.Node]:
    """The node, and those that go with it."""
    gone = {last: None}
    for node in reversed(last.graph.nodes):
        if node < last and node.op == "call_function" and node.users and all(user in gone for user in node.users):
            gone[node] = None
    return [*gone]


def _rows(value: Any) -> sympy.Symbol | None:
    """The symbol of a first dim whose length data decides."""
    tensor = value.meta.get(VAL) if isinstance(value, fx.Node) else None
    first = tensor.shape[0] if isinstance(tensor, torch.Tensor) and tensor.dim() else 1
    return first.node.expr if isinstance(first, torch.SymInt) and first.node.expr.is_Symbol else None


def _of_rows(value: fx.Node) -> Placement | None:
    """How [rows, k] is placed of which this is the value, or [1, rows, k]."""
    placement: Placement | None = value.meta.get(PLACEMENT)
    if placement is None or not placement.is_shard or value.meta[VAL].dim() == 2:
        return placement
    return S(placement.dim - 1, placement.cut)


def _has_rows(value: fx.Node, user: fx.Node) -> bool:
    """Whether a dim of this operand meets the rows of the result."""
    shape = value.meta[VAL].shape
    return len(shape) == user.meta[VAL].dim() and shape[0] != 1


def _numbers(node: fx.Node) -> list[Any]:
    """Arguments that are no values of the graph."""
    return [*(a for a in node.args if not isinstance(a, fx.Node)), *sorted(node.kwargs.items())]
