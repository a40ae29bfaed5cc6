"""A function as a module that is captured, and an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

D = 16


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
