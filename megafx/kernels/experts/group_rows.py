"""Rows in the order of their experts, and back: megafx::group_order, group_ends, group_of_rows, group_rows, ungroup_rows.

    group_order     ids int [S] -> order int64 [S]: the rows of expert 0 first, then those of expert 1, ...; rows of one expert
                    in the order in which they come
    group_ends      ids int [S] -> ends int64 [E]: the rows of expert e are order[ends[e-1]:ends[e]] (ends[-1] taken as 0).
                    ids from E on have their rows after the last end
    group_of_rows   rows [S, ..] in that order, ends [E] -> int64 [S]: the expert of each row
    group_rows      x [S/times, ..], order [S] -> y [S, ..]: y_s = x_(order_s // times): `times` experts get a token
    ungroup_rows    y [S, ..], order [S] -> x [S, ..]: x_(order_s) = y_s

ids are not negative. Gradients: group_rows and ungroup_rows are linear, and each is the other's gradient; that of `times` > 1
sums over a token's experts. Nothing is added in an order that is not fixed.

Ranks of an axis that cuts the rows group their own ones, each by itself. What is then computed of each row by itself, and put
back, is what one process computes: that is the rule `outer` of these ops. passes/experts/group_by_expert.py puts them where
it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import ids, real
from megafx.kernels.common.op import define_gradient, define_op
from megafx.rules.families import OpCall


def group_order(ids: Tensor, experts: int) -> Tensor:
    return torch.argsort(ids, stable=True)


def group_ends(ids: Tensor, experts: int) -> Tensor:
    # by histc, for which the host does not wait; on CUDA in whole numbers, whose sum has no order
    counted = ids.int() if ids.is_cuda else ids.double()
    return torch.histc(counted, experts + 1, 0, experts)[:-1].cumsum(0, dtype=torch.int64)


def group_of_rows(rows: Tensor, ends: Tensor) -> Tensor:
    at = torch.arange(rows.shape[0], device=rows.device)
    return torch.searchsorted(ends, at, right=True)


def group_rows(x: Tensor, order: Tensor, times: int) -> Tensor:
    return x[order] if times == 1 else x[order // times]


def ungroup_rows(y: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(y, memory_format=torch.contiguous_format).index_copy_(0, order, y)


def _outer_rule(call: OpCall) -> str:
    times = call.get("times")
    return "lin: s ..., ~s -> s ..." if times == 1 else "lin: s ..., ~(s times) -> (s times) ..."


_WHY = {"s": "rows are put in the order of all rows' experts"}

define_op(
    "group_order(Tensor ids, int experts) -> Tensor",
    rule="nl: s! -> s!",
    outer="nl: s -> s",
    why=_WHY,
    samples=[(ids(4, 6), 4)],
    reference=group_order,
    fake=lambda ids, experts: torch.empty_like(ids, dtype=torch.int64),
)
define_op(
    "group_ends(Tensor ids, int experts) -> Tensor",
    rule="nl: s! -> e!",
    outer="nl: s -> *",  # each rank has its own, which none but products of its own rows read
    why={"s": "rows are counted"},
    samples=[(ids(4, 6), 4)],
    reference=group_ends,
    fake=lambda ids, experts: ids.new_empty(experts, dtype=torch.int64),
)
define_op(
    "group_of_rows(Tensor rows, Tensor ends) -> Tensor",
    rule="nl: ~s! ..., ~e! -> s!",
    outer="nl: ~s ..., * -> s",
    why={"s": "rows are counted"},
    samples=[(real(6, 4), ids(7, 4))],
    reference=group_of_rows,
    fake=lambda rows, ends: rows.new_empty(rows.shape[0], dtype=torch.int64),
)
define_op(
    "group_rows(Tensor x, Tensor order, int times) -> Tensor",
    rule="lin: r! ..., ~s! -> s! ...",
    outer=_outer_rule,
    why=_WHY,
    samples=[(real(6, 4), ids(6, 6), 1), (real(3, 4), ids(6, 6), 2)],
    reference=group_rows,
    fake=lambda x, order, times: x.new_empty(order.shape[0], *x.shape[1:]),
)
define_op(
    "ungroup_rows(Tensor y, Tensor order) -> Tensor",
    rule="lin: s! ..., ~s! -> s! ...",
    outer="lin: s ..., ~s -> s ...",
    why=_WHY,
    samples=[(real(6, 4), ids(6, 6))],
    reference=ungroup_rows,
    fake=lambda y, order: torch.empty_like(y, memory_format=torch.contiguous_format),
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, order, *times = inputs
    ctx.rows, ctx.times = x.shape[0], times[0] if times else 1
    ctx.save_for_backward(order)


def _backward_of_group(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (order,) = ctx.saved_tensors
    home = torch.ops.megafx.ungroup_rows(grad, order)
    if ctx.times > 1:
        home = home.reshape(ctx.rows, ctx.times, *grad.shape[1:]).sum(1)
    return home, None, None


def _backward_of_ungroup(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (order,) = ctx.saved_tensors
    return torch.ops.megafx.group_rows(grad, order, 1), None


define_gradient("group_rows", _backward_of_group, _saves)
define_gradient("ungroup_rows", _backward_of_ungroup, _saves)
