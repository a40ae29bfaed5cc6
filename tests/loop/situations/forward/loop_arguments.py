"""Kinds of containers that a call is given."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
from loop import Loop, situation
from torch import Tensor, nn

CONTAINERS = "https://github.com/pytorch/pytorch/issues/142161"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, batch: Mapping[str, Tensor], views: Sequence[Tensor] = ()) -> Tensor:
        loss = (self.linear(batch["x"]) * batch["weight"]).square().mean()
        return loss + sum(self.linear(view).tanh().mean() for view in views)


@situation(CONTAINERS)
def batches_are_dicts_with_defaults_and_deques(loop: Loop) -> None:
    model = loop.model(Net())
    for rows in (3, 5):
        batch = defaultdict(list, x=torch.randn(rows, 6), weight=torch.randn(4))
        loss = model(batch, deque([torch.randn(2, 6), torch.randn(rows, 6)]))
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)
