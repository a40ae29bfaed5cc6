"""Experts of a list that data-parallel ranks share out, however their tokens are selected, against eager at fp64.

Covers: passes/experts/stack_lists.py, passes/experts/expert_chains.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from index_dispatch import EXPERTS, HIDDEN, Expert, tokens
from listed_mixtures import FORMS, Model
from torch import nn

import megafx
from megafx.config import Config
from megafx.errors import PlanError
from megafx.ir.nodes import op_name
from megafx.ir.program import Program
from megafx.planner.context import CompileContext


def verified(
    model: nn.Module, mesh: dict[str, int], *passes: Any, experts: int = 2, check: int = 1, **options: Any
) -> Any:
    config = Config(passes=passes, expert_model_parallel_size=experts, **options)
    with megafx.debug(check=check):
        call = (tokens(2 * mesh["dp"], 3),)
        return megafx.verify(model.double(), config, example_inputs=call, mesh=mesh, tolerance=1e-10)


def kept(into: list[Program], where: str) -> tuple[str, Any]:
    def keep(program: Program, context: CompileContext) -> int:
        into.append(program.copy())
        return 0

    return where, keep


FEW = ("one_hot_of_hugging_face", "above")
OWN = "boolean_of_own"  # each expert's results in a tensor of their own, which are added: no chain of sums into rows
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "tp": 2}, {}),
        pytest.param({"dp": 2, "tp": 2}, {"check": 2}, marks=SLOW),
        ({"dp": 3}, {"experts": 3}),  # two experts, two, and none
        pytest.param({"dp": 4}, {"experts": 4, "data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 4}, {"data_parallel": "zero1"}, marks=SLOW),
        pytest.param({"dp": 4, "tp": 2}, {"data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 2, "cp": 2}, {}, marks=SLOW),
        pytest.param({"dp": 3, "tp": 2}, {"experts": 3, "data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 6}, {"experts": 6}, marks=SLOW),  # fewer experts than ranks
        pytest.param({"dp": 4, "tp": 3}, {"experts": 4, "sequence_parallel": True}, marks=SLOW),
        pytest.param({"dp": 2}, {"activation_memory_budget": 0.4}, marks=SLOW),
        pytest.param({"dp": 2}, {"recompute_granularity": "full", "recompute_method": "uniform"}, marks=SLOW),
    ],
)
def test_as_one_process(mesh: dict[str, int], options: dict[str, Any]) -> None:
    verdict = verified(Model(*FEW), mesh, **options)
    assert verdict, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("form", sorted({*FORMS} - {*FEW, OWN}))
def test_forms(form: str) -> None:
    verdict = verified(Model(form), {"dp": 2})
    assert verdict, str(verdict)


def test_rows_are_choices_where_each_has_one_expert() -> None:
    programs: list[Program] = []
    assert verified(
        Model("where_add_in_place", "two_masks", bias=False), {"dp": 2}, kept(programs, "after dispatch_experts")
    )
    moved = [n for n in programs[0].graph.nodes if op_name(n) == "tokens_to_ranks"]
    assert [n.args[1] for n in moved] == [2, 2 * EXPERTS // 2 * 1]  # of two choices; of a mask for each expert
    assert not [n for n in programs[0].graph.nodes if op_name(n) in ("rows", "index_add", "index_put")]


def test_a_rank_holds_its_experts_whole_and_nothing_of_the_others() -> None:
    programs: list[Program] = []
    verdict = verified(Model("where_add_in_place"), {"dp": 3}, kept(programs, "after hold_experts"), experts=3)
    assert verdict, str(verdict)
    batch = programs[0].batch
    assert batch is not None
    owner = {name: rank for name, rank in batch.experts.items() if name.endswith("up.bias")}
    assert owner == {f"layers.0.experts.{e}.up.bias": e // 2 for e in range(EXPERTS)}
    assert len(batch.experts) == 5 * EXPERTS and not [n for n in programs[0].notes if "holds" in n.message]


def test_weights_that_autocast_casts_are_held_alone_too() -> None:
    config = Config(tensor_model_parallel_size=1, data_parallel_size=2, expert_model_parallel_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        plan = megafx.plan(Model("where_add_in_place").float(), config, example_inputs=(tokens(4, 3).float(),))
    assert len(plan.experts) == 5 * EXPERTS, plan.experts


def test_each_exchange_is_needed() -> None:
    config = Config(tensor_model_parallel_size=1, data_parallel_size=2, expert_model_parallel_size=2)
    found = megafx.sabotage(Model("where_add_in_place").double(), config, example_inputs=(tokens(4, 3),))
    exchanges = [each for each in found.tried if "dispatch_rows" in each.change or "combine_rows" in each.change]
    assert found and len(exchanges) >= 2 * (2 + 1), str(found)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"cp": 2}, {"check": 2}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"data_parallel": "zero1"}),
        pytest.param({"cp": 3, "tp": 2}, {"sequence_parallel": True}, marks=SLOW),
        pytest.param({"dp": 2, "cp": 2}, {"data_parallel": "fsdp"}, marks=SLOW),
    ],
)
def test_context_parallel_ranks_compute_their_own_tokens(mesh: dict[str, int], options: dict[str, Any]) -> None:
    programs: list[Program] = []
    options = {"experts": 1} | options
    verdict = verified(Model("where_add_in_place"), {"dp": 1} | mesh, kept(programs, "after join_stacks"), **options)
    assert verdict, str(verdict)
    names = [op_name(n) for n in programs[0].graph.nodes]
    assert names.count("grouped_mm") == 3 and "rows" not in names
    assert ("stack" in names) == ("data_parallel" in options)  # parameters of odd sizes, of which ranks share the rows


def test_context_parallel_experts_that_stay_on_all_tokens() -> None:
    """Where rows would be as many as tokens times experts, and where the user wants no grouped products."""
    for model, options in ((Model("above"), {}), (Model("where_add_in_place"), {"moe_grouped_gemm": False})):
        programs: list[Program] = []
        assert verified(model, {"dp": 1, "cp": 2}, kept(programs, "after join_stacks"), experts=1, **options)
        assert "grouped_mm" not in [op_name(n) for n in programs[0].graph.nodes]
        assert options or any("a token may have any of them" in n.message for n in programs[0].notes)


class Unlike(Model):
    """One expert has a wider ffn."""

    def __init__(self) -> None:
        super().__init__("where_add_in_place")
        self.layers[0].experts[1] = nn.Sequential(nn.Linear(HIDDEN, 9), nn.SiLU(), nn.Linear(9, HIDDEN))


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__("where_add_in_place")
        for i in range(EXPERTS):
            self.layers[0].experts[i] = nn.Sequential(Expert(), nn.LayerNorm(HIDDEN))


@pytest.mark.parametrize("model", [Unlike, Dropping])
def test_what_cannot_be_stacked_is_refused(model: type[Model]) -> None:
    with pytest.raises(PlanError, match="experts of a list, of which .* are not stacked: "):
        verified(model(), {"dp": 2})


def test_results_in_tensors_of_their_own_are_refused() -> None:
    with pytest.raises(PlanError, match="has no mixture of experts whose rows are sorted by expert"):
        verified(Model(OWN), {"dp": 2})
