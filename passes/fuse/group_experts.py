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

`moe_grouped_gemm` 'auto': by the price of the ops that go and of those that come (analysis/prices.py). None takes less than its
launch, nor, where the host waits for the number of rows, than the launches that then find nothing queued. Grouped products of
small groups are slower than as many single ones of a weight each, and of all experts' rows more is held at once (RESULTS.md):
one by one is the better for two to four large experts. True: always.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megafx.analysis.joined_parameters import leaves_gaps, placed_together, stored_parameters, why_not_one
from megafx.analysis.prices import seconds
from megafx.ir.nodes import between, mark
from megafx.ir.program import PLACEMENT, VAL, Fusion, Phase, Program, fqn_of, source_of
from megafx.ir.sizes import RowCount, row_sources
from megafx.kernels import join_parameters, nonzero  # noqa: F401  registers the ops
from megafx.kernels.activation import activation  # noqa: F401  registers the ops
from megafx.kernels.experts import group_rows, grouped_mm  # noqa: F401  registers the ops
from megafx.passes.experts.expert_chains import Added, InStep, Refused, chains, row_symbol
from megafx.planner.context import CompileContext
from megafx.planner.cost import TRAINING_PASSES

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "group_experts"
ops, aten = torch.ops.megafx, torch.ops.aten
# Of the price, what grouping has to save: it holds up to twice as much (0.79 and 1.47 GiB, 0.94 and 1.84; RESULTS.md).
LEAST_GAIN = 0.1
# Launches during which the device has nothing to do where the host waits for a number of rows: nonzero's own kernels, and those
# up to the first product. Of the 10.06 ms of 8 experts one by one (RESULTS.md, H200, 2026-11-22) the products and launches are
# 9.05 as modelled, router and loss 0.3; the rest is 8 waits of 9 launches.
WAIT = 9


def group_experts(program: Program, context: CompileContext) -> int:
    """Return the number of products that others took over."""
    if context.config.moe_grouped_gemm is False:
        return 0
    changes, before = 0, len(program.notes)
    for chain in chains(program.graph):
        changes += _Grouping(program, context, chain).run()
    program.erase_unused()
    known = row_sources(program.graph)
    left = [
        n
        for n in program.graph.find_nodes(op="call_function", target=aten.linear.default)
        if row_symbol(n.args[0]) in known
    ]
    if len({row_symbol(n.args[0]) for n in left}) > 1 and len(program.notes) == before:
        how = "their results are not all put back by index_add, or their experts do not do the same"
        program.note(
            "merge", f"{len(left)} products of experts, each on its own tokens, are not grouped: {how}", left[0]
        )
    return changes


