"""Largest magnitudes of values of the joint graph, for their casts to FP8: the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.contracts import is_transition, layout_of
from megafx.ir.program import PLACEMENT, VAL, Builder, Program
from megafx.ir.sizes import SizeEmitter
from megafx.kernels.fp8.quantize import amax
from megafx.placements.types import M, Placement, R, S
from megafx.planner.context import CompileContext
from megafx.rules.inference import infer

TRANSITION = torch.ops.megafx.transition.default


class Maxima:
    """What ranks hold of values, and what they find of their largest magnitudes together."""

    def __init__(self, program: Program, context: CompileContext) -> None:
        self.program, self.config, self.t = program, context.config, context.t
        self.axis, self.stored = (context.solved.axis, context.solved.params) if context.t > 1 else ("tp", {})
        self.sizes = SizeEmitter(program.graph, program.sizes)
        self.params = {node: spec.name for node, spec in program.input_nodes() if spec.kind == "param"}
        self.maxima: dict[Any, fx.Node] = {}
        self.seen: dict[fx.Node, Placement] = {}

    def placement(self, node: fx.Node) -> Placement:
        """Of a forward value: what it is marked with, else what its op makes of what its operands are."""
        if self.t == 1:
            return R
        if node in self.params:
            return self.stored[self.params[node]]
        if PLACEMENT in node.meta:
            found: Placement = node.meta[PLACEMENT]
            return found
        if is_transition(node):
            return Placement.parse(str(node.args[2]), layout_of(self.program, node.args[4]))
        if node not in self.seen:
            operands = {n: self.placement(n) for n in node.all_input_nodes if isinstance(n.meta[VAL], torch.Tensor)}
            made = infer(node, operands, self.t, self.program.sizes) if node.op == "call_function" else R
            self.seen[node] = made if isinstance(made, Placement) else R
        return self.seen[node]

    def largest(
        self, build: Builder, source: fx.Node, value: fx.Node, held: Placement, kept: int, pads: bool = False
    ) -> fx.Node:
        """The largest magnitudes of `source`, which ranks hold so: over all ranks, but for those that a rank's rows have.

        value: `source`, or what it is gathered to. pads: padding may hold anything along any dim.
        """
        if (source, kept) in self.maxima:
            return self.maxima[source, kept]
        cut: tuple[Any, ...] = (-1, [], self.axis)
        gathered = source is not value
        # Pads of parameters are zeros, and so are those along a dim that is summed over.
        if held.is_shard and held.dim != kept and source not in self.params and (gathered or pads or held.dim == 0):
            flat = value.args[3] if gathered else [self.sizes(n) for n in held.flat_layout]
            cut = held.dim, flat, self.axis
        found = build(amax, source, kept, *cut)
        found.meta[PLACEMENT] = R
        if held.is_shard and held.dim == kept:
            found.meta[PLACEMENT] = S(0, held.cut)
        elif held.is_shard:
            found.meta[PLACEMENT] = M
            found = build(TRANSITION, found, "M", "R", [], [], self.axis, self.t)
            found.meta[PLACEMENT] = R
        self.maxima[source, kept] = found
        return found
