"""Gradients of gradients, and other forms of differentiation around a model."""

from __future__ import annotations

import torch
from loop import Loop, situation
from torch import Tensor, nn

PENALTY = "https://github.com/pytorch/pytorch/issues/159959"


def critic(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 1))


@situation(PENALTY)
def a_gradient_penalty_is_part_of_the_loss(loop: Loop) -> None:
    model = loop.model(critic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(5, 8).t().contiguous().t().requires_grad_()
        score = model(x)
        (found,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = ((found.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        (score.mean() + 10 * penalty).backward()
        loop.see(score=score, penalty=penalty)
        loop.see_gradients(model)
        optimizer.step()


@situation("https://discuss.pytorch.org/t/hessian-vector-product-optimization/12581")
def a_hessian_times_a_vector(loop: Loop) -> None:
    model = loop.model(critic(15))
    loss = model(torch.randn(5, 8)).square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * torch.ones_like(g)).sum() for g in first), parameters)
    loop.see(first=list(first), second=list(second))


@situation(PENALTY)
def a_jvp_by_two_backwards(loop: Loop) -> None:
    model = loop.model(critic())
    x = torch.randn(5, 8)
    value, tangent = torch.autograd.functional.jvp(model, x, torch.ones_like(x))
    loop.see(value=value, tangent=tangent)


@situation("https://github.com/pytorch/pytorch/issues/91469")
def forces_are_the_gradient_of_an_energy(loop: Loop) -> None:
    model, x = loop.model(critic()), torch.randn(5, 8, requires_grad=True)
    energy = model(x).sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    loop.see(energy=energy, forces=forces)
    (energy + forces.square().sum()).backward()
    loop.see_gradients(model)


class Recurrent(nn.Module):
    """Leaves tensors behind, counts, and reads an attribute that the user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out, self.scale, self.calls = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 1), 1.0, 0
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x)
        self.calls += 1
        self.energy = h.square().mean()
        self.norms.append(h.norm())
        return self.out(h) * self.scale


@situation("https://github.com/pytorch/pytorch/issues/91469")
def a_penalty_of_a_model_with_hooks_on_tensors_and_state(loop: Loop) -> None:
    model = loop.model(Recurrent())
    model.out.weight.register_hook(lambda g: 3 * g)
    for scale in (1.0, 0.5):
        model.scale = scale
        x = torch.randn(5, 3, 8, requires_grad=True)
        x.register_hook(lambda g: 2 * g)
        y = model(x)
        energy = model.energy
        wanted = [x, model.out.weight]
        first = torch.autograd.grad(y.square().mean() + energy, wanted, create_graph=True)
        (sum(g.square().sum() for g in first) + energy).backward()
        loop.see(first=first, x=x.grad, energy=model.energy, norms=model.norms, calls=model.calls)
        loop.see_gradients(model)


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, offset: float) -> Tensor:
        return torch.copysign(self.up(x).abs(), torch.full_like(x, offset))


@situation("https://github.com/pytorch/pytorch/issues/112567")
def zeros_of_both_signs_are_given(loop: Loop) -> None:
    model, x = loop.model(Signed()), torch.randn(3, 4)
    for offset in (0.0, -0.0, 0.0):
        loop.see(out=model(x, offset))


@situation("https://github.com/pytorch/pytorch/issues/109052")
def anomalies_are_looked_for(loop: Loop) -> None:
    model = loop.model(critic())
    with torch.autograd.detect_anomaly(check_nan=True):
        model(torch.randn(5, 8)).square().mean().backward()
    loop.see_gradients(model)
