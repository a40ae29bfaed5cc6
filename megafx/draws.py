"""Ops that draw random bits: found by the names of their arguments, not by their own name.

An op draws if its schema has the six arguments of `NAMES` (kernels/dropout.py says what they mean). Its element index is
the linear index in its (first) result, and `shard_dim` is a dim of that result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

NAMES = ("seed", "p", "op_id", "shard_dim", "layout", "axis")


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
