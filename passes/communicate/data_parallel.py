"""Add the collectives of parameters' gradients on the data-parallel axis.

Before:  return loss, ..., %da, %db                   # of this rank's rows
After:   %c = cat([%db.view(-1), %da.view(-1)]); %s = all_reduce(%c, 'dp'); ...; %w = wait_tensor(%s)
         return loss, ..., %w[n:].view(a's shape), %w[:n].view(b's shape)
Legal because: the loss is the sum over ranks of what they hold of it (`Batch.outputs`), so a parameter's gradient is the sum
of theirs; where the loss is not in the graph it is divided by their number, as DistributedDataParallel does.

The gradient of experts (`hold_experts`) is that of the tokens of all ranks that share them out, and is summed over those that
have the same ones. Of a parameter that ranks hold shards of, each keeps its rows of the sum: reduce-scatter instead of
all-reduce, in one collective for a region (megafx/analysis/layers.py); groups of ranks that hold copies of the shards then sum
these in an all-reduce. A tensor-parallel rank that holds whole rows too first takes those of the rows that it is to keep.

A bucket is reduced as soon as backward has made the last of its gradients. Source: Li et al. 2020, PyTorch Distributed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from megafx.analysis.layers import Layers
from megafx.ir.nodes import BACKWARD, shows_operand, storage_of
from megafx.ir.program import PHASE, VAL, Builder, Phase, Program
from megafx.ir.sizes import SizeEmitter
from megafx.ops.owners import OWNER_PARAMETER_GRADIENT
from megafx.passes.communicate.emit import NodeOps, join_flat, of_many_modules, split_flat
from megafx.placements.data_axis import (
    BATCH_AXIS,
    EXPERT_GRADIENT_AXIS,
    EXPERT_REPLICA_AXIS,
    GRADIENT_AXIS,
    REPLICA_AXIS,
    SAME_EXPERTS_AXIS,
    TENSOR_AXIS,
    DataAxis,
    rows_of,
)
from megafx.placements.moves import apply_transition, to_stacked
from megafx.placements.types import Placement
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
NAME = "data_parallel"
aten, mfx = torch.ops.aten, torch.ops.megafx


def data_parallel(program: Program, context: CompileContext) -> int:
    """Return the number of collectives added.

    context.gradients: "hold" and "accumulate" leave gradients this rank's own (`no_sync`); the others reduce them.
    """
    if context.data is None:
        return 0
    adder = _Adder(program, context.data, context.t, context.solved.params)
    if context.gradients in ("reduce", "add"):
        adder.reduce_gradients()
    program.batch = replace(adder.batch, reduced=True)
    program.erase_unused()
    program.graph.lint()
    return adder.count


@dataclass
class _Gradients:
    """Gradients that are reduced as one. base: the value that they show; results: their places among the outputs."""

    base: fx.Node
    results: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        value = self.base.meta[VAL]
        return int(value.numel() * value.element_size())


class _Adder:
    def __init__(self, program: Program, data: DataAxis, t: int, stored: Mapping[str, Placement]) -> None:
        assert program.batch is not None, "place_axes has not run"
        self.program, self.data, self.batch, self.t, self.stored = program, data, program.batch, t, stored
        self.sizes = SizeEmitter(program.graph, program.sizes)
        self.count = 0

    # -- gradients of parameters

    def reduce_gradients(self) -> None:
        """Make gradients views of the reduced bucket."""
        output = self.program.output_node()
        for bucket in self._buckets():
            if self._of_experts(bucket[0]) and self.data.alike == 1:
                sums = [self._complete(gradients.base) for gradients in bucket]
            else:
                sums = self._scattered(bucket) if self._sharded(bucket[0]) else self._reduced(bucket)
            for gradients, total in zip(bucket, sums, strict=True):
                results, build = list(self.program.results()), Builder(self.program, output, total, NAME)
                for i in gradients.results:
                    results[i] = _same_view(build, results[i], gradients.base, total)
                output.args = (tuple(results),)

    def _base(self, node: fx.Node) -> fx.Node:
        """The value that a gradient shows: of experts of a list, that of all experts of a rank."""
        if node.target is OWNER_PARAMETER_GRADIENT:
            return storage_of(node.args[0])
        return node if self.data.sharded else storage_of(node)

    def _buckets(self) -> list[list[_Gradients]]:
        """In the order in which backward makes them."""
        found: dict[fx.Node, _Gradients] = {}
        for i, node, _ in self.program.parameter_gradients():
            base = self._base(node)
            found.setdefault(base, _Gradients(base)).results.append(i)
        order = {n: i for i, n in enumerate(self.program.graph.nodes)}
        buckets: list[list[_Gradients]] = []
        for together in self._regions(sorted(found.values(), key=lambda g: order[g.base])):
            last = buckets[-1] if buckets else []
            size = sum(g.bytes for g in (*last, *together))
            if (
                last
                and not self._varies(together[0])
                and size <= self.data.bucket_bytes
                and self._kind(last[0]) == self._kind(together[0])
            ):
                last += together
            else:
                buckets.append(together)
        for bucket in buckets:
            bucket.sort(key=lambda g: order[g.base])
        return buckets

    def _regions(self, gradients: list[_Gradients]) -> list[list[_Gradients]]:
        """What is not to be split: the gradients of one kind of a region, where they are scattered, else each."""
        if not self.data.sharded:
            return [[g] for g in gradients]
        nodes = self.program.input_nodes()
        layers = Layers.of({spec.name: n.meta[VAL].shape for n, spec in nodes if spec.kind == "param"})
        names = layers.regions(self.program.outputs[g.results[0]].name for g in gradients)
        found: dict[Any, list[_Gradients]] = defaultdict(list)
        for name, g in zip(names, gradients, strict=True):
            found[name, self._kind(g)].append(g)
        return [*found.values()]

    def _sharded(self, gradients: _Gradients) -> bool:
        if self._of_experts(gradients):
            return self.data.same_experts > 1
        return self.data.sharded and gradients.base.meta[VAL].ndim > 0

    def _of_experts(self, gradients: _Gradients) -> bool:
        """True if a rank has its experts alone: the tokens of the ranks that have others went into it."""
        return self.program.outputs[gradients.results[0]].name in self.batch.experts

    def _varies(self, gradients: _Gradients) -> bool:
        """Whether other ranks than the owner of an expert have no rows of it, so that no size of a bucket with it is theirs."""
        place = gradients.results[0]
        owned = self.batch.experts.get(self.program.outputs[place].name, -1) >= 0
        return owned and [*self.program.results()][place].target is not OWNER_PARAMETER_GRADIENT

    def _kind(self, gradients: _Gradients) -> tuple[Any, ...]:
        value = gradients.base.meta[VAL]
        return value.dtype, value.device, self._sharded(gradients), self._of_experts(gradients), self._varies(gradients)

    def _complete(self, base: fx.Node) -> fx.Node:
        """The gradient of experts that no other rank has."""
        if self.batch.summed:
            return base
        return _marked(Builder(self.program, base.next, base, NAME)(aten.div.Scalar, base, self.data.ranks))

    def _reduced(self, bucket: list[_Gradients]) -> list[fx.Node]:
        """What the gradients of the bucket are over all ranks."""
        last = bucket[-1].base
        where = last.next if last.op != "placeholder" else self.sizes.anchor
        build = Builder(self.program, where, last, NAME)
        values = [g.base for g in bucket]
        joined = last if len(bucket) == 1 else join_flat(build, values, values)
        if not self.batch.summed:
            joined = build(aten.div.Scalar, joined, self.data.ranks)
        axis, ranks = BATCH_AXIS if self.data.cp == 1 else GRADIENT_AXIS, self.data.ranks * self.data.cp
        if self._of_experts(bucket[0]):
            axis, ranks = EXPERT_GRADIENT_AXIS, self.data.alike
        ops = NodeOps(self.program, where, self.sizes, axis, NAME)
        ops.build.origin = last
        total = apply_transition(joined, "P", "I", [], [], ranks, ops)
        self.count += 1
        if len(bucket) == 1:
            return [_marked(total)]
        build = Builder(self.program, self.program.output_node(), last, NAME)
        shapes = [v.meta[VAL].shape for v in values]
        return split_flat(build, of_many_modules(_marked(total)), shapes, values, {PHASE: BACKWARD})

    def _scattered(self, bucket: list[_Gradients]) -> list[fx.Node]:
        """This rank's rows of what the gradients of the bucket are over all ranks."""
        where, data = bucket[-1].base.next, self.data
        ranks, axis, copies, between_axis = data.sharing, data.shard_axis, data.replicas, REPLICA_AXIS
        if self._of_experts(bucket[0]):
            ranks, axis, copies = data.same_experts, SAME_EXPERTS_AXIS, data.alike // data.same_experts
            between_axis = REPLICA_AXIS if data.cp == 1 else EXPERT_REPLICA_AXIS
        ops = NodeOps(self.program, where, self.sizes, axis, NAME)
        parts, shapes = [], []
        for gradients in bucket:
            ops.build.origin = gradients.base
            stacked = self._stacked(gradients, where)
            shapes.append([*ops.shape(stacked)][1:])
            parts.append(ops.view(ops.contiguous(stacked), [ranks, math.prod(shapes[-1])]))
        joined = parts[0] if len(parts) == 1 else ops.call(aten.cat.default, parts, 1)
        if not self.batch.summed:
            joined = ops.call(aten.div.Scalar, joined, self.data.ranks)
        length = sum(math.prod(shape) for shape in shapes)
        total = ops.reduce_scatter(ops.view(joined, [ranks * length]), ranks)
        self.count += 1
        if copies > 1:
            between = NodeOps(self.program, where, self.sizes, between_axis, NAME)
            between.build.origin = bucket[-1].base
            total = between.all_reduce(total)
            ops.emitted += between.emitted
            self.count += 1
        for made in ops.emitted:
            _marked(made)
        build = Builder(self.program, self.program.output_node(), bucket[-1].base, NAME)
        if len(bucket) == 1:
            return [_marked(build(aten.view.default, total, shapes[0]))]
        return split_flat(build, of_many_modules(total), shapes, [g.base for g in bucket], {PHASE: BACKWARD})

    def _stacked(self, gradients: _Gradients, where: fx.Node) -> fx.Node:
        """[n, ...] -> [ranks that scatter, rows of one, ...]."""
        node = gradients.base
        cut = self.stored[self.program.outputs[gradients.results[0]].name].is_shard
        alone, ranks, layout = rows_of(node.meta[VAL].shape[0], self.data, self.t, cut, self._of_experts(gradients))
        ops = NodeOps(self.program, where, self.sizes, TENSOR_AXIS, NAME)
        ops.build.origin = node
        stacked: fx.Node = to_stacked(ops.contiguous(node), 0, layout.flat(), ranks, ops)
        if not alone:  # this tensor-parallel rank's rows of each
            shape = [*ops.shape(stacked)]
            split = ops.view(ops.contiguous(stacked), [self.data.sharing, self.t, *shape[1:]])
            order = [1, 0, *range(2, len(shape) + 1)]
            stacked = ops.rank_select(ops.contiguous(ops.call(aten.permute.default, split, order)))
        for made in ops.emitted:
            _marked(made)
        return stacked


def _same_view(build: Builder, node: fx.Node, base: fx.Node, total: fx.Node) -> fx.Node:
    """`node`, a view of `base`, as a view of `total`."""
    if node is base:
        return total
    assert shows_operand(node) or node.target is OWNER_PARAMETER_GRADIENT
    source = _same_view(build, node.args[0], base, total)
    build.origin = node
    target: Callable[..., Any] = node.target
    return build(target, source, *node.args[1:], **node.kwargs)


def _marked(node: fx.Node) -> fx.Node:
    node.meta[PHASE] = BACKWARD
    return node
