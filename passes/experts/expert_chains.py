"""Experts that are called one by one, each on its own tokens: which are summed up together, and what is alike of them.

    %at0 = rows(%mask0, 'u0'); %rows0 = select(%at0, 1, 1); %x0 = index(%x, [%rows0])
    %y0 = mul(linear(%x0, %w0), %p0); %o0 = index_add(%out, 0, %rows0, %y0)
    %at1 = rows(%mask1, 'u1'); ..                              ; %o1 = index_add(%o0, 0, %rows1, %y1)

is a chain of two experts. They are walked in step, from what they add backward: `operands((%y0, %y1))` are (linear, linear) and
(%p0, %p1), of which one op may do what each does if they are `alike`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from megafx.analysis.experts import rows_added
from megafx.ir.nodes import PASS_ON, argument, behind, is_draw, mark, op_name
from megafx.ir.program import PLACEMENT, VAL, Builder, Program
from megafx.ir.sizes import SizeEmitter, row_sources
from megafx.kernels import nonzero  # noqa: F401  registers the ops
from megafx.kernels.activation import activation  # noqa: F401  registers the ops
from megafx.kernels.experts import group_rows, grouped_mm  # noqa: F401  registers the ops
from megafx.placements.types import I, Placement, S
from megafx.rules.families import VIEWS

ops, aten = torch.ops.megafx, torch.ops.aten
# Which operand of a fused activation is a bias: it is then each expert's own.
BIASED = {ops.glu_packed.default: 1, ops.bias_act.default: 1}
BY_ROW = {*BIASED, ops.glu.default, aten.to.dtype}


class Added(NamedTuple):
    """What an expert adds: y, to the rows of `out` of these numbers."""

    node: fx.Node
    out: fx.Node
    rows: fx.Node
    y: fx.Node


def chains(graph: fx.Graph) -> list[list[Added]]:
    """Sums into rows, each of the one before, of which nobody else knows: of two experts or more."""
    chains: list[list[Added]] = []
    last: dict[fx.Node, list[Added]] = {}
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


def _added(node: fx.Node) -> Added | None:
    found = rows_added(node)
    if found is None:
        return None
    out, y, _ = found
    arguments = node.args
    if node.target is aten.index_add.default:
        plain = arguments[1] == 0 and argument(node, "alpha") == 1
        return Added(node, out, arguments[2], y) if plain else None
    indices = arguments[1]
    if len(indices) != 1 or indices[0] is None or indices[0].meta[VAL].dim() != 1:
        return None
    return Added(node, out, indices[0], y) if argument(node, "accumulate") or _are_apart(indices[0]) else None


def _are_apart(numbers: fx.Node) -> bool:
    """True if no row is named twice, which would count once: a mask has one place for each, or a choice of topk, whose experts
    differ."""
    places: Any = numbers.args[0] if numbers.args else None
    if not isinstance(places, fx.Node) or places.target is not ops.rows.default:
        return False
    mask = places.args[0]
    of_tokens = numbers.target is aten.select.int and numbers.args[1:] == (1, 0)
    return mask.meta[VAL].dim() == 1 or (of_tokens and _chosen_once(mask))


def _chosen_once(mask: fx.Node) -> bool:
    """True if a row of the mask [rows, choices] has at most one place: where topk has chosen one expert."""
    if mask.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return any(map(_chosen_once, mask.all_input_nodes))
    ids: Any = behind(mask.args[0], PASS_ON) if mask.target is aten.eq.Scalar else None
    if ids is None or ids.target is not operator.getitem or ids.args[1] != 1 or ids.meta[VAL].dim() != 2:
        return False
    return op_name(ids.args[0]) == "topk" and argument(ids.args[0], "dim") in (-1, 1)


class Refused(Exception):
    """Says why."""


class InStep(ABC):
    """The experts of a chain, whose values are given as tuples with one of each. places: of each, where its mask is true.
    build: makes nodes before the last sum of the chain. known: what has been made once for all experts.

    A subclass puts rows and weights of all experts together: `of_rows`, `of_each`, `stacked`. rows: how many, structural. ids:
    int64 [rows], their experts. products: those that one does.
    """

    name = ""
    rows: int
    ids: fx.Node

    def __init__(self, program: Program, chain: list[Added]) -> None:
        self.program, self.chain = program, chain
        self.last = chain[-1].node
        self.build = Builder(program, self.last, self.last, self.name)
        self.places: tuple[fx.Node, ...] = ()
        self.known: dict[tuple[Any, ...], fx.Node] = {}
        self.products: list[tuple[fx.Node, ...]] = []

    def find_places(self, values: tuple[Any, ...]) -> None:
        """values: with the rows of each expert. Raises Refused."""
        symbols, found = [row_symbol(value) for value in values], row_sources(self.program.graph)
        places = [found[s][0] for s in symbols if s in found and found[s][0].target is ops.rows.default]
        if len({*symbols}) < len(symbols) or len(places) < len(symbols):
            raise Refused("their rows are not selected by a mask each")
        self.places = tuple(places)

    # -- doing it once

    def batch(self, values: tuple[Any, ...]) -> fx.Node:
        """[rows, ..], of all experts, one below the other, where each has [rows, ..] or [1, rows, ..]. Raises Refused."""
        if values not in self.known:
            if not self.alike(values):
                raise Refused(f"{op_name(values[0])} has no form that does the rows of all experts")
            self.known[values] = mark(self._do(values), _of_rows(values[0]))
        return self.known[values]

    def _do(self, values: tuple[fx.Node, ...]) -> fx.Node:
        first, operands = values[0], self.operands(values)
        if first.target is aten.linear.default:
            self.products.append(values)
            x, weight, *bias = operands
            turned = self.build(aten.transpose.int, self.stacked(weight), 1, 2)
            made = self.build(ops.grouped_mm.default, self.batch(x), turned, self._ends())
            return self._biased(mark(made, _of_rows(first)), bias[0]) if bias and bias[0][0] is not None else made
        if first.target is aten.index.Tensor:
            return self._taken(values)
        if str(first.target) in VIEWS:
            rows = SizeEmitter(self.program.graph, self.program.sizes)(self.rows)
            return self.build(aten.reshape.default, self.batch(operands[0]), [rows, *tail(first)])
        own = BIASED.get(first.target)
        args = [each[0] if i == own else self._operand(each, first) for i, each in enumerate(operands)]
        if own is not None and args[own] is not None:
            args[0], args[own] = self._biased(args[0], operands[own]), None
        return self.build(first.target, *args, **first.kwargs)

    def _operand(self, each: tuple[Any, ...], user: fx.Node) -> Any:
        """A number, a tensor without rows that all experts share, or the rows of all."""
        if not isinstance(each[0], fx.Node):
            return each[0]
        if is_one(each) and not has_rows(each[0], user):
            if each[0].meta[VAL].dim() > len(tail(user)) + 1:
                raise Refused(f"{op_name(user)} reads a value of more dims than a row")
            return each[0]
        return self.batch(each)

    def _ends(self) -> fx.Node:
        """int64 [experts]: where the rows of each end."""
        key = ("ends",)
        if key not in self.known:
            self.known[key] = self.build(ops.group_ends.default, self.ids, len(self.chain))
        return self.known[key]

    def _biased(self, x: fx.Node, biases: tuple[Any, ...]) -> fx.Node:
        """With the bias of each row's expert."""
        own = self.build(aten.index_select.default, self.stacked(biases), 0, self.expert())
        return self.build(aten.add.Tensor, x, own)

    def _taken(self, values: tuple[fx.Node, ...]) -> fx.Node:
        """value[column, ..]: what is each row's."""
        sources: Any = tuple(v.args[0] for v in values)
        source, columns = sources[0], list[tuple[Any, ...]]()
        for each in self.operands(values):
            if each[0] is not None:
                columns.append(each)
                continue
            if columns or source.meta[VAL].shape[0] != 1:
                raise Refused("a value is read by rows that are not its first dim")
            source = mark(self.build(aten.select.int, source, 0, 0), without_first(source))
        return self.of_rows(source, columns) if is_one(sources) else self.of_each(sources, columns)

    @abstractmethod
    def of_rows(self, value: fx.Node, columns: list[tuple[Any, ...]]) -> fx.Node:
        """What each row of all experts has of a value, whose first dims these columns index. Raises Refused."""

    @abstractmethod
    def of_each(self, values: tuple[fx.Node, ...], columns: list[tuple[Any, ...]]) -> fx.Node:
        """The same of a value of each expert."""

    @abstractmethod
    def stacked(self, values: tuple[Any, ...]) -> fx.Node:
        """Weights [n, k] -> [experts, n, k], biases [n] -> [experts, n]."""

    @abstractmethod
    def expert(self) -> fx.Node:
        """int64 [rows]: the expert of each, in the order of the rows that are computed."""

    # -- what is alike of the experts

    def linears(self, values: tuple[Any, ...]) -> list[tuple[fx.Node, ...]]:
        """Products of the experts that are reached in step from what they add."""
        found, todo, seen = [], [values], set()
        while todo:
            at = todo.pop()
            if at in seen or not self.alike(at):
                continue
            seen.add(at)
            if at[0].target is aten.linear.default:
                found.append(at)
            todo += [each for each in self.operands(at) if isinstance(each[0], fx.Node)]
        return found

    def alike(self, values: tuple[Any, ...]) -> bool:
        """True if one op on all rows can do what these do."""
        first = values[0]
        if not one_op(values) or len({*values}) < len(values):
            return False
        if first.target is aten.linear.default:
            return first.meta[VAL].dim() == 2 or (first.meta[VAL].dim() == 3 and first.meta[VAL].shape[0] == 1)
        if first.target is aten.index.Tensor:
            if any(None in v.args[1] for v in values) and not is_one(tuple(v.args[0] for v in values)):
                return False
            return len({len(v.args[1]) for v in values}) == 1
        if str(first.target) in VIEWS:
            return self._keep_rows(values)
        return (first.target in BY_ROW or is_pointwise(first)) and all(numbers(v) == numbers(first) for v in values)

    def _keep_rows(self, values: tuple[fx.Node, ...]) -> bool:
        """True if each view has a row for each of its operand's, which may have a dim of 1 before them."""
        tails = set()
        for v in values:
            shape, given = (self.program.sizes.shape(x.meta[VAL]) for x in (v, v.args[0]))
            given = given[1:] if given[:1] == (1,) else given
            if row_symbol(v) is None or given[:1] != shape[:1]:
                return False
            tails.add((shape[1:], given[1:]))
        return len(tails) == 1

    def operands(self, values: tuple[fx.Node, ...]) -> list[tuple[Any, ...]]:
        """The experts' operands, one tuple for each place."""
        if values[0].target is aten.index.Tensor:
            return [*zip(*(v.args[1] for v in values), strict=True)]
        if str(values[0].target) in VIEWS:
            return [tuple(v.args[0] for v in values)]
        return [*zip(*(v.args for v in values), strict=True)]

    def column(self, values: tuple[Any, ...]) -> int | None:
        """Which column of each expert's places these are."""
        first = values[0]
        if not one_op(values) or not all(
            v.args and is_one((v.args[0], p)) for v, p in zip(values, self.places, strict=True)
        ):
            return None
        if all(v.target is aten.select.int and v.args[1:] == (1, first.args[2]) for v in values):
            return int(first.args[2]) % int(self.places[0].meta[VAL].shape[1])
        alone = self.places[0].meta[VAL].shape[1] == 1
        return 0 if alone and all(str(v.target) in VIEWS and v.meta[VAL].dim() == 1 for v in values) else None

    def of_all(self, values: tuple[Any, ...]) -> fx.Node:
        """[experts, ..] of a value of each, by one op where they are parts of one value, or made alike of such parts."""
        key = ("all", *values)
        if key not in self.known:
            first = values[0]
            made = None
            if one_op(values) and not any(v.meta.get(PLACEMENT, I).is_shard for v in values):
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
        if first.target is not aten.select.int or not is_one(tuple(v.args[0] for v in values)):
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
        if first.target is not aten.eq.Scalar or not is_one(x) or [v.args[1] for v in values] != [*range(len(values))]:
            return None
        device = first.meta[VAL].device
        numbers = self.build(aten.arange.default, len(values), dtype=torch.int64, device=device, pin_memory=False)
        return self.build(aten.eq.Tensor, x[0], self._below(numbers, first.meta[VAL].dim()))

    def _reduced(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        """x.any(-1), of dims that are counted from the last."""
        first: Any = values[0]
        if first.target not in (aten.any.dim, aten.sum.dim_IntList) or any(
            numbers(v) != numbers(first) for v in values
        ):
            return None
        dims = first.args[1] if isinstance(first.args[1], (list, tuple)) else [first.args[1]]
        if any(d >= 0 for d in dims):
            return None
        return self.build(first.target, self.of_all(tuple(v.args[0] for v in values)), *first.args[1:], **first.kwargs)

    def _pointwise(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        first = values[0]
        if not is_pointwise(first) or any(numbers(v) != numbers(first) for v in values):
            return None
        args: list[Any] = []
        for each in zip(*(v.args for v in values), strict=True):
            if not isinstance(each[0], fx.Node) or is_one(each):
                args.append(each[0])
            else:
                dims = first.meta[VAL].dim() - each[0].meta[VAL].dim()
                args.append(self._below(self.of_all(each), dims))
        return self.build(first.target, *args, **first.kwargs)

    def _below(self, value: fx.Node, dims: int) -> fx.Node:
        """[experts, ..] -> [experts, 1, .., 1, ..] with so many more dims."""
        for _ in range(dims):
            value = self.build(aten.unsqueeze.default, value, 1)
        return value


def one_op(values: tuple[Any, ...]) -> bool:
    """True if all are results of the same op."""
    first = values[0]
    same = all(isinstance(v, fx.Node) and v.op == "call_function" and v.target is first.target for v in values)
    return same and all(len(v.args) == len(first.args) for v in values)


def is_one(values: Sequence[Any]) -> bool:
    """True if all are the same value, also where each is computed anew."""
    first = values[0]
    if all(v is first for v in values):
        return True
    if not one_op(tuple(values)) or is_draw(first):
        return False
    if first.target is ops.rows.default:  # sizes of one mask may have several names
        return is_one([v.args[0] for v in values])
    if any(numbers(v) != numbers(first) for v in values):
        return False
    operands = [v.all_input_nodes for v in values]
    return len({len(each) for each in operands}) == 1 and all(is_one(each) for each in zip(*operands, strict=True))


def is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_draw(node)


def row_symbol(value: Any) -> sympy.Symbol | None:
    """The symbol of a first dim whose length data decides."""
    tensor = value.meta.get(VAL) if isinstance(value, fx.Node) else None
    first = tensor.shape[0] if isinstance(tensor, torch.Tensor) and tensor.dim() else 1
    return first.node.expr if isinstance(first, torch.SymInt) and first.node.expr.is_Symbol else None


def has_rows(value: fx.Node, user: fx.Node) -> bool:
    """True if a dim of this operand meets the rows of the result."""
    shape = value.meta[VAL].shape
    return len(shape) == user.meta[VAL].dim() and shape[0] != 1


def numbers(node: fx.Node) -> list[Any]:
    """Arguments that are no values of the graph."""
    return [*(a for a in node.args if not isinstance(a, fx.Node)), *sorted(node.kwargs.items())]


def tail(value: fx.Node) -> list[int]:
    """Sizes of a row, of [rows, ..] or [1, rows, ..]."""
    shape = value.meta[VAL].shape
    return [*map(int, shape[1 if row_symbol(value) is not None else 2 :])]


def _of_rows(value: fx.Node) -> Placement | None:
    """How [rows, ..] is placed of which this is the value, or [1, rows, ..]."""
    return value.meta.get(PLACEMENT) if row_symbol(value) is not None else without_first(value)


def without_first(value: fx.Node) -> Placement | None:
    """How value[0] is placed."""
    placement: Placement | None = value.meta.get(PLACEMENT)
    return S(placement.dim - 1, placement.cut) if placement is not None and placement.is_shard else placement
