"""Loops over the experts that some token chose (`for e in hit`), in one graph, against eager at fp64.

Covers: capture/libraries/expert_loops.py.
"""

from __future__ import annotations

from typing import Any

import index_dispatch as moe
import pytest
import torch
from calls import captured
from index_dispatch import assert_as_eager, made_for, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import CaptureError


class ByHit(moe.Mixture):
    """As Hugging Face's mixtures loop: `step(self, out, x, weights, mask, e)` is the body. classes: one more than there are
    experts where the model has an index for none of them."""

    def __init__(self, step: Any, classes: int = moe.EXPERTS) -> None:
        super().__init__(moe.where_add_in_place)
        self.step, self.classes = step, classes
        self.named = nn.ModuleDict({f"expert_{i}": e for i, e in enumerate(self.experts)})
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, moe.EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, moe.HIDDEN)
        weights, chosen = self.router(flat).softmax(-1).topk(moe.TOP, dim=-1)
        mask = F.one_hot(chosen, self.classes).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        out = torch.zeros_like(flat)
        for e in hit:
            out = self.step(self, out, flat, weights, mask, e)
        return out.view_as(x), weights.square().mean() + self.scale.square().sum()


def by_name(self, out, x, weights, mask, e):
    which, rows = torch.where(mask[e].squeeze(0))
    y = self.named[f"expert_{e[0]}"](x[None, rows].reshape(-1, moe.HIDDEN)) * weights[rows, which, None]
    out.index_add_(0, rows, y)
    return out


def by_number(self, out, x, weights, mask, e):
    """In a list, and scaled by a row of a parameter."""
    e = e[0]
    which, rows = torch.where(mask[e])
    out[rows] += self.experts[min(int(e), 3)](x[rows]) * weights[rows, which, None] * self.scale[e]
    return out


def returned(self, out, x, weights, mask, e):
    rows = mask[e].squeeze(0).any(0).nonzero().flatten()
    return out.index_add(0, rows, self.experts[e.item()](x[rows]))


def model_of(step: Any, classes: int = moe.EXPERTS) -> nn.Module:
    model = moe.Model(moe.where_add_in_place)
    model.moe = ByHit(step, classes)
    return model.double()


@pytest.mark.parametrize(
    ("step", "classes", "t"), [(by_name, 4, 2), (by_number, 5, 2), (by_number, 4, 4), (returned, 4, 3)]
)
def test_loop_over_hits(step: Any, classes: int, t: int) -> None:
    """One graph for every routing. Of experts that no token chose gradients are zero; eager leaves them None."""
    model = model_of(step, classes)
    program, made = made_for(model, t)
    (note,) = [n.message for n in program.notes if "loop over what was hit" in n.message]
    assert f"runs over all {classes}" in note and "`for e in hit:`" in note
    assert made.plan.params["moe.experts.0.down.weight"].tag == "S1"
    assert not made.plan.params["moe.router.weight"].is_shard
    assert_as_eager(model, program, made, tokens(3, 5))
    moe.turn_off(model, [1, 3])
    none = assert_as_eager(model, program, made, tokens(2, 9))
    assert {n.split(".")[2] for n in none if "experts" in n} == {"1", "3"}


def sum_of_all(self, out, x, weights, mask, e):
    """What every expert computes for every token would be added up for experts that nobody chose, too."""
    return out + self.experts[int(e)](x)


def everything_in_place(self, out, x, weights, mask, e):
    out += self.experts[int(e)](x)
    return out


def rows_of_before(self, out, x, weights, mask, e):
    out[0] = self.experts[int(e)](x[0])
    return out


def kept(self, out, x, weights, mask, e):
    rows = torch.where(mask[e].squeeze(0))[1]
    self.last = self.experts[int(e)](x[rows])
    return out.index_add(0, rows, self.last)


class Kept(ByHit):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, balance = super().forward(x)
        return out, balance + self.last.sum()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (sum_of_all, "its results are used after an iteration"),
        (everything_in_place, "otherwise than by writing to selected rows"),
        (rows_of_before, "otherwise than by writing to selected rows"),
        (kept, "its results are used after an iteration"),
    ],
)
def test_what_an_iteration_without_tokens_would_change_is_refused(step: Any, why: str) -> None:
    model = model_of(step)
    if step is kept:
        model.moe = Kept(step).double()
    with pytest.raises(CaptureError, match=why) as error:
        captured(model, {"x": tokens(3, 5)})
    assert "capture/test_expert_loops.py" in str(error.value) and "enumerate(self.experts)" in str(error.value)


class LastSum(nn.Module):
    """Returns what its last iteration made."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for e in (x[:4, 0] > 0).nonzero():
            total = x[e].sum()
        return total


def test_results_of_the_call_are_looked_at_too() -> None:
    with pytest.raises(CaptureError, match="its results are used after an iteration"):
        captured(nn.Sequential(nn.Linear(3, 3), LastSum()), {"input": torch.randn(5, 3)})
