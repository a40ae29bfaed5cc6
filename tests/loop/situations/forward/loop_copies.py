"""Copies that forward makes: `copy.copy` and `copy.deepcopy` of tensors, of modules, and of objects that hold settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

COPIED = "https://androidkt.com/difference-between-clone-vs-detach-copy-deepcopy-in-pytorch/"
STALE = "https://github.com/pytorch/pytorch/issues/115774"


class Settings:
    def __init__(self) -> None:
        self.scale, self.gain = 2.0, torch.ones(6)


@dataclass
class Options:
    scale: float = 2.0
    gain: Tensor = field(default_factory=lambda: torch.ones(6))


class Copying(nn.Module):
    """`computes` makes the output of (the model, the input, hidden values, what they give)."""

    def __init__(self, computes: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.computes = nn.Linear(6, 8), nn.Linear(8, 6), computes
        self.register_buffer("mean", torch.ones(8))
        self.settings, self.options = Settings(), Options()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.computes(self, x, h, self.down(h))


def _of_settings(m: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    ours = copy.copy(m.settings)
    ours.scale *= 2
    return y * ours.scale * ours.gain * copy.deepcopy(m.options).scale + copy.deepcopy(m.settings).gain


def _of_tensors(m: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    mean = copy.deepcopy(m.mean)
    mean += 1
    target = copy.deepcopy({"y": y.detach(), "all": [x, x > 0]})
    m.last = copy.deepcopy(h.detach())
    return m.down(h * mean) + target["y"] * target["all"][1] + copy.copy(x)


def _of_weights(m: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return F.linear(h, copy.deepcopy(m.down.weight)) + F.linear(h, copy.copy(m.down.weight)) + y


def _of_modules(m: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = copy.deepcopy(m.down)(h)
    return copy.deepcopy(m.down).requires_grad_(False)(h) + y - 0.5 * teacher


def _train(loop: Loop, computes: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
    model = loop.model(Copying(computes))
    for step in range(4):
        loss = model(torch.randn(3, 6)).square().mean()
        loss.backward()
        loop.see(loss=loss, last=model.last)
        loop.see_gradients(model)
        model.settings.scale += 0.5
        model.settings.gain = torch.full((6,), step + 1.5)
        model.options.scale -= 0.25


@situation(STALE, like="tensors_are_copied")
def settings_are_copied_and_change(loop: Loop) -> None:
    _train(loop, _of_settings)


@situation(COPIED)
def tensors_are_copied(loop: Loop) -> None:
    _train(loop, _of_tensors)


@situation(COPIED, like="tensors_are_copied")
def weights_are_copied(loop: Loop) -> None:
    _train(loop, _of_weights)


@situation(COPIED)
def modules_are_copied(loop: Loop) -> None:
    _train(loop, _of_modules)
