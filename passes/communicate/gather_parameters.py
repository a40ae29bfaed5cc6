"""Gather parameters that data-parallel ranks hold shards of, a region at a time, the next region's while this one computes.

Before:  %a, %b (parameters of one region), %c (of the next)
         %y = mm(%x, t(%a)); %z = add(%y, %b); %u = mm(%z, t(%c))
After:   %a, %b, %c (this rank's rows of them)
         %s = gather_region([%a, %b], 2, 'dp_shard'); %w = wait_tensor(%s)
         %s2 = gather_region([%c], 2, 'dp_shard')                            # runs beside the products
         %y = mm(%x, t(view(%w[:n]))); %z = add(%y, view(%w[n:]))
         %w2 = wait_tensor(%s2); %u = mm(%z, t(view(%w2)))
Legal because: ranks hold consecutive rows of one value, padded to be of equal number; put together they are the value.

A region is a layer, or what is used before, between or after layers (megafx/analysis/layers.py). A parameter is gathered in
each region that uses it, one collective for each dtype and group of ranks (tensor-parallel ranks share whole parameters too;
experts that ranks share out are gathered by those that have the same ones).

In the form 'fsdp' the gathered parameters are not kept: backward gathers them again (ir.RECOMPUTE; passes/lower/regather.py).
In the form 'zero1' whoever runs the graph makes the gather, once for each change of the shards (`partition`); here it is only
waited for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import fx

from megafx.analysis.layers import Layers
from megafx.ir.nodes import in_backward, mark, storage_of
from megafx.ir.program import PHASE, PLACEMENT, RECOMPUTE, VAL, Builder, Phase, Program, fqn_of
from megafx.ops.gather_region import starts
from megafx.passes.communicate.emit import of_many_modules
from megafx.placements.data_axis import FSDP, SAME_EXPERTS_AXIS, DataAxis, rows_of
from megafx.placements.types import Placement
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "gather_parameters"
aten, mfx = torch.ops.aten, torch.ops.megafx


def gather_parameters(program: Program, context: CompileContext) -> int:
    """Return the number of gathers added."""
    data, t = context.data, context.t
    if data is None or not data.sharded:
        return 0
    stored, experts = context.solved.params, () if program.batch is None else program.batch.experts
    params = {
        node: _Parameter(node, spec.name, node.meta[VAL].shape, stored[spec.name].is_shard, spec.name in experts)
        for node, spec in program.input_nodes()
        if spec.kind == "param" and node.meta[VAL].ndim and (spec.name not in experts or data.same_experts > 1)
    }
    regions = _regions(program, params)
    for param in params.values():
        _keep_rows(program, param, data, t)
    count, before = 0, None
    for region in regions:
        for uses in region.groups(params).values():
            _gather(program, region, uses, params, before or region.first, data.form == FSDP)
            count += 1
        before = region.first
    if data.form == FSDP:  # a cast of a gathered parameter (autocast's) is recomputed in backward, as the parameter is
        for node in program.graph.find_nodes(op="call_function", target=aten._to_copy.default):
            if storage_of(node.args[0]).meta.get(RECOMPUTE) and not in_backward(node):
                node.meta[RECOMPUTE] = True
    program.erase_unused()  # joins, and what they joined
    program.graph.lint()
    return count


@dataclass
class _Parameter:
    """shape: of one tensor-parallel rank's part of it. cut: whether these hold shards. experts: whether it has this rank's
    experts alone. axis, ranks: who shares its rows."""

    node: fx.Node
    name: str
    shape: torch.Size
    cut: bool
    experts: bool = False
    placement: Placement | None = None
    axis: str = ""
    ranks: int = 1


@dataclass
class _Region:
    """first: the node that first uses one of its parameters; uses: what uses each of them here."""

    name: str
    first: fx.Node
    uses: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))

    def groups(self, params: Mapping[fx.Node, _Parameter]) -> dict[Any, dict[fx.Node, list[fx.Node]]]:
        """What can be gathered in one collective."""
        found: dict[Any, dict[fx.Node, list[fx.Node]]] = defaultdict(dict)
        for node, users in self.uses.items():
            value, param = node.meta[VAL], params[node]
            found[value.dtype, value.device, param.axis, param.ranks][node] = users
        return found


def _regions(program: Program, params: Mapping[fx.Node, _Parameter]) -> list[_Region]:
    """In the order of first use. What backward uses is of the region of that use in forward whose module is nearest."""
    layers = Layers.of({param.name: param.shape for param in params.values()})
    uses = [(param, user) for user in program.graph.nodes for param in user.all_input_nodes if param in params]
    uses.sort(key=lambda use: in_backward(use[1]))  # stable: forward first, else as in the graph
    paths = [fqn_of(user) or params[param].name for param, user in uses]
    found: dict[str, _Region] = {}
    seen: dict[fx.Node, list[tuple[str, str]]] = defaultdict(list)
    for (param, user), path, name in zip(uses, paths, layers.regions(paths), strict=True):
        if in_backward(user) and seen[param]:
            name = max(seen[param], key=lambda use: _common(use[0], path))[1]
        else:
            seen[param].append((path, name))
        found.setdefault(name, _Region(name, user)).uses[param].append(user)
    return [*found.values()]


def _common(a: str, b: str) -> int:
    """Number of modules that two paths begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False)))


