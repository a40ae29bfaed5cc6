"""Covers: passes/backward/recompute_activations.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_programs import local_program
from lowered import parts_of
from torch import nn
from torch.nn import functional as F

from megafx.checks.simulate import run_logical
from megafx.config import Config
from megafx.ir.facts import facts_of
from megafx.ir.program import Program
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.recompute_activations import recompute_activations
from megafx.testing import make_context

ops = torch.ops.megafx
RECOMPUTE = Config(recompute_activation_func=True)


def values() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"gate": (6, 4), "up": (6, 4), "both": (12, 4), "down": (4, 6), "bias": (6,), "bias2": (12,)}
    made: dict[str, Any] = {n: nn.Parameter(torch.randn(s).double()) for n, s in sizes.items()}
    return made | {"x": nn.Parameter(torch.randn(3, 5, 4).double())}


def swiglu(gate: Any, up: Any, both: Any, down: Any, bias: Any, bias2: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(ops.glu(F.linear(x, gate), F.linear(x, up), "silu"), down),)


def packed(gate: Any, up: Any, both: Any, down: Any, bias: Any, bias2: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(ops.glu_packed(F.linear(x, both), None, "gelu"), down),)


def packed_bias(gate: Any, up: Any, both: Any, down: Any, bias: Any, bias2: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(ops.glu_packed(F.linear(x, both), bias2, "silu"), down),)


def gelu(gate: Any, up: Any, both: Any, down: Any, bias: Any, bias2: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(ops.bias_act(F.linear(x, up), None, "gelu_tanh"), down),)


def bias_gelu(gate: Any, up: Any, both: Any, down: Any, bias: Any, bias2: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(ops.bias_act(F.linear(x, up), bias, "gelu"), down),)


def joint(function: Any, inputs: dict[str, Any]) -> Program:
    program = local_program(function, inputs)
    differentiate(program, list(range(len(inputs))), [0])
    return program


def activations(program: Program) -> list[str]:
    names = {n.name for n in program.graph.nodes if "glu" in str(n.target) or "act" in str(n.target)}
    return [s.name for s in parts_of(program).saved if s.name in names]


@pytest.mark.parametrize("function", [swiglu, packed, packed_bias, gelu, bias_gelu])
def test_the_output_is_not_kept_and_gradients_are_the_same(function: Any) -> None:
    inputs = values()
    program = joint(function, inputs)
    tangent = torch.randn(3, 5, 4).double()
    before = run_logical(program, {**inputs, "0": tangent}, {}, 1).gradients
    assert len(activations(program)) == 1
    assert recompute_activations(program, make_context(1, RECOMPUTE)) == 1
    assert activations(program) == []
    gradients = [n for n in program.graph.nodes if facts_of(n.target).recompute]
    assert [n.args[-1] for n in gradients] == [True]
    after = run_logical(program, {**inputs, "0": tangent}, {}, 1).gradients
    for name in inputs:
        assert (before[name] is None) == (after[name] is None)
        if before[name] is not None:
            assert torch.equal(before[name], after[name]), name  # type: ignore[arg-type]
    assert after["down"] is not None
    assert recompute_activations(program, make_context(1, RECOMPUTE)) == 0


def test_an_output_that_the_user_gets_is_left() -> None:
    def function(up: Any, down: Any, x: Any) -> tuple[Any, ...]:
        y = ops.bias_act(F.linear(x, up), None, "silu")
        return (F.linear(y, down), y)

    inputs = {n: v for n, v in values().items() if n in ("up", "down", "x")}
    program = joint(function, inputs)
    before = str(program.graph)
    assert recompute_activations(program, make_context(1, RECOMPUTE)) == 0 and str(program.graph) == before


def test_what_its_own_gradient_needs_is_left() -> None:
    def function(up: Any, x: Any) -> tuple[Any, ...]:
        y = ops.bias_act(F.linear(x, up), None, "silu")
        return (y * y.exp(),)  # the gradient of y is made from y

    inputs = {n: v for n, v in values().items() if n in ("up", "x")}
    program = joint(function, inputs)
    before = str(program.graph)
    assert recompute_activations(program, make_context(1, RECOMPUTE)) == 0 and str(program.graph) == before


def test_without_a_reader_in_backward_nothing_changes() -> None:
    def function(up: Any, x: Any) -> tuple[Any, ...]:
        return (ops.bias_act(F.linear(x, up), None, "silu").sum(-1),)

    inputs = {n: v for n, v in values().items() if n in ("up", "x")}
    program = joint(function, inputs)
    before = str(program.graph)
    assert recompute_activations(program, make_context(1, RECOMPUTE)) == 0 and str(program.graph) == before
