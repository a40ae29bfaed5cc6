"""Transitions and rank-dependent values as ops, and the ranks that they run on.

    megafx::transition    local value at src -> local value at dst (placements.TRANSITIONS); backward: the dual transition
    megafx::rank_select   [t, ...] -> [...]      backward: rank_place
    megafx::rank_place    [...] -> [t, ...]      backward: rank_select
    megafx::rank0_only    x on rank 0, zeros elsewhere; its own backward
    megafx::split_head_tail, join_head_tail   a sequence <-> the two ranges of it that each rank has (Layout.head_tail), stacked
    megafx::pad_rows      [n, ...] -> [rows, ...] with zeros behind; the operand itself where n is rows when it runs
    megafx::mm_rows       a product [n, k] x [k, m] -> [rows, m] with zeros behind, as pad_rows of it

The graph is the same on every rank: which rank runs it is known only from `on_mesh`, inside which these ops (and dropout
and cross entropy) must be executed:

    with on_mesh({"tp": AxisContext(rank=0, size=2, group_name="0")}):
        y = torch.ops.megafx.transition(x, "P", "I", [], [], "tp", 2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # gives _c10d_functional its fake implementations
from torch import Tensor

from megafx.errors import UsageError
from megafx.ir.facts import declare
from megafx.ops.axes import AxisContext, axis_context, axis_rank
from megafx.placements.moves import TENSORS, Ops, apply_transition, is_identity, shape_after

c10d = torch.ops._c10d_functional


class _RankOps(Ops):
    """`moves.Ops` on the tensors of a real rank, collectives waited for at once."""

    def __init__(self, context: AxisContext) -> None:
        self.rank, self.group = context.rank, context.group_name

    def rank_select(self, x: Any) -> Any:
        return x[self.rank].clone(memory_format=torch.contiguous_format)

    def rank_place(self, x: Any, t: int) -> Any:
        return _place(x, t, self.rank)

    def rank0_only(self, x: Any) -> Any:
        return x.clone() if self.rank == 0 else torch.zeros_like(x)

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        return c10d.wait_tensor(c10d.all_reduce(x, op, self.group))

    def all_gather(self, x: Any, t: int) -> Any:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, t, self.group))

    def reduce_scatter(self, x: Any, t: int) -> Any:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", t, self.group))

    def all_to_all(self, x: Any, t: int) -> Any:
        return c10d.wait_tensor(c10d.all_to_all_single(x, [1] * t, [1] * t, self.group))


def _place(x: Tensor, size: int, rank: int) -> Tensor:
    out = x.new_zeros([size, *x.shape])
    out[rank] = x
    return out


_DUAL = {"R": "P", "P": "R"}


@torch.library.custom_op("megafx::transition", mutates_args=())
def transition(
    x: Tensor, src: str, dst: str, src_layout: Sequence[int], dst_layout: Sequence[int], axis: str, size: int
) -> Tensor:
    """x: this rank's value at src -> its value at dst; layouts are Layout.flat() of shards, else []."""
    if is_identity(src, dst, src_layout, dst_layout, size):
        return x.clone()
    context = axis_context(axis)
    if context.size != size:
        raise UsageError(f"a transition for {size} ranks runs on axis '{axis}' of {context.size} ranks")
    out = apply_transition(x, src, dst, src_layout, dst_layout, size, _RankOps(context))
    return out.clone() if out.untyped_storage()._cdata == x.untyped_storage()._cdata else out


@transition.register_fake
def _(x, src, dst, src_layout, dst_layout, axis, size):
    if is_identity(src, dst, src_layout, dst_layout, size):
        return torch.empty_like(x)
    return x.new_empty(shape_after(x.shape, src, dst, src_layout, dst_layout, size))


def dual_arguments(
    src: str, dst: str, src_layout: Sequence[int], dst_layout: Sequence[int], axis: str, size: int
) -> tuple[Any, ...]:
    """Arguments of a transition -> those of its backward: a gradient has the dual placement and moves from dst to src."""
    return _DUAL.get(dst, dst), _DUAL.get(src, src), dst_layout, src_layout, axis, size