class _Grouping(InStep):
    """Of one mixture."""

    name = NAME

    def __init__(self, program: Program, context: CompileContext, chain: list[Added]) -> None:
        super().__init__(program, chain)
        self.context, self.parameters = context, stored_parameters(program)
        self.at: fx.Node | None = None

    def run(self) -> int:
        """Number of products that are gone."""
        added = tuple(each.y for each in self.chain)
        sizes = [row_symbol(value) for value in added]
        linears = self.linears(added)
        if None in sizes or not linears:
            return 0
        before = self.last.prev
        try:
            self.find_places(added)
            if self.context.config.fp8 is not None and self._by_price:
                raise Refused("single products run in FP8, and grouped ones do not")
            for products in linears:
                self._check(products)
            self._name_rows()
            whole, rows = self.batch(added), self.batch(tuple(each.rows for each in self.chain))
            new = self.build(aten.index_add.default, self.chain[0].out, 0, rows, whole)
        except Refused as reason:
            return self._leave(linears[0], f"{reason}")
        mark(new, self.last.meta.get(PLACEMENT))
        if self._by_price:
            come = self._microseconds(between(before, self.last))
            gone = self._microseconds(_read_by_none_but(self.last))
            text = f"modelled at {gone:.0f} us one by one, at {come:.0f} grouped"
            if come > (1 - LEAST_GAIN) * gone:
                self.program.graph.erase_node(new)
                return self._leave(linears[0], text)
        self.last.replace_all_uses_with(new)
        for products in self.products:
            shape = self.program.sizes.shape(products[0].meta[VAL])
            elements = shape[0] * shape[1] * len(products)
            self.program.fusions.append(Fusion(NAME, fqn_of(products[0]), source_of(products[0]), NAME, elements))
        self._say(self.products[0], "grouped: their products are one" + (f" ({text})" if self._by_price else ""))
        return sum(len(products) - 1 for products in self.products)

    def _leave(self, products: tuple[fx.Node, ...], why: str) -> int:
        if self.at is not None:  # a size that nothing has
            self.program.sizes.row_counts.pop(self.at.meta[VAL].shape[0].node.expr)
        self._say(products, f"not grouped: {why}")
        return 0

    @property
    def _by_price(self) -> bool:
        return self.context.config.moe_grouped_gemm == "auto"

    def _microseconds(self, nodes: list[fx.Node]) -> float:
        """Of a step; an op has to be launched, and for numbers of rows the host waits."""
        total, hardware = 0.0, self.context.hardware
        for node in nodes:
            once = seconds(self.program, node, hardware, self.context.t)
            host = hardware.launch_seconds * (WAIT if node.target is ops.rows.default else 1)
            value = node.meta[VAL]
            has_gradient = self.context.training and isinstance(value, torch.Tensor) and value.is_floating_point()
            passes = TRAINING_PASSES if has_gradient else 1
            total += passes * max(once, host) if once else 0.0
        return 1e6 * total

    def _check(self, products: tuple[fx.Node, ...]) -> None:
        """Raises Refused where weights or biases cannot be read as one tensor."""
        for place in range(1, len(products[0].args)):
            given = [p.args[place] for p in products]
            if all(x is None for x in given):
                continue
            parts = self._parts(given)
            if len({tuple(x.meta[VAL].shape) for x in given}) > 1:
                raise Refused("their shapes differ")
            if len({(x.meta[VAL].dtype, x.meta[VAL].device) for x in parts}) > 1:
                raise Refused("their dtypes or devices differ")
            if reason := why_not_one(parts, self.parameters, self.context.wants_grad):
                raise Refused(reason)
            if leaves_gaps(parts, self.context.data, self.context.t):
                raise Refused("their rows do not divide by the data-parallel ranks")

    def _parts(self, given: Sequence[Any]) -> list[Any]:
        """Parameters, those of which `merge_linears` has made one tensor each by itself."""
        joined = ops.join_parameters.default
        return [p for x in given for p in (x.args[0] if x is not None and x.target is joined else [x])]

    # -- doing it once

    def batch(self, values: tuple[Any, ...]) -> fx.Node:
        column = self.column(values)
        return super().batch(values) if column is None else self._column_of_all(column + 1)

    def of_rows(self, value: fx.Node, columns: list[tuple[Any, ...]]) -> fx.Node:
        return self.build(aten.index.Tensor, value, [*map(self.batch, columns)])

    def of_each(self, values: tuple[fx.Node, ...], columns: list[tuple[Any, ...]]) -> fx.Node:
        return self.build(aten.index.Tensor, self.of_all(values), [self.expert(), *map(self.batch, columns)])

    def stacked(self, values: tuple[Any, ...]) -> fx.Node:
        """In one memory."""
        parts, shape = self._parts(values), map(int, values[0].meta[VAL].shape)
        whole = self.build(ops.join_parameters.default, parts)
        mark(whole, placed_together(parts, 0, self.context.t))
        return self.build(aten.view.default, whole, [len(values), *shape])

    # -- whose rows

    def _column_of_all(self, column: int) -> fx.Node:
        """Of each row of all experts: its expert, then its place in the mask."""
        key: tuple[Any, ...] = ("column", column)
        if key not in self.known:
            made = self.build(aten.select.int, self.at, 1, column)
            self.known[key] = mark(made, self.places[0].meta.get(PLACEMENT))
        return self.known[key]

    def _name_rows(self) -> None:
        masks = self.of_all(tuple(p.args[0] for p in self.places))
        sizes, known = self.program.sizes, self.program.fake_mode.shape_env.row_counts
        name = next(n for i in itertools.count(len(known)) if (n := f"rows{i}") not in known)
        self.at = mark(self.build(ops.rows.default, masks, name), self.places[0].meta.get(PLACEMENT))
        count, one = self.at.meta[VAL].shape[0], sizes.row_counts[self.places[0].meta[VAL].shape[0].node.expr]
        sizes.row_counts[count.node.expr] = RowCount(name, one.among * len(self.places), one.shares)
        self.rows, self.ids = sizes.of(count), self._column_of_all(0)

    def expert(self) -> fx.Node:
        return self.ids

    def _say(self, products: tuple[fx.Node, ...], what: str) -> None:
        name = fqn_of(products[0]).rpartition(".")[0]
        self.program.note("merge", f"{len(self.chain)} experts, of which {name} is the first, {what}", products[0])


def _read_by_none_but(last: fx.Node) -> list[fx.Node]:
    """The node, and those that go with it."""
    gone = {last: None}
    for node in reversed(last.graph.nodes):
        if node < last and node.op == "call_function" and node.users and all(user in gone for user in node.users):
            gone[node] = None
    return [*gone]
