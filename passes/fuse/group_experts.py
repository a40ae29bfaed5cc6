"""Experts that are called one by one, each on its own tokens, become grouped products (Megatron's `moe_grouped_gemm`).

Before:  %x0 = index(%x, [%rows0]); %h0 = linear(%x0, %w0); %y0 = mul(%h0, %p0); %o0 = index_add(%out, 0, %rows0, %y0)
         %x1 = index(%x, [%rows1]); %h1 = linear(%x1, %w1); %y1 = mul(%h1, %p1); %o1 = index_add(%o0, 0, %rows1, %y1)
After:   %ends = cumsum(stack([sum(%mask0), sum(%mask1)]), 0)       # of the masks that the rows are those of
         %rows = cat([%rows0, %rows1]); %w = transpose(view(join_parameters([%w0, %w1]), [2, n, k]), 1, 2)
         %h = grouped_mm(index(%x, [%rows]), %w, %ends); %o = index_add(%out, 0, %rows, mul(%h, cat([%p0, %p1])))
Legal because: all ops between compute each row by itself, so that rows of all experts may stand one below the other.

The experts are walked in step, from what they add backward. Where they do the same the op is done once, on all rows; where they
part, or an op does not work row by row, their values are put one below the other. Each rank groups its own shards, after
planning. Weights are read as one tensor, as by `merge_linears`, which has run before. Library: torch's grouped product (CUDA).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from megafx.analysis.joined_parameters import leaves_gaps, mark, placed_together, stored_parameters, why_not_one
from megafx.ir.nodes import argument
from megafx.ir.program import PLACEMENT, VAL, Builder, Fusion, Phase, Program, fqn_of, source_of
from megafx.ir.sizes import row_sources
from megafx.kernels import join_parameters  # noqa: F401  registers the op
from megafx.kernels.activation import activation  # noqa: F401  registers the ops
from megafx.kernels.experts import group_rows, grouped_mm  # noqa: F401  registers the ops
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "group_experts"
ops, aten = torch.ops.megafx, torch.ops.aten
# Which operand of a fused activation is a bias: it is then each expert's own.
BIASED = {ops.glu_packed.default: 1, ops.bias_act.default: 1}
BY_ROW = {*BIASED, ops.glu.default, aten.to.dtype}


def group_experts(program: Program, planner: Planner) -> int:
    """Return the number of products that others took over."""
    if not planner.config.moe_grouped_gemm:
        return 0
    changes, before = 0, len(program.notes)
    for chain in _chains(program.graph):
        changes += _Grouping(program, planner, chain).run()
    if changes:
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


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """Sums into rows, each of the one before, of which nobody else knows: of two experts or more."""
    chains: list[list[fx.Node]] = []
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.index_add.default):
        out, dim = node.args[:2]
        if dim != 0 or argument(node, "alpha") != 1:
            continue
        chain = last.pop(out, None) if len(out.users) == 1 else None  # type: ignore[arg-type,union-attr]
        if chain is None:
            chains.append(chain := [])
        chain.append(node)
        last[node] = chain
    return [chain for chain in chains if len(chain) > 1]


class _Refused(Exception):
    """Says why."""


class _Grouping:
    """Of one mixture. chain: what its experts add. sizes: the symbol that counts the rows of each."""

    def __init__(self, program: Program, planner: Planner, chain: list[fx.Node]) -> None:
        self.program, self.planner, self.chain = program, planner, chain
        self.build = Builder(program, chain[-1], chain[-1], NAME)
        self.parameters = stored_parameters(program)
        self.grouped: list[tuple[fx.Node, ...]] = []
        self.known: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.ends: fx.Node | None = None

    def run(self) -> int:
        """Number of products that are gone."""
        rows = tuple(node.args[2] for node in self.chain)
        added = tuple(node.args[3] for node in self.chain)
        sizes = [_rows(value) for value in added]
        linears = self._linears(added)
        if None in sizes or not linears:
            return 0
        self.sizes, self.masks = sizes, self._masks(sizes)
        try:
            if len({*sizes}) < len(sizes) or None in self.masks:
                raise _Refused("their rows are not selected by a mask each")
            for products in linears:
                self._check(products)
            whole = self.batch(added)
        except _Refused as reason:
            self._say(linears[0], f"not grouped: {reason}")
            return 0
        last, start = self.chain[-1], self.chain[0].args[0]
        new = self.build(aten.index_add.default, start, 0, self._one_below_the_other(rows), whole)
        mark(new, last.meta.get(PLACEMENT))
        last.replace_all_uses_with(new)
        for products in self.grouped:
            shape = self.program.sizes.shape(products[0].meta[VAL])
            elements = shape[0] * shape[1] * len(products)
            self.program.fusions.append(Fusion(NAME, fqn_of(products[0]), source_of(products[0]), NAME, elements))
        self._say(self.grouped[0], "grouped: their products are one")
        return sum(len(products) - 1 for products in self.grouped)

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
        if not all(isinstance(v, fx.Node) and v.op == "call_function" for v in values) or len({*values}) < len(values):
            return False
        if any(v.target is not first.target or len(v.args) != len(first.args) for v in values):
            return False
        by_row = first.target in BY_ROW or torch.Tag.pointwise in getattr(first.target, "tags", ())
        if first.target is aten.linear.default:
            return first.meta[VAL].dim() == 2
        if first.target is aten.index.Tensor:
            return len({v.args[0] for v in values}) == 1 and all(None not in v.args[1] for v in values)  # type: ignore[operator]
        return by_row and all(_numbers(v) == _numbers(first) for v in values)

    def _operands(self, values: tuple[fx.Node, ...]) -> list[tuple[Any, ...]]:
        """The experts' operands, one tuple for each place."""
        if values[0].target is aten.index.Tensor:
            return [*zip(*(v.args[1] for v in values), strict=True)]  # type: ignore[arg-type]
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

    def batch(self, values: tuple[Any, ...]) -> Any:
        """What gives the rows of all experts, one below the other."""
        if values not in self.known:
            self.known[values] = self._do(values) if self._alike(values) else self._one_below_the_other(values)
        return self.known[values]

    def _do(self, values: tuple[fx.Node, ...]) -> fx.Node:
        first, places = values[0], self._operands(values)
        if first.target is aten.linear.default:
            self.grouped.append(values)
            x, weight, *bias = places
            turned = self.build(aten.transpose.int, self._stacked(weight), 1, 2)
            made = self.build(ops.grouped_mm.default, self.batch(x), turned, self._ends())
            mark(made, first.meta.get(PLACEMENT))
            if bias and bias[0][0] is not None:
                made = self.build(aten.add.Tensor, made, self._of_each_row(bias[0]))
        elif first.target is aten.index.Tensor:
            made = self.build(aten.index.Tensor, first.args[0], [self.batch(each) for each in places])
        else:
            own = BIASED.get(first.target)  # type: ignore[call-overload]
            args = [self._operand(each, first) for each in places]
            if own is not None and args[own] is not None:
                args[0], args[own] = self.build(aten.add.Tensor, args[0], self._of_each_row(places[own])), None
            made = self.build(first.target, *args, **first.kwargs)  # type: ignore[arg-type]
        return mark(made, first.meta.get(PLACEMENT))

    def _operand(self, each: tuple[Any, ...], user: fx.Node) -> Any:
        """A number, a tensor without rows that all experts share, or the rows of all."""
        if not isinstance(each[0], fx.Node) or (user.target in BIASED and not _rows(each[0])):
            return each[0]
        if len({*each}) == 1 and not _has_rows(each[0], user):
            return each[0]
        return self.batch(each)

    def _one_below_the_other(self, values: tuple[Any, ...]) -> fx.Node:
        tails = {(v.meta[VAL].dtype, tuple(v.meta[VAL].shape[1:])) for v in values}
        if len(tails) > 1 or [_rows(v) for v in values] != self.sizes:
            raise _Refused(f"{values[0].name} has other rows than the experts' tokens")
        if len({str(v.meta.get(PLACEMENT)) for v in values}) > 1:
            raise _Refused("their values are placed apart")
        return mark(self.build(aten.cat.default, list(values)), values[0].meta.get(PLACEMENT))

    def _stacked(self, parameters: tuple[Any, ...]) -> fx.Node:
        """Weights [n, k] -> [experts, n, k], biases [n] -> [experts, n], in one memory."""
        parts, shape = self._parts(parameters), map(int, parameters[0].meta[VAL].shape)
        whole = self.build(ops.join_parameters.default, parts)
        mark(whole, placed_together(parts, 0, self.planner.t))
        return self.build(aten.view.default, whole, [len(parameters), *shape])

    def _of_each_row(self, biases: tuple[Any, ...]) -> fx.Node:
        """[n] of each expert -> [rows, n]."""
        return self.build(aten.index_select.default, self._stacked(biases), 0, self._expert_of_row())

    # -- whose rows

    def _masks(self, sizes: Sequence[Any]) -> list[Any]:
        """For each symbol the mask whose rows it counts."""
        found = row_sources(self.program.graph)
        return [found[s][0].args[0] if s in found else None for s in sizes]

    def _ends(self) -> fx.Node:
        """int64 [experts]: where the rows of each end."""
        if self.ends is None:
            counts = [self.build(aten.sum.default, mask) for mask in self.masks]
            self.ends = self.build(aten.cumsum.default, self.build(aten.stack.default, counts), 0)
        return self.ends

    def _expert_of_row(self) -> fx.Node:
        rows = self._one_below_the_other(tuple(node.args[2] for node in self.chain))
        return self.build(ops.group_of_rows.default, rows, self._ends())

    def _say(self, products: tuple[fx.Node, ...], what: str) -> None:
        name = fqn_of(products[0]).rpartition(".")[0]
        self.program.note("merge", f"{len(self.chain)} experts, of which {name} is the first, {what}", products[0])


def _rows(value: Any) -> sympy.Symbol | None:
    """The symbol of a first dim whose length data decides."""
    tensor = value.meta.get(VAL) if isinstance(value, fx.Node) else None
    first = tensor.shape[0] if isinstance(tensor, torch.Tensor) and tensor.dim() else 1
    return first.node.expr if isinstance(first, torch.SymInt) and first.node.expr.is_Symbol else None


def _has_rows(value: fx.Node, user: fx.Node) -> bool:
    """Whether a dim of this operand meets the rows of the result."""
    shape = value.meta[VAL].shape
    return len(shape) == user.meta[VAL].dim() and shape[0] != 1


def _numbers(node: fx.Node) -> list[Any]:
    """Arguments that are no values of the graph."""
    return [*(a for a in node.args if not isinstance(a, fx.Node)), *sorted(node.kwargs.items())]