def _op(fake: Callable[..., Tensor]) -> Callable[..., Any]:
    """A decorator: the function is megafx::<its name>; fake: what the result looks like."""

    def register(function: Callable[..., Tensor]) -> Any:
        made = torch.library.custom_op(f"megafx::{function.__name__}", function, mutates_args=())
        made.register_fake(fake)
        return made

    return register


@_op(lambda x, axis: x.new_empty(x.shape[1:]))
def rank_select(x: Tensor, axis: str) -> Tensor:
    """x: [t, ...] -> [...]: this rank's entry."""
    return x[axis_rank(axis)].clone(memory_format=torch.contiguous_format)


@_op(lambda x, size, axis: x.new_empty([size, *x.shape]))
def rank_place(x: Tensor, size: int, axis: str) -> Tensor:
    """x: [...] -> [t, ...]: x at this rank's entry, zeros elsewhere."""
    return _place(x, size, axis_rank(axis))


@_op(lambda x, axis: torch.empty_like(x))
def rank0_only(x: Tensor, axis: str) -> Tensor:
    """x: held by every rank -> summands of it: x on rank 0, zeros elsewhere."""
    return x.clone() if axis_rank(axis) == 0 else torch.zeros_like(x)


@_op(lambda x, dim, t, local: x.new_empty([t, *x.shape[:dim], local, *x.shape[dim + 1 :]]))
def split_head_tail(x: Tensor, dim: int, t: int, local: int) -> Tensor:
    """x: [.., n, ..] -> [t, .., local, ..]."""
    return TENSORS.split_head_tail(x, dim, t, local)


@_op(lambda x, dim, n: x.new_empty([*x.shape[1 : dim + 1], n, *x.shape[dim + 2 :]]))
def join_head_tail(x: Tensor, dim: int, n: int) -> Tensor:
    """x: [t, .., local, ..] -> [.., n, ..]."""
    return TENSORS.join_head_tail(x, dim, n)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x: [n, ...] -> [rows, ...] with zeros behind, contiguous; x itself where it is that already."""
    return TENSORS.pad_rows(x, rows).contiguous()


def mm_rows(a: Tensor, b: Tensor, rows: int) -> Tensor:
    """a: [n, k], b: [k, m] -> [rows, m], their product with zeros behind."""
    if a.shape[0] == rows:
        return torch.mm(a, b)
    out = a.new_empty([rows, b.shape[1]])
    torch.mm(a, b, out=out[: a.shape[0]])
    out[a.shape[0] :].zero_()
    return out


# A view where nothing is to be added: only a schema may say so.
torch.library.define("megafx::pad_rows", "(Tensor(a) x, SymInt rows) -> Tensor(a)")
torch.library.impl("megafx::pad_rows", "CompositeExplicitAutograd", pad_rows)
torch.library.register_fake("megafx::pad_rows", lambda x, rows: x.new_empty([rows, *x.shape[1:]]))
torch.library.custom_op("megafx::mm_rows", mm_rows, mutates_args=()).register_fake(
    lambda a, b, rows: a.new_empty([rows, b.shape[1]])
)

declare("megafx.rank0_only.default", types="R -> P", outer="lin: ... -> ...")


def differentiate(op: Any, gradient: Callable[..., Tensor]) -> None:
    """gradient(gradient of the result, shape of the operand, *other arguments) -> gradient of the operand."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape, ctx.rest = inputs[0].shape, inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gradient(grad, ctx.shape, *ctx.rest), *([None] * len(ctx.rest))

    op.register_autograd(backward, setup_context=save)


mfx = torch.ops.megafx
differentiate(transition, lambda grad, shape, *ends: mfx.transition(grad, *dual_arguments(*ends)))
differentiate(rank_select, lambda grad, shape, axis: mfx.rank_place(grad, shape[0], axis))
differentiate(rank_place, lambda grad, shape, size, axis: mfx.rank_select(grad, axis))
differentiate(rank0_only, lambda grad, shape, axis: mfx.rank0_only(grad, axis))