def _keep_rows(program: Program, param: _Parameter, data: DataAxis, t: int) -> None:
    """The parameter becomes this rank's rows."""
    node = param.node
    alone, param.ranks, layout = rows_of(int(param.shape[0]), data, t, param.cut, param.experts)
    param.axis = SAME_EXPERTS_AXIS if param.experts else data.shard_axis if alone else data.copy_axis
    param.placement = node.meta.pop(PLACEMENT, None)
    with program.fake_mode:
        node.meta[VAL] = node.meta[VAL].new_empty([layout.local_size(param.ranks), *param.shape[1:]])


def _gather(
    program: Program,
    region: _Region,
    uses: Mapping[fx.Node, list[fx.Node]],
    params: Mapping[fx.Node, _Parameter],
    start_at: fx.Node,
    again: bool,
) -> None:
    """Gather the parameters that `uses` has from `start_at` on. again: backward gathers them again."""
    nodes = [*uses]
    ranks, axis = params[nodes[0]].ranks, params[nodes[0]].axis
    start = Builder(program, start_at, region.first, NAME)(mfx.gather_region.default, nodes, ranks, axis)
    wait = Builder(program, region.first, region.first, NAME)(torch.ops._c10d_functional.wait_tensor.default, start)
    for made in (start, wait):
        of_many_modules(made, region.name)
    made_here = [wait] if not again else [start, wait]
    places = starts([n.meta[VAL].shape for n in nodes], ranks)
    for (node, users), at in zip(uses.items(), places, strict=False):
        param = params[node]
        build = Builder(program, region.first, users[0], NAME)
        part = build(aten.slice.Tensor, wait, 0, at, at + math.prod(param.shape))
        whole = build(aten.view.default, part, list(param.shape))
        made_here += [part, whole]
        mark(whole, param.placement)
        for user in users:
            user.replace_input_with(node, whole)
    made_here += _joins(program, uses, wait)
    for made in [start, *made_here]:
        made.meta.pop(PHASE, None)
        made.meta.pop(RECOMPUTE, None)
    for made in made_here:
        made.meta[RECOMPUTE] = True


def _joins(program: Program, uses: Mapping[fx.Node, list[fx.Node]], wait: fx.Node) -> list[fx.Node]:
    """Parameters that are read as one (`merge_linears`, which knows that they follow each other) become one view."""
    made = []
    for join in {u: None for users in uses.values() for u in users if u.target is mfx.join_parameters.default}:
        views = join.args[0]
        at = views[0].args[0].args[2]
        sizes = [v.meta[VAL].numel() for v in views]
        assert [v.args[0].args[2] - at for v in views] == [*accumulate(sizes, initial=0)][:-1]
        build = Builder(program, join, join, NAME)
        part = build(aten.slice.Tensor, wait, 0, at, at + join.meta[VAL].numel())
        whole = build(aten.view.default, part, list(join.meta[VAL].shape))
        mark(whole, join.meta.get(PLACEMENT))
        join.replace_all_uses_with(whole)
        made += [part, whole]
    return made


def gathers(graph: fx.Graph) -> Iterator[fx.Node]:
    """The gathers of a graph, in order."""
    yield from graph.find_nodes(op="call_function", target=mfx.gather_region.default)
