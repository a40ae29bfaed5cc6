"""Data parallelism times tensor parallelism in the simulator: what all ranks compute is what one process computes on the whole
batch (loss and gradients, dropout on, ranks that count unequal numbers of labels), and what that moves."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from data_mesh import compile_on, run_on, seeded
from harness import Case, errors
from torch import fx

from megafx.analysis.communication import communication, is_product, is_start, is_wait
from megafx.checks.simulate import Logical, local_inputs, logical_of, simulate
from megafx.errors import PlacementError
from megafx.ir.program import PHASE, VAL
from megafx.placements.data_axis import BATCH_AXIS, DataAxis
from megafx.placements.types import ALL_REDUCE, payload

RTOL = 1e-10
WANTED: dict[Any, Logical] = {}  # by model and batch


def worst(case: Case, compiled, data: DataAxis, rows: int = 2) -> float:
    """The largest relative error of any group of ranks against one process."""
    inputs = seeded(case, rows * data.ranks)
    key = (id(case), rows * data.ranks)
    if key not in WANTED:
        WANTED[key] = case.run(case.compile(1), inputs)
    wanted = WANTED[key]
    found = run_on(case, compiled, data, inputs)
    wanted.outputs = {name: v for name, v in wanted.outputs.items() if name in found.outputs}
    assert wanted.outputs and wanted.gradients
    return max(errors(found, wanted).values())


@cache
def gpt2() -> Case:
    return Case.of("gpt2", dropout=0.2)


def sums(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if is_start(n) and n.args[-1] == BATCH_AXIS]


def of_gradients(graph: fx.Graph) -> list[fx.Node]:
    """Of parameters: the loss has one of its own, a single number."""
    return [n for n in sums(graph) if n.meta.get(PHASE) == "backward" and n.args[0].meta[VAL].dim()]


@pytest.mark.parametrize(
    ("name", "d", "t", "options"),
    [
        ("gpt2", 3, 2, {"dropout": 0.2}),
        pytest.param("llama", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("t5", 2, 1, {"dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("bert", 2, 3, {"dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("nanogpt", 4, 2, {"dropout": 0.2}, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_compute_what_one_process_does(name, d, t, options):
    case, data = gpt2() if name == "gpt2" else Case.of(name, **options), DataAxis(d, bucket_bytes=4000)
    compiled = compile_on(case, data, t, sequence_parallel=t > 1)
    assert worst(case, compiled, data) <= RTOL


@pytest.mark.slow
def test_each_gradient_collective_is_needed():
    """Without any one of them, or of the sums of the loss and of its labels, a rank's result is another."""
    data = DataAxis(2, bucket_bytes=8000)
    whole = compile_on(gpt2(), data, 2)
    assert worst(gpt2(), whole, data) <= RTOL
    count = len(sums(whole.program.graph))
    assert count >= 5
    for i in (0, 1, 2, count - 1):
        broken = dataclasses.replace(whole, program=whole.program.copy())
        start = sums(broken.program.graph)[i]
        (wait,) = start.users
        wait.replace_all_uses_with(start.args[0])
        broken.program.gm.recompile()
        try:
            assert worst(gpt2(), broken, data) > 1e-3, start
        except PlacementError as error:
            assert "differs between ranks" in str(error)


@pytest.mark.parametrize("t", [2, 1, 3])
def test_a_step_sends_each_gradient_once(t):
    """2 n (d - 1) / d bytes a rank for the n bytes of its gradients, and three numbers: loss, labels, gradient."""
    data = DataAxis(4)
    compiled = compile_on(gpt2(), data, t)
    program = compiled.program
    sent = [c for c in communication(program, t, {BATCH_AXIS: 4}) if c.axis == BATCH_AXIS]
    assert {c.collective for c in sent} == {ALL_REDUCE}
    stored = [n.meta[VAL] for n, i in program.input_nodes() if i.kind == "param"]
    gradients = sum(payload(ALL_REDUCE, v.numel(), 4) * v.element_size() for v in stored)
    assert sum(c.bytes_moved for c in sent if c.direction == "backward") == pytest.approx(gradients, abs=64)
    assert [c.bytes_moved for c in sent if c.direction == "forward"] == [payload(ALL_REDUCE, 1, 4) * 8] * 2


def test_buckets_start_while_backward_goes_on_and_are_waited_for_at_its_end():
    compiled = compile_on(gpt2(), DataAxis(2, bucket_bytes=6000), 2)
    order = {n: i for i, n in enumerate(compiled.program.graph.nodes)}
    starts = of_gradients(compiled.program.graph)
    products = [order[n] for n in order if is_product(n) and n.meta.get(PHASE) == "backward"]
    assert len(starts) > 3
    assert order[starts[0]] < products[len(products) // 2]
    waits = [order[u] for s in starts for u in s.users if is_wait(u)]
    assert len(waits) == len(starts) and min(waits) > products[-1]
    one = compile_on(gpt2(), DataAxis(2), 2)
    assert len(of_gradients(one.program.graph)) == 1


def test_bytes_of_a_bucket_are_bounded():
    compiled = compile_on(gpt2(), DataAxis(2, bucket_bytes=6000), 1)
    sizes = [s.args[0].meta[VAL].numel() * 8 for s in of_gradients(compiled.program.graph)]
    singles = [n for n in sizes if n > 6000]
    largest = max(p.numel() for p in gpt2().model.parameters()) * 8
    assert singles and max(singles) == largest and all(n <= 6000 for n in sizes if n not in singles)


@pytest.mark.slow
def test_averaged_gradients_are_those_of_each_ranks_own_loss():
    """What DistributedDataParallel gives: the mean over ranks of what each would compute alone."""
    case, data = Case.of("nanogpt"), DataAxis(2)
    compiled = compile_on(case, data, 2, data_parallel_loss="average")
    inputs = seeded(case, 4)
    alone = case.compile(1)
    halves = [{k: v[i : i + 2] for k, v in inputs.items()} for i in (0, 2)]
    parts, program, stored = [case.run(alone, half) for half in halves], compiled.program, compiled.plan.params
    given = [x for half in halves for x in local_inputs(program, case.values(program, half), stored, 2)]
    results = simulate(program, given, mesh={**data.mesh, "tp": 2})
    found = [logical_of(program, results[k : k + 2], given[k:], {}, stored, 2) for k in (0, 2)]
    for part, mine in zip(parts, found, strict=True):
        for name, value in mine.outputs.items():
            torch.testing.assert_close(value, part.outputs[name], rtol=RTOL, atol=0)
        for name, gradient in mine.gradients.items():
            mean = (parts[0].gradients[name] + parts[1].gradients[name]) / 2
            torch.testing.assert_close(gradient, mean, rtol=RTOL, atol=1e-12)
