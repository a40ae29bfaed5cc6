"""A part of the model matrix that stands for it: every kind of architecture, every kind of cell. `make test-models` runs all.

Covers: tests/models/, and the whole pipeline on Hugging Face models.
"""

from __future__ import annotations

import catalogue
import hf_plans
import pytest
import table
import torch
from eager import Promoted
from matrix import Cell, Result, Runner, all_cells, some_cells

from megafx.placements.types import Layout, S
from megafx.planner.plan import Plan

PART = {  # attention, training, dropout, t, sequence parallelism
    "GPT-2": Cell("eager", True, True, 3, "auto"),
    "GPT-NeoX": Cell("sdpa", False, False, 4, "auto"),
    "GPT-J": Cell("eager", True, False, 2, False),
    "GPT-BigCode": Cell("sdpa", True, True, 8, "auto"),
    "OPT": Cell("sdpa", True, True, 2, "auto"),
    "MPT": Cell("eager", False, False, 3, False),
    "Falcon (new decoder)": Cell("eager", True, False, 4, "auto"),
    "Llama": Cell("sdpa", True, False, 3, "auto"),
    "Phi-3": Cell("eager", True, True, 4, "auto"),
    "Gemma 3": Cell("sdpa", True, False, 2, "auto"),
    "Cohere": Cell("eager", False, False, 2, "auto"),
    "OLMo 2": Cell("sdpa", False, False, 3, False),
    "Mixtral": Cell("eager", True, True, 2, "auto"),
    "XLNet": Cell("eager", True, False, 2, "auto"),
    "VQ autoencoder": Cell("own", True, False, 3, "auto"),
    "minGPT": Cell("own", True, True, 4, "auto"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if i % 2 else ()) for i, n in enumerate(PART)])
def test_cell_is_exact(name: str) -> None:
    """Also: enough is sharded, and every weight on the dim that transformers' own plan cuts, where it has one."""
    row = catalogue.rows()[name]
    assert PART[name] in all_cells(row)
    made = table.entry(row, [PART[name]], dynamic=True)
    assert not table.failures([made])
    assert made.compared >= bool(hf_plans.shipped(row))


def test_eager_models_compute_in_fp64_where_they_cast_to_fp32() -> None:
    x = torch.rand(5, dtype=torch.float64)
    with Promoted():
        assert x.float().dtype == torch.float64
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert torch.equal(x.to(torch.float32), x)


def test_what_is_not_exact_is_said() -> None:
    cell = PART["Llama"]
    entry = table.Entry("Llama", "dense decoder", [Result(cell, 1e-3, "loss"), Result(cell, 1e-12, "loss")], least=0.9)
    assert table.failures([entry]) == [
        "Llama: training, sdpa, t=3, sequence parallelism auto: loss is off by 1.0e-03",
        "Llama: 0.0% of parameters sharded, 90% wanted",
    ]
    assert "1 of 2 cells are exact" in table.page([entry])


def test_another_choice_than_transformers_plan_is_said() -> None:
    row = catalogue.rows()["Llama"]
    name = "model.layers.0.mlp.down_proj.weight"
    plan = Plan(
        2,
        params={
            name: S(0, Layout.contiguous(36, 2)),
            "model.layers.1.mlp.up_proj.weight": S(0, Layout.contiguous(53, 2)),
        },
    )
    compared, different = hf_plans.compare(row, plan, dict.fromkeys(plan.params, 2))
    assert compared == 2 and different == [f"{name}: rowwise in transformers, S0 here"]


def test_a_failure_is_a_result() -> None:
    """An architecture that cannot be built or captured is a line of the table, not the end of it."""
    row = catalogue.Architecture("none", "dense decoder", "NoSuchConfig", "NoSuchModel", {}, catalogue.text)
    result = Runner(row).run(PART["Llama"])
    assert not result.exact and "NoSuchConfig" in result.failure


def test_every_row_has_every_mode() -> None:
    for row in catalogue.rows().values():
        cells = list(all_cells(row))
        whole = len(row.attention) * len(row.degrees) * (4 + row.has_dropout)
        assert len(cells) == len(set(cells)) == (2 + row.has_dropout if row.tried else whole)
        assert set(some_cells(row)) <= set(cells)
