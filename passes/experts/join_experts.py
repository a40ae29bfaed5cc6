"""Put the MLPs of a mixture's experts into one op where the experts are to be split over the ranks (expert parallelism).

Before:  %h = grouped_mm(%x, %up, %ends); %b = index(%up_bias, [%ids]); %s = add(%h, %b); %a = relu(%s)
         %y = grouped_mm(%a, %down, %ends); %c = index(%down_bias, [%ids]); %z = add(%y, %c)
After:   %z = grouped_mlp(%x, %starts, %ends, [%up], %down, %down_bias, [%up_bias], [],
                          "v0 = add.Tensor(h0, e0); v1 = relu(v0); v1")
         # starts: the ends of the experts before
Legal because: it is the same formula. The planner then shards weights and biases over experts, and %z is partial.
Between the products may be any ops that compute each row by itself (expert_units.py). Products with weights that are looked up
for each row become the same, on sorted rows.

Where: the user's override says 'expert' of the weights, or no weight has an override and splitting experts gives the busiest
rank less to do than splitting every expert's ffn does: ceil(E/t)/E of the products against ceil(F/t)/F, or against all of
them where the ops between cannot be cut in the ffn (gate and up that alternate). Both ways communicate the same. The op's
price has its first products once more, for the gradient. Weights that an earlier graph has settled stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.errors import PlanError
from megafx.ir.program import VAL, Builder, Phase, Program, fqn_of, located
from megafx.ir.sizes import SizeEmitter
from megafx.kernels.experts import grouped_mlp as _defines_the_op  # noqa: F401
from megafx.passes.experts import expert_units as units
from megafx.passes.experts.expert_units import ExpertMlp, NotByRow, Product, RowValue
from megafx.planner.context import CompileContext
from megafx.planner.overrides import Overrides
from megafx.planner.policy import weight_values

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "join_experts"
aten, ops = torch.ops.aten, torch.ops.megafx


def join_experts(program: Program, context: CompileContext) -> int:
    """Returns the number of mixtures whose experts are joined.

    PlanError where an override asks for it and something between the products is in the way; a note where only cost does.
    """
    products = units.find_products(program) if context.t > 1 else []
    if not products:
        return 0
    weights = weight_values(program, set(program.graph.nodes))
    overrides = Overrides(program, context.config.overrides, weights, context.t)
    joining = _Joining(program, context, overrides, weights, products)
    count = sum(joining.join(product) for product in products)
    for product in products:
        if not product.node._erased:
            joining.refuse(product)
    return count


class _Joining:
    """reasons: why a product is not joined with others."""

    def __init__(
        self,
        program: Program,
        context: CompileContext,
        overrides: Overrides,
        weights: set[fx.Node],
        products: list[Product],
    ) -> None:
        self.program, self.context, self.overrides, self.weights = program, context, overrides, weights
        self.products = products
        self.reasons: dict[fx.Node, NotByRow] = {}

    def join(self, last: Product) -> bool:
        """True if this product is the last of a mixture that is joined now."""
        try:
            found = units.find_unit(self.program, self.products, last)
            if found is not None and last.looked_up and not units.never_negative(last.by):
                what = "a lookup by ids that are not indices of topk, sort or argmax, so that they may be negative"
                raise NotByRow(what, last.node)
        except NotByRow as reason:
            self._not_joined(last, reason)
            return False
        if found is None or not self._wanted([*found.firsts, last], found.cut):
            return False
        self._replace(last, found)
        return True

    def _wanted(self, products: list[Product], cut: bool) -> bool:
        if any(p.weight not in self.weights for p in products):
            return False
        stored = [n for p in products for n in self._names(p) if n in self.context.fixed]
        if stored:  # by an earlier graph
            where = self.context.fixed[stored[0]]
            return where.is_shard and where.dim == 0
        styles = {self._style(p) for p in products}
        return styles == {"expert"} or (styles == {""} and _cheaper(products, self.context.t, cut))

    def _names(self, product: Product) -> tuple[str, ...]:
        return self.overrides.names_of(product.weight, product.node)

    def _style(self, product: Product) -> str:
        return self.overrides.style_of(product.weight, product.node)

    def _not_joined(self, last: Product, reason: NotByRow) -> None:
        before = units.products_before(self.products, last)
        for product in (*before, last):
            self.reasons.setdefault(product.node, reason)
        if self._wanted([*before, last], cut=True) and self._style(last) != "expert":
            what = f"whole experts on each rank would be less work, but between their products there is {reason.found}"
            self.program.note("experts", what, reason.node)

    def refuse(self, product: Product) -> None:
        """PlanError for a product whose weight is to be split over experts and that was not joined."""
        if self._style(product) != "expert":
            return
        name = self._names(product)[0]
        reason = self.reasons.get(product.node)
        others = [p for p in self.products if p.by is product.by and p is not product and self._names(p)]
        missing = ", ".join(self._names(p)[0] for p in others) or "another weight of the mixture"
        what = f"the override does not hold for {missing}, which goes with it"
        if reason is not None:
            what = f"between their products there is {reason.found}"
        raise PlanError(
            f"override: {name} is split over experts, but {what}",
            fix="experts are split where each computes its rows by itself between its products, and all of their weights have "
            "the override; else leave it out: experts are then split in their ffn where they can be",
            **located(reason.node if reason else product.node),
        )

    # -- the op

    def _replace(self, last: Product, found: ExpertMlp) -> None:
        add, bias = self._bias(last)
        where = add or last.node
        emit = Builder(self.program, where, last.node, NAME)
        x, rows = found.firsts[0].x, [self._each_row(emit, each, found.firsts[0].node) for each in found.rows]
        order, ends = None, last.by
        if last.looked_up:  # sort the rows by expert
            order = emit(ops.group_order.default, last.by, last.experts)
            ends = emit(ops.group_ends.default, last.by, last.experts)
            x, *rows = (emit(ops.group_rows.default, a, order, 1) for a in (x, *rows))
        before = emit(aten.slice.Tensor, ends, 0, 0, last.experts - 1)
        starts = emit(aten.constant_pad_nd.default, before, [1, 0], 0)
        *ups, down = (emit(aten.transpose.int, p.weight, 1, 2) if p.turned else p.weight for p in (*found.firsts, last))
        y = emit(ops.grouped_mlp.default, x, starts, ends, ups, down, bias, found.stacks, rows, found.unit)
        made = y if order is None else emit(ops.ungroup_rows.default, y, order)
        where.replace_all_uses_with(made)
        self._erase(where)
        self.program.note("experts", f"experts of '{fqn_of(y)}' are split over the ranks, each whole", y)

    def _erase(self, node: fx.Node) -> None:
        """Take out a node, and what only it has read."""
        if node.op != "call_function" or node.users or node._erased:
            return
        operands = node.all_input_nodes
        self.program.graph.erase_node(node)
        for operand in operands:
            self._erase(operand)

    def _bias(self, last: Product) -> tuple[fx.Node | None, fx.Node | None]:
        """(the sum of the last product and a bias of each expert, the stack of biases) if only that sum reads it."""
        add: Any = next(iter(last.node.users)) if len(last.node.users) == 1 else None
        if add is None or add.target is not aten.add.Tensor or add.kwargs or last.node not in add.args:
            return None, None
        lookup = add.args[1 - add.args.index(last.node)]
        stack, why = units.stack_of(lookup, last) if isinstance(lookup, fx.Node) else (None, "")
        if stack is None or why:
            return None, None
        bias, weight = stack.meta[VAL], last.weight.meta[VAL]
        alike = bias.shape == (last.experts, last.width) and bias.dtype == weight.dtype
        return (add, stack) if alike else (None, None)

    def _each_row(self, emit: Builder, given: RowValue, like: fx.Node) -> fx.Node:
        value, dims = given
        if not dims:
            return value
        shape = value.meta[VAL].shape
        if len(shape) < dims:
            value = emit(aten.reshape.default, value, [*[1] * (dims - len(shape)), *shape])
        rows = SizeEmitter(self.program.graph, self.program.sizes)(self.program.sizes.of(like.meta[VAL].shape[0]))
        return emit(aten.expand.default, value, [rows, *[-1] * (dims - 1)])


def _cheaper(products: list[Product], t: int, cut: bool) -> bool:
    """True if whole experts are less work. cut: whether splitting them in their ffn splits the work.

    As in a training step, since all graphs of a model share the weights: each product three times, the first ones once more.
    """
    *firsts, last = products
    first = sum(p.terms * p.width for p in firsts)
    again = 1 + first / (3 * (first + last.terms * last.width))
    share = lambda n: -(-n // t) / n  # of the busiest rank
    return bool(share(last.experts) * again < (share(last.terms) if cut else 1))
