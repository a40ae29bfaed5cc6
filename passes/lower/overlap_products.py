"""Run tensor-parallel collectives in pieces, overlapped with the products that use or make the pieces.

Before:  %g = wait_tensor(all_gather_into_tensor(%x, 2, '7')); %y = mm(view(%g), %w)
         %s = reduce_scatter_tensor(view(mm(%a, %v)), 'sum', 2, '7'); %dw = mm(%b, %c); %z = wait_tensor(%s)
         %r = wait_tensor(all_reduce(mm(%d, %u), 'sum', '7'))
After:   %g, %y = gather_matmul(%x, [(%w, None)], '7', rank, own)
         %s = matmul_scatter_start(%a, (%v, None), shape, '7', rank); %dw = mm(%b, %c); %z = scatter_wait(%s, '7', rank)
         %t = matmul_scatter_start(%d, (%u, None), shape, '7', rank)
         %r = gather_wait(regather_start(%t, '7', rank, own), '7', rank)
Legal because: rows of a product (of FP8: with the scale of all rows, or of each) depend on the same rows of its left operand
alone, and rows are in the order of their ranks (`_keeps_rows`); each function is what it replaces
(distributed/exchange.py). All sum in the order of the ranks.

A gather whose product does not follow at once, and a scatter of what no product made, have a separate start and wait: products
that `schedule_collectives` put between them run meanwhile. An all-reduce becomes a reduce-scatter and a gather, which starts as
soon as the sum is there. Small collectives, all-reduces that the library does faster, and those of other groups stay.

Gathered values stay in the exchange's slot if only products and views read them, before it is reused; else they get memory of
their own. A fused op writes what is to be gathered into the slot, if all who read it do so before the slot is reused.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import is_product, is_start, is_wait
from megafx.distributed import exchange
from megafx.ir.nodes import COPIES, RESHAPES, between, readers_of, replace, shows_operand, storage_of
from megafx.ir.program import VAL, Phase, Program, copied_graph, graph_module, new_call
from megafx.kernels.common.op import writes_into
from megafx.kernels.fp8.scaled_mm import mm as scaled_mm
from megafx.ops.axes import AxisContext
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.moves import same_size, same_sizes
from megafx.placements.types import ALL_REDUCE
from megafx.planner.context import CompileContext
from megafx.planner.cost import collective_bytes, library_seconds
from megafx.planner.timeline import LEAST_BYTES

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "overlap_products"
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_MAY_SHOW = (aten.contiguous.default,)
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
REDUCE = c10d.all_reduce.default
PAD = torch.ops.megafx.pad_rows.default
SUMS = (aten.mm.default, scaled_mm)  # products that add nothing, so that their results can be summed over ranks
PRODUCTS = (*SUMS, aten.addmm.default)
GATHERS = (exchange.gather_start, exchange.gather_matmul, exchange.regather_start)
BEGIN = (*GATHERS, exchange.scatter_start, exchange.matmul_scatter_start)  # operations of the exchange, in order


def overlap_products(program: Program, context: CompileContext) -> int:
    """Return the number of collectives that run in pieces, or as copies beside something else."""
    parts, axes = program.partition, context.axes
    if parts is None or axes is None or TENSOR_AXIS not in axes or context.config.tp_comm_overlap is False:
        return 0
    find = _Finder(program, context, axes[TENSOR_AXIS])
    found = [gm for gm in (parts.forward, parts.backward) if gm is not None and find(gm)]
    if not found:
        return 0
    reason = exchange.why_not(find.place.group_name, find.place.rank)
    if reason:
        program.note("overlap", f"tensor-parallel communication does not run beside products: {reason}")
        return 0
    change = lambda gm, direction: _Overlap(find, gm).run() if gm in found else (gm, 0)
    program.partition, count = parts.changed(change)
    return count


class _Finder:
    """Which collectives of a graph run in pieces."""

    def __init__(self, program: Program, context: CompileContext, place: AxisContext) -> None:
        self.program, self.place, self.hardware = program, place, context.hardware
        self.always = context.config.tp_comm_overlap is True

    def __call__(self, gm: fx.GraphModule) -> list[fx.Node]:
        """Their starts, in order."""
        return [node for node in gm.graph.nodes if self._is_one(node)]

    def _is_one(self, node: fx.Node) -> bool:
        kinds = (GATHER, SCATTER, REDUCE)
        if node.target not in kinds or node.args[-1] != self.place.group_name or len(node.users) != 1:
            return False
        value: Any = (node if node.target is GATHER else node.args[0]).meta[VAL]
        summed = node.target is GATHER or (node.args[1] == "sum" and value.dtype.is_floating_point)
        if not summed or value.ndim < 2 or not is_wait(next(iter(node.users))):
            return False
        elements = self.program.sizes.workload(math.prod(self.program.sizes.shape(value)))
        if node.target is REDUCE and not self._pays(node, elements, value.element_size()):
            return False
        return self.always or elements * value.element_size() >= LEAST_BYTES

    def _pays(self, node: fx.Node, elements: int, itemsize: int) -> bool:
        """True if a reduce-scatter (hidden, where a product makes the rows) and a gather take less than an all-reduce does."""
        t, hardware = self.place.size, self.hardware
        rate = hardware.transfer_bytes_per_second or hardware.link_bytes_per_second
        one = elements * itemsize * (t - 1) / t / rate
        hidden = _product_behind(node.args[0]) is not None
        pair = 2 * hardware.transfer_seconds + one * (1 if hidden else 2)
        sent = collective_bytes(ALL_REDUCE, elements, itemsize, t)
        return self.always or pair < library_seconds(ALL_REDUCE, sent, hardware, t)


class _Overlap:
    """Rewrites a copy of one graph."""

    def __init__(self, find: _Finder, gm: fx.GraphModule) -> None:
        self.graph = copied_graph(gm.graph)
        self.gm = graph_module(gm, self.graph)
        self.end = (find.place.group_name, find.place.rank)
        self.t = find.place.size
        self.starts = find(self.gm)
        self.ahead: dict[fx.Node, fx.Node] = {}  # gather -> what makes its rows in the slot

    def run(self) -> tuple[fx.GraphModule, int]:
        rewrite: dict[Any, Any] = {GATHER: self._gather, SCATTER: self._scatter, REDUCE: self._reduce}
        for start in self.starts:
            (wait,) = start.users
            rewrite[start.target](start, wait)
        self._choose_memory()
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        new_call(first, exchange.begin, self.end, None, first, NAME)
        self.graph.lint()
        self.gm.recompile()
        return self.gm, len(self.starts)

    def _call(self, origin: fx.Node, target: Any, *args: Any, value: Any = None) -> fx.Node:
        """Insert a call before `origin`, its source, with that node's value or `value`."""
        return new_call(origin, target, args, origin.meta[VAL] if value is None else value, origin, NAME)

    def _gather(self, start: fx.Node, wait: fx.Node) -> None:
        x = start.args[0]
        products = self._products(start, wait)
        if products:
            first = products[0]
            rights = [_right(p) for p in products]
            values = (wait.meta[VAL], *(p.meta[VAL] for p in products))
            call = self._call(first, exchange.gather_matmul, x, rights, *self.end, False, value=values)
            gathered = self._call(first, operator.getitem, call, 0, value=wait.meta[VAL])
            views = _dependents(wait, first)
            wait.replace_all_uses_with(gathered)
            for view in views:
                first.prepend(view)
            for place, product in enumerate(products, 1):
                made = self._call(first, operator.getitem, call, place, value=product.meta[VAL])
                rows = _rows(_left(product), gathered)
                if rows is not None:  # cut off the padding at the end
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

    def _products(self, start: fx.Node, wait: fx.Node) -> list[fx.Node]:
        """Products whose left operand is the gathered rows and that can run where the first of them does; none if another
        product runs during the gather, or if another op reads the rows earlier."""
        found = sorted(n for n in readers_of(wait, _MAY_SHOW) if _reads_rows(n, wait))
        if not found or any(is_product(n) for n in between(start, found[0])):
            return []
        if not all(shows_operand(n) or n.target in COPIES for n in _dependents(wait, found[0])):
            return []
        return [n for n in found if all(a < found[0] for a in n.all_input_nodes if a is not _left(n))]

    def _scatter(self, start: fx.Node, wait: fx.Node) -> None:
        x = start.args[0]
        product, shape = _product_behind(x), _sizes(x)
        if product is not None and shape is not None:
            begun = self._call(start, exchange.matmul_scatter_start, _left(product), _right(product), shape, *self.end)
        else:
            begun = self._call(start, exchange.scatter_start, x, *self.end)
        ended = self._call(wait, exchange.scatter_wait, begun, *self.end)
        self._replace(start, wait, ended)

    def _reduce(self, start: fx.Node, wait: fx.Node) -> None:
        """An all-reduce of [..., n], with its rows padded to a multiple of the ranks. Products between its start and its wait
        overlap with the gather; if no product makes the rows, the first half of them overlaps with the reduce-scatter."""
        x = start.args[0]
        shape, product = self._all_sizes(start, x), _product_behind(x)
        rows = functools.reduce(lambda a, b: self._compute(start, operator.mul, a, b), shape[:-1])
        more = self._compute(start, operator.add, rows, self.t - 1)
        padded = self._compute(start, operator.mul, self._compute(start, operator.floordiv, more, self.t), self.t)
        others = [n for n in between(start, wait) if is_product(n)]
        behind, value = start.next, x.meta[VAL]
        if product is not None:
            operands = _left(product), _right(product), [padded, shape[-1]]
            begun = self._call(start, exchange.matmul_scatter_start, *operands, *self.end)
        else:
            flat = x if len(shape) == 2 else self._call(start, aten.view.default, x, [rows, shape[-1]], value=value)
            flat = flat if padded is rows else self._call(start, PAD, flat, padded, value=value)
            begun = self._call(start, exchange.scatter_start, flat, *self.end, value=value)
            behind = others[len(others) // 2] if others else wait
        gathering = self._call(behind, exchange.regather_start, begun, *self.end, False, value=value)
        gathered = self._call(wait, exchange.gather_wait, gathering, *self.end)
        made = gathered if padded is rows else self._call(wait, aten.slice.Tensor, gathered, 0, 0, rows)
        made = made if len(shape) == 2 else self._call(wait, aten.view.default, made, shape)
        self._replace(start, wait, made)

    def _all_sizes(self, where: fx.Node, x: fx.Node) -> list[Any]:
        """The sizes of a value, as numbers and nodes."""
        known = _sizes(x)
        if known is not None:
            return known
        size = aten.sym_size.int
        return [
            n if isinstance(n, int) else self._call(where, size, x, d, value=n) for d, n in enumerate(x.meta[VAL].shape)
        ]

    def _compute(self, where: fx.Node, operation: Any, a: Any, b: Any) -> Any:
        """A size, computed now or by a node."""
        if isinstance(a, int) and isinstance(b, int):
            return operation(a, b)
        return self._call(
            where, operation, a, b, value=operation(*(x.meta[VAL] if isinstance(x, fx.Node) else x for x in (a, b)))
        )

    def _replace(self, start: fx.Node, wait: fx.Node, made: fx.Node) -> None:
        x = start.args[0]
        replace(wait, made)
        self.graph.erase_node(start)
        while not x.users and x.op == "call_function" and isinstance(x.args[0], fx.Node):
            dead, x = x, _before(x)
            self.graph.erase_node(dead)

    # -- whose memory

    def _choose_memory(self) -> None:
        """Gathered values and what is gathered: in slots, or in memory of their own."""
        begins = [n for n in self.graph.nodes if n.target in BEGIN]
        place = {n: i for i, n in enumerate(self.graph.nodes)}
        waits = [place[n if n.target in GATHERS else next(iter(n.users))] for n in begins]
        end = len(place)

        def begin(index: int) -> int:
            """Where an operation begins: where its rows are made, if that is in the slot."""
            return place[self.ahead.get(begins[index], begins[index])] if index < len(begins) else end

        for index, call in reversed([*enumerate(begins)]):
            if call.target not in GATHERS:
                continue
            gathered = next(n for n in call.users if n.target is exchange.gather_wait or n.args[1:] == (0,))
            readers, last = readers_of(gathered, _MAY_SHOW), index + exchange.SLOTS - 1
            safe = all(n.target in PRODUCTS and not _adds(n, gathered) for n in readers)
            # the barrier of a reduce-scatter comes when it is waited for, or when the next operation begins
            barrier = min(waits[last], begin(last + 1)) if last < len(begins) else end
            if not safe or any(barrier < place[n] for n in readers):
                call.args = (*call.args[:-1], True)
            if call.target is not exchange.regather_start:
                self._make_in_slot(call, waits[index - 1] if index else -1, begin(index + exchange.SLOTS), place)

    def _make_in_slot(self, call: fx.Node, after: int, before: int, place: dict[fx.Node, int]) -> None:
        """Let the fused op that makes what is gathered write it into the slot, if it runs after the wait for the operation
        before, and what it makes is read before the slot is written again."""
        x = call.args[0]
        producer, result = (x.args[0], x.args[1]) if x.target is operator.getitem else (x, 0)
        into, readers = writes_into(producer.target), readers_of(x, _MAY_SHOW)
        if into is None or producer.kwargs or any(n.op == "output" or is_start(n) for n in readers):
            return
        value = x.meta[VAL]
        alike = same_sizes(producer.args[0].meta[VAL].shape, value.shape) and value.is_contiguous()
        if not alike or place[producer] < after or any(place[n] >= before for n in readers):
            return
        slot = self._call(producer, exchange.rows_of_next, producer.args[0], value.dtype, *self.end, value=value)
        producer.target, producer.args = into, (slot, result, *producer.args)
        self.ahead[call] = producer


# -- rows


def _product_behind(x: Any) -> fx.Node | None:
    """The product whose rows x has, perhaps padded at the end, if nothing else reads them."""
    node = x
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target in SUMS:
            return node
        if not _keeps_rows(node):
            break
        node = _before(node)
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """True if the rows (all dims but the last) of a value are those of its first operand, in order, perhaps with some cut
    off or zeros added at the end."""
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
    return node.args[0]


def _sizes(node: fx.Node) -> list[Any] | None:
    """The sizes of a value as its graph has them: numbers and nodes; None where a view does not say them."""
    if node.target in RESHAPES:
        return [*node.args[1]]
    if node.target in COPIES:
        return _sizes(_before(node))
    found = [*node.meta[VAL].shape]
    if node.target is PAD:
        found[0] = node.args[1]
    return None if any(isinstance(n, torch.SymInt) for n in found) else found


def _reads_rows(product: fx.Node, gathered: fx.Node) -> bool:
    """True if the product's rows are those of what is gathered."""
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
            last = last or node.args[1][0]
        if node.target is aten.slice.Tensor:
            return last or node.args[3]
        node = _before(node)
    return None


def _left(product: fx.Node) -> Any:
    return product.args[1] if product.target is aten.addmm.default else product.args[0]


def _adds(product: fx.Node, base: fx.Node) -> bool:
    """True if the product adds to `base` or a view of it, perhaps in place."""
    return product.target is aten.addmm.default and storage_of(product.args[0]) is base


def _right(product: fx.Node) -> tuple[Any, ...]:
    """The right operand as the exchange takes it: (weight, bias), or that of FP8."""
    if product.target is aten.addmm.default:
        return product.args[2], product.args[0]
    return product.args[1:] if product.target is scaled_mm else (product.args[1], None)


# -- places in the graph


def _dependents(base: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Nodes before `end` that depend on `base`, in order."""
    found: dict[fx.Node, None] = {base: None}
    for node in between(base, end):
        if any(a in found for a in node.all_input_nodes):
            found[node] = None
    return [*found][1:]
