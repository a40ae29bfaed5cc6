"""Sequence parallelism's gathers and scatters in pieces, beside the products that use or make the pieces.

Before:  %g = wait_tensor(all_gather_into_tensor(%x, 2, '7')); %y = mm(view(%g), %w)
         %s = reduce_scatter_tensor(view(mm(%a, %v)), 'sum', 2, '7'); %dw = mm(%b, %c); %z = wait_tensor(%s)
After:   %g, %y = gather_matmul(%x, [%w], [None], '7', rank, own)
         %s = matmul_scatter_start(%a, %v, shape, '7', rank); %dw = mm(%b, %c); %z = scatter_wait(%s, '7', rank)
Legal because: rows of a product depend on the same rows of its left operand alone, and rows are in the order of their ranks
(`_keeps_rows`); each function is what it replaces (distributed/exchange.py). Both sides sum in the order of the ranks.

A gather whose product does not follow at once, and a scatter of what no product made, start and are waited for apart: products
that `schedule_collectives` put between them run meanwhile. Small ones, those of other groups, and all-reduces stay.

Gathered values are in the exchange's slot where only products and views read them, before the next operation's barrier; else
they have memory of their own.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import is_product, is_wait
from megafx.distributed import exchange
from megafx.ir.nodes import COPIES, RESHAPES, shows_operand, storage_of
from megafx.ir.program import VAL, Phase, Program, inherit
from megafx.ops.axes import AxisContext
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.moves import same_size
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "overlap_products"
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
# Bytes of the whole tensor below which a collective of the library is as fast (one transfer has about 16 us of its own).
LEAST_BYTES = 2**20
PAD = torch.ops.megafx.pad_rows.default
PRODUCTS = (aten.mm.default, aten.addmm.default)


def overlap_products(program: Program, planner: Planner) -> int:
    """Return the number of collectives that run in pieces, or as copies beside something else."""
    parts, axes = program.partition, planner.axes
    if parts is None or axes is None or TENSOR_AXIS not in axes or planner.config.tp_comm_overlap is False:
        return 0
    place = axes[TENSOR_AXIS]
    least = 0 if planner.config.tp_comm_overlap is True else LEAST_BYTES
    graphs = [gm for gm in (parts.forward, parts.backward) if gm is not None]
    found = [gm for gm in graphs if _collectives(program, gm, place.group_name, least)]
    if not found:
        return 0
    reason = exchange.why_not(place.group_name, place.rank)
    if reason:
        program.note("overlap", f"tensor-parallel communication does not run beside products: {reason}")
        return 0
    made = {gm: _Overlap(program, gm, place, least).run() for gm in found}
    new = {gm: changed for gm, (changed, _) in made.items()}
    backward = parts.backward if parts.backward is None else new.get(parts.backward, parts.backward)
    forward = new.get(parts.forward, parts.forward)
    program.partition = replace(parts, forward=forward, backward=backward, last_backward=backward)
    return sum(count for _, count in made.values())


def _collectives(program: Program, gm: fx.GraphModule, group: str, least: int) -> list[fx.Node]:
    """Starts, in order, of collectives of at least so many bytes."""
    found = []
    for node in gm.graph.nodes:
        if node.target not in (GATHER, SCATTER) or node.args[-1] != group or len(node.users) != 1:
            continue
        value = (node if node.target is GATHER else node.args[0]).meta[VAL]
        elements = program.sizes.workload(math.prod(program.sizes.shape(value)))
        summed = node.target is GATHER or node.args[1] == "sum"
        if summed and value.ndim > 1 and elements * value.element_size() >= least and is_wait(next(iter(node.users))):
            found.append(node)
    return found


class _Overlap:
    """Rewrites a copy of one graph."""

    def __init__(self, program: Program, gm: fx.GraphModule, place: AxisContext, least: int) -> None:
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(gm.graph, {}))
        self.graph.set_codegen(gm.graph._codegen)
        self.gm = fx.GraphModule(gm, self.graph)
        self.end = (place.group_name, place.rank)
        self.starts = _collectives(program, self.gm, place.group_name, least)
        self.barriers: list[fx.Node] = []  # of each operation: the call that meets the other ranks
        self.gathers: list[tuple[int, fx.Node, fx.Node]] = []  # operation, call that has `own`, what is gathered

    def run(self) -> tuple[fx.GraphModule, int]:
        for start in self.starts:
            (wait,) = start.users
            if start.target is GATHER:
                self._gather(start, wait)
            else:
                self._scatter(start, wait)
        self._choose_memory()
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            inherit(self.graph.call_function(exchange.begin, self.end), first, NAME).meta[VAL] = None
        self.graph.lint()
        self.gm.recompile()
        return self.gm, len(self.starts)

    def _call(self, origin: fx.Node, target: Any, *args: Any, value: Any = None) -> fx.Node:
        """A call in front of `origin`, which it stems from, with its value or this one."""
        with self.graph.inserting_before(origin):
            node = self.graph.call_function(target, args)
        node.meta[VAL] = origin.meta[VAL] if value is None else value
        return inherit(node, origin, NAME)

    def _gather(self, start: fx.Node, wait: fx.Node) -> None:
        x = start.args[0]
        products = self._products(start, wait)
        if products:
            first = products[0]
            weights, biases = zip(*(_weight_and_bias(p) for p in products), strict=True)
            values = (wait.meta[VAL], *(p.meta[VAL] for p in products))
            call = self._call(first, exchange.gather_matmul, x, [*weights], [*biases], *self.end, False, value=values)
            gathered = self._call(first, operator.getitem, call, 0, value=wait.meta[VAL])
            views = _dependents(wait, first)
            wait.replace_all_uses_with(gathered)
            for view in views:
                first.prepend(view)
            for place, product in enumerate(products, 1):
                made = self._call(first, operator.getitem, call, place, value=product.meta[VAL])
                rows = _rows(_left(product), gathered)
                if rows is not None:  # those of padding, at the end, go
                    made = self._call(first, aten.slice.Tensor, made, 0, 0, rows, value=product.meta[VAL])
                product.replace_all_uses_with(made)
            for node in (*products, *reversed(views)):
                if not node.users:
                    self.graph.erase_node(node)
        else:
            call = self._call(start, exchange.gather_start, x, *self.end, False)
            gathered = self._call(wait, exchange.gather_wait, call, *self.end)
            wait.replace_all_uses_with(gathered)
        self.graph.erase_node(wait)
        self.graph.erase_node(start)
        self.barriers.append(call)
        self.gathers.append((len(self.barriers) - 1, call, gathered))

    def _products(self, start: fx.Node, wait: fx.Node) -> list[fx.Node]:
        """Products that have the gathered rows on their left and can run where the first of them does; none where another
        product runs while the gather does, or where somebody reads the rows before."""
        found = sorted(n for n in _readers(wait) if _reads_rows(n, wait))
        if not found or any(is_product(n) for n in _between(start, found[0])):
            return []
        if not all(shows_operand(n) or n.target in COPIES for n in _dependents(wait, found[0])):
            return []
        return [n for n in found if all(a < found[0] for a in n.all_input_nodes if a is not _left(n))]

    def _choose_memory(self) -> None:
        """Gather to memory of its own, unless products alone read what is gathered, before the next barrier."""
        for index, call, gathered in self.gathers:
            readers = _readers(gathered)
            safe = all(n.target in PRODUCTS and not _adds(n, gathered) for n in readers)
            following = self.barriers[index + 1 : index + 2]
            if not safe or any(barrier < n for n in readers for barrier in following):
                call.args = (*call.args[:-1], True)

    def _scatter(self, start: fx.Node, wait: fx.Node) -> None:
        x: Any = start.args[0]
        product, shape = self._product_behind(x)
        if product is not None:
            begun = self._call(start, exchange.matmul_scatter_start, *product.args, shape, *self.end)
        else:
            begun = self._call(start, exchange.scatter_start, x, *self.end)
        ended = self._call(wait, exchange.scatter_wait, begun, *self.end)
        self.barriers.append(ended)
        wait.replace_all_uses_with(ended)
        self.graph.erase_node(wait)
        self.graph.erase_node(start)
        while product is not None and not x.users and x.op == "call_function":
            dead, x = x, _before(x)
            self.graph.erase_node(dead)

    def _product_behind(self, x: Any) -> tuple[fx.Node | None, list[Any]]:
        """(product whose rows are those of x, padded at the end, and are read by nobody else; sizes of x as the graph has
        them). (None, []) where there is none."""
        shape, node = _sizes(x), x
        while shape is not None and isinstance(node, fx.Node) and len(node.users) == 1:
            if node.target is aten.mm.default:
                return node, shape
            if not _keeps_rows(node):
                break
            node = _before(node)
        return None, []


# -- rows


def _keeps_rows(node: fx.Node) -> bool:
    """Whether the rows (all dims but the last) of a value are those of its first operand, in order; at the end some may be cut
    off, or zeros be added."""
    if node.op != "call_function" or not isinstance(node.meta.get(VAL), torch.Tensor):
        return False
    shape = node.meta[VAL].shape
    if node.target in COPIES or node.target is PAD:
        return True
    if node.target is aten.slice.Tensor:
        return len(node.args) == 4 and node.args[1:3] == (0, 0) and len(shape) > 1
    if node.target not in RESHAPES:
        return False
    before = _before(node).meta[VAL].shape
    return len(shape) > 1 and len(before) > 1 and same_size(shape[-1], before[-1])


def _before(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _sizes(node: fx.Node) -> list[Any] | None:
    """The sizes of a value as its graph has them: numbers and nodes; None where a view does not say them."""
    if node.target in RESHAPES:
        return [*node.args[1]]  # type: ignore[misc]
    if node.target in COPIES:
        return _sizes(_before(node))
    found = [*node.meta[VAL].shape]
    if node.target is PAD:
        found[0] = node.args[1]
    return None if any(isinstance(n, torch.SymInt) for n in found) else found


def _reads_rows(product: fx.Node, gathered: fx.Node) -> bool:
    """Whether the product's rows are those of what is gathered."""
    if product.target not in PRODUCTS:
        return False
    node = _left(product)
    while node is not gathered:
        if not _keeps_rows(node) or node.target is PAD:
            return False
        node = _before(node)
    return True


