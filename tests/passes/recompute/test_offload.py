"""Covers: passes/recompute/offload.py, passes/lower/schedule_offload.py, megafx/ops/offload.py."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Case
from torch import nn

import megafx
from megafx.analysis.prices import bytes_of, seconds
from megafx.checks.simulate import Logical
from megafx.compiler.compiled import Compiled
from megafx.config import Config
from megafx.errors import ConfigError, PlanError
from megafx.ir.nodes import in_backward
from megafx.ir.program import LAYER, VAL, Partition, Recomputed
from megafx.ops.offload import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from megafx.passes.lower.partition import partition
from megafx.passes.lower.schedule_offload import schedule_offload
from megafx.passes.recompute.choose_kept import choose_kept

LAYERS = 4


@functools.cache
def case() -> Case:
    return Case.of("gpt2", layers=LAYERS, dropout=0.1)


@functools.cache
def plain(t: int, sp: bool = False) -> tuple[Compiled, Logical]:
    made = case().compile(t, sequence_parallel=sp)
    return made, run(made)


def run(made: Compiled) -> Logical:
    return case().run(made, case().inputs(2, 16))


def chosen(made: Compiled, **options: Any) -> Compiled:
    """The same with what is offloaded under these options."""
    hardware = options.pop("hardware", {})
    program, context = made.program.copy(), copy.copy(made.context)
    context.config = context.config.replace(**options)
    context.hardware = replace(context.hardware, **hardware)
    choose_kept(program, context)
    return Compiled(program, context)


def outcome(made: Compiled) -> Recomputed:
    assert made.program.recomputed is not None
    return made.program.recomputed


def parts(made: Compiled) -> Partition:
    program = made.program.copy()
    partition(program, made.context)
    schedule_offload(program, made.context)
    assert program.partition is not None
    return program.partition


def same_bits(found: Logical, wanted: Logical) -> None:
    for kind in ("outputs", "gradients"):
        for name, value in getattr(wanted, kind).items():
            other = getattr(found, kind)[name]
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name


@pytest.mark.parametrize(("t", "sp"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu_offloading_num_layers": 2, "recompute_granularity": "selective", "recompute_modules": ["norm", "act"]},
        {"activation_memory_budget": 0.3},
    ],
)
def test_the_same_bits_come_back(t: int, sp: bool, options: dict[str, Any]) -> None:
    made, wanted = plain(t, sp)
    found = chosen(made, cpu_offloading=True, **options)
    assert outcome(found).offloaded > 0 and outcome(found).kept < outcome(found).without
    same_bits(run(found), wanted)


@pytest.mark.slow
def test_a_copy_that_loses_something_is_seen() -> None:
    """That the comparison can fail: one value comes back from another one's copy."""
    made, wanted = plain(1)
    found = chosen(made, cpu_offloading=True)
    first, second = [n for n in found.program.graph.nodes if n.target is RELOAD and n.meta["val"].dim() > 2][:2]
    first.args = second.args = (first.args[0], False)
    with pytest.raises((AssertionError, RuntimeError)):
        same_bits(run(found), wanted)


def test_layers_go_and_prediction_knows() -> None:
    made, _ = plain(1)
    kept, saved = [], []
    for count in (1, 2, 3):
        found = chosen(made, cpu_offloading=True, cpu_offloading_num_layers=count)
        out, memory = outcome(found), found.memory()
        assert out.kept + out.offloaded == out.without
        kept.append(out.offloaded)
        saved.append(memory.saved)
    assert kept[1] == 2 * kept[0] and kept[2] == 3 * kept[0]  # layers are alike
    assert saved == sorted(saved, reverse=True) and len({*saved}) == 3
    everything = chosen(made, cpu_offloading=True)
    assert outcome(everything).offloaded == kept[2]  # all but the last
    whole, less = made.memory(), everything.memory()
    assert less.saved < 0.6 * whole.saved and less.backward is not None and whole.backward is not None
    assert less.backward.start < 0.6 * whole.backward.start and less.peak <= whole.peak


def test_copies_run_beside_the_next_layer() -> None:
    """Forward waits two layers on, or at its end; backward asks for a layer's values while the layer behind it computes."""
    made, _ = plain(1)
    cut = parts(chosen(made, cpu_offloading=True))
    assert cut.backward is not None
    nodes = [n for n in cut.forward.graph.nodes if LAYER in n.meta]
    for place, node in enumerate(nodes):
        if node.target is OFFLOADED:
            before = [n.meta[LAYER] for n in nodes[:place] if n.target not in (OFFLOAD, OFFLOADED)]
            assert max(before) >= node.meta[LAYER] + 1
            assert all(n.target is OFFLOADED or n.meta[LAYER] != node.meta[LAYER] for n in nodes[place:])
    nodes = [n for n in cut.backward.graph.nodes if LAYER in n.meta and isinstance(n.meta["val"], torch.Tensor)]
    nodes = [n for n in nodes if n.op == "call_function"]
    ahead: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        if node.target is RELOAD:
            done = next(u for u in node.users if u.target is RELOADED)
            between = {n.meta[LAYER] for n in nodes[place : nodes.index(done)] if n.target not in (RELOAD, RELOADED)}
            ahead.setdefault(node.meta[LAYER], []).append(len(between))
            assert max(between) <= node.meta[LAYER] + 2, (
                node,
                between,
            )  # sums and norms at a border are of either layer
    assert len(ahead) == LAYERS - 1 and all(max(counts) > 1 for counts in ahead.values()), ahead
    total = sum(n.target is OFFLOAD for n in cut.forward.graph.nodes)
    assert total == sum(n.target is RELOAD for n in cut.backward.graph.nodes) > 3


