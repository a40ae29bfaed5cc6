"""Gradients that meet in one value are summed by the matrix products that make them.

Before:  %a = mm(%dq, %wq), %b = mm(%dk, %wk)              # one input, several linears: q, k, v; gate and up
         %dx = add(view(%a), view(%b))
After:   %dx = view(addmm(%a, %dk, %wk))
Legal because: addmm is the sum; both products are used nowhere else.

`reuse_buffers` lets the product add to %a's memory in place: one more read in place of two reads and a write.
"""

from __future__ import annotations

import torch
from torch import fx

from megafx.ir.nodes import RESHAPES
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.ir.sizes import Sizes
from megafx.kernels.products_fp32 import SUMS
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "accumulate_products"
aten = torch.ops.aten
# Product -> what adds it to something.


def accumulate_products(program: Program, context: CompileContext) -> int:
    """Return the number of sums that products took over."""
    changes = 0
    for node in list(program.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not isinstance(node.args[1], fx.Node):
            continue
        first, second = (_product(x) for x in node.args)
        if first is None or second is None or first is second or not _alike(first, second, program.sizes):
            continue
        if second.target not in SUMS:
            first, second = second, first
        if second.target not in SUMS:
            continue
        build = Builder(program, node, second, NAME)
        total = build(SUMS[second.target], first, *second.args)
        views = [x.args[1] for x in node.args if isinstance(x, fx.Node) and x.target in RESHAPES]
        shape = views[0] if views else None  # one of the two may be no view, of the shape that the other one has
        build.origin = node
        node.replace_all_uses_with(total if shape is None else build(aten.view.default, total, shape))
        changes += 1
    if changes:
        program.erase_unused()
    return changes


def _product(node: fx.Node) -> fx.Node | None:
    """The product that the value is, or is a view of, where nothing else uses it."""
    if len(node.users) == 1 and node.target in RESHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.target in (*SUMS, *SUMS.values()) and len(node.users) == 1 else None


def _alike(first: fx.Node, second: fx.Node, sizes: Sizes) -> bool:
    a, b = first.meta[VAL], second.meta[VAL]
    shown = [next(iter(x.users)).meta[VAL] for x in (first, second)]
    return a.dtype == b.dtype and sizes.shape(a) == sizes.shape(b) and sizes.shape(shown[0]) == sizes.shape(shown[1])
