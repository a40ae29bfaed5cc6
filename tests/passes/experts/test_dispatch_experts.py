"""Experts that data-parallel ranks share out, against eager at fp64; what they hold; what is refused; exchanges that are wrong.

Covers: passes/experts/dispatch_experts.py, passes/communicate/hold_experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sorted_mixtures import EXPERTS, FORMS, HIDDEN, Mixture, Model, a_call, as_transformers, grouped_mm, put_back
from torch import Tensor
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.errors import ConfigError, PlanError
from megafx.ir.nodes import op_name
from megafx.ir.program import VAL, Program
from megafx.planner.context import CompileContext
from megafx.units import bytes_text

MOVES = ("dispatch_rows", "combine_rows")


def verified(model: Model, mesh: dict[str, int], *passes: Any, experts: int = 2, check: int = 1, **options: Any) -> Any:
    config = Config(passes=passes, expert_model_parallel_size=experts, **options)
    with megafx.debug(check=check):
        call = a_call(2 * mesh["dp"])
        return megafx.verify(model.double(), config, example_inputs=call, mesh=mesh, tolerance=1e-10)


def kept(into: list[Program], where: str) -> tuple[str, Any]:
    def keep(program: Program, context: CompileContext) -> int:
        into.append(program.copy())
        return 0

    keep.__name__ = where.replace(" ", "_")
    return where, keep


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "tp": 2}, {"check": 2}),
        ({"dp": 4}, {"data_parallel": "fsdp", "experts": 4}),  # two experts, two, one, and none
        ({"dp": 2, "cp": 2}, {}),
        (
            {"dp": 4},
            {"data_parallel": "zero1", "check": 2},
        ),  # of three experts of a rank, its like has a row in shards of two
        pytest.param({"dp": 6}, {"data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 8}, {"data_parallel": "fsdp", "data_parallel_shard_size": 4}, marks=SLOW),
        pytest.param({"dp": 4, "cp": 2}, {"data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 3, "tp": 3}, {"data_parallel": "zero1", "experts": 3}, marks=SLOW),
        pytest.param({"dp": 4, "tp": 2}, {"data_parallel": "fsdp"}, marks=SLOW),
        pytest.param({"dp": 4}, {"data_parallel": "fsdp", "data_parallel_shard_size": 2, "check": 2}, marks=SLOW),
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True}, marks=SLOW),
        pytest.param({"dp": 2, "tp": 2}, {"activation_memory_budget": 0.4}, marks=SLOW),
        pytest.param({"dp": 2}, {"recompute_granularity": "full", "recompute_method": "uniform"}, marks=SLOW),
    ],
)
def test_as_one_process(mesh: dict[str, int], options: dict[str, Any]) -> None:
    verdict = verified(Model(*FORMS), mesh, **options)
    assert verdict, str(verdict)


def test_a_token_travels_once_to_a_rank_and_comes_back_as_one_sum() -> None:
    programs: list[Program] = []
    placed, lowered = kept(programs, "after place_axes"), kept(programs, "after hold_experts")
    dispatched = kept(programs, "after dispatch_experts")
    assert verified(Model(as_transformers), {"dp": 2}, placed, dispatched, lowered)
    before, after, held = programs[:3]
    assert not [n for n in before.graph.nodes if op_name(n) in MOVES]
    moved = [n for n in after.graph.nodes if op_name(n) in MOVES]
    rows = [after.sizes.shape(n.args[0].meta[VAL])[0] for n in moved]
    assert [*map(after.sizes.text, rows[:2])] == ["batch*seq", "2*batch*seq"] and after.sizes.from_data(rows[2])
    assert [*map(op_name, moved)] == ["dispatch_rows", "dispatch_rows", "combine_rows"]
    assert [n.args[6] for n in moved] == [False, True, False]  # the weights of the rows are entries of tokens
    assert not [n for n in after.graph.nodes if op_name(n) in ("group_rows", "ungroup_rows")]
    shapes = {spec.name: tuple(node.meta[VAL].shape) for node, spec in held.input_nodes()}
    assert (
        shapes["layers.0.up"][0] == shapes["layers.0.bias"][0] == 3 and shapes["layers.0.router.weight"][0] == EXPERTS
    )
    assert held.batch is not None and held.batch.experts == dict.fromkeys(
        ("layers.0.bias", "layers.0.down", "layers.0.up"), -1
    )
    (note,) = [
        n.message for n in held.notes if "5 experts of 'layers.0' are shared out over 2 ranks: 3 a rank" in n.message
    ]
    found = re.search(r"a rank sends (\d+) rows for its (\d+) tokens \((.*)\) each way", note)
    assert found is not None, note
    # three quarters of the tokens have one of their two choices on the other rank; a row has its token and two weights
    assert int(found[1]) == round(0.75 * int(found[2])) and found[3] == bytes_text(
        int(0.75 * int(found[2]) * (HIDDEN + 2) * 8)
    )


class Penalised(Model):
    """Reads a weight of experts beside the products, and has one that is computed."""

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return super().forward(x, wanted) + 0.01 * self.layers[0].down.square().sum()


def scaled(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    ids = chosen[:, 0]
    order = ids.argsort()
    ends = F.one_hot(ids, EXPERTS).sum(0).cumsum(0)
    return grouped_mm(grouped_mm(x[order], of.up[..., :HIDDEN] * 0.5, ends), of.down[:, :HIDDEN], ends)[order.argsort()]


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (lambda: Penalised(put_back), "'layers.0.down' is read by square too, so each rank holds all experts of it"),
        (
            lambda: Model(scaled),
            "mul computes weights of experts, so each rank holds and computes those of all experts",
        ),
    ],
)
def test_weights_that_a_rank_needs_whole_are_held_whole(model: Callable[[], Model], note: str) -> None:
    programs: list[Program] = []
    verdict = verified(model(), {"dp": 2}, kept(programs, "after hold_experts"))
    assert verdict, str(verdict)
    assert any(note in str(n) for n in programs[0].notes), [str(n) for n in programs[0].notes]


def all_to_one(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Whatever the router says: all tokens of a rank to one expert, and none to the others."""
    return put_back(of, x, weights, torch.topk(x.new_zeros(x.shape[0], EXPERTS) + torch.arange(EXPERTS), 1)[1])


