"""Copies of models whose functions refer to the model itself."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.ir.model_copies import deep_copy


class Tied(nn.Module):
    """As x-transformers ties its head: by a lambda in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.to_logits = lambda x: x @ self.embedding.weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.to_logits(self.linear(self.embedding(ids))).flatten(0, 1), ids.flatten()
        )


def wrapped(model: Tied) -> None:
    """As packages wrap the forward of one module."""
    old = model.linear.forward

    @functools.wraps(old)
    def forward(*args: Any) -> Tensor:
        return 2 * old(*args)

    model.linear.forward = forward  # type: ignore[method-assign]


def defaulted(model: Tied) -> None:
    model.to_logits = lambda x, table=model.embedding, scale=3: scale * nn.functional.linear(x, table.weight)  # type: ignore


def hooked(model: Tied) -> None:
    model.linear.register_forward_hook(lambda module, args, out: out + model.embedding.weight.sum())


def partial(model: Tied) -> None:
    model.to_logits = functools.partial(lambda x, table: x @ table().t(), table=lambda: model.embedding.weight)  # type: ignore


FORMS: list[Any] = [lambda model: None, wrapped, defaulted, hooked, partial]
IDS = torch.arange(10).reshape(2, 5)


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_computes_with_its_own_parameters(form: Any) -> None:
    model = Tied().double()
    form(model)
    wanted = model(IDS)
    copied: Any = deep_copy(model)
    assert torch.equal(copied(IDS), wanted)
    copied(IDS).backward()
    assert all(p.grad is not None for p in copied.parameters()) and all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert torch.equal(model(IDS), wanted)


def test_what_holds_nothing_of_the_model_is_shared() -> None:
    calls: list[int] = []

    def count() -> None:
        calls.append(1)

    model = nn.Linear(2, 2)
    model.count, model.apart = count, lambda: model.count  # type: ignore[assignment]
    copied: Any = deep_copy(model)
    assert copied.count is count and copied.apart is not model.apart and copied.apart() is count
    copied.count()
    assert calls == [1]


def test_two_functions_share_a_variable() -> None:
    model: Any = nn.Linear(2, 2)

    def pair(held: Any) -> tuple[Any, Any]:
        def put(value: Any) -> None:
            nonlocal held
            held = value

        return put, lambda: held

    model.put, model.get = pair(model)
    copied = deep_copy(model)
    assert copied.get() is copied  # type: ignore[operator]
    copied.put(3)  # type: ignore[operator]
    assert copied.get() == 3 and model.get() is model  # type: ignore[operator]


def test_a_function_of_no_module() -> None:
    """As `exec` makes them."""
    model: Any = Tied().double()
    model.to_logits.__module__ = None
    copied: Any = deep_copy(model)
    copied(IDS).backward()
    assert model.embedding.weight.grad is None and copied.embedding.weight.grad is not None


@pytest.mark.parametrize("form", FORMS)
def test_verify_compares_with_the_same_parameters(form: Any) -> None:
    model = Tied().double()
    form(model)
    verdict = megafx.verify(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=(IDS,))
    assert verdict, str(verdict)


def test_python_keeps_functions_as_they_are() -> None:
    """If this fails, deep_copy is not needed any more."""
    model = Tied()
    copy.deepcopy(model)(IDS).backward()
    assert model.embedding.weight.grad is not None
