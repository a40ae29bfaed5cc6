"""A stack of parameters is a view of one memory (kernels/join_parameters.py).

Before:  %3 = stack([%a, %b])                                  # [n, k] each
After:   %3 = view(join_parameters([%a, %b]), [2, n, k])
Legal because: rows of the one follow rows of the other either way. The stack stays, and is a copy, where a parameter is read
elsewhere, is tied or frozen, where dtypes differ, or where data-parallel ranks share parameters whose memory would have gaps.
"""

from __future__ import annotations

from typing import Any

import torch

from megafx.analysis.joined_parameters import leaves_gaps, placed_together, stored_parameters, why_not_one
from megafx.ir.nodes import mark, replace
from megafx.ir.program import PLACEMENT, VAL, Builder, Phase, Program
from megafx.kernels import join_parameters  # noqa: F401  registers the op
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "join_stacks"
aten, ops = torch.ops.aten, torch.ops.megafx


def join_stacks(program: Program, context: CompileContext) -> int:
    """Return the number of stacks that are views."""
    if context.data is not None and context.data.experts > 1:
        return 0  # hold_experts cuts stacks
    parameters, count = stored_parameters(program), 0
    for node in program.graph.find_nodes(op="call_function", target=aten.stack.default):
        parts, dim = [*node.args[0]], node.args[1] if len(node.args) > 1 else 0
        if dim != 0 or why_not_one(parts, parameters, context.wants_grad) or not parts[0].meta[VAL].dim():
            continue
        placement = placed_together(parts, 0, context.t)
        kinds = {(x.meta[VAL].dtype, x.meta[VAL].device) for x in parts}  # a stack may promote dtypes
        if placement is None or len(kinds) > 1 or leaves_gaps(parts, context.data, context.t):
            continue
        build: Any = Builder(program, node, node, NAME)
        whole = mark(build(ops.join_parameters.default, parts), placement)
        made = build(aten.view.default, whole, [*map(int, node.meta[VAL].shape)])
        mark(made, node.meta.get(PLACEMENT))
        replace(node, made)
        count += 1
    return count
