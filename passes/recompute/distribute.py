"""Split the kept inputs of layers over the tensor-parallel ranks (`Config.distribute_saved_activations`).

Before:  %y = ...                                         # equal on all ranks, kept as the input of the next layer
After:   %p = rank_select(view(%y, [t, n/t]), 'tp'); %g = wait_tensor(all_gather_into_tensor(%p, t, 'tp'))
         %a = again(%y, view(%g, y's shape))              # %p is kept; what read %y reads %a
Legal because: ranks hold the same bits of a value that is not sharded; each keeps its part of the elements, in their order.

As in Megatron: for full recompute without sequence parallelism, which keeps slices anyway. One more gather per layer and step.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from megafx.analysis.kept import Kept, is_given, is_value
from megafx.ir.nodes import in_backward, mark, storage_of
from megafx.ir.program import PLACEMENT, RECOMPUTE, VAL, Program, new_call
from megafx.ir.sizes import SizeEmitter
from megafx.ops.again import AGAIN
from megafx.passes.communicate.emit import NodeOps
from megafx.passes.recompute.budget import NAME, layers_of, model_places
from megafx.planner.context import CompileContext


def distribute(program: Program, context: CompileContext, kept: Kept) -> int:
    """Return the number of values that are split."""
    if context.t == 1:
        return 0
    layer = layers_of(program)
    places = model_places(program, layer)
    outputs = {storage_of(r) for r in program.results() if isinstance(r, fx.Node)}
    count = 0
    for value in [n for n in program.graph.nodes if n in kept.saved and is_value(n) and not is_given(n)]:
        readers = kept.readers[value]
        inside = any(layer.get(r) in places for r in readers) and not any(r in kept.lazy for r in readers)
        if not inside or in_backward(value) or storage_of(value) in outputs or not _is_whole(value):
            continue
        dim = _even_dim(value.meta[VAL], context.t)
        if dim is None:
            program.note("recompute", f"kept whole on each rank: no dim of it divides by {context.t}", value)
        else:
            _spread(program, context, value, dim)
            count += 1
    return count


def _is_whole(value: fx.Node) -> bool:
    """True if all ranks hold the same values. For a sum that is fused with a norm, by the norm's placement."""
    if not value.meta[VAL].is_floating_point() or value.meta[VAL].dim() < 2:
        return False
    placement = value.meta.get(PLACEMENT)
    source = value.args[0] if value.args else None
    if placement is None and isinstance(source, fx.Node) and "_norm" in str(source.target):
        alike = [u for u in source.users if PLACEMENT in u.meta and u.meta[VAL].dim() == value.meta[VAL].dim()]
        placement = alike[0].meta[PLACEMENT] if alike else None
    return placement is not None and placement.kind in ("I", "R")


def _even_dim(value: torch.Tensor, t: int) -> int | None:
    return next((d for d, n in reversed([*enumerate(value.shape)]) if isinstance(n, int) and n % t == 0), None)


def _spread(program: Program, context: CompileContext, value: fx.Node, dim: int) -> None:
    t, readers, shape = context.t, list(value.users), value.meta[VAL].shape
    where = value.next
    ops = NodeOps(program, where, SizeEmitter(program.graph, program.sizes), context.solved.axis, NAME)
    ops.build.origin = value
    part = math.prod(n // t if d == dim else n for d, n in enumerate(shape))
    own = ops.rank_select(ops.view(ops.contiguous(value), [t, part]))
    first = len(ops.emitted)
    back = ops.view(ops.all_gather(own, t), [*shape])
    both = new_call(where, AGAIN, (value, back), value.meta[VAL], value, NAME)
    for node in (*ops.emitted[first:], both):
        node.meta[RECOMPUTE] = True
    mark(both, value.meta.get(PLACEMENT))
    for reader in readers:
        reader.replace_input_with(value, both)
