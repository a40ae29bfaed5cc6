"""Every collective of two joint graphs matters: without it, or with another in its place, the numbers are wrong.

If deleting one went unnoticed, the equality tests would prove nothing. Twice over: by numbers in the simulator, on the
lowered graphs, and by the type checker, on the same graphs before transitions are written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import harness
import pytest
import torch
import zoo
from torch import fx

import megafx
from megafx.analysis.communication import COLLECTIVES, collective_nodes
from megafx.checks.sabotage import changed_collective, with_another, without, without_transition
from megafx.checks.types import check_types
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.errors import PlacementError
from megafx.ir.contracts import is_transition
from megafx.ir.program import PHASE, Program
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from megafx.planner.context import CompileContext
from megafx.testing import make_context

T = 2
SEQUENCE_PARALLEL = {"nanogpt": True, "llama": False}
# Collectives by direction that the two graphs must have, so that the tests below test something.
EXPECTED = {
    "nanogpt": {"forward": {ALL_GATHER, REDUCE_SCATTER}, "backward": {ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE}},
    "llama": {"forward": {ALL_REDUCE, ALL_GATHER}, "backward": {ALL_REDUCE}},
}
aten, c10d, mfx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.megafx


@dataclass
class Control:
    """One model on T ranks. joint: its graph before transitions are expanded; wanted: what one process computes."""

    case: Any
    compiled: Compiled
    joint: Program
    inputs: dict[str, Any]
    wanted: Any

    def run(self) -> None:
        """Raises where the ranks do not compute what one process does."""
        harness.assert_equal(self.case.run(self.compiled, self.inputs), self.wanted)


@cache
def _control(name: str) -> Control:
    case = harness.Case.of(name)
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    passes = (("after canonicalize", harness.promote_casts), ("after coalesce_gradients", keep))
    config = Config(sequence_parallel=SEQUENCE_PARALLEL[name], passes=passes)
    context = make_context(T, config, wants_grad=lambda spec: spec.kind == "param")
    inputs = case.inputs(2, 13)
    return Control(case, compile_program(case.program.copy(), context), kept[0], inputs, case.reference(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_right_graphs_are_right(name: str) -> None:
    control = _control(name)
    control.run()
    check_types(control.joint, control.compiled.plan, T)
    found: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for start in collective_nodes(control.compiled.program.graph):
        found[start.meta.get(PHASE, "forward")].add(COLLECTIVES[start.target])
    assert found == EXPECTED[name]


@pytest.mark.slow
@pytest.mark.parametrize("change", [without, with_another])
@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_each_collective_matters(name: str, change: Any) -> None:
    control = _control(name)
    unnoticed = []
    for start in collective_nodes(control.compiled.program.graph):
        with changed_collective(control.compiled.program.graph, start, T, change):
            try:
                control.run()
            except (AssertionError, PlacementError):
                continue
        unnoticed.append(f"{start.name} ({start.meta.get(PHASE, 'forward')})")
    control.run()  # all put right again
    assert not unnoticed


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_each_gradient_loses_by_itself(name: str) -> None:
    """With a backward all-reduce or reduce-scatter deleted the loss stays perfect: only gradients tell."""
    control = _control(name)
    loss = harness.loss_name(control.case.program)
    for start in collective_nodes(control.compiled.program.graph):
        if start.meta.get(PHASE) != "backward":
            continue
        with changed_collective(control.compiled.program.graph, start, T, without):
            try:
                found = control.case.run(control.compiled, control.inputs)
            except PlacementError as error:
                assert "gradient" in str(error)
                continue
        off = harness.errors(found, control.wanted)
        assert off[f"output {loss}"] <= harness.RTOL < max(off.values())


def _transitions(program: Program) -> list[fx.Node]:
    """Those that move data: I -> R only says what the gradient is, and its backward is a node of its own."""
    return [n for n in program.graph.nodes if is_transition(n) and set(n.args[1:3]) != {"I", "R"}]


@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_the_type_checker_finds_each_deleted_transition(name: str) -> None:
    control = _control(name)
    transitions = _transitions(control.joint)
    assert len(transitions) >= len(collective_nodes(control.compiled.program.graph))
    unnoticed = []
    for node in transitions:
        with without_transition(control.joint.graph, node):
            try:
                check_types(control.joint, control.compiled.plan, T)
            except PlacementError:
                continue
        unnoticed.append(f"{node.format_node()} ({node.meta.get(PHASE, 'forward')})")
    check_types(control.joint, control.compiled.plan, T)
    assert not unnoticed


@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_the_type_checker_finds_each_transition_from_a_wrong_placement(name: str) -> None:
    control = _control(name)
    unnoticed = []
    for node in _transitions(control.joint):
        args = node.args
        for wrong in {"I", "P"} - {str(args[1]).replace("R", "I"), str(args[2])}:
            node.args = (args[0], wrong, args[2], [], *args[4:])
            try:
                check_types(control.joint, control.compiled.plan, T)
            except PlacementError:
                continue
            finally:
                node.args = args
            unnoticed.append(f"{node.name} from {wrong}")
    assert not unnoticed


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "sequence_parallel", "stored"), [(1, False, "S"), (1, True, "I"), (2, False, "I")])
def test_fewer_key_heads_than_ranks(kv: int, sequence_parallel: bool, stored: str) -> None:
    """4 heads on 4 ranks with keys and values of fewer: gathered from parts of a head, or computed whole on every rank."""
    ranks, case, kept = 4, harness.Case.of("llama", kv=kv), []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    whole = {"*.k_proj": "replicate", "*.v_proj": "replicate"} if stored == "I" else {}
    options: Any = {"sequence_parallel": sequence_parallel, "overrides": whole}
    config = Config(
        passes=(("after canonicalize", harness.promote_casts), ("after coalesce_gradients", keep)), **options
    )
    context = make_context(ranks, config, wants_grad=lambda spec: spec.kind == "param")
    plan = compile_program(case.program.copy(), context).plan
    keys = [p for name, p in plan.params.items() if "k_proj" in name or "v_proj" in name]
    assert keys and {p.kind for p in keys} == {stored}
    check_types(kept[0], plan, ranks)
    transitions = _transitions(kept[0])
    assert len(transitions) > 5
    for node in transitions:
        with without_transition(kept[0].graph, node), pytest.raises(PlacementError):
            check_types(kept[0], plan, ranks)
    check_types(kept[0], plan, ranks)


def test_sabotage_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """megafx.sabotage says the same of a user's own model; a graph that types cannot confirm has numbers alone."""
    model, inputs = zoo.build("nanogpt", layers=1)
    config = Config(tensor_model_parallel_size=3, sequence_parallel=True)
    found = megafx.sabotage(model.double(), config, example_inputs=inputs(2, 13))
    assert found, str(found)
    by = {one.by: sum(other.by == one.by for other in found.tried) for one in found.tried}
    assert by["numbers"] > 10 and by["types"] >= by["numbers"] // 2
    assert f"{by['numbers']} of {by['numbers']} changes on 3 ranks are noticed by numbers" in str(found)
    assert all(one.fqn or one.source for one in found.tried[:4])


def test_a_change_that_goes_unnoticed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.build("nanogpt", layers=1)
    monkeypatch.setattr("megafx.equivalence.without", lambda emit, start, t: next(iter(start.users)))
    found = megafx.sabotage(model.double(), Config(tensor_model_parallel_size=2), example_inputs=inputs(2, 13))
    assert not found and "NOT NOTICED by numbers: without %all_reduce" in str(found)


def test_types_alone() -> None:
    """On the meta device, without numbers; a graph that is wrong is refused with its module and line."""
    model, inputs = zoo.build("nanogpt", layers=1)
    call = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in inputs(2, 13).items()}
    verdict = megafx.verify(model.to("meta"), Config(tensor_model_parallel_size=2), example_inputs=call, types=True)
    assert verdict and str(verdict).startswith("typed: 2 ranks")

    def break_one(program: Program, context: CompileContext) -> int:
        node = next(n for n in program.graph.nodes if is_transition(n) and n.args[1] == "P")
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
        return 1

    broken = Config(tensor_model_parallel_size=2, passes=(("after coalesce_gradients", break_one),))
    refused = megafx.verify(model, broken, example_inputs=call, types=True)
    assert not refused and "in module 'h.0' at" in str(refused), str(refused)
