"""Ops that have several names get one.

Before:  %y = multiply(%a, %b); %z = true_divide(%y, %c)
After:   %y = mul(%a, %b); %z = div(%y, %c)
Legal because: torch defines the one by the other, with the same arguments. Grouped matmuls, torch's and the stand-in that
transformers exports for dtypes without one, are megafx.grouped_mm, which has the same formula in every dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir import VAL
from megafx.kernels import grouped_mm as _defines_the_op  # noqa: F401
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
    """multiply -> mul, true_divide -> div, clip -> clamp, ...; grouped matmuls -> megafx.grouped_mm"""
    if node.target in _TABLE:
        return respell(node, _TABLE[node.target], node.args, dict(node.kwargs))
    return str(node.target) in _GROUPED and _grouped(node)


_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def _grouped(node: fx.Node) -> bool:
    """x [S, K] by weight [E, K, N] with ends of groups, without a bias or another dtype."""
    named = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
    x, weight = (a.meta[VAL] for a in node.args[:2] if isinstance(a, fx.Node))
    ends, bias, dtype = (named.get(k) for k in ("offs", "bias", "out_dtype"))
    if (x.dim(), weight.dim()) != (2, 3) or ends is None or bias is not None or dtype not in (None, x.dtype):
        return False
    return respell(node, torch.ops.megafx.grouped_mm.default, (*node.args[:2], ends))
