"""Experts that are dispatched by one-hot einsums with a capacity (GShard), shared out by data-parallel ranks, at fp64.

Covers: passes/experts/capacity_experts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from capacity_mixtures import Model, a_call

import megafx
from megafx.config import Config
from megafx.ir.program import Program
from megafx.planner.context import CompileContext

SLOW = pytest.mark.slow


def verified(model: Model, mesh: dict[str, int], *passes: Any, experts: int = 2, check: int = 1, **options: Any) -> Any:
    config = Config(passes=passes, expert_model_parallel_size=experts, **options)
    with megafx.debug(check=check):
        return megafx.verify(model.double(), config, example_inputs=a_call(2 * mesh["dp"]), mesh=mesh, tolerance=1e-10)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "tp": 2}, {}),
        pytest.param({"dp": 2, "tp": 2}, {"check": 2}, marks=pytest.mark.slow),
        ({"dp": 3}, {"experts": 3}),
        pytest.param({"dp": 4}, {"experts": 4, "data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 4, "tp": 2}, {"data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 4}, {"data_parallel": "zero1"}, marks=SLOW),
        pytest.param({"dp": 6}, {"experts": 6}, marks=SLOW),
        pytest.param({"dp": 2}, {"activation_memory_budget": 0.4}, marks=SLOW),
    ],
)
def test_as_one_process(mesh: dict[str, int], options: dict[str, Any]) -> None:
    verdict = verified(Model(), mesh, **options)
    assert verdict, str(verdict)


@pytest.mark.slow
def test_without_gates_and_biases() -> None:
    verdict = verified(Model(gated=False, bias=False), {"dp": 2})
    assert verdict, str(verdict)


def test_rows_travel_by_all_to_all_and_weights_are_held_alone() -> None:
    programs: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        programs.append(program.copy())
        return 0

    assert verified(Model(bias=False), {"dp": 2}, ("after hold_experts", keep))
    ends = [n.args[1:3] for n in programs[0].graph.nodes if "transition" in str(n.target) and "ep" in n.args]
    assert sorted(ends) == [("S0", "S1"), ("S0", "S1"), ("S1", "S0"), ("S1", "S0")]  # forward and backward
    assert programs[0].batch is not None and programs[0].batch.experts == {"moe.down": -1, "moe.up": -1}
    notes = [
        n.message
        for n in programs[0].notes
        if "which have a capacity, are shared out over 2 ranks: 3 a rank" in n.message
    ]
    assert len(notes) == 1


def test_each_exchange_is_needed() -> None:
    config = Config(tensor_model_parallel_size=1, data_parallel_size=2, expert_model_parallel_size=2)
    found = megafx.sabotage(Model().double(), config, example_inputs=a_call())
    assert found, str(found)
    assert len([each for each in found.tried if "all_to_all" in each.change]) >= 4, str(found)