def test_a_budget_offloads_what_hides_and_makes_the_rest_again() -> None:
    made, _ = plain(1)
    free = outcome(
        chosen(made, cpu_offloading=True, activation_memory_budget=0.5, hardware={"host_bytes_per_second": 1e18})
    )
    slow = outcome(
        chosen(made, cpu_offloading=True, activation_memory_budget=0.5, hardware={"host_bytes_per_second": 1.0})
    )
    none = outcome(chosen(made, activation_memory_budget=0.5))
    assert free.seconds == 0.0 and free.offloaded > 0 and free.promise is not None and free.kept <= free.promise
    assert slow.offloaded == 0 and slow.seconds == none.seconds > 0
    loose = outcome(
        chosen(made, cpu_offloading=True, activation_memory_budget=0.9, hardware={"host_bytes_per_second": 1e18})
    )
    assert 0 < loose.offloaded < free.offloaded
    least = chosen(made, cpu_offloading=True, activation_memory_budget=0, hardware={"host_bytes_per_second": 1.0})
    assert outcome(least).kept < outcome(chosen(made, activation_memory_budget=0.1)).kept
    first = chosen(made, cpu_offloading=True, cpu_offloading_num_layers=1, activation_memory_budget=0.5)
    assert outcome(first).offloaded > 0


@pytest.mark.parametrize("part", [0.3, 1.0, 3.0])
def test_no_copy_that_a_budget_chose_is_waited_for(part: float) -> None:
    """On a link that carries all that is kept in `1 / part` of forward's time, by the prices and the schedule of the graph."""
    made, _ = plain(1)
    program, context = made.program, made.context
    time = lambda node: seconds(program, node, context.hardware, 1)
    forward = sum(time(n) for n in program.graph.nodes if not in_backward(n))
    rate = outcome(chosen(made, activation_memory_budget=1.0)).without / forward * part
    hardware = {"host_bytes_per_second": rate}
    found = chosen(made, cpu_offloading=True, activation_memory_budget=0.4, hardware=hardware)
    assert outcome(found).offloaded > 0.2 * part * outcome(found).without or part > 1
    now, free, ends = 0.0, 0.0, {}
    for node in parts(found).forward.graph.nodes:
        if node.target is OFFLOAD:
            free = ends[node] = max(free, now) + bytes_of(program, node.args[0]) / rate
        elif node.target is OFFLOADED:
            assert ends.pop(node.args[0]) <= now, node
        elif node.op == "call_function":
            now += time(node)
    assert not ends and free > 0


def test_what_cannot_be_is_refused() -> None:
    made, _ = plain(1)
    with pytest.raises(PlanError, match="priced by the link to the host"):
        chosen(made, cpu_offloading=True, activation_memory_budget=0.5, hardware={"host_bytes_per_second": None})
    with pytest.raises(ConfigError, match="cpu_offloading_num_layers"):
        Config(cpu_offloading_num_layers=2)
    with pytest.raises(ConfigError, match="cuda_graphs"):
        Config(cpu_offloading=True, cuda_graphs=True)
    one = megafx.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), megafx.Config(cpu_offloading=True))
    with pytest.raises(ConfigError, match="this model has no layers"):
        one(torch.randn(2, 4)).sum()


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)) for _ in range(4))
    )


def step(model: nn.Module, retain: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    loss = model(x).square().sum()
    if retain:
        loss.backward(retain_graph=True)
        model.zero_grad()
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def test_a_backward_that_never_comes_or_comes_twice() -> None:
    wanted = step(megafx.parallelize(blocks(), megafx.Config()))
    model = megafx.parallelize(blocks(), megafx.Config(cpu_offloading=True, gradient_accumulation_fusion=True))
    for retain in (False, True):
        assert all(map(torch.equal, step(model, retain), wanted))
        model(torch.randn(5, 8))  # in training mode, dropped
        pending = model(torch.randn(5, 8)).sum()
        with torch.no_grad():
            model(torch.randn(5, 8))
        handle = next(model.parameters()).register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pending.backward()
        handle.remove()
        model.zero_grad()
        assert all(map(torch.equal, step(model), wanted))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        assert all(map(torch.equal, step(model), wanted))
    assert packed
    assert "on the host" in str(megafx.explain(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"cpu_offloading_num_layers": 3}, {"activation_memory_budget": 0.5}])
def test_on_a_gpu(options: dict[str, Any]) -> None:
    """Copies on their own stream: the bits of a step are the same, and between forward and backward less is alive."""
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.2), nn.Linear(4096, 1024)) for _ in range(6))
    )
    x = torch.randn(4096, 1024, device="cuda")
    found, alive = [], []
    for chosen in ({}, {"cpu_offloading": True, "hardware": "h200-nvlink", **options}):
        model = megafx.parallelize(copy.deepcopy(blocks).cuda(), megafx.Config(**chosen))
        torch.manual_seed(1)
        for every in range(4):
            before = torch.cuda.memory_allocated()
            loss = model(x + every).square().mean()
            if every == 3:
                alive.append(torch.cuda.memory_allocated() - before)
            if every != 1:  # a backward that never comes
                loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
    assert alive[1] < 0.75 * alive[0], alive


def test_a_number_that_is_brought_back_takes_no_time() -> None:
    """A free op is no product: its operand, of no dims, was asked for its last one."""
    made = plain(1)[0]
    program = made.program.copy()
    values = ((n, n.meta.get(VAL)) for n in program.graph.nodes)
    number = next(n for n, value in values if isinstance(value, torch.Tensor) and value.dim() == 0)
    with program.graph.inserting_after(number):
        node = program.graph.call_function(RELOAD, (number, False))
    node.meta[VAL] = number.meta[VAL]
    assert seconds(program, node, made.context.hardware, 1) == 0.0
