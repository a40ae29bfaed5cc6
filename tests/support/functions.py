"""A function as a model, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Function(nn.Module):
    """A function of (module, *inputs) with parameters of the given shapes."""

    def __init__(self, fn: Callable[..., Any], parameters: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.fn = fn
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        if fn is _counting:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.fn(self, *inputs)


def x_of(batch: int = 2, seq: int = 5) -> torch.Tensor:
    return torch.randn(batch, seq, 8, dtype=torch.float64, requires_grad=True)


def ids_of(batch: int = 2, seq: int = 5) -> torch.Tensor:
    return torch.randint(0, 8, (batch, seq))


def _counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    return x * m.count
