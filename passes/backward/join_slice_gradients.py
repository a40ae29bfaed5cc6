"""Gradients of slices of one value are put side by side instead of each into zeros and summed.

Before:  %a = slice_backward(%dq, shape, dim, 0, 8), %b = slice_backward(%dk, shape, dim, 8, 16)     # fused q, k, v
         %dx = add(%a, %b)
After:   %dx = cat([%dq, %dk], dim)
Legal because: each summand is zero where the others are not, and what no slice covers stays zero.

For n slices that cover the value autograd takes 3n + 3(n - 1) passes over it, zeros included, against 2 here. Select is a
slice of one row. Sums of gradients that are no slices are left beside it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.ir.sizes import Sizes
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "join_slice_gradients"
aten = torch.ops.aten


class Piece(NamedTuple):
    """A summand that is `gradient` at [start, stop) of dim `dim` of a value of `size` there, and zero elsewhere."""

    node: fx.Node
    gradient: fx.Node
    dim: int
    start: int
    stop: int
    size: int


def join_slice_gradients(program: Program, context: CompileContext) -> int:
    """Return the number of sums replaced."""
    changes = 0
    for node in reversed(list(program.graph.nodes)):
        part = len(node.users) == 1 and _is_sum(next(iter(node.users)), program.sizes)  # of a larger sum
        if _is_sum(node, program.sizes) and not part:
            changes += _join(program, node)
    if changes:
        program.erase_unused()
    return changes


def _is_sum(node: fx.Node, sizes: Sizes) -> bool:
    """True if it adds two tensors of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    tensors = [x.meta[VAL] for x in node.args if isinstance(x, fx.Node) and isinstance(x.meta.get(VAL), torch.Tensor)]
    return len(tensors) == 2 and len({(sizes.shape(v), v.dtype) for v in tensors}) == 1


def _summands(node: fx.Node, sizes: Sizes) -> list[fx.Node]:
    found: list[fx.Node] = []
    for operand in node.args:
        inner = _is_sum(operand, sizes) and len(operand.users) == 1
        found += _summands(operand, sizes) if inner else [operand]
    return found


def _piece(node: fx.Node) -> Piece | None:
    """The summand as a piece; None where it is none, has another user or sizes that are not numbers."""
    value = node.meta[VAL]
    if len(node.users) != 1:
        return None
    if node.target is aten.slice_backward.default:
        gradient, _, dim, start, stop, step = node.args
    elif node.target is aten.select_backward.default:
        gradient, _, dim, start = node.args
        stop, step = (start + 1 if isinstance(start, int) and start != -1 else None), 1
    else:
        return None
    size = value.shape[dim]
    if step != 1 or not all(isinstance(n, int) for n in (start, size)):
        return None
    stop = size if stop is None else stop
    if not isinstance(stop, int):
        return None
    start, stop = (max(0, min(n + size if n < 0 else n, size)) for n in (start, stop))
    return Piece(node, gradient, dim % value.dim(), start, stop, size)


def _join(program: Program, total: fx.Node) -> int:
    summands = _summands(total, program.sizes)
    pieces = [p for p in map(_piece, summands) if p is not None]
    pieces = sorted((p for p in pieces if p.dim == pieces[0].dim), key=lambda p: p.start)
    if len(pieces) < 2 or any(a.stop > b.start for a, b in itertools.pairwise(pieces)):
        return 0
    joined = {p.node for p in pieces}
    build = Builder(program, total, pieces[0].node, NAME)
    result = build(aten.cat.default, _side_by_side(build, pieces), pieces[0].dim)
    build.origin = total
    for other in summands:
        if other not in joined:
            result = build(aten.add.Tensor, result, other)
    total.replace_all_uses_with(result)
    return 1


def _side_by_side(build: Builder, pieces: list[Piece]) -> list[fx.Node]:
    """The gradients in order, with zeros where no slice was taken."""
    parts: list[fx.Node] = []
    dim, end = pieces[0].dim, 0

    def zeros(width: int) -> None:
        if width:
            shape: list[Any] = list(pieces[0].node.args[1])
            shape[dim] = width
            parts.append(build(aten.new_zeros.default, pieces[0].gradient, shape))

    for piece in pieces:
        build.origin = piece.node
        zeros(piece.start - end)
        whole = piece.node.target is aten.slice_backward.default
        parts.append(piece.gradient if whole else build(aten.unsqueeze.default, piece.gradient, dim))
        end = piece.stop
    zeros(pieces[0].size - end)
    return parts
