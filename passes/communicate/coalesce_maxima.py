"""Take the largest magnitudes of weights over ranks in one collective, in front of the first product that needs one.

Before:  %a = fp8_amax(%w); %b = wait_tensor(all_reduce(%a, 'max'))          # of each weight whose products run in FP8
After:   %c = cat([%a.view(-1), %a2.view(-1), ...]); %d = wait_tensor(all_reduce(%c, 'max'))
         %b = %d[0:1].view([]); ...
Legal because: the largest is taken of each element, whatever its place; parameters are there from the start.

One collective in forward, and one in backward (for scales of other rows), in place of one for each weight: they carry a number,
so that their time is all latency. Weights that data-parallel ranks hold shards of have one more of each, over these ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import in_backward, replace
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.kernels.fp8.quantize import amax
from megafx.kernels.join_parameters import join_parameters
from megafx.passes.communicate.emit import join_flat, of_many_modules, split_flat
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "coalesce_maxima"
c10d = torch.ops._c10d_functional


def coalesce_maxima(program: Program, context: CompileContext) -> int:
    """Return the number of all-reduces saved."""
    params, pieces, saved = {node for node, spec in program.input_nodes() if spec.kind == "param"}, set[fx.Node](), 0
    while several := _several(program, params, pieces):  # again: over another axis, of what was taken together over one
        for starts in several:
            pieces |= _take_together(program, starts, params, pieces)
            saved += len(starts) - 1
    if saved:
        program.graph.lint()
    return saved


def _several(program: Program, params: set[fx.Node], pieces: set[fx.Node]) -> list[list[fx.Node]]:
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for start in program.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        found = start.args[0]
        if start.args[1] == "max" and _made_of(found, params, pieces) is not None:
            key = (in_backward(start), found.meta[VAL].dtype, found.meta[VAL].device, start.args[2])
            groups.setdefault(key, []).append(start)
    return [starts for starts in groups.values() if len(starts) > 1]


def _made_of(node: fx.Node, params: set[fx.Node], pieces: set[fx.Node]) -> list[fx.Node] | None:
    """The nodes that make it, in order, where it is the largest magnitude of parameters alone."""
    if node in params or node in pieces:
        return []
    if node.target not in (amax, join_parameters, torch.ops.aten.maximum.default) and _is_tensor(node):
        return None
    found: list[fx.Node] = []
    for operand in node.all_input_nodes:
        mine = _made_of(operand, params, pieces)
        if mine is None:
            return None
        found += [n for n in mine if n not in found]
    return found if node.op == "placeholder" else [*found, node]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta[VAL], torch.Tensor)


def _take_together(program: Program, starts: list[fx.Node], params: set[fx.Node], pieces: set[fx.Node]) -> set[fx.Node]:
    """The results, in front of the first product that needs one."""
    first = starts[0]
    amaxes: list[Any] = [start.args[0] for start in starts]
    made = [_made_of(found, params, pieces) or [] for found in amaxes]
    read = {n for nodes in made for node in nodes for n in node.all_input_nodes if n in pieces} | (pieces & {*amaxes})
    if not in_backward(first):
        made_here = {n for nodes in made for n in nodes}
        rest = (n for n in program.graph.nodes if n.op != "placeholder" and n not in made_here)
        first = next(n for n in rest if all(n > piece for piece in read))
    for nodes in made:
        for node in nodes:
            if node > first:
                first.prepend(node)
    build = Builder(program, first, amaxes[0], NAME)
    flat = join_flat(build, amaxes, amaxes)
    started = of_many_modules(build(c10d.all_reduce.default, flat, *starts[0].args[1:]))
    largest = of_many_modules(build(c10d.wait_tensor.default, started))
    parts = split_flat(build, largest, [found.meta[VAL].shape for found in amaxes], amaxes, {})
    for start, piece in zip(starts, parts, strict=True):
        (wait,) = start.users
        replace(wait, piece)
        program.graph.erase_node(start)
    return {*parts}
