"""Covers: capture/functions.py: gradients that a model writes itself are those that it writes, also in graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.analysis.derivatives import same_gradient
from megafx.capture.export import capture_call
from megafx.ops.eager_call import find_call

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


def function_of(forward: Any, backward: Any) -> Any:
    """A Function of these; `backward` gets the gradient and the tensors that forward is given."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given)
            return forward(*given)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return Made


def written_rows(grad: Tensor, x: Tensor) -> Tensor:
    made = torch.zeros_like(grad)
    made[x > 0] = grad[x > 0]
    return made


def zeroed_rows(grad: Tensor, x: Tensor) -> Tensor:
    made = grad.clone()
    made[x <= 0] = 0
    return made.mul_(2)


def numpy_doubled(grad: Tensor, x: Tensor) -> Tensor:
    return torch.from_numpy(2 * grad.numpy())


def double(x: Tensor) -> Tensor:
    return 2 * x


DERIVATIVES = {
    "a product in place": (lambda x: x * x, lambda g, x: g.clone().mul_(2 * x)),
    "rows that are written": (torch.relu, written_rows),
    "rows that are zeroed": (lambda x: 2 * torch.relu(x), zeroed_rows),
    "a softmax": (lambda x: x.softmax(-1), lambda g, x: (y := x.softmax(-1)) * (g - (g * y).sum(-1, keepdim=True))),
    "parts": (lambda x: torch.cat([x, 2 * x], -1), lambda g, x: (p := g.chunk(2, -1))[0] + 2 * p[1]),
    "a sum along a dim": (lambda x: x.cumsum(0), lambda g, x: g.flip(0).cumsum(0).flip(0)),
}
# None of these is seen on usual numbers.
OTHERS = {
    "a threshold on gradients": (double, lambda g, x: torch.where(g.abs() > 1e3 * g.abs().mean(), 0.0, 2 * g)),
    "a far limit of gradients": (double, lambda g, x: 2 * g.clamp(-1e40, 1e40)),
    "NaN of gradients": (double, lambda g, x: torch.where(g.isnan(), 0.0, 2 * g)),
    "a threshold on values": (double, lambda g, x: torch.where(x.abs() > 1e9 * x.abs().mean(), 0.0, 2 * g)),
    "a threshold of forward": (lambda x: torch.where(x.abs() > 1e9 * x.abs().mean(), 0.0, 2 * x), lambda g, x: 2 * g),
    "a far limit of values": (lambda x: x.clamp(-1e20, 1e20), lambda g, x: g),
    "a number that is read": (double, lambda g, x: g if float(g.abs().max()) > 1e40 else 2 * g),
    "past torch": (double, numpy_doubled),
    "ones": (double, lambda g, x: torch.full_like(g, 2.0)),
}


@pytest.mark.parametrize("name", [*DERIVATIVES, *OTHERS])
def test_what_is_shown_to_be_a_derivative(name: str) -> None:
    made = function_of(*{**DERIVATIVES, **OTHERS}[name])
    assert same_gradient(made, (torch.randn(30, 40, requires_grad=True),)) == (name in DERIVATIVES)


@pytest.mark.parametrize("label", [5, -100])
def test_a_label_that_is_left_out_is_tried(label: int) -> None:
    """Made-up labels are 0 and 1."""
    kept = lambda labels: (labels != label)[:, None]
    given = torch.randn(30, 40, requires_grad=True), torch.zeros(30, dtype=torch.long)
    both = function_of(lambda x, labels: x * kept(labels), lambda g, x, labels: (g * kept(labels), None))
    backward = function_of(lambda x, labels: x.clone(), lambda g, x, labels: (g * kept(labels), None))
    assert same_gradient(both, given) and not same_gradient(backward, given)


class SmallBatches(StraightThrough):
    """Another gradient for batches that no probe has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad if grad.shape[0] < 100 else grad


class AllBatches(SmallBatches):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_size_that_varies_decides() -> None:
    (node,) = (n for n in capture_call(Net(AllBatches.apply).double(), example()).graph.nodes if "eager_call" in str(n))
    assert find_call(node.args[4]).by_rows is not None
    torch.manual_seed(0)
    model = Net(SmallBatches.apply).double()
    example_of = lambda rows: (torch.randn(rows, 3, 6, dtype=torch.float64),)
    program = capture_call(model, example_of(4))
    (node,) = (n for n in program.graph.nodes if "eager_call" in str(n.target))
    assert find_call(node.args[4]).by_rows is None
    parallel = megafx.parallelize(copy.deepcopy(model), megafx.Config(tensor_model_parallel_size=1))
    for rows in (4, 128):
        x = example_of(rows)
        model.zero_grad()
        parallel.zero_grad()
        model(*x).backward()
        parallel(*x).backward()
        for (name, p), q in zip(model.named_parameters(), parallel.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-10), (rows, name)
