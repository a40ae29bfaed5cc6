"""Kinds of containers that a call is given."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

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


class Task(enum.IntEnum):
    CLASSES = 0
    RANKS = 1


class Pool(str, enum.Enum):  # noqa: UP042  # as users write it
    MEAN = "mean"
    LAST = "last"


class Parts(enum.Flag):
    LINEAR = enum.auto()
    SQUARE = enum.auto()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({"CLASSES": nn.Linear(8, 3), "RANKS": nn.Linear(8, 5)})

    def forward(
        self, x: Tensor, task: Task, pool: Any = Pool.MEAN, parts: Any = Parts.LINEAR, **options: Any
    ) -> Tensor:
        h = torch.tanh(self.trunk(x)).to(options.get("dtype", x.dtype))
        h = h[options.get("rows", slice(None))].to(options.get("device", "cpu"), memory_format=torch.contiguous_format)
        h = h.mean(1) if pool is Pool.MEAN else h[:, -1]
        y = self.heads[task.name](h.to(x.dtype)) * (task + 1)
        y = y * y if Parts.SQUARE in parts else y
        return (y * options.get("turn", 1j)).imag.square().sum() + sum(y[0, i] for i in options.get("places", range(2)))


@situation("https://github.com/pytorch/pytorch/issues/135859")
def arguments_are_enums_dtypes_slices_and_complex_numbers(loop: Loop) -> None:
    """Each value has a graph of its own."""
    model = loop.model(Heads())
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((Task.CLASSES,), {}),
        ((Task.RANKS, Pool.LAST), {"dtype": torch.float32, "device": torch.device("cpu")}),
        ((Task.RANKS, "last", Parts.LINEAR | Parts.SQUARE), {"rows": slice(1, None), "turn": 2 + 0.5j}),
        ((Task.CLASSES, Pool.LAST, Parts.SQUARE), {"rows": slice(0, 3), "places": range(0, 3, 2)}),
        ((Task.CLASSES,), {}),
    ]
    for arguments, options in calls:
        loss = model(torch.randn(4, 5, 6), *arguments, **options)
        model.zero_grad()
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
