"""Cross entropy behind a linear layer: logits in chunks only, on one rank's shapes.

Before:  %y = linear(%h, %w); %c = cross_entropy(reshape(%y), %target); %l = sum(%c)
After:   %l = linear_cross_entropy(reshape(%h), %w, None, %target)

Before:  %s = ce_stats(%y, %target); %a = transition(unsqueeze(%s), S0 -> I); %c = ce_loss(%y, %target, %a)
After:   %s = linear_ce_stats(%h, %w, None, %target); %a = transition(...); %c = linear_ce_loss(%h, %w, None, %target, %a)

The first where a rank has all classes, the second where they are sharded: its collectives are those of the plan.
Legal because: what is between the two (views and slices of rows, casts to fp32, in which the loss computes anyway) does
to the rows of the hidden states what it does to the rows of the logits, and nothing else reads the logits. Where the user's
output does, it becomes a lazy one (megafx/analysis/lazy.py).

Tokens must be whole: sums over a rank's tokens mask the padding in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import megafx.kernels.loss.linear_cross_entropy
import megafx.kernels.loss.vocab_linear_cross_entropy  # noqa: F401  registers the ops
from megafx.analysis.lazy import copy_for_outputs, describe, outside_user, read_outside, why_not_lazy, with_views_out
from megafx.debugging import current, say
from megafx.ir.contracts import layout_of
from megafx.ir.dump import op_text
from megafx.ir.nodes import COPIES, RESHAPES, mark
from megafx.ir.program import PLACEMENT, VAL, Builder, Fusion, Phase, Program, fqn_of, source_of
from megafx.ir.sizes import SizeEmitter
from megafx.placements.types import Layout
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "fuse_linear_loss"
aten, ops = torch.ops.aten, torch.ops.megafx
FUSION = "linear_cross_entropy"


class Refused(Exception):
    """Why a loss stays as it is."""


@dataclass
class Head:
    """A linear layer and what is done to its logits on the way to the loss. links: in graph order."""

    linear: fx.Node
    links: list[fx.Node]

    @property
    def chain(self) -> list[fx.Node]:
        return [self.linear, *self.links]

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        x, weight, *bias = self.linear.args
        return x, weight, bias[0] if bias else None


def fuse_linear_loss(program: Program, context: CompileContext) -> int:
    """Return the number of losses fused."""
    if not context.config.cross_entropy_fusion:
        return 0
    lazy = why_not_lazy(program, context.config, context.t) if context.training else "no gradients are taken"
    count = 0
    for node in list(program.graph.nodes):
        fuse = _LOSSES.get(str(node.target))
        if fuse is None:
            continue
        try:
            fuse(program, node, lazy)
            count += 1
        except Refused as refused:
            program.note("fuse", f"{FUSION} does not match: {refused}", node)
    if count:
        program.erase_unused()
        if current().level >= 2:
            say(f"megafx {NAME}: {FUSION} matches {count}")
    return count


# -- the way from the loss to the linear layer


def head_of(program: Program, logits: fx.Node) -> Head:
    """Walk from the loss's operand up to the linear layer; Refused where something else is between them."""
    links: list[fx.Node] = []
    node = logits
    while node.target is not aten.linear.default:
        if not _keeps_rows(program, node):
            what = "an input" if node.op == "placeholder" else op_text(node)
            raise Refused(f"its logits come from {what}, not from a linear layer")
        links.append(node)
        node = node.args[0]
    return Head(node, links[::-1])


