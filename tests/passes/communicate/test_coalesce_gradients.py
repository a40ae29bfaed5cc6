"""Covers: passes/communicate/coalesce_gradients.py."""

from __future__ import annotations

from typing import Any

import torch
from local_programs import local_program
from torch import nn
from torch.nn import functional as F

import megafx.passes.communicate.coalesce_gradients as under_test
from megafx.checks.simulate import run_logical
from megafx.ir.program import FQN, MADE_BY, PHASE, PLACEMENT, VAL, Program
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.communicate.coalesce_gradients import coalesce_gradients
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.types import Layout
from megafx.testing import make_context

T, TOKENS, H = 2, 6, 4
ROWS = Layout.contiguous(TOKENS, T)


def norms(scale: Any, bias: Any, gain: Any, x: Any) -> tuple[Any, ...]:
    """Norms on tokens sharded over the ranks, their weights replicated: every weight's gradient is a sum over ranks."""
    move = torch.ops.megafx.transition
    x = move(x, "I", "S0", [], ROWS.flat(), "tp", T)
    scale, bias, gain = (move(w, "I", "R", [], [], "tp", T) for w in (scale, bias, gain))
    y = F.layer_norm(F.layer_norm(x, (H,), scale, bias).tanh() * gain, (H,), scale)
    return (move(y, "S0", "I", ROWS.flat(), [], "tp", T),)


def reference(scale: Any, bias: Any, gain: Any, x: Any) -> Any:
    return F.layer_norm(F.layer_norm(x, (H,), scale, bias).tanh() * gain, (H,), scale)


def built(gain: torch.dtype = torch.float64) -> tuple[Program, dict[str, Any]]:
    torch.manual_seed(0)
    values: dict[str, Any] = {n: nn.Parameter(torch.randn(H).double()) for n in ("scale", "bias", "gain")}
    values["gain"] = nn.Parameter(values["gain"].detach().to(gain))
    values["x"] = torch.randn(TOKENS, H).double()
    program = local_program(norms, values)
    differentiate(program, [0, 1, 2], [0])
    return program, values


def sums(program: Program) -> list[str]:
    return [
        str(list(n.meta[VAL].shape))
        for n in program.graph.nodes
        if n.target is torch.ops.megafx.transition.default and n.args[1:3] == ("P", "I")
    ]


def ops(program: Program) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def test_three_gradients_one_all_reduce() -> None:
    program, values = built()
    tangent = torch.randn(TOKENS, H).double()
    before = run_logical(program, {**values, "0": tangent}, {}, T)
    assert sums(program) == ["[4]", "[4]", "[4]"]
    assert coalesce_gradients(program, make_context()) == 2
    assert sums(program) == ["[12]"]
    after = run_logical(program, {**values, "0": tangent}, {}, T)
    weights = [values[n] for n in ("scale", "bias", "gain")]
    want = torch.autograd.grad(reference(*values.values()), weights, tangent)
    for name, expected in zip(("scale", "bias", "gain"), want, strict=True):
        got = after.gradients[name]
        assert got is not None and torch.equal(got, before.gradients[name])  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert coalesce_gradients(program, make_context()) == 0


def test_it_comes_last_and_nodes_are_complete() -> None:
    program, _ = built()
    coalesce_gradients(program, make_context())
    names = ops(program)
    assert names[-11:] == [*["view"] * 3, "cat", "transition", *["slice", "view"] * 3]
    for node in list(program.graph.nodes)[-12:-1]:
        assert node.meta[PHASE] == "backward" and node.meta[MADE_BY][-1] == "coalesce_gradients"
        assert VAL in node.meta and PLACEMENT in node.meta and isinstance(node.meta.get(FQN, ""), str)


def test_gradients_stay_parts_of_one_buffer_when_expanded() -> None:
    program, values = built()
    coalesce_gradients(program, make_context())
    expand_transitions(program, make_context())
    names = ops(program)
    assert names[-8:] == ["all_reduce", "wait_tensor", *["slice", "view"] * 3]
    run_logical(program, {**values, "0": torch.randn(TOKENS, H).double()}, {}, T)


def test_dtypes_do_not_mix() -> None:
    program, _ = built(gain=torch.float32)
    assert coalesce_gradients(program, make_context()) == 1
    assert sums(program) == ["[4]", "[8]"]


def test_large_gradients_go_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(under_test, "LARGEST_BYTES", 4 * 8 - 1)
    program, _ = built()
    text = str(program.graph)
    assert coalesce_gradients(program, make_context()) == 0 and str(program.graph) == text


def test_sharded_weights_and_sums_used_again_are_left() -> None:
    def function(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        move = torch.ops.megafx.transition
        cut = Layout.contiguous(8, T)
        a = move(a, "S0", "R", cut.flat(), [], "tp", T)
        b = move(b.exp(), "I", "R", [], [], "tp", T)
        return (move(a * b * move(c, "I", "R", [], [], "tp", T), "R", "I", [], [], "tp", T),)

    weights = {n: nn.Parameter(torch.randn(s).double()) for n, s in (("a", 4), ("b", 8), ("c", 8))}
    program = local_program(function, weights)
    differentiate(program, [0, 1, 2], [0])
    # a's gradient is reduce-scattered; b's sum is used by exp's backward, only c's is a sum and nothing else
    assert sums(program) == ["[8]", "[8]"] and coalesce_gradients(program, make_context()) == 0
