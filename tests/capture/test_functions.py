"""Covers: capture/functions.py: gradients that a model writes itself are those that it writes, also in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.capture.export import capture_call
from megafx.capture.functions import same_gradient

TWO, THREE = (megafx.Config(tensor_model_parallel_size=t) for t in (2, 3))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class BoundedRoot(torch.autograd.Function):
    """Differs from autograd for small numbers only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / torch.sqrt(torch.clamp(4 * ctx.saved_tensors[0], min=1e-8))


class HalfForTheFirst(torch.autograd.Function):
    """Two operands, two results, a number, in the newer style."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x * y, x.sum(-1) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return 0.5 * first * y, first * x, None


class HandWrittenSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


def two_results(x: Tensor) -> Tensor:
    a, b = HalfForTheFirst.apply(x, x.cos(), 3.0)  # type: ignore[no-untyped-call]
    return a + b[..., None]


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.function = function  # bound before the model is captured

    def forward(self, x: Tensor) -> Tensor:
        hidden = 3 * self.up(x).square()
        return self.down(self.function(hidden)).square().sum()


def example() -> tuple[Tensor, ...]:
    return (torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


OWN = [StraightThrough.apply, BoundedRoot.apply, two_results]


@pytest.mark.parametrize("function", OWN, ids=["straight through", "bounded", "two results"])
@pytest.mark.parametrize("config", [TWO, THREE], ids=["2", "3"])
def test_a_gradient_of_its_own_is_kept(config: megafx.Config, function: Any) -> None:
    torch.manual_seed(0)
    model = Net(function).double()
    found = megafx.verify(model, config, example_inputs=example())
    assert found.ok, str(found)
    notes = " ".join(n.message for n in capture_call(model, example()).notes)
    assert "has a backward that is not the derivative of its forward" in notes


def test_a_derivative_by_hand_is_traced_and_sharded() -> None:
    torch.manual_seed(0)
    model = Net(HandWrittenSilu.apply).double()
    found = megafx.verify(model, TWO, example_inputs=example())
    assert found.ok, str(found)
    program = capture_call(model, example())
    assert not program.notes and "eager_call" not in str(program.graph)
    assert {"up.weight", "down.weight"} <= {*megafx.plan(model, TWO, example_inputs=example()).params}


class HalfStraightThrough(StraightThrough):
    """Inherits its forward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


def test_a_backward_beside_an_inherited_forward_is_kept() -> None:
    torch.manual_seed(0)
    found = megafx.verify(Net(HalfStraightThrough.apply).double(), TWO, example_inputs=example())
    assert found.ok, str(found)


def test_without_gradients_forward_is_traced() -> None:
    with torch.no_grad():
        program = capture_call(Net(StraightThrough.apply), (example()[0].float(),))
    assert "round" in str(program.graph) and "eager_call" not in str(program.graph)


def test_the_gelu_of_bloom_is_a_derivative_by_hand() -> None:
    """Its constants have 8 digits, and it goes through zero."""
    from transformers.models.bloom.modeling_bloom import GeLUFunction

    assert same_gradient(GeLUFunction, (torch.randn(300, 40, requires_grad=True),))
    for function in (StraightThrough, BoundedRoot):
        assert not same_gradient(function, (torch.randn(30, 40, requires_grad=True),))
