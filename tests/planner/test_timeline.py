"""Covers: planner/timeline.py, on pictures made by hand; what comes of it (compiler/choose.py `sequence_parallel`)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo

import megafx
from megafx.compiler import choose
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, LOCAL, REDUCE_SCATTER
from megafx.planner.costed import CostedGraph, CostedOp, PricedTransition, Region
from megafx.planner.hardware import Hardware
from megafx.planner.timeline import StepTimes, graphs_pay, timeline

MiB = 2**20
# A second for a byte of a collective, in units in which a mebibyte takes 1000 us; a copy is twice as fast.
HW = Hardware("test", {"bfloat16": 1.0}, 1e18, 1e3 * MiB, 0.0, "made up", hidden=0.25)
PEERS = replace(HW, transfer_bytes_per_second=2e3 * MiB)


def product(us: float, **more: Any) -> CostedOp:
    return CostedOp("product", 0, "", "S", "linear", us=us, flops=1.0, has_weight=True, **more)


def move(forward: str, backward: str, mebibytes: int = 1) -> CostedOp:
    sent = lambda kind: 0 if kind == LOCAL else mebibytes * MiB
    made = PricedTransition("S0", "R", forward, backward, sent(forward), sent(backward), 0.0, 0.0)
    return CostedOp("move", 0, "", "R", forward, move=made)


def step(
    nodes: list[CostedOp], hardware: Hardware = HW, training: bool = False, t: int = 2, times: int = 1
) -> StepTimes:
    edges = [(i, i + 1) for i in range(len(nodes) - 1)]
    region = Region("all", times, False, list(range(len(nodes))))
    overlap = hardware.transfer_bytes_per_second is not None
    return timeline(CostedGraph([region], nodes, edges, {}, None, 0.0, training, [], hardware, t, overlap))


def test_a_collective_of_the_library_is_waited_for() -> None:
    found = step([move(ALL_GATHER, LOCAL), product(4000.0)])
    assert (found.total_us, found.exposed_us, found.send_us) == (5000.0, 1000.0, 1000.0)


def test_a_product_begins_with_its_own_rows_while_the_others_arrive() -> None:
    assert step([move(ALL_GATHER, LOCAL), product(4000.0)], PEERS).total_us == 4000.0
    found = step([move(ALL_GATHER, LOCAL, 6), product(4000.0)], PEERS)
    assert found.total_us == 3000.0 + 4000.0 / 2, "6 MiB arrive after 3000 us; then the product of the other half"


def test_rows_leave_while_the_product_runs() -> None:
    assert step([product(4000.0), move(REDUCE_SCATTER, LOCAL)]).total_us == 5000.0
    assert step([product(4000.0), move(REDUCE_SCATTER, LOCAL)], PEERS).total_us == 4000.0
    found = step([product(4000.0), move(REDUCE_SCATTER, LOCAL, 6)], PEERS)
    assert found.total_us == 2000.0 + 3000.0, "the first half of the product, then the transfer"


def test_an_all_reduce_in_pieces_is_a_scatter_and_a_gather_where_that_is_faster() -> None:
    nodes = [product(4000.0), move(ALL_REDUCE, LOCAL, 4)]
    assert step(nodes).total_us == 8000.0
    assert step(nodes, PEERS).total_us == 4000.0 + 1000.0, (
        "2 MiB each way: sent beside the product, and gathered after it"
    )
    assert step(nodes, replace(PEERS, transfer_seconds=9e-3)).total_us == 8000.0


def test_products_hide_a_part_of_a_library_collective() -> None:
    """The gradient of a weight runs while that of the input is summed over the ranks."""
    found = step([move(LOCAL, ALL_REDUCE, 2), product(100.0, back_us=100.0, weight_us=1000.0)], training=True)
    assert found.exposed_us == 2000.0 - 0.25 * 1000.0
    copies = step([move(LOCAL, ALL_REDUCE, 2), product(100.0, back_us=100.0, weight_us=1000.0)], PEERS, training=True)
    assert copies.exposed_us == pytest.approx(0.0, abs=100.0)


def test_what_was_gathered_is_gathered_again_for_the_gradient_of_a_weight() -> None:
    nodes = [move(ALL_GATHER, REDUCE_SCATTER), product(4000.0, back_us=4000.0, weight_us=4000.0)]
    assert step(nodes, training=True).send_us == 3000.0
    assert step(nodes, PEERS, training=True).exposed_us == 0.0


def test_products_are_slower_beside_copies_and_nothing_runs_before_it_is_launched() -> None:
    nodes = [move(ALL_GATHER, LOCAL), product(4000.0)]
    slower = replace(PEERS, beside={"copies": 1.1})
    assert step(nodes, slower).total_us == 4000.0 + 0.1 * 500.0, "while the copy of 500 us runs"
    found = step([product(1.0), product(1.0)], replace(HW, launch_seconds=5e-6), times=3)
    assert found.total_us == 3 * 11.0 and found.host_us == 3 * 9.0 and found.compute_us == 6.0


def test_cuda_graphs_pay_where_the_device_waits_for_the_host() -> None:
    slow = replace(HW, launch_seconds=1e-5)
    tiny, large = (step([product(us), product(us)], slow) for us in (1.0, 1000.0))
    assert (tiny.total_us, tiny.host_us, tiny.graphs_us) == (21.0, 19.0, 2.0) and graphs_pay(tiny, slow)[0]
    assert (large.total_us, large.host_us, large.graphs_us) == (2010.0, 10.0, 2000.0)
    assert graphs_pay(large, slow) == (False, "a step of 2010 us waits 10 us for launches; replayed it takes 2000 us")
    assert not graphs_pay(step([product(1.0)]), HW)[0], "nothing is known about launches"


def test_copies_of_gradients_count_against_cuda_graphs() -> None:
    slow = replace(HW, launch_seconds=1e-5, memory_bytes_per_second=1e6 * MiB)
    region, memory = Region("all", 1, False, [0]), {"gradients": 10 * MiB}
    costed = CostedGraph([region], [product(1.0)], [], memory, None, 0.0, False, [], slow, 1, False)
    found = timeline(costed)
    assert (found.total_us, found.graphs_us) == (11.0, 1.0 + 20.0) and not graphs_pay(found, slow)[0]


def test_the_report_of_a_plan_says_whether_graphs_are_expected_to_pay() -> None:
    def told(seq: int, **options: Any) -> list[str]:
        config = megafx.Config(tensor_model_parallel_size=2, seq_length=seq, **options)
        plan = megafx.plan(model, config, example_inputs=inputs(2, 16))
        return [note for note in megafx.explain(plan).notes if note.startswith("cuda graphs")]

    model, inputs = zoo.build("nanogpt", layers=1)
    (tiny,) = told(16, hardware="h200-nvlink", cuda_graphs="auto")
    assert "'auto' expects CUDA graphs to pay at the sizes that are priced (a step of" in tiny
    (unknown,) = told(16, hardware="cpu-gloo", cuda_graphs="auto")
    assert "'auto' expects no gain" in unknown and "'cpu-gloo' does not say how long a launch takes" in unknown
    assert told(16, hardware="h200-nvlink") == []


@cache
def planned_by_its_prices() -> tuple[Any, Any, megafx.Config, bool]:
    """(model, inputs, config, whether the plan is sequence-parallel)"""
    model, inputs = zoo.build("nanogpt", layers=1)
    config = megafx.Config(tensor_model_parallel_size=2, hardware="h100-nvlink")
    return model, inputs, config, megafx.plan(model, config, example_inputs=inputs(2, 16)).sequence_parallel


@pytest.mark.parametrize(
    ("faster", "taken"), [(0.5, True), (0.99, False), pytest.param(2.0, False, marks=pytest.mark.slow)]
)
def test_auto_takes_the_layout_whose_schedule_is_shorter(monkeypatch: Any, faster: float, taken: bool) -> None:
    model, inputs, config, first = planned_by_its_prices()
    planned, times = choose._planned, {"auto": 100.0, (not first): 100.0 * faster}

    def timed(program: Any, context: Any, passes: Any, wanted: Any, keeps_problem: bool) -> Any:
        trial = planned(program, context, passes, wanted, keeps_problem)
        trial.context.plan = replace(trial.context.solved, step_us=times[wanted])
        return trial

    monkeypatch.setattr(choose, "_planned", timed)
    plan = megafx.plan(model, config, example_inputs=inputs(2, 16))
    assert plan.sequence_parallel is (not first if taken else first)
    assert any("by its schedule" in note for note in megafx.explain(plan).notes) is taken


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "off"), [("h200-nvlink", 0.15), ("h100-nvlink", 0.1)])
def test_modelled_steps_are_near_recorded_ones(hardware: str, off: float) -> None:
    from modelled_steps import RECORDED, report_of

    torch.manual_seed(0)
    for row, ms in RECORDED[hardware].items():
        assert report_of(row, hardware).step.total_us / 1e3 == pytest.approx(ms, rel=off), row


@pytest.mark.parametrize("row", [(32768, 1, 2), (131072, 2, 2)])
def test_modelled_steps_of_ranks_that_cut_a_sequence_are_near_recorded_ones(row: tuple[int, int, int]) -> None:
    from modelled_steps import CONTEXT, context_ms

    ms, waits = context_ms(*row)
    assert ms == pytest.approx(CONTEXT[row], rel=0.1) and waits > 1


@pytest.mark.slow
def test_modelled_steps_are_near_published_ones_of_gpus_at_700_watts() -> None:
    """Of many hosts, with pipelines, by a network that was not measured."""
    from published_runs import RUNS, llama, modelled

    plans: dict[Any, Any] = {}
    model = llama("70B")
    (run,) = (run for run in RUNS if run.model == "70B" and run.source == "Megatron-Bridge")
    rate, parts = modelled(run, model, plans)
    assert rate == pytest.approx(run.published, rel=0.2)
    assert parts["idle pipeline ranks"] > 0 and parts["messages between stages"] > 0


@pytest.mark.parametrize("layers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_auto_picks_a_configuration_within_3_percent_of_the_fastest_recorded_one(layers: int) -> None:
    """Of what was recorded in one run. With one layer: the batch whose rows are nearest to each other."""
    from modelled_steps import RUNS, picked

    runs = RUNS["h200-nvlink"][2:3] if layers else RUNS["h200-nvlink"]
    modes = {run: picked(*run, "h200-nvlink", layers) for run in dict.fromkeys(run for run, _ in runs)}
    for run, times in runs:
        assert times[modes[run]] <= 1.03 * min(times.values()), (run, modes[run])
