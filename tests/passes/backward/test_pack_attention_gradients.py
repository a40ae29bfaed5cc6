"""Covers: passes/backward/pack_attention_gradients.py and megafx::attention_backward_packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import nn

from megafx.checks.simulate import run_logical
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.join_slice_gradients import join_slice_gradients
from megafx.passes.backward.pack_attention_gradients import pack_attention_gradients
from megafx.testing import make_context

B, S, D = 2, 5, 3
HEADS = {"q": 4, "k": 2, "v": 2}


def attention_of(order: str, p: float = 0.0) -> Callable[..., tuple[Any, ...]]:
    def function(x: Any, seed: Any) -> tuple[Any, ...]:
        x, start, part = x.tanh(), 0, {}
        for name in order:
            width = HEADS[name] * D
            part[name] = x[..., start : start + width].view(B, S, HEADS[name], D).transpose(1, 2)
            start += width
        options = (0.5, True, 3, 0.0, 0, p, 1, -1, [], "tp")  # a window: megafx's own kernel
        return (torch.ops.megafx.attention(part["q"], part["k"], part["v"], None, None, None, None, seed, *options),)

    return function


@pytest.mark.parametrize(("order", "p"), [("qkv", 0.0), ("vqk", 0.3)])
def test_gradients_are_written_side_by_side(order: str, p: float) -> None:
    torch.manual_seed(0)
    function = attention_of(order, p)
    inputs = {"x": nn.Parameter(torch.randn(B, S, 8 * D).double()), "seed": torch.tensor(7)}
    program = local_program(function, inputs)
    differentiate(program, [0], [0])
    tangent = torch.randn(B, 4, S, D).double()
    before = run_logical(program, {**inputs, "0": tangent}, {}, 1).gradients["x"]
    assert pack_attention_gradients(program, make_context()) == 0  # sums over zeros as yet
    assert join_slice_gradients(program, make_context()) == 1 and pack_attention_gradients(program, make_context()) == 1
    names = [str(n.target) for n in program.graph.nodes]
    assert names.count("megafx.attention_backward_packed.default") == 1
    assert not any("cat" in n or n == "megafx.attention_backward.default" for n in names)
    after = run_logical(program, {**inputs, "0": tangent}, {}, 1).gradients["x"]
    assert torch.equal(before, after)  # type: ignore[arg-type]


def test_a_gradient_that_something_else_reads_is_left() -> None:
    def function(x: Any, seed: Any) -> tuple[Any, ...]:
        x = x.tanh()
        q = x.view(B, S, 4, D).transpose(1, 2)
        return (
            torch.ops.megafx.attention(
                q, q, q, None, None, None, None, seed, 0.5, True, 3, 0.0, 0, 0.0, 1, -1, [], "tp"
            ),
        )

    inputs = {"x": nn.Parameter(torch.randn(B, S, 4 * D).double()), "seed": torch.tensor(7)}
    program = local_program(function, inputs)
    differentiate(program, [0], [0])
    before = str(program.graph)
    assert pack_attention_gradients(program, make_context()) == 0 and str(program.graph) == before
