"""Take the largest magnitudes of weights over ranks in one collective, in front of the first product that needs one.

Before:  %a = fp8_amax(%w); %b = wait_tensor(all_reduce(%a, 'max'))          # of each weight whose products run in FP8
After:   %c = cat([%a.view(-1), %a2.view(-1), ...]); %d = wait_tensor(all_reduce(%c, 'max'))
         %b = %d[0:1].view([]); ...
Legal because: the largest is taken of each element, whatever its place; parameters are there from the start.

One collective in forward, and one in backward (for scales of other rows), in place of one for each weight: they carry a number,
so that their time is all latency. Weights that ranks gather first (fsdp) keep theirs, which come after the gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import in_backward
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.kernels.fp8.quantize import amax
from megafx.kernels.join_parameters import join_parameters
from megafx.passes.communicate.emit import join_flat, of_many_modules, split_flat
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "coalesce_maxima"
c10d = torch.ops._c10d_functional


def coalesce_maxima(program: Program, planner: Planner) -> int:
    """Return the number of all-reduces saved."""
    params = {node for node, spec in program.input_nodes() if spec.kind == "param"}
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for start in program.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        found: Any = start.args[0]
        if start.args[1] == "max" and found.target is amax and _stems_from(found.args[0], params):
            key = (in_backward(start), found.meta[VAL].dtype, found.meta[VAL].device, start.args[2])
            groups.setdefault(key, []).append(start)
    several = [starts for starts in groups.values() if len(starts) > 1]
    for starts in several:
        _take_together(program, starts)
    if several:
        program.graph.lint()
    return sum(len(starts) - 1 for starts in several)


def _stems_from(weight: Any, params: set[fx.Node]) -> bool:
    """True if it is a parameter, or several as one."""
    return weight in params or (weight.target is join_parameters and {*weight.all_input_nodes} <= params)


def _take_together(program: Program, starts: list[fx.Node]) -> None:
    first = starts[0]
    if not in_backward(first):
        first = next(n for n in program.graph.nodes if n.op != "placeholder")
    amaxes: list[Any] = [start.args[0] for start in starts]
    for found in amaxes:
        joined = found.args[0]
        for node in (joined, *found.all_input_nodes[1:], found):
            if node.op != "placeholder" and node > first:
                first.prepend(node)
    build = Builder(program, first, amaxes[0], NAME)
    flat = join_flat(build, amaxes, amaxes)
    started = of_many_modules(build(c10d.all_reduce.default, flat, *starts[0].args[1:]))
    largest = of_many_modules(build(c10d.wait_tensor.default, started))
    pieces = split_flat(build, largest, [found.meta[VAL].shape for found in amaxes], amaxes, {})
    for start, piece in zip(starts, pieces, strict=True):
        (wait,) = start.users
        wait.replace_all_uses_with(piece)
        program.graph.erase_node(wait)
        program.graph.erase_node(start)
