"""Covers: capture/tensor_hooks.py (what forward asks of autograd). Hooks at work: loop_hooks_inside.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad as bound_early

import megafx
from megafx.errors import CaptureError


class Net(nn.Module):
    def __init__(self, code: Any) -> None:
        super().__init__()
        self.up, self.down, self.code = nn.Linear(4, 6), nn.Linear(6, 3), code
        self.kept: list[torch.Tensor] = []

    def keep(self, gradient: torch.Tensor) -> None:
        self.kept.append(gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).relu()
        return self.down(h).square().mean() + self.code(self, h)


def closes_over_a_value(net: Net, h: torch.Tensor) -> Any:
    scale = h.detach().mean()
    h.register_hook(lambda gradient: gradient * scale)
    return 0


def retains(net: Net, h: torch.Tensor) -> Any:
    h.retain_grad()
    return 0


def differentiates(net: Net, h: torch.Tensor) -> Any:
    return torch.autograd.grad(h.sum(), h, create_graph=True)[0].mean()


def differentiates_by_a_bound_name(net: Net, h: torch.Tensor) -> Any:
    return bound_early(h.square().sum(), h, create_graph=True)[0].mean()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (closes_over_a_value, r"computes with a tensor that forward has made[\s\S]*torch.autograd.Function"),
        (retains, r"retain_grad\(\) on a value inside of forward[\s\S]*value.register_hook\(self.keep\)"),
        (differentiates, r"forward differentiates[\s\S]*take its gradient outside of the model"),
        (differentiates_by_a_bound_name, r"forward differentiates[\s\S]*take its gradient outside of the model"),
    ],
)
def test_what_a_graph_cannot_do_is_refused_with_its_line(code: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        megafx.parallelize(Net(code))(torch.randn(5, 4))
    assert "test_tensor_hooks.py" in str(caught.value)


def test_the_advice_for_retain_grad_works() -> None:
    def keeps(net: Net, h: torch.Tensor) -> Any:
        h.register_hook(net.keep)
        return 0

    torch.manual_seed(0)
    x, plain = torch.randn(5, 4), Net(keeps)
    model = Net(keeps)
    model.load_state_dict(plain.state_dict())
    model = megafx.parallelize(model)
    for each in (plain, model):
        each(x).backward()
    torch.testing.assert_close(model.kept, plain.kept)
    assert len(model.kept) == 1
