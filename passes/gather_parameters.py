"""Gather parameters that data-parallel ranks hold shards of, where they are used.

Before:  %w (a parameter);            %y = mm(%x, t(%w))
After:   %w (this rank's rows of it); %s = all_gather_into_tensor(%w, 2, 'dp_shard'); %g = wait_tensor(%s)
         %y = mm(%x, t(view(%g)))
Legal because: ranks hold consecutive rows of one value, padded to be of equal number; put together they are the value.

A parameter is gathered once a region: the modules of one layer (the path up to its first number), or one module outside of
layers. In the form 'fsdp' nothing of it is kept: backward gathers again (ir.RECOMPUTE), each where it needs it.
`schedule_collectives` and `partition` start a gather a product before its use. In the form 'zero1' what forward gathered is
kept for backward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx

from megafx.aliasing import storage_of
from megafx.collectives import COPY_AXIS, SHARD_AXIS
from megafx.data_axis import FSDP, DataAxis, rows_of
from megafx.ir import PHASE, PLACEMENT, RECOMPUTE, VAL, Phase, Program, fqn_of
from megafx.passes.expand_common import NodeOps
from megafx.placements import Placement
from megafx.sizes import SizeEmitter
from megafx.stacking import move

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "gather_parameters"
aten = torch.ops.aten
_REGION = re.compile(r"(.*?\.\d+)(\.|$)")


def gather_parameters(program: Program, data: DataAxis, t: int, stored: Mapping[str, Placement]) -> int:
    """Return the number of gathers added. stored: placement of each parameter on the t tensor-parallel ranks."""
    sizes = SizeEmitter(program.graph, program.sizes)
    count = 0
    for node, spec in zip(program.placeholders(), program.inputs, strict=True):
        if spec.kind == "param" and node.meta[VAL].ndim:
            count += _gather(program, node, data, t, stored[spec.name].is_shard, sizes)
    if data.form == FSDP:
        _repeat_casts(program)
    program.graph.lint()
    program.gm.recompile()
    return count


def region_of(fqn: str) -> str:
    """'model.layers.3.mlp.up' -> 'model.layers.3'; outside of layers the module itself."""
    found = _REGION.match(fqn)
    return found[1] if found else fqn


def _gather(program: Program, param: fx.Node, data: DataAxis, t: int, cut: bool, sizes: SizeEmitter) -> int:
    whole = param.meta[VAL]
    alone, ranks, layout = rows_of(whole.shape[0], data, t, cut)
    with program.fake_mode:
        param.meta[VAL] = whole.new_empty([layout.local_size(ranks), *whole.shape[1:]])
    placement = param.meta.pop(PLACEMENT, None)
    regions: dict[str, list[fx.Node]] = defaultdict(list)
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    for user in sorted(param.users, key=order.__getitem__):
        regions[region_of(fqn_of(user))].append(user)
    for users in regions.values():
        forward = [u for u in users if u.meta.get(PHASE) != "backward" and u.op != "output"]
        ops = NodeOps(program, (forward or users)[0], sizes, SHARD_AXIS if alone else COPY_AXIS, NAME)
        gathered = move(param, "S0", "R", layout.flat(), [], ranks, ops)
        if placement is not None:
            gathered.meta[PLACEMENT] = placement
        for user in users:
            user.replace_input_with(param, gathered)
        for made in ops.emitted:
            made.meta.pop(PHASE, None)  # backward's own uses repeat it, or read what forward kept
            if data.form == FSDP:
                made.meta[RECOMPUTE] = True
    return len(regions)


def _repeat_casts(program: Program) -> None:
    """A cast of a gathered parameter (autocast's) is made again in backward, as the parameter is."""
    for node in program.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if storage_of(node.args[0]).meta.get(RECOMPUTE) and node.meta.get(PHASE) != "backward":
            node.meta[RECOMPUTE] = True
