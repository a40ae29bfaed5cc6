"""Covers: compiler/pipeline.py, runtime/compile_call.py (Planned): what a call was planned with, it is compiled from."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import megafx
from megafx.capture.export import capture_call
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.compiler.runner import Runner
from megafx.compiler.stages import runner_of
from megafx.ir import dump
from megafx.ir.program import Program
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan

HARDWARE = Hardware.load("h100-nvlink")


def text(program: Program) -> str:
    """Without which input a size is read from: compiles of one process differ in that."""
    return re.sub(r"sym_size\.int\(%\d+", "sym_size.int(", dump.text(program))


@pytest.mark.parametrize("sequence_parallel", ["auto", True])
@pytest.mark.parametrize("name", ["nanogpt", "llama", "bert", "t5"])
def test_a_planned_program_is_compiled_to_what_its_capture_is(name: str, sequence_parallel: Any) -> None:
    model, inputs = zoo.build(name)
    program = capture_call(model, (), inputs(2, 8))
    config = megafx.Config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    context = CompileContext(config, 2, HARDWARE, wants_grad=lambda spec: spec.kind == "param")
    placed, own = program.copy(), replace(context)
    plan = plan_only(placed, own)
    fixed = dict(plan.params)
    again = compile_program(program.copy(), replace(context, given=plan, fixed=fixed))
    own.fixed, own.given = fixed, plan
    once = compile_program(placed, own)
    assert text(once.program) == text(again.program)
    assert once.plan.diff(again.plan) == ""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each pass has run."""
    found: Counter[str] = Counter()
    plain = Runner._run

    def run(self: Runner, step: Any, *args: Any) -> Any:
        found[step.name] += 1
        return plain(self, step, *args)

    monkeypatch.setattr(Runner, "_run", run)
    return found


def of_others(plan: Plan) -> Plan:
    """As what another rank has sent."""
    return Plan.from_json(plan.to_json(), plan.sizes)


@pytest.mark.parametrize(("agree", "times"), [(None, 2), (lambda plan: plan, 2), (of_others, 3)])
def test_the_layout_that_was_tried_is_not_planned_again(
    agree: Any, times: int, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another rank's plan is taken, or somebody sees the passes."""
    model, inputs = zoo.build("nanogpt")
    program = capture_call(model, (), inputs(2, 8))
    config = megafx.Config(tensor_model_parallel_size=2)
    context = CompileContext(config, 2, HARDWARE, wants_grad=lambda spec: spec.kind == "param", agree=agree)
    placed, own = program.copy(), replace(context)
    runner = runner_of(own)
    plan_only(placed, own, runner)
    assert ran["flatten_tokens"] == ran["plan_sharding"] == times and ran["fuse"] == 1
    assert own.config is config and own.agree is agree
    monkeypatch.setattr(Runner, "shows_nothing", False)
    again, other = program.copy(), replace(context)
    shown = runner_of(other)
    plan_only(again, other, shown)
    assert text(placed) == text(again) and own.solved.to_json() == other.solved.to_json()
    reports = [re.sub(r"planning [\d.]+ s", "", str(each.solved.report)) for each in (own, other)]
    assert reports[0] == reports[1]
    assert [r.name for r in runner.records] == [r.name for r in shown.records]
    assert {n.name for n in own.rules} == {n.name for n in other.rules} <= {n.name for n in placed.graph.nodes}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def frozen(model: nn.Module) -> nn.Module:
    model.up.requires_grad_(False)
    return model


@pytest.mark.parametrize(("change", "times"), [(lambda m: m, 1), (frozen, 2), (lambda m: m.eval(), 2)])
def test_a_first_call_is_planned_and_compiled_in_one_run(change: Any, times: int, ran: Counter[str]) -> None:
    """Where other gradients are wanted than those that it is planned with, or it is no training call, it is in two."""
    torch.manual_seed(0)
    eager, x = change(Net().double()), torch.randn(3, 8, dtype=torch.float64)
    expected = eager(x)
    wanted = torch.autograd.grad(expected, [p for p in eager.parameters() if p.requires_grad])
    model = megafx.parallelize(eager, megafx.Config(cache=False))
    found = model(x)
    found.backward()
    assert ran["fuse"] == ran["canonicalize"] == ran["plan_sharding"] == times
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    got = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_dumps_are_of_whole_compiles(tmp_path: Any) -> None:
    with megafx.debug(dump=str(tmp_path)):
        model = megafx.parallelize(Net(), megafx.Config(cache=False))
        model(torch.randn(3, 8))
    assert [*(tmp_path / "graph1").glob("*_fuse.txt")] and [*tmp_path.glob("*_plan_sharding.txt")]
    assert not [*tmp_path.glob("*_localize_shapes.txt")] and [*(tmp_path / "graph1").glob("*_localize_shapes.txt")]
