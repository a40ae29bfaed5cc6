"""What the rewrites of `canonicalize` share: which ops they look at, emitting nodes, sizes as arguments, replacing a node.

@on("expand expand_as broadcast_to")                             # called for these ops of ATen alone
def one_spelling_of_expand(editor: Editor, node: fx.Node) -> bool:
    return respell(node, aten.expand.default, (node.args[0], editor.shape(node.meta[VAL])))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megafx.errors import CaptureError, in_part, or_leave_eager
from megafx.ir.nodes import argument, aten_ops
from megafx.ir.program import MADE_BY, VAL, Builder, Program, located
from megafx.ir.sizes import SizeEmitter, size_sources

BY = "canonicalize"


@dataclass(frozen=True)
class Rewrite:
    """A function that may rewrite a node of these ops; it returns whether it has."""

    ops: frozenset[Any]
    function: Callable[..., bool]

    def __call__(self, editor: Editor, node: fx.Node, *more: Any) -> bool:
        return node.target in self.ops and self.function(editor, node, *more)


def on(names: str, *others: Any) -> Callable[[Callable[..., bool]], Rewrite]:
    """A decorator: the function rewrites ATen's ops of these names (`aten_ops`), and others."""
    return lambda function: Rewrite(aten_ops(names).union(others), function)


class Editor:
    """One run of the pass over one program."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.without_grad: set[fx.Node] = set()  # nodes that the model computes under no_grad

    @functools.cached_property
    def size_node(self) -> SizeEmitter:
        """Of the sizes that the graph has: those of its inputs, and those of `megafx.rows`."""
        return SizeEmitter(self.program.graph, self.program.sizes)

    def know_sizes(self) -> None:
        """Learn anew which sizes the graph has."""
        self.__dict__.pop("size_node", None)

    def at(self, node: fx.Node) -> Builder:
        """A builder of nodes before `node`, which they stem from."""
        return Builder(self.program, node, node, BY)

    def arg(self, size: int | torch.SymInt) -> int | fx.Node:
        """A size as a graph argument. Raises CaptureError for one that has no source."""
        if isinstance(size, int):
            return size
        try:
            return self.size_node(self.program.sizes.of(size))
        except KeyError:
            raise self._of_data(size.node.expr.free_symbols - size_sources(self.graph).keys()) from None

    def _of_data(self, symbols: set[Any]) -> CaptureError:
        """The error for sizes of no input. Names the first node that makes one, by its shape or as a number."""

        def makes_one(node: fx.Node) -> bool:
            value = node.meta.get(VAL)
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            return any(isinstance(n, torch.SymInt) and symbols & n.node.expr.free_symbols for n in sizes)

        maker = next((n for n in self.graph.nodes if n.op == "call_function" and makes_one(n)), None)
        shape = maker is None or is_tensor(maker)
        what = f"the {'shape of the result' if shape else 'size that is the result'} of {maker.target if maker else 'an op'}"
        fix = "compute with masks (torch.where) instead of selecting by data (nonzero, x[mask], .item())"
        where = located(maker) if maker else {}
        found = f"{what} depends on the data of a tensor"
        return in_part(CaptureError(found, fix=or_leave_eager(fix, where.get("module")), **where))

    def shape(self, value: torch.Tensor) -> list[int | fx.Node]:
        return [self.arg(n) for n in value.shape]

    def same(self, a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
        """True if two sizes are equal for every value of the symbols."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        return self.program.sizes.of(a) == self.program.sizes.of(b)

    def same_shape(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.dim() == b.dim() and all(self.same(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def respell(node: fx.Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> bool:
    """Give the node another op that computes the same value: `val` stays. False if the node is spelled so already."""
    new_args, new_kwargs = tuple(args), kwargs or {}
    if node.target is target and _equal(node.args, new_args) and node.kwargs == new_kwargs:
        return False
    node.target, node.args, node.kwargs = target, new_args, new_kwargs
    node.meta[MADE_BY] = (*node.meta.get(MADE_BY, ()), BY)
    return True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a is b if isinstance(a, fx.Node) or isinstance(b, fx.Node) else type(a) is type(b) and a == b


def arguments(node: fx.Node, *names: str) -> tuple[Any, ...]:
    return tuple(argument(node, name) for name in names)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get(VAL), torch.Tensor)
