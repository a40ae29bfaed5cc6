"""`megafx.Meter`: what it returns are numbers that can be checked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megafx
from megafx import meter as module
from megafx.errors import UsageError


class Clock:
    """Time that a test moves."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(module, "time", Clock)
    Clock.now = 0.0
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    return megafx.parallelize(net, megafx.Config(tensor_model_parallel_size=1, hardware="h100-nvlink"))


def test_means_tokens_and_mfu(model: nn.Module) -> None:
    meter, losses = megafx.Meter(model, every=2), []
    for step in range(4):
        for _ in range(3):  # micro-batches
            losses.append(model(torch.randn(5, 8)).mean().detach())
        Clock.now += 0.25
        values = meter.step(tokens=10, loss=losses[-1], rate=step)
        assert (values is None) == (step in (0, 2))
    assert values is not None
    assert values["loss"] == pytest.approx(float(losses[-1] + losses[-4]) / 2) and values["rate"] == 2.5
    assert values["seconds"] == 0.25 and values["tokens/s"] == 40.0
    flops = megafx.explain(model).step.flops
    assert flops == 3 * 2 * 5 * (8 * 16 + 16)  # forward, and the gradients of both operands
    assert values["MFU"] == pytest.approx(6 * flops / 0.5 / 989e12, rel=1e-3)
    assert ("memory GiB" in values) == torch.cuda.is_available()


def test_what_is_no_training_is_left_out(model: nn.Module) -> None:
    meter = megafx.Meter(model, every=1)
    with torch.no_grad():
        model(torch.randn(5, 8))
    Clock.now = 100.0
    meter.start()
    model(torch.randn(5, 8)).mean().backward()
    Clock.now += 2.0
    values = meter.step(tokens=4)
    assert values is not None and values["seconds"] == 2.0 and values["tokens/s"] == 2.0
    assert values["MFU"] == pytest.approx(megafx.explain(model).step.flops / 2.0 / 989e12, rel=1e-3)


def test_what_it_refuses(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="Linear is not parallelized"):
        megafx.Meter(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="every=0"):
        megafx.Meter(model, every=0)
