"""A model with a submodule that decides by data, and a call of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Chosen(nn.Module):
    """An expert for each token, found by loops over what the data says. No export traces it."""

    def __init__(self, width: int, p: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(p)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor, *, times: float = 1.0) -> dict[str, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = self.router(tokens).softmax(-1)
        weight, index = probabilities.max(-1)
        out = torch.zeros_like(tokens)
        for i in index.unique().tolist():
            places = (index == i).nonzero()[:, 0]
            out[places] = self.experts[i](tokens[places]) * weight[places, None]
        return {
            "y": self.drop(out * self.scale * times).view_as(x),
            "counts": index.bincount(minlength=3),
            "p": probabilities,
        }


class Layer(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 50), nn.Linear(50, width)
        self.chosen = Chosen(width, p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        found = self.chosen(x, times=2.0)
        assert found["p"].shape == (x.shape[0] * x.shape[1], 3)
        return x + found["y"], found["p"].mean(0).square().sum() + 0.01 * found["counts"].amax()


class Net(nn.Module):
    def __init__(self, p: float = 0.0, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, width)
        self.layers = nn.ModuleList(Layer(width, p) for _ in range(2))
        self.head = nn.Linear(width, 67)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, extra = self.embed(ids), torch.zeros((), dtype=self.head.weight.dtype)
        for layer in self.layers:
            x, one = layer(x)
            extra = extra + one
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + extra


IDS = torch.randint(0, 67, (3, 13), generator=torch.Generator().manual_seed(0))


CALL = {"ids": IDS, "labels": IDS.roll(1)}


def build(p: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(p).double()
