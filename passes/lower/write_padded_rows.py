"""Products whose rows are padded write into memory that has room for the padding.

Before:  %y = mm(%x, %w); %p = pad_rows(%y, n); %s = reduce_scatter_tensor(%p, ...)
After:   %p = mm_rows(%x, %w, n); %s = reduce_scatter_tensor(%p, ...)
Legal because: the rows of a product are contiguous, and nothing else reads it.

`pad_rows` copies if it has to add rows: when the ranks do not divide the tokens. What is scattered is most often a product.
Other values (sums, embedding lookups) are still padded by a copy.

It has to run before `call_directly`.
"""

from __future__ import annotations

import torch
from torch import fx

from megafx.ir.nodes import change_parts
from megafx.ir.program import Phase, Program
from megafx.ops import collectives  # noqa: F401  registers the ops
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
aten, ops = torch.ops.aten, torch.ops.megafx


def write_padded_rows(program: Program, context: CompileContext) -> int:
    """Return the number of products that are padded in place."""
    return change_parts(program, write_in_padded)


def write_in_padded(node: fx.Node) -> bool:
    """True if the node was a padded product, and is one that has the room."""
    product = node.args[0] if node.target is ops.pad_rows.default else None
    if not isinstance(product, fx.Node) or product.target is not aten.mm.default or len(product.users) > 1:
        return False
    node.target, node.args = ops.mm_rows.default, (*product.args, node.args[1])
    product.graph.erase_node(product)
    return True
