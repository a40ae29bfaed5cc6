"""Linears that read one value become one linear, where that pays: gate and up, queries, keys and values.

Before:  %g = linear(%x, %w0); %u = linear(%x, %w1); %y = megafx.glu(%g, %u, act)
After:   %w = megafx.join_parameters([%w0, %w1]); %m = linear(%x, %w); %y = megafx.glu_packed(%m, None, act)

Before:  %q = linear(%x, %w0, %b0); %k = linear(%x, %w1, %b1); %v = ...
After:   %w = megafx.join_parameters([%w0, ...]); %b = ...; %m = linear(%x, %w, %b); %q = slice(%m, ...); ...
Legal because: rows of a linear's weight give columns of its result, independently of each other.

Each rank merges its own shards, after planning. The parameters stay the user's: they are put into one memory where that is
possible, else copied together at each call. Shards of data-parallel ranks are gathered side by side (`gather_parameters`).

Measurements of the device decide, else these counts. Gate and up: nothing is moved for it, since the packed kernels read and
write the one tensor. Others, in training: the gradients of m parts are copied together, 2 N elements a token (N columns in
all), and 4 (m - 1) k elements of x [tokens, k] and its gradient are not read and written again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from megafx.analysis.joined_parameters import leaves_gaps, placed_together, stored_parameters, why_not_one
from megafx.config import MEASURE_NOTHING
from megafx.ir.nodes import mark
from megafx.ir.program import PLACEMENT, VAL, Builder, Fusion, Phase, Program, fqn_of, inherit, source_of
from megafx.kernels import join_parameters  # noqa: F401  registers the ops
from megafx.placements.types import Placement
from megafx.planner.context import CompileContext, price_workload
from megafx.planner.fusion_profile import MERGE_GATE_UP, MERGE_LINEARS, mode_of
from megafx.rewrite.driver import fold

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "merge_linears"
ops, aten = torch.ops.megafx, torch.ops.aten


def merge_linears(program: Program, context: CompileContext) -> int:
    """Return the number of linears that others took over."""
    if not context.config.merge_linears:
        return 0
    merger = _Merger(program, context)
    for group, gated in list(merger.groups()):
        merger.consider(group, gated)
    merger.say()
    if merger.changes:
        program.erase_unused()
    return merger.changes


class _Merger:
    def __init__(self, program: Program, context: CompileContext) -> None:
        self.program, self.context, self.trains = program, context, context.wants_grad
        self.params = stored_parameters(program)
        self.changes = 0
        self.reported: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)  # (folded module, what) -> linears
        price_workload(program, context.config)

    def groups(self) -> Iterator[tuple[list[fx.Node], fx.Node | None]]:
        """Linears of one value: gate and up of a gated unit (with that), and those whose modules are of one module."""
        taken: set[fx.Node] = set()
        for unit in self.program.graph.find_nodes(op="call_function", target=ops.glu.default):
            pair = list(unit.args[:2])
            linears = all(isinstance(n, fx.Node) and n.target is aten.linear.default for n in pair)
            if linears and pair[0] is not pair[1] and pair[0].args[0] is pair[1].args[0]:
                taken |= {*pair}
                yield pair, unit
        found: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.program.graph.find_nodes(op="call_function", target=aten.linear.default):
            if node not in taken:
                found[node.args[0], self.name(node).rpartition(".")[0]].append(node)
        yield from ((group, None) for group in found.values() if len(group) > 1)

    def name(self, node: fx.Node) -> str:
        """'layers.0.attn.q' for the linear of layers.0.attn.q.weight; its module where it has no parameter."""
        known = self.params.get(node.args[1])
        return known.name.removesuffix(".weight") if known else fqn_of(node)

    def consider(self, group: list[fx.Node], gated: fx.Node | None) -> None:
        refusal = self.refusal(group, gated)
        slower, why = (True, refusal) if refusal else self.judge(group, gated)
        if not slower:
            self.merge(group, gated)
        self.tell(group, ("not merged: " if slower else "merged: ") + why)

    # -- whether

    def refusal(self, group: list[fx.Node], gated: fx.Node | None) -> str:
        """Why these cannot be merged, or ''."""
        if len({len(_biases(n)) for n in group}) > 1:
            return "some have a bias, others none"
        weights: list[Any] = [n for node in group for n in (node.args[1], *_biases(node))]
        if reason := why_not_one(weights, self.params, self.trains):
            return reason
        if len({(n.args[1].meta[VAL].dtype, n.args[1].meta[VAL].device) for n in group}) > 1:
            return "their dtypes or devices differ"
        if gated is not None and any({*n.users} != {gated} for n in group):
            return "what goes into the gated unit is used elsewhere too"
        widths = [n.args[1].meta[VAL].shape[0] for n in group]
        if gated is not None and widths[0] != widths[1]:
            return "gate and up have different widths"
        for values in (group, [n.args[1] for n in group], [b for n in group for b in _biases(n)]):
            if values and values is not group and leaves_gaps(values, self.context.data, self.context.t):
                return "their rows do not divide by the data-parallel ranks, so they are not gathered side by side"
            if values and self.together(values) is None:
                return "they are placed apart: " + ", ".join(str(v.meta.get(PLACEMENT)) for v in values)
        return ""

    def together(self, values: list[Any]) -> Placement | str | None:
        """The placement of parameters one below the other, or of results with their columns side by side."""
        stored = values[0] in self.params
        return placed_together(values, 0 if stored else values[0].meta[VAL].dim() - 1, self.context.t)

    def judge(self, group: list[fx.Node], gated: fx.Node | None) -> tuple[bool, str]:
        """(whether it is slower, by what that is known)."""
        pattern = MERGE_LINEARS if gated is None else MERGE_GATE_UP
        training = self.trains is not None
        columns = sum(n.args[1].meta[VAL].shape[0] for n in group)
        profile = self.context.fusions
        if profile is not None and profile.measured(pattern):
            mode = mode_of(self.context.config.compile is True, training)
            shape = self.program.sizes.shape(group[0].meta[VAL])
            elements = self.program.sizes.workload(math.prod(shape[:-1])) * columns
            slower = profile.slower(pattern, elements, mode)
            if slower is None:
                return False, f"pays as measured on {profile.device}, {mode}"
            times = f"{slower[0]:.4g} ms against {slower[1]:.4g} ms, {mode}"
            return True, f"slower by measurement on {profile.device} ({times})"
        if self.context.config.fusion_profile == MEASURE_NOTHING:
            return False, "whatever it costs (fusion_profile)"
        if gated is not None:
            return False, "the packed kernels read and write one tensor"
        k = int(group[0].args[1].meta[VAL].shape[1])
        copied, spared = (2 * columns, 4 * (len(group) - 1) * k) if training else (0, (len(group) - 1) * k)
        return copied >= spared, f"by count, {copied} elements a token are copied for {spared} that are not moved"

    # -- how

    def merge(self, group: list[fx.Node], gated: fx.Node | None) -> None:
        program, first = self.program, min(group)
        build = Builder(program, first, first, NAME)
        weight = self._join(build, [n.args[1] for n in group])
        bias = self._join(build, [_biases(n)[0] for n in group]) if _biases(group[0]) else None
        own = () if bias is None or gated is not None else (bias,)  # the packed unit adds it
        operands = (group[0].args[0], weight, *own)
        whole = mark(build(aten.linear.default, *operands), self.together(group))
        elements = math.prod(program.sizes.shape(whole.meta[VAL]))
        pattern = MERGE_LINEARS if gated is None else MERGE_GATE_UP
        module = self.name(group[0]).rpartition(".")[0]
        program.fusions.append(Fusion(pattern, module, source_of(first), NAME, elements))
        self.changes += len(group) - 1
        if gated is not None:
            build = Builder(program, gated, gated, NAME)
            self._replace(gated, build(ops.glu_packed.default, whole, bias, gated.args[2]))
            return
        at, dim = 0, whole.meta[VAL].dim() - 1
        for node in group:
            width = int(node.meta[VAL].shape[-1])
            self._replace(node, build(aten.slice.Tensor, whole, dim, at, at + width))
            at += width

    def _join(self, build: Builder, parameters: list[Any]) -> fx.Node:
        return mark(build(ops.join_parameters.default, parameters), self.together(parameters))

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        inherit(new, old, NAME)
        mark(new, old.meta.get(PLACEMENT))
        old.replace_all_uses_with(new)

    # -- what is reported

    def tell(self, group: list[fx.Node], what: str) -> None:
        names = [self.name(n) for n in group]
        module = names[0].rpartition(".")[0]
        short = ", ".join(n.rpartition(".")[2] for n in names)
        self.reported[fold(module), f"{short} {fold(what)}"].append(group[0])

    def say(self) -> None:
        for (_, what), nodes in self.reported.items():
            more = f"; {len(nodes)} places alike" if len(nodes) > 1 else ""
            self.program.note("merge", what + more, nodes[0])


def _biases(node: fx.Node) -> list[Any]:
    return [b for b in node.args[2:] if b is not None]
