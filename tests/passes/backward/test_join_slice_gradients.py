"""Covers: passes/backward/join_slice_gradients.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import nn

from megafx.checks.simulate import run_logical
from megafx.ir.program import PHASE, VAL, Program
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.join_slice_gradients import join_slice_gradients
from megafx.testing import make_context


def ops(program: Program) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def qkv(x: Any) -> tuple[Any, ...]:
    x = x.tanh()
    return (x[:, 0:3].sin() * x[:, 3:6].cos() + x[:, 6:9],)


def gap(x: Any) -> tuple[Any, ...]:
    x = x.tanh()
    return (x[:, 1:3].sin() * x[:, 6:8],)


def rows(x: Any) -> tuple[Any, ...]:
    x = x.tanh()
    return (x.select(1, 0).sin() * x.select(1, 3) + x.select(1, 8),)


def beside(x: Any) -> tuple[Any, ...]:
    x = x.tanh()
    return ((x[:, 0:4].sin() * x[:, 5:9]).sum() + (x * x),)


def check(function: Callable[[Any], tuple[Any, ...]]) -> Program:
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(5, 9).double())
    program = local_program(function, {"x": x})
    differentiate(program, [0], [0])
    assert any("_backward" in op for op in ops(program))
    tangent = torch.randn_like(function(x)[0])
    assert join_slice_gradients(program, make_context()) == 1
    got = run_logical(program, {"x": x, "0": tangent}, {}, 1).gradients["x"]
    (want,) = torch.autograd.grad(function(x)[0], x, tangent)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    return program


def test_slices_that_cover_the_value_become_one_cat() -> None:
    program = check(qkv)
    backward = [n for n in program.graph.nodes if n.meta.get(PHASE) == "backward"]
    names = [str(n.target).split(".")[1] for n in backward]
    assert names.count("cat") == 1 and "slice_backward" not in names and "add" not in names
    assert all(VAL in n.meta for n in backward)
    assert join_slice_gradients(program, make_context()) == 0


def test_what_no_slice_covers_is_zero() -> None:
    names = ops(check(gap))
    assert names.count("new_zeros") == 3 and names.count("cat") == 1


def test_selected_rows_are_slices() -> None:
    names = ops(check(rows))
    assert names.count("unsqueeze") == 3 and "select_backward" not in names


def test_other_summands_stay() -> None:
    names = ops(check(beside))
    assert names.count("cat") == 1 and "slice_backward" not in names


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.tanh()[:, 0:3].sin(),),  # one slice alone
        lambda x: ((lambda y: y[:, 0:5] * y[:, 4:9])(x.tanh()),),  # they overlap
        lambda x: ((lambda y: y[:, 0:3].sum() * y[2:4, :])(x.tanh()),),  # different dims
        lambda x: ((lambda y: y[:, 0:9:3] * y[:, 1:9:3])(x.tanh()),),  # steps
    ],
)
def test_others_are_left_alone(function: Callable[[Any], tuple[Any, ...]]) -> None:
    program = local_program(function, {"x": nn.Parameter(torch.randn(5, 9).double())})
    differentiate(program, [0], [0])
    before = str(program.graph)
    assert join_slice_gradients(program, make_context()) == 0 and str(program.graph) == before
