"""Arithmetic of sizes, remembered: a trace adds, multiplies and compares the same few sizes thousands of times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megafx.meanwhile import meanwhile

_OPERATIONS = (
    *("_add", "_sub", "_mul", "_int_floordiv", "_mod", "_sym_max", "_sym_min"),
    *("_eq", "_ne", "_ge", "_gt", "_le", "_lt", "_and_", "_or_"),
)


def remembering(env: ShapeEnv | None) -> contextlib.AbstractContextManager[None]:
    """Within, an operation on sizes of this environment is computed once for the same expressions, and has one node in a graph
    that is traced.

    Legal because: what it gives follows from the expressions, and no `SymNode` changes. Questions are asked of the result, and
    still are.
    """
    known: dict[Any, SymNode] = {}

    def remembered(operation: Callable[[SymNode, SymNode], SymNode]) -> Callable[[SymNode, SymNode], SymNode]:
        def run(a: SymNode, b: SymNode) -> SymNode:
            if a.shape_env is not env or b.shape_env is not env:
                return operation(a, b)
            key = operation, a.expr, b.expr, a.pytype, b.pytype, get_proxy_mode()
            found = known.get(key)
            if found is None:
                found = known[key] = operation(a, b)
            return found

        return run

    return meanwhile(SymNode, **{name: remembered(getattr(SymNode, name)) for name in _OPERATIONS})
