"""Covers: what is left in memory of a parallelized model that is freed: nothing (findings C18)."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import megafx


@pytest.fixture(scope="module", autouse=True)
def _not_what_other_tests_left() -> None:
    gc.collect()  # it would stay for ever
    gc.freeze()  # the collector takes seconds to look at what thousands of tests leave in caches


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


def held_bytes() -> int:
    gc.collect(), gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.device.type == "cpu"]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_a_model_that_is_used_holds_no_call() -> None:
    """Neither what was given at first nor what the capture made of it (longer and shorter inputs, twice the batch)."""
    use_and_free()
    before = held_bytes()
    model = megafx.parallelize(Net().requires_grad_(False))
    model(torch.zeros(64, 512, dtype=torch.long))
    assert held_bytes() - before < 64 * 512 * 8
    assert sum(p.numel() for p in model.parameters()) * 4 < 64 * 512  # or the bound would show nothing
