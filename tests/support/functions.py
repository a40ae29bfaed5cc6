"""A function as a model, and inputs for it: with parameters of given shapes, or with a linear layer and a buffer."""

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


D = 16  # features of a Lambda


class Lambda(nn.Module):
    """forward is `fn(self, *args, **kwargs)`; `lin` and a buffer to play with."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.lin = fn, nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def _x(b: int, s: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(b, s, D),), {}
