"""The arguments of a node by schema name, in the form in which pattern and graph are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx import draws
from megafx.ir import VAL

aten = torch.ops.aten

# Ops whose first two operands may be exchanged (`add` where alpha is 1).
COMMUTES = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.logical_and.default,
        aten.logical_or.default,
    }
)
# Arguments of ATen ops that do not say what is computed.
_IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"})
_DIMS = frozenset({"dim", "dims", "dim0", "dim1"})


def arguments_of(node: fx.Node) -> list[tuple[str, Any]]:
    """(schema name, value) of what says what the node computes: defaults filled in, dims counted from the front, numbers
    of where and how a tensor lies left out, as are the six arguments of ops that draw."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return [(str(i), a) for i, a in enumerate(node.args)] + sorted(node.kwargs.items())
    ignored = _IGNORED if target.namespace == "aten" else draws.NAMES if draws.positions(target) else ()
    found = []
    for i, argument in enumerate(target._schema.arguments):
        name = argument.name
        if name in ignored:
            continue
        if i < len(node.args):
            value = node.args[i]
        elif name in node.kwargs:
            value = node.kwargs[name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        found.append((name, _from_front(node, value) if name in _DIMS else value))
    return found


def _from_front(node: fx.Node, dim: Any) -> Any:
    first = node.args[0] if node.args else None
    like = first if isinstance(first, fx.Node) else node
    value = like.meta.get(VAL)
    rank = value.dim() if isinstance(value, torch.Tensor) else 0
    if isinstance(dim, int) and not isinstance(dim, bool):
        return dim + rank if dim < 0 else dim
    return [_from_front(node, d) for d in dim] if isinstance(dim, (list, tuple)) else dim
