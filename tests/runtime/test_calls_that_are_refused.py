"""Covers: runtime/runtime.py, bound_graph.py (calls whose result would lack something): forward-mode differentiation, threads,
meta tensors, gradients of gradients with dropout."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import megafx
from megafx.errors import UsageError


def made(p: float = 0.0) -> Any:
    torch.manual_seed(0)
    return megafx.parallelize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 2)).double())


def test_dual_tensors_are_refused_and_the_advice_works() -> None:
    model, x = made(), torch.randn(3, 4).double()
    with forward_ad.dual_level():
        assert model(x).shape == (3, 2)
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(UsageError, match=r"'input' is a dual tensor[\s\S]*torch.autograd.functional.jvp"):
            model(dual)
    _, found = torch.autograd.functional.jvp(model, x, torch.ones_like(x))
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    plain.load_state_dict({k.replace("3.", "2."): v for k, v in model.state_dict().items()})
    _, wanted = torch.autograd.functional.jvp(plain, x, torch.ones_like(x))
    torch.testing.assert_close(found, wanted)


def test_gradients_of_gradients_with_dropout_are_refused_and_the_advice_works() -> None:
    model, x = made(0.5), torch.randn(3, 4, requires_grad=True, dtype=torch.float64)
    loss = model(x).square().mean()
    with pytest.raises(UsageError, match=r"draws other masks than the graph's[\s\S]*model.eval\(\)"):
        torch.autograd.grad(loss, x, create_graph=True)
    model.eval()
    (found,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    found.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_changed_weights_are_noticed_before_gradients_of_gradients() -> None:
    model, x = made(), torch.randn(3, 4, requires_grad=True, dtype=torch.float64)
    loss = model(x).square().mean()
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(UsageError, match=r"'3.weight' was changed in place between forward and backward"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("what", ["bias", "buffer"])
def test_values_that_only_the_computation_anew_reads_are_noticed_when_they_change(what: str) -> None:
    """Eager mode does not need them for gradients: it would go on."""
    model, x = made(), torch.randn(3, 4, requires_grad=True, dtype=torch.float64)
    model[3].register_buffer("shift", torch.ones(2, dtype=torch.float64))
    model[3].forward = lambda h: nn.functional.linear(h, model[3].weight, model[3].bias) + model[3].shift
    loss = model(x).square().mean()
    with torch.no_grad():
        (model[0].bias if what == "bias" else model[3].shift).add_(1)
    with pytest.raises(
        UsageError, match="changed in place between forward and backward[^`]*call once more for gradients of"
    ):
        torch.autograd.grad(loss, x, create_graph=True)


def test_gradients_of_gradients_of_a_call_that_writes_much_are_refused_and_the_advice_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megafx.runtime.again.KEPT_BYTES", 15)
    model = megafx.parallelize(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).double())
    x = torch.randn(3, 4, requires_grad=True, dtype=torch.float64)
    loss = model(x).square().mean()
    with pytest.raises(UsageError, match=r"no copy is kept \(more than 15 B: '1.running_mean', [^`]*model.eval\(\)"):
        torch.autograd.grad(loss, x, create_graph=True)
    model.eval()
    torch.autograd.grad(model(x).square().mean(), x, create_graph=True)[0].sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(4, 2).double(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sin() * 0.5**self.calls


def test_gradients_of_gradients_of_numbers_that_change() -> None:
    x = torch.randn(3, 4, requires_grad=True, dtype=torch.float64)
    model: Any = megafx.parallelize(Annealed())
    found = []
    for each in (model, Annealed()):
        each.load_state_dict(model.state_dict())
        for each.calls in (1, 2):
            (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), each.up.weight)[0])
    torch.testing.assert_close(found[:2], found[2:])
    y = model(x)
    model.calls = 1
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # an input of the graph, which knows what it was
    torch.testing.assert_close(torch.autograd.grad(first.square().sum(), model.up.weight)[0], found[1])


def test_gradients_of_gradients_after_a_change_are_refused_and_the_advice_works() -> None:
    model, x = made(), torch.randn(3, 4, requires_grad=True, dtype=torch.float64)
    model[1].slope = 1.0
    model[1].forward = lambda x: torch.tanh(x * model[1].slope)
    y = model(x)
    model[1].slope = 2.0
    with pytest.raises(UsageError, match=r"forward reads '1.slope', which changed[\s\S]*before the change"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    model[1].slope = 1.0
    torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("how", ["initialize", "to_empty"])
def test_a_call_on_meta_is_refused_and_the_advice_works(how: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    model = megafx.parallelize(model, example_inputs=(torch.randn(3, 4),))
    with pytest.raises(UsageError, match=rf"on the meta device: they have no values\n  fix: .*{how}"):
        model(torch.randn(3, 4))
    if how == "initialize":
        megafx.initialize(model, lambda: nn.Linear(4, 2))
    else:
        nn.init.ones_(model.to_empty(device="cpu").weight)
        nn.init.zeros_(model.bias)
    assert model(torch.randn(3, 4)).isfinite().all()


def test_a_model_of_several_ranks_takes_one_thread() -> None:
    model = made()
    runtime, errors, inside, done = model.megafx, [], threading.Event(), threading.Event()
    runtime.mesh = object()

    def slow(*call: Any) -> Any:
        inside.set()
        done.wait(20)

    def other() -> None:
        inside.wait(20)
        with pytest.raises(UsageError, match="two threads call one model at the same time") as caught:
            runtime._call((torch.randn(3, 4).double(),), {})
        errors.append(caught.value)
        done.set()

    runtime._run = slow
    thread = threading.Thread(target=other)
    thread.start()
    runtime._call((torch.randn(3, 4).double(),), {})
    thread.join()
    assert len(errors) == 1