def halves(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Four experts a token, of which two get one half of it each: rows of which as many in turn are alike as are no choices."""
    weights, of_token = of.router(x).softmax(-1).topk(4)
    ids = of_token.flatten()
    order, ends = ids.argsort(stable=True), F.one_hot(ids, EXPERTS).sum(0).cumsum(0)
    parts = torch.stack([x, 2 * x], 1).flatten(0, 1)
    y = of.unit(parts[order // 2], ends) + x[order // 4]
    return (y[order.argsort()].view(-1, 4, HIDDEN) * weights[..., None]).sum(1)


def test_rows_that_are_neither_tokens_nor_choices() -> None:
    verdict = verified(Model(halves), {"dp": 2})
    assert verdict, str(verdict)


def test_experts_without_tokens() -> None:
    verdict = verified(Model(all_to_one), {"dp": 2})
    assert verdict, str(verdict)


def test_each_exchange_is_needed() -> None:
    config = Config(tensor_model_parallel_size=1, data_parallel_size=2, expert_model_parallel_size=2)
    found = megafx.sabotage(Model(as_transformers).double(), config, example_inputs=a_call())
    exchanges = [each for each in found.tried if "dispatch_rows" in each.change or "combine_rows" in each.change]
    assert found, str(found)
    assert len(exchanges) == 2 * (3 + 2)  # forward, and the gradients of weights and results; tokens are the call's own


def without_mixture(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("th,ehf->tf", x, of.up)[:, :HIDDEN]


def scaled_between(of: Mixture, x: Tensor, chosen: Tensor, by: Tensor) -> Tensor:
    ids = chosen[:, 0]
    order, ends = ids.argsort(), F.one_hot(ids, EXPERTS).sum(0).cumsum(0)
    y = grouped_mm(x[order], of.up[..., :HIDDEN].contiguous(), ends) * by
    return grouped_mm(y, of.down[:, :HIDDEN].contiguous(), ends)[order.argsort()]


def by_place(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Between the products, ones that have a row for each of this rank's rows."""
    return scaled_between(of, x, chosen, x.new_ones(x.shape[0], 1))


def broadcast(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return scaled_between(of, x, chosen, x.new_ones(1, 1))


def test_what_cannot_be_shared_out_is_refused() -> None:
    """And what is advised works."""
    with pytest.raises(PlanError, match="this model has no mixture of experts whose rows are sorted by expert"):
        verified(Model(without_mixture), {"dp": 2})
    assert verified(Model(without_mixture), {"dp": 2}, experts=1)
    rows = "between their products, mul reads %.* which has a row for each of this rank's rows"
    with pytest.raises(PlanError, match=rows):
        verified(Model(by_place), {"dp": 2})
    assert verified(Model(broadcast), {"dp": 2})
    with pytest.raises(PlanError, match="override 'expert' gives experts to tensor-parallel ranks"):
        verified(Model(broadcast), {"dp": 2, "tp": 2}, overrides={"layers.0.up": "expert"})
    with pytest.raises(ConfigError, match="a divisor of data_parallel_size=3"):
        Config(data_parallel_size=3, expert_model_parallel_size=2)
    config = Config(expert_model_parallel_size=2)
    with pytest.raises(ConfigError, match="without data-parallel ranks, among which experts are shared out"):
        megafx.plan(Model(put_back).double(), config, example_inputs=a_call())
    assert megafx.plan(Model(put_back).double(), config.replace(data_parallel_size=2), example_inputs=a_call())


def test_a_large_run_is_rehearsed() -> None:
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 4, "expert_model_parallel_size": 2}
    run = megafx.rehearse(Model(as_transformers).double(), Config(**sizes), world=4, example_inputs=a_call(8))
    assert run and run.groups["ep"] == (2, 2, 7), run.groups  # counts, which row is whose, and five moves of tokens
