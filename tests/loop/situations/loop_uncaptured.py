"""Modules that decide by data, which no graph holds: they run as they are, between parts that are compiled."""

from __future__ import annotations

import warnings

import torch
from loop import Loop, situation
from torch import Tensor, nn

BY_DATA = "https://github.com/pytorch/pytorch/issues/93579"  # export refuses control flow that depends on data


class Gate(nn.Module):
    """Early exit: rows that are certain are not refined. It notes what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.certain, self.refine, self.seen = nn.Linear(8, 1), nn.Linear(8, 8), []

    def forward(self, x: Tensor, *, often: int = 2) -> Tensor:
        for _ in range(often):
            doubtful = self.certain(x)[..., 0] < 0
            self.seen.append(int(doubtful.sum()))
            if not doubtful.any():
                break
            x = torch.where(doubtful[..., None], x + self.refine(x), x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 24), Gate(), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.gate(x)))).square().mean()


@situation(BY_DATA)
def an_early_exit_by_data(loop: Loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loop.model(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for batch in (4, 2, 4):
            loss = model(torch.randn(batch, 5, 8))
            loss.backward()
            loop.see(loss=loss, seen=list(model.gate.seen))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loop.see(evaluated=model.eval()(torch.randn(3, 5, 8)))
        loop.see_state(model)
