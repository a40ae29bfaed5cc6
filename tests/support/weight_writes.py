"""Ways in which users change the weights of a model between calls, and casts of weights to FP8 that are to notice them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megafx

Write = Callable[[nn.Module, Any], Any]  # the model, one of its weights
WRITES: dict[str, Write] = {}


def write(function: Write) -> Write:
    WRITES[function.__name__] = function
    return function


def stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@write
def step(model: nn.Module, weight: Any) -> None:
    stepped(torch.optim.SGD(model.parameters(), lr=0.1))


@write
def fused_step(model: nn.Module, weight: Any) -> None:
    stepped(torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True))


@write
@torch.no_grad()
def in_place(model: nn.Module, weight: Any) -> None:
    weight.add_(0.5)


@write
@torch.no_grad()
def of_many(model: nn.Module, weight: Any) -> None:
    torch._foreach_mul_([p for p in model.parameters() if p.dim() == 2], 1.5)


@write
@torch.no_grad()
def of_a_view(model: nn.Module, weight: Any) -> None:
    weight.view(-1).mul_(1.5)


@write
def through_data(model: nn.Module, weight: Any) -> None:
    weight.data.mul_(1.5)


@write
def through_detach(model: nn.Module, weight: Any) -> None:
    weight.detach().mul_(1.5)


@write
def other_data(model: nn.Module, weight: Any) -> None:
    weight.data = weight.data * 1.5


@write
def swapped_data(model: nn.Module, weight: Any) -> None:
    """As weights and their averages change places."""
    average = weight.data.clone() * 0.5
    weight.data, average = average, weight.data


@write
def copied(model: nn.Module, weight: Any) -> None:
    weight.data.copy_(weight.data.clone() * 1.5)


@write
def initialized(model: nn.Module, weight: Any) -> None:
    nn.init.constant_(weight, 0.25)


@write
def loaded(model: nn.Module, weight: Any) -> None:
    model.load_state_dict({name: value.clone() * 1.5 for name, value in model.state_dict().items()})


@write
def whole(model: nn.Module, weight: Any) -> None:
    with megafx.whole_parameters(model), torch.no_grad():
        weight.mul_(1.5)


@write
def by_kernels_that_count_nothing(model: nn.Module, weight: Any) -> None:
    """An optimizer of one's own, with the usual zero_grad()."""
    local = getattr(weight, "_local_tensor", weight)
    torch.from_numpy(local.detach().numpy())[...] *= 1.5  # type: ignore[index]  # a tensor of one dim or more
    model.zero_grad()


class Held:
    """A view of a weight's memory from before."""

    def __init__(self, weight: Any) -> None:
        self.data: Tensor = weight.data

    def __call__(self, model: nn.Module, weight: Any) -> None:
        self.data.mul_(0.75)


def unnoticed(model: Any, batch: Any, weight: Any) -> list[str]:
    """Writes after which a call still reads casts of the values before. The model has FP8, and the weight runs in it."""
    casts, found = model.megafx.settled.casts, []

    def call() -> Tensor:
        loss = model(*batch)
        loss.backward()
        value: Tensor = loss.detach().clone()
        return value

    assert torch.equal(call(), call())
    assert casts.made == 1, "weights have served two calls: their casts are kept"
    held = Held(weight)
    for name, function in ({"held": held} | WRITES).items():
        before, made = call(), casts.made
        assert torch.equal(before, call()) and casts.made == made
        function(model, weight)
        after = call()
        assert not torch.equal(before, after), f"{name}: the loss did not change"
        casts.kept.clear()
        if not torch.equal(after, call()):
            found.append(name)
    return found
