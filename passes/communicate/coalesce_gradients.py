"""Sum the gradients of replicated parameters over the ranks in one collective.

Before:  %da = transition(%a, P -> I), %db = transition(%b, P -> I)      # norm weights under sequence parallelism
         return ..., %da, %db
After:   %c = cat([%a.view(-1), %b.view(-1)]); %d = transition(%c, P -> I)
         return ..., %d[:n].view(a's shape), %d[n:].view(b's shape)
Legal because: a transition P -> I adds elements over ranks whatever their place, and nothing but the caller sees the sums.

One collective a dtype and axis, after all else in backward. Only gradients of at most LARGEST_BYTES: a larger one pays its
own latency, and is better started early than copied and sent last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import megafx.ops.collectives  # noqa: F401  (defines megafx::transition)
from megafx.ir.nodes import in_backward
from megafx.ir.program import PLACEMENT, VAL, Builder, Phase, Program
from megafx.passes.communicate.emit import join_flat, of_many_modules, split_flat
from megafx.placements.types import I, P
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "coalesce_gradients"
# By the profile h200-nvlink, an all-reduce of 1 MiB on 8 ranks takes 24 us to start and 6 us to move; copying it, about 1 us.
LARGEST_BYTES = 2**20
aten = torch.ops.aten


def coalesce_gradients(program: Program, context: CompileContext) -> int:
    """Return the number of all-reduces saved."""
    output = program.output_node()
    results = list(output.args[0])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, spec in enumerate(program.outputs):
        if spec.kind == "gradient" and _is_small_sum(results[i], output, results):
            value = results[i].meta[VAL]
            groups.setdefault((value.dtype, value.device, *results[i].args[5:7]), []).append(i)
    saved = 0
    for indices in groups.values():
        if len(indices) > 1:
            for i, piece in zip(indices, _one_sum(program, [results[i] for i in indices]), strict=True):
                results[i] = piece
            saved += len(indices) - 1
    output.args = (tuple(results),)
    program.erase_unused()
    return saved


def _is_small_sum(node: Any, output: fx.Node, results: list[Any]) -> bool:
    """True if this gradient is a sum over ranks that nobody but the caller sees, of a known and small size."""
    if not (isinstance(node, fx.Node) and node.target is torch.ops.megafx.transition.default):
        return False
    value = node.meta[VAL]
    return (
        node.args[1:3] == ("P", "I")
        and set(node.users) == {output}
        and sum(r is node for r in results) == 1
        and all(isinstance(n, int) for n in value.shape)
        and value.numel() * value.element_size() <= LARGEST_BYTES
    )


def _one_sum(program: Program, sums: list[fx.Node]) -> list[fx.Node]:
    """Gradients equal to `sums`, parts of one."""
    build = Builder(program, program.output_node(), sums[0], NAME)
    joined = join_flat(build, [node.args[0] for node in sums], sums)
    for node in (joined, *joined.all_input_nodes):
        node.meta[PLACEMENT] = P
    total = of_many_modules(build(torch.ops.megafx.transition.default, joined, *sums[0].args[1:]))
    total.meta[PLACEMENT] = I
    pieces = split_flat(build, total, [node.meta[VAL].shape for node in sums], sums, {PLACEMENT: I})
    assert all(in_backward(n) for n in pieces)
    return pieces
