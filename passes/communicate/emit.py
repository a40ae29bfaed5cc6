"""What passes write transitions out with: `moves.Ops` whose calls become nodes, collectives started and waited for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for

import megafx.ops.collectives  # noqa: F401  registers the ops
from megafx.ir.nodes import shows_operand
from megafx.ir.program import FQN, SOURCE, VAL, Builder, Program, inherit
from megafx.ir.sizes import SizeEmitter
from megafx.placements.moves import Ops, Size, same_size

aten, c10d, mfx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.megafx


class NodeOps(Ops):
    """`moves.Ops` that emits nodes before `where`. Sizes in calls become size nodes at the top of the graph."""

    def __init__(self, program: Program, where: fx.Node, sizes: SizeEmitter, axis: str, by: str) -> None:
        self.program, self.where, self.sizes, self.axis, self.by = program, where, sizes, axis, by
        self.build = Builder(program, where, where, by)
        self.emitted: list[fx.Node] = []

    def _size(self, size: Any) -> Any:
        if isinstance(size, torch.SymInt):
            return self.sizes(self.program.sizes.of(size))
        return [self._size(s) for s in size] if isinstance(size, (list, tuple)) else size

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.build(target, *(self._size(a) for a in args), **kwargs))

    def _made(self, node: fx.Node) -> fx.Node:
        if self.sizes.anchor is self.where:  # about to go; sizes stay in front of everything else
            self.sizes.anchor = node
        self.emitted.append(node)
        return node

    def shape(self, x: fx.Node) -> Sequence[Size]:
        return x.meta[VAL].shape

    def contiguous(self, x: fx.Node) -> fx.Node:
        """No node where the strides are known to be contiguous; else one that copies only if they are not when it runs."""
        value = x.meta[VAL]
        if same_strides(value, None) and not _is_of_a_part(x):
            return x
        with self.program.graph.inserting_before(self.where):
            node = self.program.graph.call_function(aten.contiguous.default, (x,))
        with self.program.fake_mode:
            node.meta[VAL] = value.new_empty(value.shape)  # asking the fake whether it is contiguous would add guards
        return self._made(inherit(node, self.build.origin, self.by))

    def view(self, x: fx.Node, size: Sequence[Size]) -> fx.Node:
        """A view of a view is one view."""
        while x in self.emitted and x.target is aten.view.default:
            x = x.args[0]
        return super().view(x, size)

    def pad_rows(self, x: fx.Node, rows: Size) -> fx.Node:
        return x if same_size(self.shape(x)[0], rows) else self.call(mfx.pad_rows.default, x, rows)

    def split_head_tail(self, x: fx.Node, dim: int, t: int, local: Size) -> fx.Node:
        return self.call(mfx.split_head_tail.default, x, dim, t, local)

    def join_head_tail(self, x: fx.Node, dim: int, n: Size) -> fx.Node:
        return self.call(mfx.join_head_tail.default, x, dim, n)

    def rank_select(self, x: fx.Node) -> fx.Node:
        return self.call(mfx.rank_select.default, x, self.axis)

    def rank_place(self, x: fx.Node, t: int) -> fx.Node:
        return self.call(mfx.rank_place.default, x, t, self.axis)

    def rank0_only(self, x: fx.Node) -> fx.Node:
        return self.call(mfx.rank0_only.default, x, self.axis)

    def _wait(self, started: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, started)

    def all_reduce(self, x: fx.Node, op: str = "sum") -> fx.Node:
        return self._wait(self.call(c10d.all_reduce.default, x, op, self.axis))

    def all_gather(self, x: fx.Node, t: int) -> fx.Node:
        return self._wait(self.call(c10d.all_gather_into_tensor.default, x, t, self.axis))

    def reduce_scatter(self, x: fx.Node, t: int) -> fx.Node:
        return self._wait(self.call(c10d.reduce_scatter_tensor.default, x, "sum", t, self.axis))

    def all_to_all(self, x: fx.Node, t: int) -> fx.Node:
        return self._wait(self.call(c10d.all_to_all_single.default, x, [1] * t, [1] * t, self.axis))


def _is_of_a_part(x: fx.Node) -> bool:
    """True for views of a slice that is not contiguous: where a product was merged with others, their strides are old ones."""
    while shows_operand(x):
        if x.target is aten.slice.Tensor and not same_strides(x.meta[VAL], None):
            return True
        x = x.args[0]
    return False


def same_strides(value: torch.Tensor, like: torch.Tensor | None) -> bool:
    """Known to have the strides of `like` (None: contiguous ones); dims of one element have no stride to speak of."""
    wanted = make_contiguous_strides_for(value.shape) if like is None else like.stride()
    return all(same_size(n, 1) or same_size(a, b) for n, a, b in zip(value.shape, value.stride(), wanted, strict=True))


# -- several values in one collective


def join_flat(build: Builder, values: Sequence[fx.Node], origins: Sequence[fx.Node]) -> fx.Node:
    """All elements of the values, one value after the other. origins: what the nodes made for each value stem from."""
    flat = []
    for value, build.origin in zip(values, origins, strict=True):
        if not value.meta[VAL].is_contiguous():
            value = build(aten.clone.default, value, memory_format=torch.contiguous_format)
        flat.append(build(aten.view.default, value, [math.prod(value.meta[VAL].shape)]))
    return of_many_modules(build(aten.cat.default, flat))


def split_flat(
    build: Builder, total: fx.Node, shapes: Sequence[Sequence[Any]], origins: Sequence[fx.Node], meta: Mapping[str, Any]
) -> list[fx.Node]:
    """Parts of a flat value, one of each shape; `meta` is set on what is made for them."""
    parts, start = [], 0
    for shape, build.origin in zip(shapes, origins, strict=True):
        end = start + int(math.prod(shape))
        piece = build(aten.slice.Tensor, total, 0, start, end)
        parts.append(build(aten.view.default, piece, [*shape]))
        piece.meta.update(meta)
        parts[-1].meta.update(meta)
        start = end
    return parts


def of_many_modules(node: fx.Node, fqn: str = "") -> fx.Node:
    """No single line of the user's model made this value."""
    node.meta[FQN] = fqn
    node.meta.pop(SOURCE, None)
    return node
