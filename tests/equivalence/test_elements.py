"""Elements of ops with several results are where the op is: a gradient that passes through topk arrives whole.

Covers: problem.py where a plan places the results of topk, sort and the like.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megafx


class Gated(nn.Module):
    """A row-parallel result times the routing weights that topk chose: these are replicated, and their gradient partial."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 5), nn.Linear(6, 53), nn.Linear(53, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, _ = torch.topk(torch.softmax(self.gate(x), -1), 2, -1)
        y = self.down(torch.relu(self.up(x)))
        return (y * weights.sum(-1, keepdim=True)).sum(-1).square().mean()  # cheapest to add up over the ranks here


@pytest.mark.parametrize("t", [2, 3])
def test_gradients_through_topk(t: int) -> None:
    torch.manual_seed(0)
    model, x = Gated().double(), torch.randn(3, 7, 6, dtype=torch.float64)
    config = megafx.Config(tensor_model_parallel_size=t)
    with megafx.debug(check=1):
        verdict = megafx.verify(model, config, example_inputs=(x,), tolerance=1e-10)
    assert verdict.ok, str(verdict)
    assert verdict.gradients["gate.weight"] <= 1e-10
    plan = megafx.plan(model, config, example_inputs=(x,))
    assert plan.ops["topk"].out == plan.ops["getitem"].out
