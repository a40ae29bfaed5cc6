"""What is computed with a model's outputs before backward."""

from __future__ import annotations

import torch
from loop import Loop, situation
from torch import nn


class Regression(nn.Module):
    """Two linears; returns (loss, prediction)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.down(torch.relu(self.up(x)))
        return (out - y).square().mean(), out


@situation("https://discuss.pytorch.org/t/how-to-do-gradient-accumulation/25570")
def losses_are_scaled_and_accumulated(loop: Loop) -> None:
    model = loop.model(Regression())
    for _ in range(3):
        loss, _ = model(torch.randn(5, 8), torch.randn(5, 4))
        (loss / 3).backward()
        loop.see(loss=loss)
    loop.see_gradients(model)
