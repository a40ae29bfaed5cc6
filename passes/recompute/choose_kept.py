"""Choose what is kept for backward, and what backward recomputes: checkpointed regions, Megatron's options, a budget in bytes.

Before:  %n = layer_norm_forward(%x, %w); %y = %n[0]; %g = gelu(mm(%y, %v))        # backward reads %y, and the product
After:   the same graph; %n, %y and the product are tagged (ir.RECOMPUTE)          # recomputed from %x
Legal because: tagged ops have no side effects and give the same bits when they run again; dropout draws from a counter, which
is an argument. Where that is not known (ops of users, of the data-parallel axis, of one rank) the result is kept. The choice
is made on the program of all ranks, from its sizes and prices alone, so it is the same on each.

1. Regions (regions.py): values that are read only inside a region are recomputed from the region's inputs.
2. Offload (offload.py): kept values of some layers wait on the host.
3. The budget (budget.py): values are dropped one after the other, the cheapest per byte first, until the rest fits.

A sum that is fused with its norm is split for backward (`split_norms`), which can keep the sum and recompute the norm.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

import megafx.kernels.norm.add_norm  # noqa: F401  registers the ops
from megafx.analysis.kept import Kept, is_given, total_bytes
from megafx.analysis.prices import seconds
from megafx.config import Config
from megafx.ir.nodes import in_backward, storage_of
from megafx.ir.program import FQN, RECOMPUTE, REGION, VAL, Phase, Program, Recomputed, fqn_of, new_call, tensors_of
from megafx.ops.again import AGAIN
from megafx.ops.offload import is_on_host
from megafx.passes.recompute.budget import NAME, Spender, layers_of, promised_bytes, whole
from megafx.passes.recompute.distribute import distribute
from megafx.passes.recompute.offload import Offload, emit_offload
from megafx.passes.recompute.regions import regions_of, tag_regions
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
mfx = torch.ops.megafx

# Fused sum and norm -> (the norm alone, those of the fused op's arguments that it takes).
_NORMS: dict[Any, tuple[Any, slice]] = {
    mfx.bias_dropout_add_layer_norm.default: (mfx.layer_norm_forward.default, slice(3, 6)),
    mfx.bias_dropout_add_rms_norm.default: (mfx.rms_norm_forward.default, slice(3, 6)),
}


def choose_kept(program: Program, context: CompileContext) -> int:
    """Tag what backward recomputes; return the number of nodes. `program.recomputed` has the result."""
    with program.sizes.at_call() if context.at_call else contextlib.nullcontext():
        return _choose(program, context)


def _choose(program: Program, context: CompileContext) -> int:
    if not any(o.kind == "gradient" for o in program.outputs) or not is_asked(program, context.config):
        return 0
    again = split_norms(program)
    before = _kept(program)
    without = total_bytes(program, before.saved)
    regions = regions_of(program, context)
    tags = tag_regions(program, context, regions)
    mark(tags)
    promise = promised_bytes(context.config.activation_memory_budget, without)
    kept, offload = _kept(program), None
    if context.config.cpu_offloading:
        offload = Offload(program, context, kept, layers_of(program))
        offload.choose(total_bytes(program, kept.saved), promise)
    if promise is not None:
        mark(Spender(program, context, kept, offload).spend(promise))
    before_joining = {both: both.all_input_nodes[0] for both in again}
    join_norms(program, again)
    moved = 0
    if context.config.distribute_saved_activations:
        distribute(program, context, _kept(program))
    if offload is not None:
        kept = _kept(program)
        away = dict.fromkeys(before_joining.get(n, n) for n in offload.away)
        moved = emit_offload(program, [n for n in kept.saved if n in away], layers_of(program))
    kept = _kept(program)
    made = [n for n in kept.again if n.meta.get(RECOMPUTE) and n not in before.again]
    time = sum(seconds(program, n, context.hardware, context.t) for n in made)
    absolute = isinstance(context.config.activation_memory_budget, int) or context.fits
    at = kept_formula(program, kept) if absolute and context.at_call else None
    program.recomputed = Recomputed(without, total_bytes(program, kept.saved), promise, time, at, moved)
    program.graph.lint()
    return len(made)


def is_asked(program: Program, config: Config) -> bool:
    """True if anything that is not free is to be recomputed or offloaded."""
    asked = config.activation_memory_budget is not None or config.recompute_granularity is not None
    if asked or config.cpu_offloading:
        return True
    return any(n.meta.get(REGION) is not None for n in program.graph.nodes)


def kept_formula(program: Program, kept: Kept) -> sympy.Expr:
    """The bytes that are kept, as a formula of a call's sizes."""
    sizes = program.sizes
    here = [node for node in kept.saved if not is_given(node) and not is_on_host(node)]
    values = [v for node in here for v in tensors_of(node)]
    return sympy.Add(*(sizes.expr(math.prod(sizes.shape(v))) * v.element_size() for v in values))


def _kept(program: Program) -> Kept:
    return Kept(program, lambda n: bool(n.meta.get(RECOMPUTE)))


def mark(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        node.meta[RECOMPUTE] = True


# -- norms that are fused with the sum before them


def split_norms(program: Program) -> list[fx.Node]:
    """Let backward recompute the norm of each fused sum and norm from the sum; returns the `megafx.again` nodes."""
    made = []
    for node in list(program.graph.nodes):
        parts = {u.args[1]: u for u in node.users} if node.target in _NORMS and not in_backward(node) else {}
        if 0 not in parts or 1 not in parts:
            continue
        total, normed = parts[0], parts[1]
        for part in reversed([*parts.values()]):
            node.append(part)
        op, taken = _NORMS[node.target]
        reader = next((r for r in normed.users if not in_backward(r)), normed)
        summed = max(whole(storage_of(node.args[0])), whole(storage_of(node.args[2])))
        statistics = [part for index, part in sorted(parts.items()) if index > 0]
        where = max(parts.values()).next
        emit = lambda op, args, value, at=(where, normed): new_call(at[0], op, args, value, at[1], NAME)
        norm = emit(op, (total, *node.args[taken]), tuple(part.meta[VAL] for part in statistics))
        new = [norm]
        for index, part in parts.items():
            if index > 0:
                readers = list(part.users)
                other = emit(operator.getitem, (norm, index - 1), part.meta[VAL])
                both = emit(AGAIN, (part, other), part.meta[VAL])
                for each in readers:
                    each.replace_input_with(part, both)
                new += [other, both]
                made.append(both)
        for each in (node, total):  # the sum belongs to the module before it, the norm to its reader
            each.meta[FQN] = fqn_of(summed)
            each.meta[REGION] = summed.meta.get(REGION)
        for each in new:
            each.meta[FQN] = fqn_of(reader)
            each.meta[REGION] = reader.meta.get(REGION)
    return made


def join_norms(program: Program, again: list[fx.Node]) -> None:
    """Remove the recomputed norms that backward does not use."""
    for both in again:
        if not both.meta.get(RECOMPUTE):
            normed, other = both.all_input_nodes
            both.replace_all_uses_with(normed)
            for node in (both, other, *other.all_input_nodes):
                if not node.users:
                    program.graph.erase_node(node)
