"""Which nodes show the same memory: views, parts of tuples of views, and the values that they are views of."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

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


# -- draws
#
# Ops that draw random bits: found by the names of their arguments, not by their own name.
#
# An op draws if its schema has the six arguments of `NAMES` (kernels/dropout.py says what they mean). Its element index is
# the linear index in its (first) result, and `shard_dim` is a dim of that result.


class Draw(NamedTuple):
    """The arguments of an op that draws random bits.

    seed: a 0-d tensor, or None: off; p: probability that an element is dropped; op_id: the op's number in the graph;
    shard_dim, layout: how the result is cut over the ranks of `axis` (-1 and []: whole).
    """

    seed: Any = None
    p: float = 0.0
    op_id: int = 0
    shard_dim: int = -1
    layout: Any = ()
    axis: str = "tp"

    @property
    def args(self) -> tuple[Any, ...]:
        """In the order that ops take them."""
        return (self.seed, self.p, self.op_id, self.shard_dim, list(self.layout), self.axis)


NAMES = Draw._fields


@cache
def positions(target: Any) -> dict[str, int] | None:
    """Where an operator takes the six arguments; None for one that draws nothing."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found = {a.name: i for i, a in enumerate(target._schema.arguments)}
    return {name: found[name] for name in NAMES} if all(name in found for name in NAMES) else None


def draws(node: fx.Node) -> bool:
    return node.op == "call_function" and positions(node.target) is not None


def drawn(node: fx.Node) -> dict[str, Any]:
    """The six arguments of a node that draws, by name."""
    places = positions(node.target)
    assert places is not None, f"{node.target} draws nothing"
    return {name: node.args[i] if i < len(node.args) else node.kwargs[name] for name, i in places.items()}


def redraw(node: fx.Node, **values: Any) -> None:
    """Change some of the six arguments."""
    places = positions(node.target)
    assert places is not None, f"{node.target} draws nothing"
    for name, value in values.items():
        if places[name] < len(node.args):
            node.update_arg(places[name], value)
        else:
            node.update_kwarg(name, value)


# -- autocast
#
# The caller's autocast: part of what a call means to capture and to graph keys, and off wherever graphs are made or run.
#
# Graphs hold autocast's casts as nodes; an op that ran under it once more would compute another dtype than the graph says.

_DEVICE_TYPES = ("cpu", "cuda")


def ambient_autocast() -> list[dict[str, Any]]:
    """The autocast contexts that the caller is in, as arguments of torch.autocast."""
    return [
        {
            "device_type": device_type,
            "dtype": torch.get_autocast_dtype(device_type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    ]


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Autocast off, whatever the caller is in."""
    with contextlib.ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


# -- fills
#
# Values that are one number in all elements by construction, told from the nodes that make them.

FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0}
FILLS_BY_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
_SAME_ELEMENTS = ("view", "reshape", "expand", "unsqueeze", "squeeze", "detach", "clone", "alias", "to", "_to_copy")


def op_name(node: Any) -> str:
    """'view' for aten.view.default; '' for what is no operator."""
    parts = str(node.target).split(".") if isinstance(node, fx.Node) and node.op == "call_function" else []
    return parts[1] if len(parts) == 3 else ""


def _stripped(node: Any) -> Any:
    """The value under views, copies and casts."""
    while op_name(node) in _SAME_ELEMENTS:
        node = node.args[0]
    return node


def is_zero(node: Any) -> bool:
    """Whether a value is 0 in all elements by construction."""
    node = _stripped(node)
    name = op_name(node)
    if name in FILLS_BY_ARGUMENT:
        value = node.args[FILLS_BY_ARGUMENT[name]]
        return isinstance(value, (int, float)) and value == 0
    return name in FILLS or (isinstance(node, (int, float)) and node == 0)
