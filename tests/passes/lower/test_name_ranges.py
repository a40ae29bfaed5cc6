"""Covers: passes/lower/name_ranges.py, ops/ranges.py, profiling.py (`megafx.profile`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megafx
from megafx.errors import UsageError
from megafx.passes.lower.name_ranges import with_ranges
from megafx.profiling import loss_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def parallel(**options: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 5, 4)
    config = megafx.Config(tensor_model_parallel_size=1, **options)
    return megafx.parallelize(model, config, example_inputs=x), x


def test_runs_of_one_module_are_within_a_range() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = [x]
    for fqn in ("a", "a", "b", "", "a"):
        nodes.append(graph.call_function(torch.sin, (nodes[-1],)))
        nodes[-1].meta["fqn"] = fqn
    graph.output(nodes[-1])
    gm, count = with_ranges(torch.fx.GraphModule({}, graph), "backward")
    assert count == 4
    assert [n.args[0] for n in gm.graph.nodes if n.name.startswith("enter")] == [
        f"megafx backward {fqn}" for fqn in ("a", "b", "<root>", "a")
    ]
    order = [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"]
    assert order[:5] == ["enter_range", "sin", "sin", "leave_range", "enter_range"]
    torch.testing.assert_close(gm(torch.ones(2)), torch.fx.GraphModule({}, graph)(torch.ones(2)))


def test_numbers_have_the_same_bits_and_a_trace_has_the_names() -> None:
    found = {}
    for asked in (False, True):
        model, x = parallel(profiler_ranges=asked)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
        names = {e.key for e in trace.key_averages() if e.key.startswith("megafx ")}
        found[asked] = loss.detach(), [p.grad for p in model.parameters()], names
    assert torch.equal(found[True][0], found[False][0])
    assert all(torch.equal(a, b) for a, b in zip(found[True][1], found[False][1], strict=True))
    assert found[False][2] == set()
    wanted = {f"megafx {way} layers.{i}.{k}" for way in ("forward", "backward") for i in range(3) for k in (0, 2)}
    assert wanted <= found[True][2], wanted - found[True][2]


def test_measured_times_stand_beside_modelled_ones() -> None:
    model, x = parallel(profiler_ranges=True)
    report = megafx.profile(model, x, steps=2)
    measured = {(m.direction, m.module): m for m in report.measured}
    first = [n for n in report.costed.nodes if n.module == "0"]
    assert any(n.has_weight and n.us > 0 for n in first)
    modelled = {"forward": sum(n.us for n in first), "backward": sum(n.back_us + n.weight_us for n in first)}
    for direction, us in modelled.items():  # as the schedule has it, not twice forward
        one = measured[direction, "layers.[0-2].0"]
        assert one.us > 0 and one.modelled_us == pytest.approx(3 * us, abs=0.11)
    assert "Measured, one step" in str(report) and "forward layers.[0-2].0: " in str(report)
    assert all(p.grad is None for p in model.parameters())
    assert [m["module"] for m in report.page_data()["measured"]] == [m.module for m in report.measured]


def test_without_ranges_there_is_nothing_to_show() -> None:
    model, x = parallel()
    with pytest.raises(
        UsageError, match=r"name no modules\n  fix: parallelize the model with Config\(profiler_ranges=True\)"
    ):
        megafx.profile(model, x)


def test_the_loss_of_what_a_model_returns() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    logits = torch.ones(3, requires_grad=True) * 2
    assert loss_of((logits, loss)) is loss and loss_of(type("Output", (), {"loss": loss})()) is loss
    assert loss_of(logits).shape == ()
    with pytest.raises(UsageError, match="nothing that takes a gradient"):
        loss_of(torch.ones(3))
