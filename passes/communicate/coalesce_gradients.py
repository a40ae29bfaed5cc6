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

import math
from typing import Any

import torch
from torch import fx

import megafx.ops.collectives  # noqa: F401  (defines megafx::transition)
from megafx.ir.nodes import in_backward
from megafx.ir.program import FQN, PLACEMENT, SOURCE, VAL, Builder, Phase, Program
from megafx.placements.types import I, P
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "coalesce_gradients"
# By the profile h200-nvlink, an all-reduce of 1 MiB on 8 ranks takes 24 us to start and 6 us to move: four fifths of it is
# latency, and copying it in and out of the flat buffer takes about 1 us.
LARGEST_BYTES = 2**20
aten = torch.ops.aten


def coalesce_gradients(program: Program, planner: Planner) -> int:
    """Return the number of all-reduces saved."""
    output = program.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, spec in enumerate(program.outputs):
        if spec.kind == "gradient" and _is_small_sum(results[i], output, results):
            value = results[i].meta[VAL]
            groups.setdefault((value.dtype, value.device, *results[i].args[5:7]), []).append(i)
    saved = 0
    for indices in groups.values():
        if len(indices) > 1:
            pieces = _one_sum(program, [results[i] for i in indices])
            for i, piece in zip(indices, pieces, strict=True):
                results[i] = piece
            saved += len(indices) - 1
    output.args = (tuple(results),)
    program.graph.eliminate_dead_code()
    program.gm.recompile()
    return saved


def _is_small_sum(node: Any, output: fx.Node, results: list[Any]) -> bool:
    """Whether this gradient is a sum over ranks that nobody but the caller sees, of a known and small size."""
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
    output = program.output_node()
    build = Builder(program, output, sums[0], NAME)
    sizes = [math.prod(n.meta[VAL].shape) for n in sums]
    flat = []
    for node, size in zip(sums, sizes, strict=True):
        build.origin = node
        summand = node.args[0]
        if not summand.meta[VAL].is_contiguous():  # type: ignore[union-attr]
            summand = build(aten.clone.default, summand, memory_format=torch.contiguous_format)
        flat.append(build(aten.view.default, summand, [size]))
        flat[-1].meta[PLACEMENT] = P
    joined = build(aten.cat.default, flat)
    reduced = build(torch.ops.megafx.transition.default, joined, *sums[0].args[1:])
    for node, placement in ((joined, P), (reduced, I)):
        node.meta[PLACEMENT] = placement
        node.meta[FQN] = ""  # of many modules
        node.meta.pop(SOURCE, None)
    pieces, start = [], 0
    for node, size in zip(sums, sizes, strict=True):
        build.origin = node
        piece = build(aten.slice.Tensor, reduced, 0, start, start + size)
        pieces.append(build(aten.view.default, piece, list(node.meta[VAL].shape)))
        piece.meta[PLACEMENT] = pieces[-1].meta[PLACEMENT] = I
        start += size
    assert all(in_backward(n) for n in pieces)
    return pieces
