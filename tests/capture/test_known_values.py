"""Covers: by_values of capture/eager_parts.py. Values that follow from constants and sizes: loop_sizes.py of tests/loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.errors import CaptureError


def _is_written(x: Tensor) -> Tensor:
    numbers = torch.tensor([0, 1, 2])
    numbers[1] = x.shape[1]
    return numbers


def _is_written_through_a_view(x: Tensor) -> Tensor:
    numbers = torch.tensor([0, 1, 2])
    numbers.view(3, 1)[1].add_(1)
    return numbers


def _is_drawn(x: Tensor) -> Tensor:
    return torch.rand(3)


def _follows_from_data(x: Tensor) -> Tensor:
    return (x.sum() * 0).long() + torch.tensor([0, 1, 2])


@pytest.mark.parametrize("values", [_is_written, _is_written_through_a_view, _is_drawn, _follows_from_data])
def test_other_values_are_not_known(values: Callable[[Tensor], Tensor]) -> None:
    class Decides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x * (2 if values(x)[1] > 1 else 3)

    model = megafx.parallelize(Decides(4, 4), megafx.Config(tensor_model_parallel_size=1))
    with pytest.raises(CaptureError, match="depends on the data of a tensor"):
        model(torch.randn(2, 4))
