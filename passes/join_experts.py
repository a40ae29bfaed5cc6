"""Put the MLPs of a mixture's experts into one op where the experts are to be split over the ranks (expert parallelism).

Before:  %h = grouped_mm(%x, %up, %ends); %b = index(%up_bias, [%ids]); %s = add(%h, %b); %a = relu(%s)
         %y = grouped_mm(%a, %down, %ends); %c = index(%down_bias, [%ids]); %z = add(%y, %c)
After:   %z = grouped_mlp(%x, %starts, %ends, [%up], %down, %down_bias, [%up_bias], [],
                          "v0 = add.Tensor(h0, e0); v1 = relu(v0); v1")
         # starts: the ends of the experts before
Legal because: it is the same formula. The planner then shards weights and biases over experts, and %z is partial.
What may stand between the products: whatever computes each row by itself (join_experts_units.py).

Where: the user's override says 'expert' of the weights, or no weight has an override and splitting experts gives the busiest
rank less to do than splitting every expert's ffn does: ceil(E/t)/E of the products against ceil(F/t)/F, or against all of
them where what stands between cannot be cut in the ffn (gate and up that alternate). Both ways communicate the same. The op
computes its first products again for the gradient, which counts as part of its price. Weights that an earlier graph has
settled stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.errors import PlanError
from megafx.ir import VAL, Builder, Phase, Program, fqn_of, source_of
from megafx.kernels import grouped_mlp as _defines_the_op  # noqa: F401
from megafx.overrides import Overrides
from megafx.passes.join_experts_rows import why_not_expert_of_row
from megafx.passes.join_experts_units import GROUPED, Found, NotByRow, Rows, find_unit, products_before
from megafx.planning import Planning
from megafx.policy import weight_values
from megafx.sizes import SizeEmitter

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "join_experts"
aten, ops = torch.ops.aten, torch.ops.megafx


def join_experts(program: Program, planning: Planning) -> int:
    """Returns the number of mixtures whose experts are joined.

    PlanError where an override asks for it and something between the products is in the way; a note where only cost does.
    """
    found = program.graph.find_nodes(op="call_function", target=GROUPED)
    if planning.t == 1 or not found:
        return 0
    weights = weight_values(program, set(program.graph.nodes))
    overrides = Overrides(program, planning.config.overrides, weights, planning.t)
    joining = _Joining(program, planning, overrides, weights)
    count = sum(joining.join(node) for node in found)
    for node in program.graph.find_nodes(op="call_function", target=GROUPED):
        joining.refuse(node)
    return count


class _Joining:
    """reasons: why a product is not joined with others."""

    def __init__(self, program: Program, planning: Planning, overrides: Overrides, weights: set[fx.Node]) -> None:
        self.program, self.planning, self.overrides, self.weights = program, planning, overrides, weights
        self.reasons: dict[fx.Node, NotByRow] = {}

    def join(self, last: Any) -> bool:
        """Whether this product is the last of a mixture that is joined now."""
        try:
            found = find_unit(self.program, last)
        except NotByRow as reason:
            self._not_joined(last, reason)
            return False
        if found is None or not self._wanted(last, found):
            return False
        self._replace(last, found)
        return True

    def _wanted(self, last: Any, found: Found) -> bool:
        products = [*found.firsts, last]
        if any(n.args[1] not in self.weights for n in products):
            return False
        stored = [n for p in products for n in self.overrides.names_of(p.args[1], p) if n in self.planning.fixed]
        if stored:  # by an earlier graph
            where = self.planning.fixed[stored[0]]
            return where.is_shard and where.dim == 0
        styles = {self.overrides.style_of(p.args[1], p) for p in products}
        return styles == {"expert"} or (styles == {""} and _cheaper(products, self.planning.t, found.cut))

    def _not_joined(self, last: Any, reason: NotByRow) -> None:
        self.reasons[last] = reason
        for user in last.args[2].users:
            if user.target is GROUPED:
                self.reasons.setdefault(user, reason)
        products = [*products_before(last), last]
        given = any(p.args[1] not in self.weights or self.overrides.style_of(p.args[1], p) for p in products)
        if not given and _cheaper(products, self.planning.t, cut=True):
            self.program.note(
                "experts", f"whole experts on each rank would be less work, but {_between(reason)}", reason.node
            )

    def refuse(self, product: Any) -> None:
        """PlanError for a product whose weight is to be split over experts and that was not joined."""
        if self.overrides.style_of(product.args[1], product) != "expert":
            return
        name = self.overrides.names_of(product.args[1], product)[0]
        reason = self.reasons.get(product)
        if reason is None:
            others = [u for u in product.args[2].users if u.target is GROUPED and u is not product]
            names = [n for u in others for n in self.overrides.names_of(u.args[1], u)[:1]]
            reason = NotByRow(f"{', '.join(names) or 'no other weight of the mixture'}", product)
            what = f"the override holds for '{name}', but not for {reason.found}"
        else:
            what = _between(reason)
        raise PlanError(
            f"override: {name} is split over experts, but {what}",
            fix="experts are split where each computes its rows by itself between its products, and all of their weights have "
            "the override; else leave it out: experts are then split in their ffn where they can be",
            module=fqn_of(reason.node),
            source=source_of(reason.node),
        )

    # -- the op

    def _replace(self, last: Any, found: Found) -> None:
        add, bias = self._bias(last)
        emit = Builder(self.program, add or last, last, NAME)
        _, down, ends = last.args
        before = emit(aten.slice.Tensor, ends, 0, 0, ends.meta[VAL].shape[0] - 1)
        starts = emit(aten.constant_pad_nd.default, before, [1, 0], 0)
        ups: list[Any] = [first.args[1] for first in found.firsts]
        rows = [self._each_row(emit, each, found.firsts[0]) for each in found.rows]
        x = found.firsts[0].args[0]
        y = emit(ops.grouped_mlp.default, x, starts, ends, ups, down, bias, found.stacks, rows, found.unit)
        (add or last).replace_all_uses_with(y)
        lookups = [a for node in (*found.nodes, *([add] if add else [])) for a in node.all_input_nodes]
        for old in (add, last, *reversed(found.nodes), *found.firsts, *lookups):
            if old is not None and old.op == "call_function" and not old.users and not old._erased:
                self.program.graph.erase_node(old)
        self.program.note("experts", f"experts of '{fqn_of(y)}' are split over the ranks, each whole", y)

    def _bias(self, last: Any) -> tuple[Any, Any]:
        """(the sum of the last product and a bias of each expert, the stack of biases) where that is what reads it."""
        add: Any = next(iter(last.users)) if len(last.users) == 1 else None
        if add is None or add.target is not aten.add.Tensor or add.kwargs or last not in add.args:
            return None, None
        lookup: Any = add.args[1 - add.args.index(last)]
        if not isinstance(lookup, fx.Node) or lookup.target is not aten.index.Tensor:
            return None, None
        stack, ids = lookup.args
        down, bias, ends = last.args[1].meta[VAL], stack.meta[VAL], last.args[2]  # type: ignore[union-attr]
        alike = bias.shape == (down.shape[0], down.shape[2]) and bias.dtype == down.dtype
        if not alike or len(ids) != 1 or why_not_expert_of_row(ids[0], ends, down.shape[0]):  # type: ignore[arg-type,index]
            return None, None
        return add, stack

    def _each_row(self, emit: Builder, given: Rows, like: fx.Node) -> fx.Node:
        value, dims = given
        if not dims:
            return value
        shape = value.meta[VAL].shape
        if len(shape) < dims:
            value = emit(aten.reshape.default, value, [*[1] * (dims - len(shape)), *shape])
        rows = SizeEmitter(self.program.graph, self.program.sizes)(self.program.sizes.of(like.meta[VAL].shape[0]))
        return emit(aten.expand.default, value, [rows, *[-1] * (dims - 1)])


def _between(reason: NotByRow) -> str:
    return f"between their products stands {reason.found}"


def _cheaper(products: list[Any], t: int, cut: bool) -> bool:
    """Whether whole experts are less work. cut: whether splitting them in their ffn splits the work.

    Also of a graph without gradients: the model's other graphs use the same weights. A training step has each product three
    times, forward and twice backward; the first ones are computed once more.
    """
    *ups, down = (p.args[1].meta[VAL].shape for p in products)
    experts, ffn, _ = down
    first = sum(up[2] for up in ups)
    again = 1 + first / (3 * (first + ffn))
    share = lambda n: -(-n // t) / n  # noqa: E731  of the busiest rank
    return bool(share(experts) * again < (share(ffn) if cut else 1))
