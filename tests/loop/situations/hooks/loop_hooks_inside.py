"""Hooks on values inside of forward: scaled, reversed, clipped and recorded gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

REVERSAL = "https://discuss.pytorch.org/t/solved-reverse-gradients-in-backward-pass/3589"
CLIPPED = "https://discuss.pytorch.org/t/gradient-clipping-inside-the-graph/24157"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.domain = nn.Linear(8, 15), nn.Linear(15, 6), nn.Linear(15, 2)
        self.scale = 0.5
        self.norms: list[float] = []


class Reversing(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x).relu()
        reversed_h = h * 1.0
        reversed_h.register_hook(lambda gradient: -self.scale * gradient)
        return self.down(h).square().mean() + self.domain(reversed_h).exp().mean()


class Clipping(Net):
    def keep(self, gradient: Tensor) -> None:
        self.norms.append(float(gradient.norm()))

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        early = self.domain(h)  # a use before the hook is set
        h.register_hook(functools.partial(torch.clamp, min=-0.01, max=0.01))
        h.register_hook(lambda gradient: gradient * 3)
        h.register_hook(self.keep)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient + 1)
        return self.down(h.tanh()).square().mean() + early.sin().mean(), h


class Removed(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        handle = h.register_hook(lambda gradient: 0 * gradient)
        handle.remove()
        return self.down(h).square().mean()


@situation(REVERSAL, like="gradients_are_clipped_and_recorded_by_hooks")
def gradients_are_reversed_by_a_hook(loop: Loop) -> None:
    model = loop.model(Reversing())
    for scale in (0.5, 2.0):
        model.scale = scale
        model(torch.randn(5, 8)).backward()
        loop.see_gradients(model)


@situation(CLIPPED)
def gradients_are_clipped_and_recorded_by_hooks(loop: Loop) -> None:
    model = loop.model(Clipping())
    for _ in range(2):
        x = torch.randn(5, 8, requires_grad=True)
        loss, h = model(x)
        (loss + h.square().mean()).backward()
        loop.see(gradient_of_x=x.grad, norms=model.norms, loss=loss)
        loop.see_gradients(model)
    model.eval()
    with torch.no_grad():
        try:
            model(torch.randn(3, 8))
        except Exception:
            loop.see(without_gradients="no hook can be set")


@situation(REVERSAL)
def a_hook_is_removed_in_forward(loop: Loop) -> None:
    model = loop.model(Removed())
    model(torch.randn(5, 8)).backward()
    loop.see_gradients(model)
