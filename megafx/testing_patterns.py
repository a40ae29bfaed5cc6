"""Test a pattern of yours in a few lines: trace a small eager function, run the pattern, compare text and numbers.

    def test_bias_gelu():
        fused = fuse_with(BiasGelu, lambda x, w, b: F.gelu(F.linear(x, w, b)),
                          x="f32[b s k=4]", w="param f32[n=8 k=4]", b="param f32[n=8]")
        expect(fused.program, '''
            %0 = x                       # f32[b s 4]
            %1 = w                       # f32[8 4] param
            %2 = b                       # f32[8] param
            %3 = linear(%0, %1)          # f32[b s 8]
            %4 = bias_act(%3, %2, 'gelu')  # f32[b s 8]
            return %4
        ''')
        assert_same(fused.before, fused.program)       # results and every gradient, in fp64
        assert fused.counts == {"bias_gelu": 1}

    def test_bias_gelu_leaves_a_second_use():
        fused = fuse_with(BiasGelu, lambda x, w, b: (y := F.linear(x, w, b), F.gelu(y)), ...)
        assert fused.near_misses == ["linear (%linear) inside of it is also used by the output"]

Values are written as in `testing.graph`; a dim without a size is dynamic. The function is eager Python, as models are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from megafx import dump
from megafx.errors import UsageError
from megafx.ir import MADE_BY, Input, Output, Phase, Program
from megafx.passes.canonicalize import canonicalize, canonicalize_nodes
from megafx.pattern import Pattern, check_pattern
from megafx.rewrite import rewrite
from megafx.rewrite_trace import plain_modes
from megafx.testing import placeholder_maker


@dataclass
class Fused:
    """A canonical program before and after; counts: matches by pattern; near_misses: reasons, whole ones first."""

    before: Program
    program: Program
    counts: dict[str, int]
    near_misses: list[str]

    @property
    def text(self) -> str:
        return dump.text(self.program)

    @property
    def ops(self) -> list[str]:
        """Names of the ops after the rewrite, in graph order."""
        return [dump.op_name(n.target) for n in self.program.graph.nodes if n.op == "call_function"]


def canonical(fn: Callable[..., Any], **values: str) -> Program:
    """The canonical program of an eager function of tensors, given as `x="bf16[b s h=8]"`, `w="param f32[h=8]"`."""
    graph = fx.Graph()
    maker = placeholder_maker(graph)
    nodes = {name: graph.placeholder(name) for name in values}
    inputs: list[Input] = [maker.placeholder(node, values[name]) for name, node in nodes.items()]
    fakes = [node.meta["val"] for node in nodes.values()]

    def call(*tensors: torch.Tensor) -> Any:
        return tree_flatten(fn(**dict(zip(values, tensors, strict=True))))[0]

    with plain_modes():
        gm = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*fakes)
    program: Program = maker.program
    program.gm, program.inputs, program.phase = gm, inputs, Phase.CAPTURED
    for node in gm.graph.nodes:
        node.meta[MADE_BY] = ()
    output = gm.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(results),)
    program.outputs = [Output("user", str(i)) for i in range(len(results))]
    program.gm.recompile()
    canonicalize(program)
    return program


def fuse_with(
    patterns: type[Pattern] | Sequence[type[Pattern]], fn: Callable[..., Any] | Program, **values: str
) -> Fused:
    """Run patterns, and no others, on an eager function (or on a canonical program). Local patterns see the same shapes."""
    chosen = [patterns] if isinstance(patterns, type) else list(patterns)
    for pattern in chosen:
        check_pattern(pattern)
    if isinstance(fn, Program) and values:
        raise UsageError("values are given for a program, which has its own")
    before = fn if isinstance(fn, Program) else canonical(fn, **values)
    after = before.copy()
    counts: dict[str, int] = {}
    misses = []
    for local in (False, True):
        stage = [p for p in chosen if p.local == local]
        done = rewrite(after, stage, canonicalize, canonicalize_nodes, "fuse_local" if local else "fuse")
        counts |= done.counts
        misses += done.near_misses
    after.graph.lint()
    after.gm.recompile()
    return Fused(before, after, counts, [m.reason for m in sorted(misses, key=lambda m: not m.whole)])
