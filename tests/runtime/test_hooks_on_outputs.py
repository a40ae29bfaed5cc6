"""Where gradients of hooked outputs cannot be computed, that is said; without hooks nothing is computed twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.runtime.hooks_on_outputs import Waiting

ONE = megafx.Config(tensor_model_parallel_size=1, hardware="h100-nvlink")


class Halves(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 9), nn.Linear(9, 4), nn.Dropout(p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(torch.tanh(self.first(x)))
        return h, self.second(h)


def test_dropout_is_refused() -> None:
    model = megafx.parallelize(Halves(0.5), ONE)
    h, y = model(torch.randn(3, 6))
    h.register_hook(lambda grad: grad * 2)
    with pytest.raises(megafx.MegafxError, match="'\\[0\\]'.*its dropout would draw other masks") as error:
        y.sum().backward()
    assert "inside of forward" in str(error.value.fix)

    class Hooked(Halves):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.first(x))
            h.register_hook(lambda grad: grad * 2)
            return h, self.second(self.drop(h))

    h, y = megafx.parallelize(Hooked(0.5), ONE)(torch.randn(3, 6))
    y.sum().backward()
    model.eval()
    h, y = model(torch.randn(3, 6))
    h.register_hook(lambda grad: grad * 2)
    y.sum().backward()


def test_a_hook_after_a_change_in_place_is_of_the_changed_value() -> None:
    class Sums(Halves):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.first(x)
            return h, h + 1

    seen: list[Tensor] = []
    h, y = megafx.parallelize(Sums(), ONE)(torch.randn(3, 6))
    h.mul_(2)
    h.register_hook(seen.append)
    h.retain_grad()
    (h.sum() + y.sum()).backward()
    assert torch.equal(seen[0], torch.ones(3, 9)) and torch.equal(h.grad, seen[0])


def test_what_no_output_depends_on_has_no_table() -> None:
    model = megafx.parallelize(Halves(), ONE)
    h, y = model(torch.randn(3, 6))
    assert not isinstance(y._backward_hooks, Waiting) and h._backward_hooks.hooks == {}
    handle = h.register_hook(lambda grad: grad * 2)
    assert len(h._backward_hooks.hooks) == 1 and type(copy.deepcopy(h._backward_hooks)).__name__ == "OrderedDict"
    handle.remove()
    y.sum().backward()
    assert not any("computed once more" in note.message for note in model.megafx.notes)
