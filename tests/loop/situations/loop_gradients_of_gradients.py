"""Gradients of gradients, and other forms of differentiation around a model."""

from __future__ import annotations

import torch
from loop import Loop, situation
from torch import Tensor, nn

PENALTY = "https://github.com/pytorch/pytorch/issues/159959"


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))


@situation(PENALTY, ranks=(1,))
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


@situation("https://discuss.pytorch.org/t/hessian-vector-product-optimization/12581", ranks=(1,))
def a_hessian_times_a_vector(loop: Loop) -> None:
    model = loop.model(critic())
    loss = model(torch.randn(5, 8)).square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * torch.ones_like(g)).sum() for g in first), parameters)
    loop.see(first=list(first), second=list(second))


@situation(PENALTY, ranks=(1,))
def a_jvp_by_two_backwards(loop: Loop) -> None:
    model = loop.model(critic())
    x = torch.randn(5, 8)
    value, tangent = torch.autograd.functional.jvp(model, x, torch.ones_like(x))
    loop.see(value=value, tangent=tangent)


@situation("https://github.com/pytorch/pytorch/issues/91469", ranks=(1,))
def forces_are_the_gradient_of_an_energy(loop: Loop) -> None:
    model, x = loop.model(critic()), torch.randn(5, 8, requires_grad=True)
    energy = model(x).sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    loop.see(energy=energy, forces=forces)
    (energy + forces.square().sum()).backward()
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