def _rows(node: fx.Node, base: fx.Node) -> Any:
    """How many rows a product's left operand has, where some of those of `base` are cut off; else None."""
    last: Any = None
    while node is not base:
        if node.target in RESHAPES:
            last = last or node.args[1][0]  # type: ignore[index]
        if node.target is aten.slice.Tensor:
            return last or node.args[3]
        node = _before(node)
    return None


def _left(product: fx.Node) -> Any:
    return product.args[0] if product.target is aten.mm.default else product.args[1]


def _adds(product: fx.Node, base: fx.Node) -> bool:
    """Whether the product adds to what `base` shows, perhaps in its memory."""
    return product.target is aten.addmm.default and storage_of(product.args[0]) is base  # type: ignore[arg-type]


def _weight_and_bias(product: fx.Node) -> tuple[Any, Any]:
    if product.target is aten.mm.default:
        return product.args[1], None
    return product.args[2], product.args[0]


# -- places in the graph


def _readers(base: fx.Node) -> set[fx.Node]:
    """Nodes that read the memory of `base`; `contiguous` may give that memory itself."""
    found: set[fx.Node] = set()
    for user in base.users:
        found |= _readers(user) if shows_operand(user) or user.target is aten.contiguous.default else {user}
    return found


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def _dependents(base: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Nodes before `end` that depend on `base`, in order."""
    found: dict[fx.Node, None] = {base: None}
    for node in _between(base, end):
        if any(a in found for a in node.all_input_nodes):
            found[node] = None
    return [*found][1:]
