"""Weights that are gathered for products in FP8 alone are cast before: bytes travel, half of bf16's.

Before:  %w = wait_tensor(gather_region([%a, %b], 2, 'dp_shard')); %v = view(%w[:n]); %u = view(%w[n:])
         %m = fp8_amax(%v); %q, _, %s = fp8_quantize(%v, %m); ...; _, %qt, _ = fp8_quantize(%v, %m)   # in backward
After:   %m = wait_tensor(all_reduce(fp8_amax(%a), 'max')); %c, _, %s = fp8_quantize(%a, %m)          # of this rank's rows
         %g = wait_tensor(gather_region([%c], 2, 'dp_shard')); %q = view(%g); ...; %qt = fp8_transposed(%q)
         %w = wait_tensor(gather_region([%b], 2, 'dp_shard')); %u = view(%w)
Legal because: a cast is elementwise, so that the cast of a gather is the gather of casts; a scale is that of a row, which one
rank has, or of the largest of all ranks, without the padding of their last rows.

Megatron's `fp8_param_gather`, for `data_parallel="fsdp"`. Backward gathers bytes again, and transposes them.
A weight that something else reads (an embedding, a gradient in bf16) is gathered as it is, and so is one that autocast casts.
It has to run before `coalesce_maxima`, which takes the largest magnitudes of all weights in one collective.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import is_region_gather
from megafx.ir.nodes import in_backward
from megafx.ir.program import FQN, PHASE, PLACEMENT, RECOMPUTE, VAL, Builder, Phase, Program, recompute_val
from megafx.kernels.fp8.quantize import amax, quantize, transposed
from megafx.ops.gather_region import starts
from megafx.passes.communicate.read_shards import gather_what_is_read
from megafx.placements.data_axis import FSDP
from megafx.placements.types import Layout
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "gather_casts"
ROWS = 0  # of `fp8_amax`'s kept
aten, c10d, mfx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.megafx


def gather_casts(program: Program, context: CompileContext) -> int:
    """Return the number of weights whose bytes are gathered."""
    if context.config.fp8 is None or context.data is None or context.data.form != FSDP:
        return 0
    count = 0
    for gather in [n for n in program.graph.nodes if is_region_gather(n)]:
        count += _Gather(program, gather).move()
    if count:
        program.erase_unused()
        gather_what_is_read(program.graph)
        program.graph.lint()
    return count


@dataclass
class _Weight:
    """A view of what is gathered, which casts alone read. shards: what it is gathered from, in order."""

    view: fx.Node
    shards: list[fx.Node]
    largest: list[fx.Node]
    casts: list[fx.Node]


@dataclass
class _Cast:
    """Shards of a weight in FP8, and who reads it whole."""

    weight: _Weight
    q: list[fx.Node]
    scale: list[fx.Node]
    kept: int
    readers: list[fx.Node]


class _Gather:
    def __init__(self, program: Program, start: fx.Node) -> None:
        self.program, self.start = program, start
        self.shards, self.ranks, self.axis = start.args
        (self.wait,) = start.users
        self.build = Builder(program, start, start, NAME)

    def move(self) -> int:
        weights = [found for part in self.wait.users for view in part.users if (found := self._weight(view))]
        casts = [cast for weight in weights for cast in self._cast(weight)]
        for late in (False, True):  # what backward alone reads is gathered in backward alone
            these = [c for c in casts if all(map(in_backward, c.readers)) == late]
            if these:
                self._gather(these)
        for weight in weights:
            for node in (*weight.casts, *weight.largest):
                for item in [*node.users]:
                    self.program.graph.erase_node(item)
                self.program.graph.erase_node(node)
        return len(weights)

    def _weight(self, view: fx.Node) -> _Weight | None:
        """None where something else than a cast reads it."""
        _, _, at, end = view.args[0].args
        places = starts([s.meta[VAL].shape for s in self.shards], self.ranks)
        shards = [s for s, place in zip(self.shards, places, strict=False) if at <= place < end]
        largest = [n for n in view.users if n.target is amax]
        casts = [n for n in view.users if n.target is quantize]
        if not casts or len(largest) + len(casts) < len(view.users) or view.meta[VAL].ndim != 2:
            return None
        for found in largest:
            reduced = [n for n in found.users if n not in casts]
            if not all(n.target is c10d.all_reduce.default and n.args[1] == "max" for n in reduced):
                return None
            if reduced and found.args[1] == ROWS and len(shards) > 1:  # of rows that several shards have
                return None
        return _Weight(view, shards, largest, casts)

    # -- casts of shards

    def _cast(self, weight: _Weight) -> list[_Cast]:
        """One for each way of scaling."""
        largest: dict[fx.Node, list[fx.Node]] = {}
        for whole in weight.largest:
            largest |= self._largest(weight, whole)
        made: dict[Any, _Cast] = {}
        for old in weight.casts:
            found, kept, *how = old.args[1:5]
            key = (found, kept, *how)
            if key not in made:
                q, scale = [], []
                for shard, its in zip(weight.shards, largest[found], strict=True):
                    cast = self._made(quantize, shard, its, kept, *how, True, False)
                    q.append(self._made(operator.getitem, cast, 0))
                    scale.append(self._made(operator.getitem, cast, 2))
                made[key] = _Cast(weight, q, scale, kept, [])
            made[key].readers.append(old)
        return [*made.values()]

    def _largest(self, weight: _Weight, old: fx.Node) -> dict[fx.Node, list[fx.Node]]:
        """What casts read in place of the whole weight's -> that of each shard."""
        kept = old.args[1]
        each = []
        for shard in weight.shards:
            layout = Layout.contiguous(self._rows(weight, shard), self.ranks)
            padded = kept != ROWS and layout.padded(self.ranks)
            each.append(self.build(amax, shard, kept, *((0, [*layout.flat()]) if padded else (-1, [])), self.axis))
        if kept != ROWS:
            found = reduce(lambda a, b: self.build(aten.maximum.default, a, b), each)
            started = self.build(c10d.all_reduce.default, found, "max", self.axis)
            each = [self.build(c10d.wait_tensor.default, started)]
        result = {old: each if len(each) > 1 else each * len(weight.shards)}
        for reduced in [n for n in old.users if n.target is c10d.all_reduce.default]:
            # over tensor-parallel ranks, too
            (wait,) = reduced.users
            reduced.replace_input_with(old, each[0])
            for node in (reduced, wait):
                self.start.prepend(node)
                for key in (PHASE, RECOMPUTE):
                    node.meta.pop(key, None)
                recompute_val(self.program, node)
            result[wait] = [wait] * len(weight.shards)
        return result

    def _rows(self, weight: _Weight, shard: fx.Node) -> int:
        """Of the whole of what this is a shard of; only the last ranks of a weight by itself have padding."""
        rows = weight.view.meta[VAL].shape[0] if len(weight.shards) == 1 else shard.meta[VAL].shape[0] * self.ranks
        return int(rows)

    def _made(self, target: Any, *args: Any) -> fx.Node:
        """A node that backward recomputes."""
        node = self.build(target, *args)
        node.meta.pop(PHASE, None)
        node.meta[RECOMPUTE] = True
        return node

    # -- gathers

    def _gather(self, casts: Sequence[_Cast]) -> None:
        bytes_ = self._whole([shard for cast in casts for shard in cast.q])
        of_rows = [shard for cast in casts if cast.kept == ROWS for shard in cast.scale]
        scales = self._whole(of_rows) if of_rows else {}
        for cast in casts:
            first = bytes_[cast.q[0]]
            value = cast.weight.view.meta[VAL]
            q = self._view(first, list(value.shape), cast.weight)
            scale = cast.scale[0]
            if cast.kept == ROWS:
                lengths = [self._rows(cast.weight, shard) for shard in cast.weight.shards]
                parts = [self._view(scales[s], [n], cast.weight) for s, n in zip(cast.scale, lengths, strict=True)]
                scale = parts[0] if len(parts) == 1 else self._behind(aten.cat.default, parts)
            for old in cast.readers:
                for item in [n for n in old.users if n.users]:
                    made = {0: q, 2: scale}.get(item.args[1])
                    item.replace_all_uses_with(made or Builder(self.program, old, old, NAME)(transposed, q))

    def _whole(self, shards: list[fx.Node]) -> dict[fx.Node, tuple[fx.Node, int]]:
        """Shard -> where its whole is: (buffer, first element)."""
        start = self._made(mfx.gather_region.default, shards, self.ranks, self.axis)
        wait = self._behind(c10d.wait_tensor.default, start)
        for made in (start, wait):
            made.meta[FQN] = self.start.meta[FQN]
        places = starts([s.meta[VAL].shape for s in shards], self.ranks)
        return {shard: (wait, at) for shard, at in zip(shards, places, strict=False)}

    def _view(self, where: tuple[fx.Node, int], shape: list[int], weight: _Weight) -> fx.Node:
        flat, at = where
        part = self._behind(aten.slice.Tensor, flat, 0, at, at + math.prod(shape))
        whole = self._behind(aten.view.default, part, shape)
        if PLACEMENT in weight.view.meta and len(shape) == 2:
            whole.meta[PLACEMENT] = weight.view.meta[PLACEMENT]
        return whole

    def _behind(self, target: Any, *args: Any) -> fx.Node:
        """As `_made`, where the gather was waited for."""
        node = Builder(self.program, self.wait, self.wait, NAME)(target, *args)
        node.meta.pop(PHASE, None)
        node.meta[RECOMPUTE] = True
        return node
