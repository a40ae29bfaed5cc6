"""Backward that adds to gradients of earlier calls: they come in as further inputs, and products add to them in place.

Before:  %dw = mm_fp32(t(%dy), %x)
         return ..., %dw
After:   %dw = addmm_fp32(%pending_0, t(%dy), %x)                      # `reuse_buffers` lets it write over %pending_0
         return ..., %dw
Legal because: addmm is the sum. A product that has the rows of several parameters (`merge_linears`) is computed part by part.

Only in the further backward graphs of a call (`CompileContext.gradients`): sums that `no_sync` holds, and, with
`gradient_accumulation_fusion`, the gradients that are there already.
"""

from __future__ import annotations

import torch
from torch import fx

from megafx.ir.nodes import BACKWARD, in_backward
from megafx.ir.program import PHASE, VAL, Builder, Input, Phase, Program
from megafx.kernels.products_fp32 import SUMS
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "add_pending"
aten = torch.ops.aten
# Product -> what adds it to something.


def add_pending(program: Program, context: CompileContext) -> int:
    """Return the number of gradients that are added to earlier ones.

    context.gradients: "reduce" (the call's own backward) and "hold" add nothing; the first leaves `program.before_reduction`
    for the others.
    """
    fuses = context.config.gradient_accumulation_fusion
    trains = any(spec.kind == "gradient" for spec in program.outputs)
    if context.gradients == "reduce" and (context.data is not None or (fuses and trains)):
        program.before_reduction = program.copy()
    if context.gradients not in ("add", "accumulate"):
        return 0
    output, results = program.output_node(), list(program.results())
    last = program.placeholders()[-1]
    gradients = program.parameter_gradients()
    for i, node, name in gradients:
        with program.graph.inserting_after(last):
            last = program.graph.placeholder(f"pending_{i}")
        last.meta[VAL] = node.meta[VAL]
        program.inputs.append(Input("pending", name))
        results[i] = _sum(program, node, last, output if fuses else None)
        results[i].meta[PHASE] = BACKWARD
    output.args = (tuple(results),)
    program.erase_unused()
    return len(gradients)


def _sum(program: Program, node: fx.Node, pending: fx.Node, output: fx.Node | None) -> fx.Node:
    """pending + node. output: the graph's, where products are to add themselves."""
    build = Builder(program, node.next if in_backward(node) else program.output_node(), node, NAME)
    product, rows = _behind_flips(node), None
    if node.target is aten.slice.Tensor and len(node.args) == 4 and node.args[1] == 0:
        product, rows = node.args[0], node.args[2:]
    alone = output is not None and (_is_alone(product, output) if product is node or rows is not None else True)
    if product.target not in SUMS or not alone:
        return build(aten.add.Tensor, pending, node)
    left, right = product.args
    if rows is not None:
        left = build(aten.slice.Tensor, left, 0, *rows)
    return build(SUMS[product.target], pending, left, right)


def _behind_flips(node: fx.Node) -> fx.Node:
    """What the node is transposed an even number of times, by nodes that nothing else reads; else the node."""
    inner, flips, found = node, 0, node
    while _is_flip(inner) and len(inner.users) == 1:
        inner, flips = inner.args[0], flips + 1
        found = inner if flips % 2 == 0 and len(inner.users) == 1 else found
    return found


def _is_flip(node: fx.Node) -> bool:
    if node.target is aten.transpose.int and (node.args[1] - node.args[2]) % 2 == 0:
        return False  # a dim with itself
    return node.target in (aten.t.default, aten.transpose.int) and node.meta[VAL].dim() == 2


def _is_alone(product: fx.Node, output: fx.Node) -> bool:
    """True if the product is seen as gradients only: whole, or rows of it."""
    rows = {u for u in product.users if u.target is aten.slice.Tensor and u.args[1] == 0}
    return all(user is output for part in (product, *rows) for user in part.users if user not in rows)
