"""Covers: capture/eager_parts.py, capture/eager_parts.py. Functions that need the values of integers are nodes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from image_models import build, call, patch_places
from torch import Tensor, nn

import megafx
from megafx.errors import CaptureError

SMALL, LARGE = (1, 2, 2), (1, 2, 6)
GRIDS: list[tuple[Any, int]] = [
    (([SMALL, (1, 2, 4)], [LARGE]), 1),
    (([LARGE], [SMALL, (2, 2, 2)]), 1),
    (([SMALL], [SMALL, (1, 4, 2)]), 2),
]
TWO = megafx.Config(tensor_model_parallel_size=2, cache=False)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="megafx cannot capture")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 3])
def test_images_of_several_sizes_on_ranks(t: int) -> None:
    config = TWO.replace(tensor_model_parallel_size=t)
    verdict = megafx.verify(build(), config, example_inputs=call(*GRIDS[0][0]), tolerance=1e-10)
    assert verdict and verdict.reference == "eager", verdict


@pytest.mark.slow
def test_only_what_needs_the_values_stays_whole() -> None:
    plan = megafx.plan(build(), TWO, example_inputs=call(*GRIDS[0][0]))
    whole = {n for n, p in plan.params.items() if not p.is_shard}
    assert plan.params["vision.up.weight"].is_shard and plan.params["up.weight"].is_shard
    assert {"vision.attention.qkv.weight", "vision.attention.out.weight"} <= whole
    report = " ".join(str(megafx.explain(plan)).split())
    assert "the function Net.positions is not captured" in report and "the function patch_places is not" in report


@pytest.mark.slow
def test_other_images_in_the_same_loop() -> None:
    """The number of patches makes a graph; how they are spread over the images does not."""
    plain = build()
    model = megafx.parallelize(copy.deepcopy(plain), TWO.replace(tensor_model_parallel_size=1))
    code, counts = patch_places.__code__, list[int]()
    for rows, captures in GRIDS:
        inputs = call(*rows)
        for each in (plain, model):
            each.zero_grad()
            each(**inputs).backward()
        assert torch.equal(model.spread, plain.spread)
        for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        counts.append(model.megafx.captures)
        assert len({*counts}) >= captures, counts
    assert patch_places.__code__ is code


class Chosen(nn.Module):
    """Its function `pick` may not be left eager by itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight, self.level = kind, nn.Parameter(torch.ones(8)), 0.0
        self.seen: list[int] = []

    def pick(self, counts: Tensor, given: list[int]) -> Tensor:
        number = int(counts.numpy().sum())
        if self.kind == "an argument":
            given.append(number)
        if self.kind == "writes":
            counts += 1
        if self.kind == "an attribute":
            self.level = float(number)
        scale = self.weight if self.kind == "a parameter" else torch.ones(8).double()
        return scale * (2.0 if number > 3 else 3.0)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return x * self.pick(counts.clone(), [])


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin, self.chosen = nn.Linear(8, 8), Chosen(kind)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.chosen(self.lin(x), counts).square().mean()


RARE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("an argument", "writes", "an attribute")]


@pytest.mark.parametrize("kind", ["", "a parameter", *RARE])
def test_a_function_that_does_more_than_keep_books(kind: str) -> None:
    """Its module is left eager in its place."""
    torch.manual_seed(0)
    model = Outer(kind).double()
    inputs = (torch.randn(3, 8).double(), torch.tensor([1, 2, 3]))
    plan = megafx.plan(model, TWO, example_inputs=inputs)
    report = " ".join(str(megafx.explain(plan)).split())
    alone = "the function Chosen.pick is not captured" in report
    assert alone == (kind == "") and (alone or "[chosen]" in report or "chosen" in report)
    plain = copy.deepcopy(model)
    model = megafx.parallelize(model, TWO.replace(tensor_model_parallel_size=1))
    for counts in (inputs[1], inputs[1] * 0):
        for each in (plain, model):
            each.zero_grad()
            each(inputs[0], counts).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_error_can_be_had() -> None:
    with pytest.raises(CaptureError, match="depends on the data|read from tensors|becomes a Python number"):
        megafx.plan(build(), TWO.replace(uncaptured="error"), example_inputs=call(*GRIDS[0][0]))