def _keeps_rows(program: Program, node: fx.Node) -> bool:
    """True if the node only rearranges, selects or widens rows of its operand."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target in COPIES:
        return True
    before, after = source.meta[VAL], node.meta[VAL]
    if node.target is aten.to.dtype:
        return after.dtype == torch.float32 and before.dtype in (torch.bfloat16, torch.float16)
    if (
        not isinstance(before, torch.Tensor) or before.dim() == 0 or after.dim() == 0
    ):  # a result of code that stays eager
        return False
    if node.target in RESHAPES:
        return program.sizes.of(before.shape[-1]) == program.sizes.of(after.shape[-1])
    dim = node.args[1] if len(node.args) > 1 else 0
    return node.target is aten.slice.Tensor and isinstance(dim, int) and dim % before.dim() != before.dim() - 1


def rows_of(program: Program, head: Head, where: fx.Node) -> fx.Node:
    """The hidden states [T, K] whose logits the loss reads, emitted in front of `where`."""
    x = head.operands[0]
    size = SizeEmitter(program.graph, program.sizes)
    emit = Builder(program, where, where, NAME)
    for link in head.links:
        placement = x.meta.get(PLACEMENT)
        if link.target in RESHAPES:
            lead = list(link.args[1])[:-1]
            width = x.meta[VAL].shape[-1]
            last = width if isinstance(width, int) else size(program.sizes.of(width))
            x = emit(aten.reshape.default, x, [*lead, last])
        elif link.target is aten.slice.Tensor:
            x = emit(aten.slice.Tensor, x, *link.args[1:])
        mark(x, placement)
    return x


def _alone(program: Program, head: Head, inside: set[fx.Node], lazy: str | None) -> None:
    """Nobody but the loss reads the logits; outputs that do become lazy. Refused otherwise."""
    if not read_outside(head.chain, inside):
        return
    chain = with_views_out(head.chain)
    other = outside_user(program, chain, inside)
    if other is not None or lazy is not None:
        reader, why = describe(other or program.output_node()), f", and {lazy}" if other is None else ""
        raise Refused(f"linear (%{head.linear.name}) inside of it is also used by {reader}{why}")
    copy_for_outputs(program, chain)


def _done(program: Program, node: fx.Node, new: fx.Node, logits: fx.Node) -> None:
    mark(new, node.meta.get(PLACEMENT))
    node.replace_all_uses_with(new)
    elements = math.prod(program.sizes.shape(logits.meta[VAL]))
    program.fusions.append(Fusion(FUSION, fqn_of(node), source_of(node), NAME, elements))


# -- whole vocabulary


def _whole(program: Program, node: fx.Node, lazy: str | None) -> None:
    """sum(cross_entropy(linear)) -> linear_cross_entropy."""
    logits, target, ignore_index, smoothing, lse = node.args
    if lse:
        return _whole_with_lse(program, node, lazy)
    head = head_of(program, logits)
    total = next(iter(node.users))
    if len(node.users) != 1 or total.target is not aten.sum.default or len(total.args) > 1 or total.kwargs:
        raise Refused(f"the losses of single tokens are used by {describe(total)}, not their sum")
    _, weight, bias = head.operands
    _check_whole(program, head, target)
    _alone(program, head, {node}, lazy)
    emit = Builder(program, total, node, NAME)
    rows = rows_of(program, head, total)
    loss: Any = emit(ops.linear_cross_entropy.default, rows, weight, bias, target, ignore_index, smoothing)
    if loss.meta[VAL].dtype != total.meta[VAL].dtype:
        loss = emit(aten.to.dtype, loss, total.meta[VAL].dtype)
    _done(program, total, loss, logits)


def _whole_with_lse(program: Program, node: fx.Node, lazy: str | None) -> None:
    """The loss and the log-sum-exp -> linear_ce_stats and linear_ce_loss, of one rank: its gradient is none of a sum's."""
    logits, target, *how = node.args
    head = head_of(program, logits)
    _check_whole(program, head, target)
    _alone(program, head, {node}, lazy)
    place = ([1, program.sizes.of(head.operands[1].meta[VAL].shape[0]), 1], 1, "")
    made, operands = _statistics(program, head, node, target, *place)
    stats = Builder(program, node, node, NAME)(aten.unsqueeze.default, made, 0)
    _loss_of(program, node, *operands, target, stats, *how, *place)


def _statistics(program: Program, head: Head, at: fx.Node, *rest: Any) -> tuple[fx.Node, list[Any]]:
    """(linear_ce_stats in front of a node, its operands): of detached ones, as the loss has the gradients."""
    operands, emit = [rows_of(program, head, at), *head.operands[1:]], Builder(program, at, at, NAME)
    fixed = [v if v is None else emit(aten.detach.default, v) for v in operands]
    return emit(ops.linear_ce_stats.default, *fixed, *rest), operands


def _loss_of(program: Program, node: fx.Node, *args: Any) -> None:
    made = Builder(program, node, node, NAME)(ops.linear_ce_loss.default, *args)
    _done(program, node, made, node.args[0])


def _check_size(program: Program, x: fx.Node, classes: int) -> None:
    """A classifier of few classes gains nothing, and its user reads the logits."""
    if classes <= program.sizes.of(x.meta[VAL].shape[-1]):
        raise Refused("its logits are no larger than the hidden states that would be kept for them")


def _check_whole(program: Program, head: Head, target: Any) -> None:
    x, weight, _ = head.operands
    for name, value in (("x", x), ("weight", weight), ("target", target)):
        placement = value.meta.get(PLACEMENT) if isinstance(value, fx.Node) else None
        if placement is not None and placement.is_shard:
            raise Refused(f"{name} is sharded")
    _check_size(program, x, program.sizes.of(weight.meta[VAL].shape[0]))


# -- sharded vocabulary


def _sharded(program: Program, node: fx.Node, lazy: str | None) -> None:
    """ce_stats of a linear layer, gathered, and ce_loss -> linear_ce_stats and linear_ce_loss."""
    everyone: Any
    logits, target, everyone, *how, layout, size, axis = node.args
    head = head_of(program, logits)
    stats = everyone  # the ce_stats whose gathered result this is
    while stats.target is not ops.ce_stats.default:
        stats = stats.args[0]
    x, weight, bias = head.operands
    for name, value, cut in (("its input", x, False), ("its weight", weight, True), ("its bias", bias, True)):
        placement = value.meta.get(PLACEMENT) if value is not None else None
        fits = placement is None or (placement.is_shard and placement.dim == 0 if cut else placement.kind in "RI")
        if not fits:
            raise Refused(f"{name} (%{value}) is {placement}")
    _check_size(program, x, Layout.from_flat(layout_of(program, layout)).size)
    inside = {node, stats, stats.args[0]} - set(head.chain)
    _alone(program, head, inside, lazy)
    made, operands = _statistics(program, head, stats, target, layout, size, axis)
    stats.replace_all_uses_with(made)
    _loss_of(program, node, *operands, target, everyone, *how, layout, size, axis)


_LOSSES = {"megafx.cross_entropy.default": _whole, "megafx.ce_loss.default": _sharded}
