"""Covers: passes/fuse/join_stacks.py: a stack of parameters as a view of one memory."""

from __future__ import annotations

from typing import Any

import torch

from megafx.config import Config
from megafx.ir.program import Program
from megafx.passes.fuse.join_stacks import join_stacks
from megafx.testing import expect, graph, make_context, run_pass

aten = torch.ops.aten


def joined(before: Program, trains: Any = lambda spec: True) -> Program:
    context = make_context(2, Config(), hardware="cpu-gloo", training=False, wants_grad=trains)
    return run_pass(join_stacks, before, context)


def test_weights_of_experts() -> None:
    before = graph(
        lambda x, a, b: aten.matmul(x, aten.stack([a, b])), local=True, out="S2@tp",
        x="f64[e=2 s h=4] R@tp", a="param f64[h=4 n=6] S1@tp", b="param f64[h=4 n=6] S1@tp",
    )  # fmt: skip
    expect(
        joined(before),
        """\
        %0 = x                          # f64[2 s 4] R@tp
        %1 = a                          # f64[4 3] S1@tp param
        %2 = b                          # f64[4 3] S1@tp param
        %3 = join_parameters([%1, %2])  # f64[8 3] S1@tp
        %4 = view(%3, [2, 4, 3])        # f64[2 4 3]
        %5 = matmul(%0, %4)             # f64[2 s 3] S2@tp
        return %5
    """,
    )


def test_what_stays_a_copy() -> None:
    def stays(code: Any, **values: str) -> bool:
        after = joined(graph(code, local=True, out="R@tp", **values))
        return any(n.target is aten.stack.default for n in after.graph.nodes)

    two = {"a": "param f64[n=6] R@tp", "b": "param f64[n=6] R@tp"}
    assert not stays(lambda a, b: aten.stack([a, b]), **two)
    assert stays(lambda a, b: aten.stack([a, b], 1), **two)
    assert stays(lambda a, b: (aten.stack([a, b]), aten.neg(a)), **two)  # a is read elsewhere
    assert stays(lambda a, b: aten.stack([a, aten.neg(b)]), **two)
    assert stays(lambda a, b: aten.stack([a, b]), a="param f64[n=6] R@tp", b="param f32[n=6] R@tp")
    frozen = graph(lambda a, b: aten.stack([a, b]), local=True, out="R@tp", **two)
    assert any(n.target is aten.stack.default for n in joined(frozen, lambda spec: spec.name == "a").graph.nodes)
