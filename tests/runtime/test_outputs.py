"""Lazy outputs: nothing is done until somebody uses them."""

from __future__ import annotations

import copy

import pytest
import torch

from megafx.runtime.outputs import LazyTensor


@pytest.fixture
def lazy():
    made = []

    def make():
        made.append(1)
        return torch.arange(6.0).view(2, 3)

    from megafx.runtime.outputs import _once

    return LazyTensor((2, 3), torch.float32, torch.device("cpu"), _once(make)), made


def test_metadata_costs_nothing(lazy):
    x, made = lazy
    assert (x.shape, x.dtype, x.device.type, x.dim(), x.numel(), x.size(1), len(x)) == (
        (2, 3),
        torch.float32,
        "cpu",
        2,
        6,
        3,
        2,
    )
    assert isinstance(x, torch.Tensor) and not x.requires_grad and x.is_floating_point() and x.grad_fn is None
    assert "LazyTensor(shape=(2, 3)" in repr(x)
    assert isinstance(x.detach(), LazyTensor) and x.detach().shape == x.shape
    assert not made


def test_casts_stay_lazy(lazy):
    x, made = lazy
    y = x.double()
    assert y.dtype == torch.float64 and y.shape == (2, 3)
    assert x.to(torch.float16).dtype == torch.float16
    assert x.float() is x
    assert not made
    assert torch.equal(y + 0, torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert len(made) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 0,
        lambda x: torch.stack([x, x])[0],
        lambda x: x[:],
        lambda x: torch.nn.functional.relu(x),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: copy.deepcopy(x),
        lambda x: torch.ops.aten.clone(x),
        lambda x: x.cpu(),
    ],
)
def test_use_makes_it_whole_once(lazy, use):
    x, made = lazy
    for _ in range(2):
        result = use(x)
        assert type(result) is torch.Tensor
        assert torch.equal(result, torch.arange(6.0).view(2, 3))
    assert len(made) == 1


def test_saving_saves_the_whole(lazy, tmp_path):
    x, _ = lazy
    torch.save({"logits": x}, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["logits"], torch.arange(6.0).view(2, 3))
