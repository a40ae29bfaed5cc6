"""Covers: what steps leave behind: no tensor is in a cycle of references, which only Python's collector would free.

Loops of large runs turn the collector off, and everywhere else it comes late: a step's logits would be kept for several steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megafx

IDS = torch.arange(12).view(2, 6) % 7
LOADED = megafx.Config(tensor_model_parallel_size=1, cache=False)


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.up = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 16)
        self.down, self.head, self.recompute = nn.Linear(16, 8), nn.Linear(8, 7), recompute

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits, "hidden": x}


def with_a_hook(out: dict[str, Tensor]) -> None:
    out["logits"].register_hook(lambda gradient: 2 * gradient)
    out["loss"].backward()


def penalty(out: dict[str, Tensor]) -> None:
    (gradient,) = torch.autograd.grad(out["loss"], out["hidden"], create_graph=True)
    (out["loss"] + gradient.square().sum()).backward()


def twice(out: dict[str, Tensor]) -> None:
    out["loss"].backward(retain_graph=True)
    out["loss"].backward()


def fails(out: dict[str, Tensor]) -> None:
    out["loss"].backward()
    with pytest.raises(megafx.MegafxError):
        out["loss"].backward()


USES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "the loss": lambda out: out["loss"].backward(),
    "nothing": lambda out: None,
    "an output beside the loss": lambda out: (out["loss"] + out["hidden"].square().mean()).backward(),
    "logits alone": lambda out: out["logits"].square().mean().backward(),
    "a gradient of an output": lambda out: torch.autograd.grad(out["loss"], out["logits"]),
    "a hook on an output": with_a_hook,
    "a retained gradient": lambda out: (out["logits"].retain_grad(), out["loss"].backward()),
    "a penalty": penalty,
    "two backwards": twice,
    "a backward that fails": fails,
}  # fmt: skip


@contextmanager
def left_behind() -> Iterator[list[Any]]:
    """Collects what the body leaves in cycles."""
    gc.collect()
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.extend(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _not_what_other_tests_left() -> None:
    gc.collect()  # it would stay for ever
    gc.freeze()  # the collector takes seconds to look at what thousands of tests leave in caches


@pytest.fixture(scope="module", params=[False, True], ids=["", "checkpointed"])
def model(request: pytest.FixtureRequest) -> Any:
    return megafx.parallelize(Net(request.param), LOADED)


@pytest.mark.parametrize("use", USES)
def test_a_step_leaves_no_tensor_behind(use: str, model: Any) -> None:
    def step() -> None:
        USES[use](model(IDS))
        model.zero_grad()

    for _ in range(3):  # outputs that a loop reads change the graph
        step()
    with left_behind() as found:
        step()
    kept = [(tuple(x.shape), x.grad_fn) for x in found if isinstance(x, Tensor)]
    assert not kept


def test_what_is_left_behind_is_seen() -> None:
    with left_behind() as found:
        cycle: list[Any] = [torch.zeros(3)]
        cycle.append(cycle)
        del cycle
    assert any(isinstance(x, Tensor) for x in found)
