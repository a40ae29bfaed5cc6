"""Every collective of two joint graphs matters: without it, or with another in its place, the numbers are wrong.

If deleting one went unnoticed, the equality tests would prove nothing. Twice over: by numbers in the simulator, on the
lowered graphs, and by the type checker, on the same graphs before transitions are written out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import harness
import pytest
import torch
from torch import fx

from megafx.analysis.communication import COLLECTIVES, collective_nodes
from megafx.checks.types import check_types
from megafx.compiler.pipeline import Compiled, compile_program
from megafx.config import Config
from megafx.errors import PlacementError
from megafx.ir.contracts import is_transition
from megafx.ir.program import PHASE, VAL, Program
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from megafx.planner.context import Planner
from megafx.testing import make_planner

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

    def keep(program: Program, planner: Planner) -> int:
        kept.append(program.copy())
        return 0

    passes = (("after canonicalize", harness.promote_casts), ("after coalesce_gradients", keep))
    config = Config(sequence_parallel=SEQUENCE_PARALLEL[name], passes=passes)
    planner = make_planner(T, config, wants_grad=lambda spec: spec.kind == "param")
    inputs = case.inputs(2, 13)
    return Control(case, compile_program(case.program.copy(), planner), kept[0], inputs, case.reference(inputs))


def _waits(program: Program) -> list[tuple[fx.Node, fx.Node]]:
    """(start, wait) of each collective."""
    return [(start, next(iter(start.users))) for start in collective_nodes(program.graph)]


@contextlib.contextmanager
def _replaced(graph: fx.Graph, node: fx.Node, make: Any) -> Iterator[None]:
    """The graph with make(emit) read in place of `node`; put right again afterwards."""
    made: list[fx.Node] = []
    users = [(user, user.args, user.kwargs) for user in node.users]

    def emit(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_after(made[-1] if made else node):
            made.append(graph.call_function(target, args))
        made[-1].meta |= node.meta
        values = fx.node.map_arg(args, lambda n: n.meta[VAL])
        with node.meta[VAL].fake_mode:
            made[-1].meta[VAL] = target(*values)
        return made[-1]

    result = make(emit)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in made)
    try:
        yield
    finally:
        for user, args, kwargs in users:
            user.args, user.kwargs = args, kwargs
        for extra in reversed(made):
            graph.erase_node(extra)


def _own_part(emit: Any, x: fx.Node, t: int) -> fx.Node:
    """[t*n, ...] -> [n, ...]: what this rank has for itself."""
    return emit(mfx.rank_select.default, emit(torch.ops.aten.unflatten.int, x, 0, [t, -1]), "tp")


def _deleted(emit: Any, start: fx.Node) -> fx.Node:
    """The rank's own contribution, in the right shape."""
    x: Any = start.args[0]
    match COLLECTIVES[start.target]:
        case "all_reduce":
            return emit(aten.clone.default, x)
        case "all_gather":
            return emit(aten.cat.default, [x] * T)
        case "reduce_scatter":
            return _own_part(emit, x, T)
    raise AssertionError(start.format_node())


def _swapped(emit: Any, start: fx.Node) -> fx.Node:
    """Another collective, or the same without its reduction, in the right shape."""
    x: Any = start.args[0]

    def arrived(target: Any, *args: Any) -> fx.Node:
        return emit(c10d.wait_tensor.default, emit(target, *args, "tp"))

    match COLLECTIVES[start.target]:
        case "all_reduce":
            return arrived(c10d.all_reduce.default, x, "avg")
        case "all_gather":
            return arrived(c10d.all_reduce.default, emit(aten.cat.default, [x] * T), "sum")
        case "reduce_scatter":  # parts of all ranks arrive, of which only rank 0's is kept
            parts = arrived(c10d.all_to_all_single.default, emit(aten.unflatten.int, x, 0, [T, -1]), [1] * T, [1] * T)
            return emit(aten.select.int, parts, 0, 0)
    raise AssertionError(start.format_node())


@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_right_graphs_are_right(name: str) -> None:
    control = _control(name)
    control.run()
    check_types(control.joint, control.compiled.plan, T)
    found: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for start, _ in _waits(control.compiled.program):
        found[start.meta.get(PHASE, "forward")].add(COLLECTIVES[start.target])
    assert found == EXPECTED[name]


@pytest.mark.parametrize("change", [_deleted, _swapped])
@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_each_collective_matters(name: str, change: Any) -> None:
    control = _control(name)
    unnoticed = []
    for start, wait in _waits(control.compiled.program):
        with _replaced(control.compiled.program.graph, wait, lambda emit, s=start: change(emit, s)):
            try:
                control.run()
            except (AssertionError, PlacementError):
                continue
        unnoticed.append(f"{start.name} ({start.meta.get(PHASE, 'forward')})")
    control.run()  # all put right again
    assert not unnoticed


@pytest.mark.parametrize("name", list(SEQUENCE_PARALLEL))
def test_each_gradient_loses_by_itself(name: str) -> None:
    """With a backward all-reduce or reduce-scatter deleted the loss stays perfect: only gradients tell."""
    control = _control(name)
    loss = harness.loss_name(control.case.program)
    for start, wait in _waits(control.compiled.program):
        if start.meta.get(PHASE) != "backward":
            continue
        with _replaced(control.compiled.program.graph, wait, lambda emit, s=start: _deleted(emit, s)):
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
    assert len(transitions) >= len(_waits(control.compiled.program))
    unnoticed = []
    for node in transitions:
        with _replaced(control.joint.graph, node, lambda emit, n=node: n.args[0]):
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


@pytest.mark.parametrize(("kv", "sequence_parallel", "stored"), [(1, False, "S"), (1, True, "I"), (2, False, "I")])
def test_fewer_key_heads_than_ranks(kv: int, sequence_parallel: bool, stored: str) -> None:
    """4 heads on 4 ranks with keys and values of fewer: gathered from parts of a head, or computed whole on every rank."""
    ranks, case, kept = 4, harness.Case.of("llama", kv=kv), []

    def keep(program: Program, planner: Planner) -> int:
        kept.append(program.copy())
        return 0

    whole = {"*.k_proj": "replicate", "*.v_proj": "replicate"} if stored == "I" else {}
    options: Any = {"sequence_parallel": sequence_parallel, "overrides": whole}
    config = Config(
        passes=(("after canonicalize", harness.promote_casts), ("after coalesce_gradients", keep)), **options
    )
    planner = make_planner(ranks, config, wants_grad=lambda spec: spec.kind == "param")
    plan = compile_program(case.program.copy(), planner).plan
    keys = [p for name, p in plan.params.items() if "k_proj" in name or "v_proj" in name]
    assert keys and {p.kind for p in keys} == {stored}
    check_types(kept[0], plan, ranks)
    transitions = _transitions(kept[0])
    assert len(transitions) > 5
    for node in transitions:
        with _replaced(kept[0].graph, node, lambda emit, n=node: n.args[0]), pytest.raises(PlacementError):
            check_types(kept[0], plan, ranks)
    check_types(kept[0], plan, ranks)
