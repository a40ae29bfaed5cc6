"""Covers: runtime/expert_balance.py, op_by_op.py: `megafx.profile` counts the rows of each expert. Ranks:
experts_shared_out.py.
"""

from __future__ import annotations

import pytest
import torch
from index_dispatch import FORMS, tokens
from index_dispatch import Model as Listed
from sorted_mixtures import EXPERTS, TOP, Model, a_call, as_transformers
from torch import nn

import megafx

RANGES = megafx.Config(profiler_ranges=True, tensor_model_parallel_size=1)


def profiled(model: nn.Module, call: tuple[torch.Tensor, ...], config: megafx.Config = RANGES) -> megafx.Report:
    model = megafx.parallelize(model, config, example_inputs=call)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = megafx.profile(model, call, steps=1)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    return report


def test_rows_of_each_expert_are_those_that_the_router_chose() -> None:
    model, (x, wanted) = Model(as_transformers).double(), a_call()
    chosen = model.layers[0].router(x.flatten(0, 1)).softmax(-1).topk(TOP)[1]
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    report = profiled(model, (x, wanted))
    (found,) = report.experts
    assert found.module == "layers.0" and [*found.rows] == counts
    share = max(counts) / sum(counts)
    text = f"layers.0: of 5 experts the busiest gets {share:.1%} of the rows ({5 * share:.2f} times an equal share)"
    assert text in str(found) and "Balance of experts, measured in one call" in str(report)


@pytest.mark.slow
def test_experts_of_a_list_that_are_grouped() -> None:
    report = profiled(
        Listed(FORMS["where_add_in_place"]).double(), (tokens(4, 5),), RANGES.replace(moe_grouped_gemm=True)
    )
    (found,) = report.experts
    assert sum(found.rows) == 4 * 5 * 2 and len(found.rows) == 4


def test_a_model_without_experts_is_not_run_once_more() -> None:
    report = profiled(nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(8, 1)), (torch.randn(2, 4),))
    assert report.experts == [] and "Balance of experts" not in str(report)
