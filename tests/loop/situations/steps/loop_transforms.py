"""torch.compile and torch.func around a model; recurrences and distributions inside of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.errors import UsageError


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@situation("https://github.com/pytorch/pytorch/issues/138422", like="forward_asks_how_its_argument_was_computed")
def a_compiled_training_step(loop: Loop) -> None:
    model, x = loop.model(Plain()), torch.randn(3, 8)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(2 * x).square().mean() + 1

    for _ in range(2):
        loss = step(x)
        loss.backward()
        loop.see(loss=loss)
    loop.see(out=torch.compile(model, backend="eager")(x))
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/96041", ranks=(1,))
def torch_func_around_a_model(loop: Loop) -> None:
    model, x = loop.model(Plain()), torch.randn(3, 8)
    loop.see(
        grad=torch.func.grad(lambda y: model(y).sum())(x),
        vmap=torch.func.vmap(model)(x),
        jvp=torch.func.jvp(model, (x,), (x,)),
        jacobian=torch.func.jacrev(model)(x),
    )
    loop.see(after=model(x))


@situation("https://github.com/pytorch/pytorch/issues/100105", ranks=(1,))
def functional_call_with_other_values(loop: Loop) -> None:
    model, x = loop.model(Plain()), torch.randn(3, 8)
    weights = {name: 2 * value.detach() for name, value in model.named_parameters()}
    loop.see(out=torch.func.functional_call(model, weights, (x,)))

    def loss(weights: dict[str, Any]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    loop.see(gradients=torch.func.grad(loss)(weights), plain=model(x))


class Transforming(nn.Module):
    """Modules inside that differentiate (forces of an energy, a tangent) and map over rows."""

    class Forces(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -torch.func.grad(lambda y: Plain.forward(self, y).square().sum())(x)

    class Tangent(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(lambda y: Plain.forward(self, y), (x,), (x.cos(),))[1]

    class Rows(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: Plain.forward(self, row) * row.sum())(x)

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.parts = nn.ModuleList([self.Forces(), self.Tangent(), self.Rows()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        return torch.stack([part(x).square().mean() for part in self.parts]).sum()


@situation("https://github.com/pytorch/pytorch/issues/172026")
def torch_func_inside_of_a_model(loop: Loop) -> None:
    model = loop.model(Transforming())
    for rows in (3, 5):
        loss = model(torch.randn(rows, 8))
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Recurrence(nn.Module):
    """A delta rule: six steps, each with a state [batch, d, d] that depends on all before."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.q, self.k, self.v, self.b, self.o = (nn.Linear(d, d) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, b = self.q(x), self.k(x), self.v(x), self.b(x).sigmoid()
        state, out = x.new_zeros(x.shape[0], x.shape[2], x.shape[2]), []
        for t in range(6):
            old = torch.einsum("bij,bj->bi", state, k[:, t])
            state = state + torch.einsum("bi,bj->bij", b[:, t] * (v[:, t] - old), k[:, t])
            out.append(torch.einsum("bij,bj->bi", state, q[:, t]))
        return self.o(torch.stack(out, 1))


@situation("https://github.com/pytorch/pytorch/issues/97155", ranks=(2,), slow=(2,))
def a_recurrence_written_as_a_loop(loop: Loop) -> None:
    model = loop.model(Recurrence())
    out = model(torch.randn(2, 6, 6))
    out.square().sum().backward()
    loop.see(out=out)
    loop.see_gradients(model)


class Probable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.tanh(self.up(x)))
        normal = torch.distributions.Normal(h, nn.functional.softplus(h))
        choice = torch.distributions.Categorical(logits=h)
        several = torch.distributions.MultivariateNormal(h, torch.eye(4, dtype=h.dtype))
        return normal.log_prob(h.detach()).sum(-1) + choice.entropy() + several.log_prob(2 * h)


@situation("https://github.com/huggingface/transformers/pull/43631", slow=(2,))
def distributions_check_their_arguments(loop: Loop) -> None:
    model = loop.model(Probable())
    out = model(torch.randn(3, 8))
    out.sum().backward()
    loop.see(out=out)
    loop.see_gradients(model)


class Seen(TorchFunctionMode):
    """Notes what functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@situation("https://docs.pytorch.org/docs/stable/notes/extending.html")
def modes_around_a_call(loop: Loop) -> None:
    """One that sees functions is refused; the advice is followed."""
    model, x = loop.model(Plain()), torch.randn(3, 8)
    with Seen():
        if loop.eager:
            first = model(x)
        else:
            with pytest.raises(
                UsageError, match=r"a call within a TorchFunctionMode \(Seen\)[\s\S]*a TorchDispatchMode sees"
            ):
                model(x)
    if not loop.eager:
        first = model(x)
    with Ops():
        second = model(x)
        second.square().mean().backward()
    loop.see(first=first, second=second)
    loop.see_gradients(model)
