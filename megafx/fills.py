"""Values that are one number in all elements by construction, told from the nodes that make them."""

from __future__ import annotations

from typing import Any

from torch import fx

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
