"""Make each placement of a value once.

Before:  %1 = transition(%0, S1 -> R)      %2 = transition(%0, S1 -> R)
After:   %1 = transition(%0, S1 -> R)      # users of %2 use %1
Legal because: a transition is a function of its arguments alone. Forward and backward of a joint graph are merged alike; a
backward use of a forward value is then a saved value, and recompute decides whether to keep it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import megafx.ops.collectives  # noqa: F401  registers megafx::transition
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext

REQUIRES = (Phase.PLACED, Phase.LOCAL, Phase.JOINT)


def merge_transitions(program: Program, context: CompileContext) -> int:
    """Return the number of transitions removed."""
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.megafx.transition.default):
        key = tuple(tuple(a) if isinstance(a, (list, tuple)) else a for a in node.args)
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
            merged += 1
    return merged
