"""A model is evaluated before it is trained, on what it cannot be trained on: a first look at validation data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

SOURCE = "https://github.com/pytorch/vision/issues/1574"


class Detector(nn.Module):
    """Wants targets in training, and has a head and a gain that evaluation does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aside = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(12, 7)
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and targets is None:
            raise ValueError("In training mode, targets should be passed")
        h = torch.relu(self.up(x))
        y = self.down(h)
        if not self.training:
            return {"boxes": y}
        assert targets is not None
        return {"loss": F.mse_loss(y, targets), "aside": self.aside(h * self.gain).square().mean()}


def evaluated(loop: Loop, model: Any) -> None:
    model.eval()
    with torch.no_grad():
        loop.see(boxes=model(torch.randn(4, 8)))
    model.train()


@situation(SOURCE, data=("ddp", "fsdp"))
def a_model_that_trains_on_targets_is_evaluated_first(loop: Loop) -> None:
    model = loop.model(Detector())
    evaluated(loop, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        x, targets = torch.randn(4, 8), torch.randn(4, 8)
        losses = model(loop.rows(x), loop.rows(targets))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        loop.see_gradients(model)
        optimizer.step()
    loop.see_state(model)
    evaluated(loop, model)


@situation(SOURCE, like="a_model_that_trains_on_targets_is_evaluated_first")
def an_evaluation_with_gradients_comes_first(loop: Loop) -> None:
    model = loop.model(Detector())
    model.eval()
    model(torch.randn(4, 8))["boxes"].square().mean().backward()
    loop.see_gradients(model)
    loop.see_error(lambda: model.train()(torch.randn(4, 8)))
    model(torch.randn(4, 8), torch.randn(4, 8))["loss"].backward()
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/4534")
def a_row_is_evaluated_before_batches_are_normed(loop: Loop) -> None:
    """In training a batch norm refuses a single row."""
    model = loop.model(nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)))
    model.eval()
    with torch.no_grad():
        loop.see(y=model(torch.randn(1, 8)))
    model.train()
    model(torch.randn(4, 8)).square().mean().backward()
    loop.see_gradients(model)
    loop.see_state(model)
