"""Forward decides by the values of its arguments: `if mask.any():`, `if lengths.max() < n:`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

ESM = "https://github.com/facebookresearch/esm/blob/main/esm/model/esm2.py"  # if not padding_mask.any(): padding_mask = None
MASKS = "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_attn_mask_utils.py"


class Net(nn.Module):
    """forward decides by what `decides` computes of (the model, ids [rows, length], mask [rows, length])."""

    def __init__(self, decides: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.decides, self.table = decides, nn.Embedding(16, 6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        if not self.decides(self, ids, mask):
            return self.down(self.up(x.square()).relu())
        x = x * mask.unsqueeze(-1).type_as(x)
        return self.down(self.up(x).relu())


def padded(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return ids.eq(0).any()


def masked(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return mask is not None and (mask == 0).any()


def not_all(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return not mask.bool().all()


def read(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return (ids == 0).any().item()


def counted(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return int(mask.sum()) < mask.numel()


def shorter(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return mask.sum(-1).max() < ids.shape[1]


def one_of_some(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return torch.isin(ids, torch.tensor([0, 15])).any() or mask[:, -1].min() == 0


def often(model: Net, ids: Tensor, mask: Tensor) -> Any:
    return sum(1 for _ in range(6) if mask.bool().all()) == 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.all():
            return x + self.linear(x).relu()
        return x + self.linear(x * mask.unsqueeze(-1)).relu()


class Stack(nn.Module):
    """Each of 6 layers asks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 6), nn.ModuleList(Layer() for _ in range(6))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, mask.bool())
        return x


def _calls(loop: Loop, model: nn.Module) -> None:
    model = loop.model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for length, pads in ((5, 0), (5, 2), (4, 0), (7, 3), (5, 1), (5, 0)):
        ids, mask = torch.randint(1, 15, (4, length)), torch.ones(4, length, dtype=torch.long)
        for rows in (ids, mask):
            rows[1:, length - pads :] = 0
        loss = model(loop.rows(ids), mask=loop.rows(mask)).square().mean()
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if not loop.eager and loop.parts == 1:
        assert sum(map(len, model.megafx.graphs.values())) <= 4, "a graph for each answer"


for _decides in (padded, masked, not_all, read, counted, shorter, one_of_some, often):

    def _situation(loop: Loop, decides: Callable[[Any, Tensor, Tensor], Any] = _decides) -> None:
        _calls(loop, Net(decides))

    _situation.__name__ = f"values_decide_{_decides.__name__}"
    _like = {masked: "padded", not_all: "padded", read: "padded", shorter: "counted"}.get(_decides, "")
    situation(ESM if _decides is padded else MASKS, like=f"values_decide_{_like}" if _like else "")(_situation)


@situation(MASKS)
def values_decide_in_each_layer(loop: Loop) -> None:
    _calls(loop, Stack())
