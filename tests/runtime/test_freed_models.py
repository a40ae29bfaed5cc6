"""Covers: what is left in memory of a parallelized model that is freed: nothing (findings C18)."""

from __future__ import annotations

import gc
from collections import Counter

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import megafx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 20), 0.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(self.embed(ids)))) * self.scale
        return F.cross_entropy(self.down(hidden).flatten(0, 1), ids.flatten())


def use_and_free() -> None:
    model, ids = megafx.parallelize(Net()), torch.randint(20, (3, 4))
    for model.scale in (0.5, 0.25):  # two graphs, the second with an input more
        model(ids).backward()
    megafx.plan(Net(), megafx.Config(tensor_model_parallel_size=2), example_inputs=(ids,))


def alive() -> Counter[str]:
    gc.collect(), gc.collect()
    kinds = {FakeTensor: "fake tensors", fx.GraphModule: "graph modules", nn.Module: "modules"}
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        found[next((name for kind, name in kinds.items() if issubclass(type(each), kind)), "")] += 1
    del found[""]
    return found


def test_nothing_is_left_of_models_that_are_freed() -> None:
    use_and_free()  # what is made once: graphs of patterns, and the like
    before = alive()
    use_and_free()
    assert alive() == before
