"""Which nodes show the same memory: views, parts of tuples of views, and the values that they are views of."""

from __future__ import annotations

import operator

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
