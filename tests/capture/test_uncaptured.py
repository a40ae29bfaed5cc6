"""Covers: capture/errors.py (`called_part`), compiler/captured.py. Parts that cannot be captured run as they are."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.capture.errors import called_part
from megafx.errors import CaptureError

TWO = megafx.Config(tensor_model_parallel_size=2, cache=False)
ONE = megafx.Config(tensor_model_parallel_size=1, cache=False)
SEEN: list[Tensor] = []


class Branch(nn.Module):
    """Decides by data; what it does besides is `act`."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.level, self.levels = act, torch.zeros(()), []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, rows: int = 0) -> Tensor:
        if self.act is not None:
            self.act(self, x)
        return self.positive(x) if x.sum() > rows else self.negative(x)


class Chosen(nn.Module):
    """Returns some of the rows, and where they were; how many, data says."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = (self.score(x)[:, 0] > x.mean().item()).nonzero()[:, 0]
        return x[chosen], chosen


class Layer(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.up, self.down, self.branch = nn.Linear(8, 32), nn.Linear(32, 8), Branch(act)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.branch(x, x.shape[0])


class Net(nn.Module):
    def __init__(self, act: Any = None, after: Any = None) -> None:
        super().__init__()
        self.layers, self.chosen = nn.ModuleList(Layer(act) for _ in range(2)), Chosen()
        self.head, self.after = nn.Linear(8, 16), after

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        rows, places = self.chosen(x.flatten(0, 1))
        y = torch.zeros_like(x).flatten(0, 1).index_add(0, places, rows)
        loss = self.head(rows).square().sum() + y.sin().mean()
        return loss if self.after is None else loss + self.after(self)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def build(act: Any = None, after: Any = None) -> Net:
    torch.manual_seed(0)
    return Net(act, after).double()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:megafx cannot capture")
@pytest.mark.parametrize("t", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_exact_on_ranks(t: int) -> None:
    verdict = megafx.verify(build(), TWO.replace(tensor_model_parallel_size=t), example_inputs=(floats(3, 5, 8),))
    assert verdict and verdict.reference == "eager", verdict


@pytest.mark.filterwarnings("ignore:megafx cannot capture")
def test_one_graph_for_all_data() -> None:
    eager = build()
    model = megafx.parallelize(copy.deepcopy(eager), ONE)
    for batch, seq in ((3, 5), (2, 7), (4, 3)):
        x = floats(batch, seq, 8)
        for each in (model, eager):
            each.zero_grad()
            each(x).backward()
        for (name, a), (_, b) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert model.megafx.captures == 1


def test_plan_report_and_warning() -> None:
    with pytest.warns(UserWarning, match=r"'layers\.0\.branch' and 2 more, with 19\.\d% of the model's parameters"):
        planned = megafx.plan(build(), TWO, example_inputs=(floats(3, 5, 8),))
    assert planned.params["layers.0.up.weight"].is_shard and planned.params["layers.1.up.weight"].is_shard
    assert not any(p.is_shard for n, p in planned.params.items() if "branch" in n or "chosen" in n)
    report = str(megafx.explain(planned)).replace("\n", " ")
    assert "not captured: a Python decision" in report and "if x.sum() > rows" in report
    assert "'.item()" in report or ".item()" in report


def test_the_error_can_be_had() -> None:
    with pytest.raises(CaptureError, match="depends on the data of a tensor") as error:
        megafx.plan(build(), TWO.replace(uncaptured="error"), example_inputs=(floats(3, 5, 8),))
    assert error.value.module == "layers.0.branch"


def test_a_line_of_the_model_itself_stays_an_error() -> None:
    class Learned(Branch):  # the data is no argument's alone
        def forward(self, x: Tensor, rows: int = 0) -> Tensor:
            return super().forward(self.negative(x), rows)

    with pytest.raises(CaptureError, match="in module '<root>'"):
        megafx.plan(Learned().double(), TWO, example_inputs=(floats(3, 8),))


def _appends(module: Any, x: Tensor) -> None:
    SEEN.append(x.mean())


REFUSED: dict[str, tuple[Any, Any]] = {
    "numpy": (lambda m, x: np.random.rand(), None),
    "the clock": (lambda m, x: time.time(), None),
    "a file": (lambda m, x: open(__file__).close(), None),
    "an attribute": (lambda m, x: setattr(m, "level", x.mean()), lambda n: n.layers[0].branch.level),
    "a list": (lambda m, x: m.levels.append(x.mean()), lambda n: sum(n.layers[0].branch.levels)),
    "a global": (_appends, lambda n: SEEN[-1]),
    "what is set before": (None, lambda n: setattr(n.layers[1].branch, "level", 1.0) or 0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_or_differ_is_refused(name: str) -> None:
    """Code that is left eager, and captured code that reads what that leaves behind."""
    act, after = REFUSED[name]
    SEEN.clear()
    with pytest.raises(CaptureError) as error:
        megafx.plan(build(act, after), TWO, example_inputs=(floats(3, 5, 8),))
    notes = getattr(error.value, "__notes__", [])
    assert error.value.module != "layers.0.branch" or "Left eager it fails, too" in notes[0]


def test_the_part_is_the_module_that_is_called() -> None:
    """A method of a submodule, called by its name, is part of the module that calls it."""

    class Inner(nn.Module):
        def decide(self, x: Tensor) -> Tensor:
            raise RuntimeError

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.decide(x)

    model = nn.Sequential(Outer())
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(1))
    assert called_part(error.value, model) == "0"
