"""Which nodes show the same memory: views, parts of tuples of views, and the values that they are views of."""

from __future__ import annotations

import math
import operator
import sys

import torch
from torch import fx

aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """Whether the op returns memory of its first operand: its schema says so (`Tensor(a)`), `unbind` and `split` included."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten._unsafe_view.default:
        return True  # declared a fresh tensor for autograd's sake; it is a view
    return (
        bool(node.args)
        and isinstance(node.args[0], fx.Node)
        and any(r.alias_info is not None for r in target._schema.returns)
        and not target._schema.is_mutable
    )


def shows_operand(node: fx.Node) -> bool:
    """Whether the node is a view of its first operand, or one part of a tuple of views."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return is_view(node)


def storage_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows; itself, where it is no view."""
    while shows_operand(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def memory_of(node: fx.Node) -> tuple[fx.Node, int, int]:
    """(base, start, stop): the node shows elements [start, stop) of base's memory; all of it where that is not known."""
    base, node = storage_of(node), _reshaped(node)
    if node is base or node.target is not aten.slice.Tensor or _reshaped(node.args[0]) is not base:  # type: ignore[arg-type]
        return base, 0, sys.maxsize
    source, dim, start, stop = (*node.args, 0, 0, 0)[:4]
    value = source.meta.get("val")  # type: ignore[union-attr]
    known = isinstance(start, int) and isinstance(stop, int) and len(node.args) == 4 and 0 <= start <= stop
    if not (known and dim == 0 and isinstance(value, torch.Tensor) and value.is_contiguous()):
        return base, 0, sys.maxsize
    row = math.prod(value.shape[1:])
    return (base, start * row, stop * row) if isinstance(row, int) else (base, 0, sys.maxsize)  # type: ignore[return-value,operator]


def _reshaped(node: fx.Node) -> fx.Node:
    """What the node is a view of that has the same elements in the same order."""
    while node.target in (aten.view.default, aten._unsafe_view.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def overlaps(a: tuple[fx.Node, int, int], b: tuple[fx.Node, int, int]) -> bool:
    return a[0] is b[0] and a[1] < b[2] and b[1] < a[2]
