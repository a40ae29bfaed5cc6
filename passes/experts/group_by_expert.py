"""Let the ranks that share out a batch or a sequence each group their own rows by expert.

Before:  %s = sort(%ids); %sorted = getitem(%s, 0); %order = getitem(%s, 1); %x = index(%tokens, [floor_divide(%order, 2)])
         %ends = cumsum(histc(%sorted, 5, 0, 4), 0); %h = grouped_mm(%x, %up, %ends); %b = index(%bias, [%sorted])
         %y = grouped_mm(relu(add(%h, %b)), %down, %ends)
         %back = index_put(full([S], 0), [%order], arange(S)); %z = index(%y, [%back])
After:   %order = group_order(%ids, 5); %ends = group_ends(%ids, 5); %x = group_rows(%tokens, %order, 2)
         %h = grouped_mm(%x, %up, %ends); %b = index(%bias, [group_rows(%ids, %order, 1)])
         %y = grouped_mm(relu(add(%h, %b)), %down, %ends); %z = ungroup_rows(%y, %order)
Legal because: all that reads the sorted rows computes each of them by itself, sums over all of them, or puts them back. So it
is the same whichever rows are sorted together, and on an axis outside of the tensor-parallel one the ops have a rule by which
their rows may be cut (`outer`, kernels/experts/group_rows.py).

Rows are put back by the inverse permutation, by `index_put`, or added to their tokens by `index_add`. Where something else
reads them, data parallelism refuses the mixture, and context parallelism gathers what is sorted.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from megafx.errors import PlanError
from megafx.ir.nodes import PASS_ON, argument, behind, is_draw, op_name
from megafx.ir.program import VAL, Builder, Phase, Program, located
from megafx.ir.sizes import SizeEmitter
from megafx.kernels.experts import group_rows as _defines_the_ops  # noqa: F401
from megafx.passes.experts.expert_units import (
    GROUPED,
    NotByRow,
    counted_ids,
    never_negative,
    same_elements,
    sorts_ascending,
)
from megafx.placements.data_axis import BATCH_AXIS
from megafx.planner.context import CompileContext
from megafx.rules.families import VIEWS
from megafx.rules.grammar import names
from megafx.rules.inference import is_uniform
from megafx.rules.strategies import OpRule, rule_for

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "group_by_expert"
aten, ops = torch.ops.aten, torch.ops.megafx


def group_by_expert(program: Program, context: CompileContext) -> int:
    """Return the number of mixtures whose rows each rank groups by itself."""
    data = context.data
    cut = data is not None and (data.cp > 1 or context.config.data_parallel_loss == "batch")
    if data is None or not (cut or data.experts > 1):
        return 0
    count = 0
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not sorts_ascending(node):
            continue
        mixture = _Mixture(program, node)
        try:
            mixture.read()
        except NotByRow as reason:
            if mixture.products:
                _refuse(program, context, mixture, reason)
            continue
        if mixture.products:
            mixture.write()
            count += 1
    if count:
        program.erase_unused()
    return count


def _refuse(program: Program, context: CompileContext, mixture: _Mixture, reason: NotByRow) -> None:
    """PlanError where ranks have parts of the batch; else a note."""
    batch = context.config.data_parallel_loss == "batch" and context.data is not None and context.data.ranks > 1
    if batch and program.sizes.mentions(mixture.rows, "batch"):
        raise PlanError(
            "data parallelism cannot cut the batch: rows are sorted by expert, and before they go back there is "
            f"{reason.found}",
            fix="compute each row by itself between the sort by expert and its inverse, or use "
            "Config(data_parallel_loss='average'), which takes each rank's batch for itself as DistributedDataParallel does",
            **located(reason.node),
        )
    cut = batch or (context.data is not None and context.data.cp > 1)
    where = "sorted rows are gathered from all ranks" if cut else "each rank holds and computes all experts"
    what = f"{where}: before the rows go back there is {reason.found}"
    program.note("experts", what, reason.node)


class _Mixture:
    """Of one sort of ids.

    orders: values that say which row of another value each sorted row is -> how many rows in turn are of the same one.
    sorted: values of the sorted rows, by their first dim. ids: the sorted ids. taken, back, added: nodes that take rows in
    the sorted order, that put them back, that add them to the rows they were taken from.
    """

    def __init__(self, program: Program, sort: fx.Node) -> None:
        self.program, self.sort = program, sort
        ids = sort.args[0]
        self.unsorted = ids
        self.every = set(program.graph.nodes)
        self.rows = program.sizes.shape(ids.meta[VAL])[0]
        self.orders: dict[fx.Node, int] = {}
        self.sorted: set[fx.Node] = set()
        self.ids: list[fx.Node] = []
        self.inverses: set[fx.Node] = set()
        self.taken: list[tuple[fx.Node, fx.Node, int]] = []
        self.back: list[tuple[fx.Node, fx.Node]] = []
        self.added: list[tuple[fx.Node, int]] = []
        self.products = self._products()
        self.experts = self.products[0].args[1].meta[VAL].shape[0] if self.products else 0
        self.counts = self._counts()

    def _products(self) -> list[Any]:
        """Grouped products whose groups are counted by these ids."""
        found = []
        for node in self.program.graph.find_nodes(op="call_function", target=GROUPED):
            _, weight, ends = node.args
            counted = counted_ids(ends, int(weight.meta[VAL].shape[0]))
            if same_elements(counted, self.unsorted) or self._sorted_here(counted):
                found.append(node)
        return found

    def _sorted_here(self, ids: Any) -> bool:
        """True if these are the ids in the order of this sort."""
        ids = behind(ids, PASS_ON)
        if not isinstance(ids, fx.Node):
            return False
        if ids.target is operator.getitem:
            return ids.args == (self.sort, 0)
        source, order = self._taken_from(ids)
        return order is not None and self._is_order(order) and same_elements(source, self.unsorted)

    def _is_order(self, node: Any) -> bool:
        node = behind(node, PASS_ON)
        return node is self.sort if "argsort" in op_name(self.sort) else getattr(node, "args", ()) == (self.sort, 1)

    def _counts(self) -> set[fx.Node]:
        """What lies between the ids and the ends of the groups."""
        found, todo = set[fx.Node](), [node.args[2] for node in self.products]
        while todo:
            node = todo.pop()
            if node not in found and not same_elements(node, self.unsorted) and not self._sorted_here(node):
                found.add(node)
                todo += node.all_input_nodes
        return found

    # -- what reads the sorted rows

    def read(self) -> None:
        """Raises NotByRow."""
        if self.sort.target in (aten.argsort.default, aten.argsort.stable):
            self.orders[self.sort] = 1
        for node in self.program.graph.nodes:
            if node <= self.sort:
                continue
            reads = [a for a in node.all_input_nodes if self._known(a)]
            if reads and node not in self.counts:
                self._read(node)
        if self.products and not never_negative(self.unsorted):
            what = "a sort of ids that are not indices of topk, sort or argmax, so that they may be negative"
            raise NotByRow(what, self.sort)
        if len({p.args[1].meta[VAL].shape[0] for p in self.products}) > 1:
            raise NotByRow("a product of another number of experts", self.products[-1])

    def _known(self, node: fx.Node) -> bool:
        return node is self.sort or node in self.orders or node in self.sorted or node in self.inverses

    def _read(self, node: fx.Node) -> None:
        if node.op == "output":
            raise NotByRow("an output that has the rows in the sorted order", self.sort)
        args = node.args
        if node.target is operator.getitem and args[0] is self.sort:
            if args[1] == 0:
                self.ids.append(node)
                self.sorted.add(node)
            else:
                self.orders[node] = 1
            return
        if node.target in PASS_ON and args[0] in self.orders:
            self.orders[node] = self.orders[args[0]]
            return
        if args and args[0] in self.orders and (times := self._divided(node)):
            self.orders[node] = times * self.orders[args[0]]
            return
        source, order = self._taken_from(node)
        if order in self.orders and source not in self.sorted:
            times = self._repeats(source)
            if times:  # the numbers of the rows, in the sorted order
                self.orders[node] = times * self.orders[order]
                return
            self.taken.append((node, source, self.orders[order]))
            self.sorted.add(node)
            return
        if order in self.inverses and source in self.sorted:
            self.back.append((node, source))
            return
        if self._is_inverse(node):
            self.inverses.add(node)
            return
        if node.target is aten.index_put.default and self._puts_back(node):
            self.back.append((node, args[2]))
            return
        if node.target is aten.index_add.default and self._adds(node):
            self.added.append((node, self.orders[args[2]]))
            return
        if node.target is GROUPED and node in self.products and args[0] in self.sorted and args[1] not in self.sorted:
            self.sorted.add(node)
            return
        self._by_row(node)

    def _taken_from(self, node: fx.Node) -> tuple[Any, Any]:
        """(value, order) of value[order], rows in another order; (None, None) of others."""
        args = node.args
        if node.target is aten.index.Tensor and len(args[1]) == 1 and args[1][0].meta[VAL].dim() == 1:
            return args[0], args[1][0]
        if node.target is aten.index_select.default and args[1] == 0:
            return args[0], args[2]
        gathers = node.target is aten.gather.default and args[0].meta[VAL].dim() == 1
        return (args[0], args[2]) if gathers else (None, None)

    def _divided(self, node: fx.Node) -> int:
        """k of order // k, or 0."""
        by = node.args[1] if len(node.args) > 1 else None
        floors = node.target is aten.floor_divide.default or (
            node.target in (aten.div.Tensor_mode, aten.div.Scalar_mode)
            and argument(node, "rounding_mode") in ("floor", "trunc")
        )
        return by if floors and isinstance(by, int) and by > 0 and self.rows % by == 0 else 0

    def _repeats(self, value: Any) -> int:
        """k where a value is 0, .., 0, 1, .., 1, 2, ..: each number k times; else 0."""
        value = behind(value, PASS_ON)
        shape = self.program.sizes.shape(value.meta[VAL])
        if not isinstance(value, fx.Node) or shape != (self.rows,):
            return 0
        if self._counts_up(value):
            return 1
        source: Any = behind(value.args[0], PASS_ON) if value.args else None
        if value.target is aten.repeat_interleave.self_int and self._counts_up(source):
            return self.rows // self.program.sizes.shape(source.meta[VAL])[0]
        if str(value.target) in VIEWS and isinstance(source, fx.Node) and source.target is aten.expand.default:
            column = behind(source.args[0], PASS_ON)
            numbers: Any = behind(column.args[0], PASS_ON) if str(column.target) in VIEWS else None
            one = self.program.sizes.shape(column.meta[VAL])[1:] == (1,)
            if one and self._counts_up(numbers):
                return self.rows // self.program.sizes.shape(numbers.meta[VAL])[0]
        return 0

    def _counts_up(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node.target is aten.arange.default and node.meta[VAL].dim() == 1

    def _is_inverse(self, node: fx.Node) -> bool:
        args = node.args
        if sorts_ascending(node) and "argsort" in op_name(node):
            return self.orders.get(args[0]) == 1
        if node.target is aten.index_put.default:
            return self._whole(args[1]) and self._repeats(args[2]) == 1
        scatters = node.target is aten.scatter.src and args[1] == 0 and self.orders.get(args[2]) == 1
        return scatters and self._repeats(args[3]) == 1

    def _whole(self, indices: Any) -> bool:
        return len(indices) == 1 and self.orders.get(indices[0]) == 1

    def _puts_back(self, node: fx.Node) -> bool:
        into, indices, value, *_ = node.args
        fresh = not argument(node, "accumulate") or op_name(behind(into, PASS_ON)) in ("zeros", "zeros_like")
        alike = self.program.sizes.shape(into.meta[VAL]) == self.program.sizes.shape(value.meta[VAL])
        return fresh and alike and self._whole(indices) and value in self.sorted and into not in self.sorted

    def _adds(self, node: fx.Node) -> bool:
        into, dim, order, value = node.args[:4]
        given = order in self.orders and value in self.sorted and into not in self.sorted
        if not given or dim != 0 or argument(node, "alpha") != 1:
            return False
        rows = self.program.sizes.shape(into.meta[VAL])[0]
        return bool(rows * self.orders[order] == self.rows)

    def _by_row(self, node: fx.Node) -> None:
        """Check that the op computes each row by itself, or sums over them."""
        what = op_name(node)
        orders = [a for a in node.all_input_nodes if a in self.orders or a in self.inverses or a is self.sort]
        if orders:
            raise NotByRow(f"{what} of the order of the rows", node)
        if is_draw(node):
            raise NotByRow(f"{what}, which draws by the number of a row", node)
        if node.target is operator.getitem:
            self.sorted.add(node)
            return
        rule = rule_for(node, self.program, self.every, BATCH_AXIS)
        if rule.kind == "view":
            if self.program.sizes.shape(node.meta[VAL])[:1] != (self.rows,):
                raise NotByRow(f"{what}, which does not keep the rows", node)
            self.sorted.add(node)
            return
        if rule.kind == "none":
            raise NotByRow(f"{what} ({rule.reason})", node)
        row = self._row_of(node, rule)
        results = rule.result if rule.template.several else (rule.result,)
        if all(entries[:1] == (row,) for entries in results):
            self.sorted.add(node)
        elif any(row in names(f) for entries in results for f in entries):
            raise NotByRow(f"{what}, which mixes rows", node)

    def _row_of(self, node: fx.Node, rule: OpRule) -> str:
        """The factor that is the rows."""
        what = op_name(node)
        rows = {o.factors[0] if o.factors else None for o in rule.operands if o.node in self.sorted}
        row = rows.pop() if len(rows) == 1 else None
        if row is None or names(row) != (row,) or row in rule.forbidden:
            raise NotByRow(f"{what}, which mixes rows", node)
        for operand in rule.operands:
            dims = [d for d, f in enumerate(operand.factors) if row in names(f)]
            if operand.node in self.sorted and dims != [0]:
                raise NotByRow(f"{what}, which mixes rows", node)
            alike = all(is_uniform(operand.node, d, self.program.sizes) for d in dims)
            if operand.node not in self.sorted and not alike:
                raise NotByRow(f"{what} of sorted rows and others", node)
        return row

    # -- the ops in their place

    def write(self) -> None:
        at = Builder(self.program, self.sort, self.sort, NAME)
        order = at(ops.group_order.default, self.unsorted, int(self.experts))
        ends = at(ops.group_ends.default, self.unsorted, int(self.experts))
        for ids in self.ids:
            ids.replace_all_uses_with(at(ops.group_rows.default, self.unsorted, order, 1))
        for product in self.products:
            product.replace_input_with(product.args[2], ends)
        for node, source, times in self.taken:
            self._instead(node, ops.group_rows.default, source, order, times)
        for node, source in self.back:
            self._instead(node, ops.ungroup_rows.default, source, order)
        for node, times in self.added:
            self._add(node, order, times)

    def _instead(self, node: fx.Node, *call: Any) -> None:
        node.replace_all_uses_with(Builder(self.program, node, node, NAME)(*call))

    def _add(self, node: fx.Node, order: fx.Node, times: int) -> None:
        into = node.args[0]
        build = Builder(self.program, node, node, NAME)
        rows = build(ops.ungroup_rows.default, node.args[3], order)
        if times > 1:
            shape = rows.meta[VAL].shape
            count = SizeEmitter(self.program.graph, self.program.sizes)(self.program.sizes.of(into.meta[VAL].shape[0]))
            rows = build(aten.sum.dim_IntList, build(aten.reshape.default, rows, [count, times, *shape[1:]]), [1])
        node.replace_all_uses_with(build(aten.add.Tensor, into, rows))
