"""What one rank computes for all: ops between values that every rank holds and values that are one rank's.

    megafx::for_rank     R -> R     x, for the owner to compute with; backward: rank_part
    megafx::of_rank      Owned -> R  the owner's parameter, for the owner to compute with; backward: to_rank
    megafx::rank_only    R -> P     summands of x: x on the owner, zeros elsewhere; its own backward
    megafx::rank_part    P -> P     a gradient to which the owner alone adds: it on the owner, zeros elsewhere
    megafx::to_rank      P -> Owned  a gradient to which the owner alone adds: it on the owner, no rows elsewhere

What lies between for_rank or of_rank and rank_only of one owner is that rank's region. As types its values are R: every rank
could compute them. Only the owner does: on the others rank_only and rank_part are zeros and to_rank is empty, whatever they are
given, so that `bind_mesh` leaves the region out of their graphs. A region has no collective. Its values' gradients are zero
on the other ranks, since they stem from gradients of rank_only; that is why the summands of the owner are all there are.

They have no sharding rules: the planner has one strategy for each value of a region (passes/plan/plan_sharding.py). With size=1
(graphs on global shapes, before `localize_shapes`) each is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from megafx.errors import UsageError
from megafx.ir.facts import FREE, declare
from megafx.ir.program import Program
from megafx.ops.axes import axis_rank

Arguments = tuple[Any, ...]


def _define(name: str, types: str, compute: Callable[[Tensor, bool], Tensor], gradient: str = "") -> None:
    """megafx::name(x, owner, axis, size). compute(x, whether this rank is the owner); gradient: the op of its backward."""
    declare(f"megafx.{name}.default", types=types, cost=FREE)

    def run(x: Tensor, owner: int, axis: str, size: int) -> Tensor:
        return compute(x, size == 1 or axis_rank(axis) == owner)

    def backward(ctx: Any, grad: Tensor) -> Arguments:
        return getattr(torch.ops.megafx, gradient)(grad, *ctx.where), None, None, None

    def save(ctx: Any, inputs: Arguments, output: Tensor) -> None:
        ctx.where = inputs[1:]

    made = torch.library.custom_op(f"megafx::{name}", run, mutates_args=())
    made.register_fake(lambda x, owner, axis, size: torch.empty_like(x, memory_format=torch.contiguous_format))
    if gradient:
        made.register_autograd(backward, setup_context=save)


def _of_rank(x: Tensor, own: bool) -> Tensor:
    if not own:
        raise UsageError("a rank computes with a parameter that another one holds")
    return x.clone()


_define("for_rank", "R -> R", lambda x, own: x.clone(), "rank_part")
_define("rank_only", "R -> P", lambda x, own: x.clone() if own else torch.zeros_like(x), "rank_only")
_define("of_rank", "O -> R", _of_rank, "to_rank")
_define("rank_part", "P -> P", lambda x, own: x.clone() if own else torch.zeros_like(x))
_define("to_rank", "P -> O", lambda x, own: x.clone() if own else x.new_zeros([0, *x.shape[1:]]))

ops = torch.ops.megafx
FOR_RANK, OF_RANK = ops.for_rank.default, ops.of_rank.default
RANK_ONLY, RANK_PART, TO_RANK = ops.rank_only.default, ops.rank_part.default, ops.to_rank.default
OWNER_OPS = frozenset((FOR_RANK, OF_RANK, RANK_ONLY, RANK_PART, TO_RANK))
EXPERT = "expert"  # the factor of a region's strategies: a rank does its share of the regions


def owners_of(program: Program) -> dict[fx.Node, int]:
    """The rank that computes each value of a region, ops of this file included (of a program without gradients)."""
    found: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.target in OWNER_OPS:
            found[node] = int(node.args[1])
            continue
        owners = {found[a] for a in node.all_input_nodes if a in found and a.target is not RANK_ONLY}
        if owners and _is_value(node):
            assert len(owners) == 1, f"%{node.name} is of the ranks {owners}"
            found[node] = owners.pop()
    return found


def _is_value(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, (torch.Tensor, tuple, list))
