"""Covers: megafx/analysis/memory.py, megafx.predict_memory, explain().memory(), the budget 'fit'."""

from __future__ import annotations

import copy
import functools
import operator
import re
import weakref
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zoo
from harness import Case
from local_programs import local_program
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megafx
from megafx.analysis.memory import BLOCK, CUBLAS_WORKSPACE, walk
from megafx.analysis.prices import seconds
from megafx.capture.export import capture_call
from megafx.checks.simulate import local_inputs
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.errors import PlanError, UsageError
from megafx.ir.nodes import op_name
from megafx.passes.lower.partition import cut
from megafx.passes.recompute.choose_kept import choose_kept
from megafx.planner.cost import matmul_seconds
from megafx.planner.hardware import Hardware
from megafx.testing import make_context


class Held(TorchDispatchMode):
    """Bytes of the storages that ops have returned and that somebody holds."""

    def __init__(self, standing: list[Any]) -> None:
        super().__init__()
        self.standing = {x.untyped_storage()._cdata for x in standing if isinstance(x, torch.Tensor)}
        self.holders: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.hold(x)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result

    def hold(self, x: torch.Tensor) -> None:
        key = x.untyped_storage()._cdata
        if key not in self.standing:
            self.holders[key] += 1
            self.sizes[key] = -(-x.untyped_storage().nbytes() // BLOCK) * BLOCK
            weakref.finalize(x, self.drop, key)

    def drop(self, key: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.sizes[key]


def measured(case: Case, made: Compiled) -> tuple[int, int, int]:
    """Highest bytes held in forward and in backward, and bytes kept between them, as one rank's graphs run."""
    inputs = local_inputs(made.program, case.values(made.program, case.inputs(2, 16)), made.plan.params, 1)[0]
    kinds = [i.kind for i in made.program.inputs]
    given = [x for x, kind in zip(inputs, kinds, strict=True) if kind != "tangent"]
    tangents = [x for x, kind in zip(inputs, kinds, strict=True) if kind == "tangent"]
    executable = made.executable()
    given += [join(given) for join in executable.joins]  # in a model that is parallelized these are views
    executable.joins = []
    with Held(given) as forward:
        outputs, kept = executable.forward(given)
    assert kept is not None
    values = kept.values[kept.inputs :]
    with Held(given) as backward:
        for x in values:
            if isinstance(x, torch.Tensor):
                backward.hold(x)
        saved = sum(backward.sizes.values())
        for x in outputs:
            backward.hold(x)
        del x, values
        gradients = executable.backward(kept, tangents)
    assert outputs and gradients
    return forward.peak, backward.peak, saved


@pytest.mark.parametrize(("name", "budget"), [("nanogpt", None), ("nanogpt", 0.4), ("llama", None), ("llama", 0.1)])
def test_what_is_predicted_is_what_graphs_hold(
    name: str, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafx.analysis.memory._workspace", lambda program, node: 0)  # it is not returned, so not seen
    case = Case.of(name, layers=2, dropout=0.1)
    made = case.compile(1, activation_memory_budget=budget, lazy_outputs=False)
    made.context.at_call = True
    found = made.memory()
    assert found.workload == {"batch": 2, "seq": 16} and found.backward is not None
    forward, backward, saved = measured(case, made)
    assert (found.saved, found.forward.peak, found.backward.peak) == (saved, forward, backward)


def test_results_that_are_no_tensors_take_nothing() -> None:
    """cuDNN's attention on CUDA: output, log-sum-exp, None, None, two ints, and tensors behind them."""
    tensor = torch.empty(4, 128, device="meta")
    graph = torch.fx.Graph()
    made = graph.call_function(torch.ops.aten._scaled_dot_product_cudnn_attention.default, ())
    made.meta["val"] = (tensor, tensor.clone(), None, None, 16, 16, tensor.clone(), tensor.clone())
    parts = [graph.call_function(operator.getitem, (made, i)) for i in (0, 2, 4, 6)]
    for part in parts:
        part.meta["val"] = made.meta["val"][part.args[1]]
    graph.output((parts[0], parts[3]))
    program = Case.of("nanogpt").program
    found = walk(program, torch.fx.GraphModule(torch.nn.Module(), graph), {})
    assert found.points[0] == (made.name, "", 4 * 2048, 0, 2 * 2048)  # which names no module; two of them are results
    assert found.end == 2 * 2048  # what nobody takes goes at once


def test_attention_backward_holds_its_dropout_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Case.of("nanogpt", layers=2, dropout=0.1).compile(1, lazy_outputs=False)
    whole = made.memory().backward
    monkeypatch.setattr("megafx.analysis.memory._workspace", lambda program, node: 0)
    without = made.memory().backward
    assert whole is not None and without is not None
    work, q = (
        made.program.sizes,
        next(n for n in made.program.graph.nodes if "attention_backward" in str(n.target)).args[1],
    )
    batch, heads, length, _ = (work.workload(work.of(n)) for n in q.meta["val"].shape)
    rows = -(-length // 64) * 64
    wanted = batch * heads * (rows * rows // 8 + 2 * 4 * rows)
    more = [a.bytes - b.bytes for a, b in zip(whole.points, without.points, strict=True) if "attention_b" in a.node]
    assert more == [-(-wanted // BLOCK) * BLOCK] * 2


# -- the formulas of activations (Korthikanti et al. 2022, table 2), for a block of GPT


S, B, H = 512, 4, 256


@functools.cache
def blocks() -> Any:
    model, inputs = zoo.build("nanogpt", layers=3, dropout=0.1, heads=4, embd=H)
    return capture_call(model.bfloat16(), (), inputs(2, 16))


def kept(t: int, sp: bool, **options: Any) -> float:
    """Bytes that the middle one of three GPT blocks keeps, in units of sbh, at 16 bits."""
    config = megafx.Config(sequence_parallel=sp, micro_batch_size=B, seq_length=S, **options)
    context = make_context(t, config, wants_grad=lambda spec: spec.kind == "param")
    program = compile_program(blocks().copy(), context).program
    saved = [s for s in cut(program).saved if s.fqn.startswith("h.1") and s.numel]
    return sum(program.sizes.workload(s.numel) * s.itemsize for s in saved) / (S * B * H)


NORMS: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["norm"]}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
STATISTICS = 16 / H + 4 * 4 / H  # of two norms, and of 4 heads, in fp32


@pytest.mark.parametrize(
    ("t", "sp", "options", "wanted"),
    [
        (1, False, {}, 24),  # 34, less 2 masks, the GeLU's output (its input is kept), and rounding
        (1, False, NORMS, 20),
        (1, False, FULL, 2),
        (4, True, {}, 20 / 4 + 4),  # the two gathered inputs of products stay whole; Megatron gathers again, for 34/t
        (4, True, NORMS, 20 / 4),
        (4, True, FULL, 2 / 4),
        (4, False, FULL, 2),
        (4, False, {**FULL, "distribute_saved_activations": True}, 2 / 4),
        (1, False, {"cpu_offloading": True}, 2),  # the input of the last block's product, whose norm ends this one
    ],
)
def test_a_block_keeps_what_the_formulas_say(t: int, sp: bool, options: dict[str, Any], wanted: float) -> None:
    assert wanted <= kept(t, sp, **options) <= wanted + STATISTICS


# -- what users call


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)
    ]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(64)), torch.randn(8, 16, 64)


def test_of_a_model_that_runs_nowhere() -> None:
    with torch.device("meta"):
        model, batch = small()
    one = megafx.predict_memory(model, example_inputs=batch)
    weights = 4 * (2 * 64 * 256 + 256 + 64) + 128
    assert 4 * weights <= one.parameters == one.gradients < 4.1 * weights and one.optimizer == 2 * one.parameters
    assert one.peak >= one.standing + one.saved and "peak of backward" in str(one)
    two = megafx.predict_memory(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=batch)
    assert two.parameters < 0.6 * one.parameters and two.saved < one.saved
    sharded = megafx.Config(data_parallel_size=4, data_parallel="fsdp")
    four = megafx.predict_memory(model, sharded, example_inputs=batch, optimizer="sgd")
    assert four.parameters < 0.3 * one.parameters and four.optimizer == 0
    with pytest.raises(UsageError, match="no optimizer 'adamm' is known"):
        megafx.predict_memory(model, example_inputs=batch, optimizer="adamm")


def test_explain_says_what_is_alive_at_the_peak() -> None:
    model, batch = small()
    plan = megafx.plan(model, example_inputs=batch)
    with pytest.raises(UsageError, match="predict_memory"):
        megafx.explain(plan).memory()
    model = megafx.parallelize(model, megafx.Config(activation_memory_budget=0.5), example_inputs=batch)
    model(batch).square().mean().backward()
    report = megafx.explain(model)
    found = report.memory()
    alive = found.at_peak()
    assert sum(a.bytes for a in alive) <= found.peak - found.standing and alive == sorted(alive, key=lambda a: -a.bytes)
    assert any(a.module.startswith("3") for a in alive) and report.curve().peak == found.peak
    assert re.search(r"kept for\s+backward .* \(budget", str(report).replace("\n", " "))


def test_a_larger_call_keeps_the_promise_too() -> None:
    model, batch = small()
    model = megafx.parallelize(model, megafx.Config(activation_memory_budget="600KB"), example_inputs=batch)
    kept = []
    for rows in (8, 4, 16, 12):
        model(torch.randn(rows, 16, 64)).square().mean().backward()
        chosen = model.megafx.settled.last.program.recomputed
        kept.append(chosen.kept)
        assert chosen.kept <= 600_000
    graphs = [graph for known in model.megafx.graphs.values() for graph in known]
    assert len(graphs) == 2, kept  # 8 rows, and 4; 16, and 12


def test_fit_takes_the_largest_budget_that_the_device_has_room_for() -> None:
    case = Case.of("nanogpt", layers=2, embd=64)
    options = {"wants_grad": lambda spec: spec.kind == "param"}

    def fitted(device_bytes: int | None) -> Compiled:
        context = make_context(1, megafx.Config(activation_memory_budget="fit", micro_batch_size=64), **options)
        context.device_bytes = device_bytes
        return compile_program(case.program.copy(), context)

    whole = fitted(10**12)
    assert whole.program.recomputed is not None and whole.program.recomputed.kept == whole.program.recomputed.without
    peak = whole.memory().peak
    less = fitted(int((0.8 * (peak - CUBLAS_WORKSPACE) + CUBLAS_WORKSPACE) / 0.94))
    assert less.program.recomputed is not None and 0 < less.program.recomputed.kept < whole.program.recomputed.kept
    assert less.memory().peak - CUBLAS_WORKSPACE <= 0.8 * (peak - CUBLAS_WORKSPACE)
    with pytest.raises(PlanError, match="the least that a step takes is"):
        fitted(2**20)
    with pytest.raises(PlanError, match="whose memory is not known"):
        fitted(None)


def test_a_model_that_does_not_fit_trains_with_fit(tmp_path: Path) -> None:
    """On a device (a profile says so) with less memory than a step without a budget takes; the bits are the same."""
    model, _ = small()
    batch = torch.randn(256, 16, 64, generator=torch.Generator().manual_seed(0))
    plain = megafx.predict_memory(copy.deepcopy(model), example_inputs=batch)
    room = plain.peak - plain.saved // 2
    profile = asdict(Hardware.load("cpu-gloo")) | {"memory_bytes": int(room / 0.94)}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(profile))

    def trained(**options: Any) -> tuple[Any, list[torch.Tensor]]:
        made = megafx.parallelize(copy.deepcopy(model), megafx.Config(hardware=str(path), **options))
        made(batch).square().mean().backward()
        return megafx.explain(made).memory(), [p.grad for p in made.parameters() if p.grad is not None]

    whole, wanted = trained()
    fitted, found = trained(activation_memory_budget="fit")
    assert whole.peak > profile["memory_bytes"] >= fitted.peak and fitted.peak <= 0.94 * profile["memory_bytes"] + 1
    assert len(wanted) == 18 and all(map(torch.equal, found, wanted))


def test_a_budget_brings_the_peak_down() -> None:
    made = Case.of("nanogpt", layers=2, embd=64).compile(1, micro_batch_size=16)
    peaks = []
    for tenths in (10, 8, 6, 4):
        program, context = made.program.copy(), copy.copy(made.context)
        context.config = context.config.replace(activation_memory_budget=tenths / 10)
        choose_kept(program, context)
        found = Compiled(program, context).memory()
        assert found.backward is not None
        peaks.append(max(found.forward.peak, found.backward.peak))
    assert max(peaks) == peaks[0] and peaks[-1] < 0.95 * peaks[0]


def test_a_fused_loss_is_priced_as_its_products() -> None:
    """With gradients it makes three; were it priced as the memory it moves, a budget would have backward make it again."""
    x, w, ids = torch.empty(512, 1024), torch.empty(4096, 1024), torch.zeros(512, dtype=torch.int64)

    def function(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.megafx.linear_cross_entropy_forward(x, w, None, ids, -100, 0.0, True)

    program = local_program(function, {"x": x, "w": w, "ids": ids})
    (node,) = [n for n in program.graph.nodes if op_name(n) == "linear_cross_entropy_forward"]
    hardware = Hardware.load("h200-nvlink")
    assert seconds(program, node, hardware, 1) >= matmul_seconds(3 * 2 * 512 * 1024 * 4096, "float32", hardware)
