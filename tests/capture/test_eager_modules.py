"""Covers: ops/eager_call.py. Submodules that decide by data run their own code between captured parts: exact at any degree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from eager_parts import CALL, Chosen, build
from torch import Tensor, nn

import megafx
from megafx.errors import CaptureError, ConfigError, UsageError

EAGER: dict[str, Any] = {"eager_modules": ["layers.*.chosen"]}


def test_the_error_says_the_way_out() -> None:
    with pytest.raises(CaptureError) as error:
        megafx.plan(build(), megafx.Config(tensor_model_parallel_size=2, uncaptured="error"), example_inputs=CALL)
    text = str(error.value)
    assert "in module 'layers.0.chosen'" in text and "eager_parts.py" in text
    assert 'Config(eager_modules=["layers.0.chosen"])' in text


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("p", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_exact_on_ranks(t: int, p: float) -> None:
    """Against eager; with dropout inside of the eager module against one rank."""
    config = megafx.Config(tensor_model_parallel_size=t, hardware="h100-nvlink", **EAGER)
    verdict = megafx.verify(build(p), config, example_inputs=CALL, tolerance=1e-10)
    assert verdict and verdict.reference == ("megafx at t=1" if p else "eager"), verdict
    assert len(verdict.gradients) == 31 and all(
        f"layers.1.chosen.experts.{i}.weight" in verdict.gradients for i in range(3)
    )


def test_plan_and_report() -> None:
    planned = megafx.plan(build(), megafx.Config(tensor_model_parallel_size=2, **EAGER), example_inputs=CALL)
    assert planned.params["layers.0.up.weight"].is_shard
    whole = [n for n in planned.params if "chosen" in n]
    assert len(whole) == 16 and not any(planned.params[n].is_shard for n in whole)
    report = str(megafx.explain(planned)).replace("\n", " ")
    assert "left eager: 1 calls run its own code on every rank" in report and "1875 parameters" in report


def test_training_loop() -> None:
    """Other sizes use the same graph; the module's own hooks run; eval has a graph of its own."""
    model = build()
    eager = copy.deepcopy(model)
    seen = []
    model.layers[0].chosen.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    megafx.parallelize(model, megafx.Config(**EAGER), example_inputs=CALL)
    for batch, seq in ((3, 13), (2, 9)):
        call = {name: value[:batch, :seq] for name, value in CALL.items()}
        for m in (model, eager):
            m.zero_grad()
            m(**call).backward()
        for (name, a), (_, b) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert model.megafx.captures == 1 and (3, 13, 24) in seen and (2, 9, 24) in seen
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**CALL), eager.eval()(**CALL))


def test_random_numbers_are_the_same_in_backward() -> None:
    """The gradient is that of the mask that was drawn: it is zero where the output is, and the seed decides both."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.lin = Chosen(8, 0.5), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.lin(x).clamp(min=0.1))["y"]

    torch.manual_seed(0)
    x = torch.randn(2, 5, 8).double()
    model = megafx.parallelize(Dropped().double(), megafx.Config(eager_modules=["inner"]), example_inputs=(x,))
    first, second = model(x), model(x)
    assert not torch.equal(first, second) and 0.2 < float((first == 0).double().mean()) < 0.8
    (first * first.detach()).sum().backward()
    with torch.no_grad():
        probabilities = model.inner.router(model.lin(x).clamp(min=0.1).reshape(-1, 8)).softmax(-1)
    weight, index = probabilities.max(-1)
    for i, expert in enumerate(model.inner.experts):
        factor = (index == i).double() * weight * 0.5 / (1 - 0.5)  # its own weight, the buffer, what dropout scales by
        wanted = (factor[:, None] * first.detach().reshape(-1, 8)).sum(0)
        torch.testing.assert_close(expert.bias.grad, wanted if (index == i).any() else None)


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.inner = Bad(what)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.inner(x)).sum() + self.inner.seen


class Bad(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "changes a buffer":
            self.seen.add_(1)
        if self.what == "needs certain sizes":
            return x.view(2, 8)
        return x


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("changes a buffer", UsageError, "changes its buffer 'seen', which captured code reads"),
        (
            "needs certain sizes",
            CaptureError,
            r"run on made-up inputs.*of shapes \(\d+, 8\), and fails on them: RuntimeError",
        ),
    ],
)
def test_what_cannot_be_left_eager(what: str, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text) as error:
        model = megafx.parallelize(Refused(what), megafx.Config(eager_modules=["inner"]))
        model(torch.randn(2, 8))
    assert error.value.module == "inner" and error.value.fix


def test_a_name_that_matches_nothing() -> None:
    with pytest.raises(ConfigError, match="'iner' matches no submodule"):
        megafx.plan(Refused(""), megafx.Config(eager_modules=["iner"]), example_inputs=(torch.randn(2, 8),))
