"""Covers: runtime/bound_graph.py, outputs.py (gradients that arrive at outputs beside a loss)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.errors import UsageError
from megafx.runtime.outputs import LazyTensor


class Tagger(nn.Module):
    """Dropout before a head of 29 classes; returns loss, logits and a hidden value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 29, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.drop(self.up(x).relu())
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "h": h}


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    return megafx.parallelize(Tagger().double(), megafx.Config(**options))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 40).double().reshape(5, 8), torch.arange(5)


def gradients(model: nn.Module, terms: str = "both") -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    out = model(*batch())
    loss = out["loss"] if terms == "loss" else out["logits"].square().mean() + out["h"].sin().mean()
    (loss + out["loss"] if terms == "both" else loss).backward()
    return [p.grad.clone() for p in model.parameters()]


def graph_of(model: Any) -> Any:
    (graphs,) = model.megafx.graphs.values()
    return graphs[0]


@pytest.mark.parametrize("terms", ["both", "outputs"])
def test_the_first_backward_has_the_masks_of_its_forward(terms: str) -> None:
    lazy, always = made(), made(differentiable_outputs=True)
    wanted = gradients(always, terms)
    for _ in range(2):  # computed again, then kept
        for a, b in zip(gradients(lazy, terms), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert lazy.megafx.captures == 1


def test_loops_that_do_not_use_them_keep_their_graph() -> None:
    model = made()
    gradients(model, "loss")
    assert graph_of(model)._differentiable is None
    assert isinstance(model(*batch())["logits"], LazyTensor)
    gradients(model)
    assert graph_of(model)._differentiable is not None
    out = model(*batch())
    assert type(out["logits"]) is torch.Tensor and out["logits"].requires_grad
    assert any("Config(differentiable_outputs=True)" in note.message for note in model.megafx.notes)


def test_changed_weights_are_refused() -> None:
    model = made()
    out = model(*batch())
    value = out["logits"].sum()
    with torch.no_grad():
        model.up.bias.add_(1)
    with pytest.raises(UsageError, match=r"'up.bias' was changed in place between forward and backward"):
        value.backward()


def test_casts_stay_lazy_and_carry_gradients() -> None:
    model, plain = made(), made(differentiable_outputs=True)
    found = []
    for m in (model, plain):
        torch.manual_seed(3)
        out = m(*batch())
        half = out["logits"].to(torch.float32).double()
        assert isinstance(half, LazyTensor) == (m is model) and half.requires_grad
        assert not copy.deepcopy(half.detach()).requires_grad
        half.square().sum().backward()
        found.append(m.head.weight.grad)
    torch.testing.assert_close(*found)
