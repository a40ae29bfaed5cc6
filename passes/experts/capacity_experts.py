"""Products of all experts with as many rows each, as one-hot dispatch with a capacity makes them, are shared out over ranks.

Before:  %x = einsum('bsec,bsm->ebcm', [%dispatch, %tokens]); %h = einsum('ebcm,emf->ebcf', [%x, %up])
         %y = einsum('ebcf,efm->ebcm', [gelu(%h), %down]); %out = einsum('bsec,ebcm->bsm', [%combine, %y])
After:   %r = transition(%x, S1 -> S0, 'ep', 2); %u = transition(%up, R -> S0, 'ep', 2); %d likewise
         %h = einsum('ebcm,emf->ebcf', [%r, %u]); %z = einsum('ebcf,efm->ebcm', [gelu(%h), %d])
         %y = transition(%z, S0 -> S1, 'ep', 2); %out = einsum('bsec,ebcm->bsm', [%combine, %y])
Legal because: by its sharding rule each op between computes each expert and each row by itself. A rank's rows are a shard of
those of all ranks; all-to-alls make of them shards of experts, and back.

A product has the dim of experts of its weight in its other operand and its result. Which of its other dims are rows is free:
the first that the weight does not have. Experts that compute all tokens are left alone: a token would go to all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.nodes import PASS_ON, aten_ops, behind, is_draw
from megafx.ir.program import VAL, Builder, Program, fqn_of, tensors_of
from megafx.ir.sizes import SizeEmitter
from megafx.passes.experts.expert_parts import NAME, OwnExperts, keeps_experts
from megafx.placements.data_axis import BATCH_AXIS, EXPERT_AXIS
from megafx.placements.types import Layout, Placement, S
from megafx.rules.strategies import Operand, OpRule, rule_for
from megafx.units import bytes_text

aten, ops = torch.ops.aten, torch.ops.megafx
_PRODUCTS = aten_ops("einsum bmm matmul baddbmm")


def share_out_batches(program: Program, own: OwnExperts) -> int:
    """Return the number of products that are shared out."""
    return _Batches(program, own).run()


def most_experts(program: Program) -> int:
    """Experts of the largest such mixture; 1 where there is none."""
    found = _Batches(program, OwnExperts(program, 1, 1))
    found.find()
    values = [found.values[node] for node in found.products]
    return max((value.rule.sizes[value.experts] for value in values), default=1)


class _Value(NamedTuple):
    """rule: of the op. experts, rows: factors. dims: of the result, those of experts and of rows."""

    rule: OpRule
    experts: str
    rows: str
    dims: tuple[int, int]


class _Batches:
    """values: what has a dim of experts and one of rows. made: on a rank's experts, with rows of all ranks."""

    def __init__(self, program: Program, own: OwnExperts) -> None:
        self.program, self.own = program, own
        self.every = set(program.graph.nodes)
        self.values: dict[fx.Node, _Value] = {}
        self.products: list[fx.Node] = []
        self.made: dict[fx.Node, fx.Node] = {}
        self.arrived: dict[fx.Node, fx.Node] = {}

    def run(self) -> int:
        self.find()
        between: dict[fx.Node, None] = {}
        for node in reversed(self.values):
            if node in self.products or any(user in between for user in node.users):
                between[node] = None
        moved = [node for node in self.values if node in between]
        for node in moved:
            self.made[node] = self._again(node)
        for node in moved:
            self._leave(node, [user for user in node.users if user not in between])
        self.program.erase_unused()
        if self.products:
            self._say()
        return len(self.products)

    # -- what is computed where

    def find(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "call_function" and isinstance(node.meta[VAL], torch.Tensor):
                self._follow(node)

    def _follow(self, node: fx.Node) -> None:
        known = [a for a in node.all_input_nodes if a in self.values]
        weighs = node.target in _PRODUCTS and any(map(self._is_weight, node.all_input_nodes))
        if (not known and not weighs) or is_draw(node) or any(not tensors_of(a) for a in node.all_input_nodes):
            return
        rule = rule_for(node, self.program, self.every, BATCH_AXIS)
        if rule.kind != "factors" or rule.template.several:
            return
        found = self._factors(rule, known[0]) if known else self._of_product(rule)
        if found is None or not {*found}.isdisjoint(rule.forbidden) or any(f not in rule.result for f in found):
            return
        for operand in rule.operands:  # rows of another value than these, which ranks have no part of
            wanted = self.values.get(operand.node)
            if found[1] in operand.factors and found[0] not in operand.factors:
                return
            if wanted is not None and tuple(operand.factors[d] for d in wanted.dims) != found:
                return
        if weighs and self._weight(rule, found[0]) is not None:
            self.products.append(node)
        elif not known:
            return
        dims = rule.result.index(found[0]), rule.result.index(found[1])
        self.values[node] = _Value(rule, found[0], found[1], dims)

    def _factors(self, rule: OpRule, known: fx.Node) -> tuple[Any, Any] | None:
        """The factors of experts and rows, of an op that reads such a value."""
        operand = next(o for o in rule.operands if o.node is known)
        e, r = (operand.factors[d] for d in self.values[known].dims)
        return None if e is None or r is None else (e, r)

    def _of_product(self, rule: OpRule) -> tuple[str, str] | None:
        for weight in [o for o in rule.operands if self._is_weight(o.node)]:
            for x in [o for o in rule.operands if o is not weight and weight.factors[0] in o.factors]:
                rows = [
                    f
                    for f in x.factors
                    if f is not None and f[0] != "(" and f not in weight.factors and f in rule.result
                ]
                if rows and not self._is_weight(x.node) and behind(x.node, PASS_ON).target is not aten.expand.default:
                    return str(weight.factors[0]), rows[0]
        return None

    def _weight(self, rule: OpRule, experts: str) -> Operand | None:
        return next((o for o in rule.operands if self._is_weight(o.node) and o.factors[:1] == (experts,)), None)

    def _is_weight(self, node: fx.Node) -> bool:
        while node not in self.own.params and keeps_experts(node):
            node = node.args[0]
        return node in self.own.params and node.meta[VAL].dim() == 3 and node.meta[VAL].shape[0] > 1

    # -- the ops in their place

    def _again(self, node: fx.Node) -> fx.Node:
        value, build = self.values[node], Builder(self.program, node, node, NAME)
        given: dict[fx.Node, fx.Node] = {}
        for operand in value.rule.operands:
            given[operand.node] = self._operand(operand, value, node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: given.get(a, a))
        return build(node.target, *args, **kwargs)

    def _operand(self, operand: Operand, value: _Value, node: fx.Node) -> fx.Node:
        x = operand.node
        if x in self.made:
            return self.made[x]
        if value.experts not in operand.factors:
            return x
        e = operand.factors.index(value.experts)
        if value.rows not in operand.factors:
            return self.own.part(x, node) if e == 0 else self._moved(x, node, Placement("R"), self._experts(value, e))
        if x not in self.arrived:
            r = operand.factors.index(value.rows)
            self.arrived[x] = self._moved(x, node, self._rows(value, r), self._experts(value, e))
        return self.arrived[x]

    def _experts(self, value: _Value, dim: int) -> Placement:
        return S(dim, Layout.contiguous(value.rule.sizes[value.experts], self.own.ranks))

    def _rows(self, value: _Value, dim: int) -> Placement:
        return S(dim, Layout.contiguous(value.rule.sizes[value.rows] * self.own.ranks, self.own.ranks))

    def _moved(self, x: fx.Node, at: fx.Node, src: Placement, dst: Placement) -> fx.Node:
        emit = SizeEmitter(self.program.graph, self.program.sizes)
        layouts: Any = [[emit(n) for n in p.flat_layout] for p in (src, dst)]
        build = Builder(self.program, at, at, NAME)
        return build(ops.transition.default, x, src.tag, dst.tag, *layouts, EXPERT_AXIS, self.own.ranks)

    def _leave(self, node: fx.Node, users: list[fx.Node]) -> None:
        """Rows come home for what reads them here."""
        if users:
            value, made = self.values[node], self.made[node]
            ends = self._experts(value, value.dims[0]), self._rows(value, value.dims[1])
            home = self._moved(made, node.next, *ends)
            for user in users:
                user.replace_input_with(node, home)

    def _say(self) -> None:
        first, ranks = self.made[self.products[0]], self.own.ranks
        value = self.values[self.products[0]]
        experts = value.rule.sizes[value.experts]
        sent = sum(self.program.sizes.bytes(x.meta[VAL]) for x in self.arrived) * (ranks - 1) // ranks
        what = (
            f"{experts} experts of '{fqn_of(first)}', which have a capacity, are shared out over {ranks} ranks: "
            f"{self.own.here(experts)} a rank, which sends {bytes_text(sent)} each way"
        )
        self.program.note("experts", what, first)
