"""Ops that have several names get one.

Before:  %y = multiply(%a, %b); %z = true_divide(%y, %c)
After:   %y = mul(%a, %b); %z = div(%y, %c)
Legal because: torch defines the one by the other, with the same arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.passes.canonicalize_common import Editor, respell

aten = torch.ops.aten

# alias -> name, both operator packets; overloads and arguments are the same
_NAMES: dict[str, str] = {
    "absolute": "abs",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "special_exp2": "exp2",
    "special_log1p": "log1p",
    "subtract": "sub",
    "true_divide": "div",
}


def _table() -> dict[Any, Any]:
    """Overload -> overload, of those that this torch has under both names."""
    table = {}
    for alias, name in _NAMES.items():
        for overload in getattr(aten, alias).overloads():
            if overload in getattr(aten, name).overloads() and "out" not in overload:
                table[getattr(getattr(aten, alias), overload)] = getattr(getattr(aten, name), overload)
    return table


_TABLE = _table()


def one_name(editor: Editor, node: fx.Node) -> bool:
    """multiply -> mul, true_divide -> div, clip -> clamp, ..."""
    return node.target in _TABLE and respell(node, _TABLE[node.target], node.args, dict(node.kwargs))
