"""Defaults of arguments, and code of functions, that are replaced between calls."""

from __future__ import annotations

from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

STALE = "https://github.com/pytorch/pytorch/issues/115774"


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scaled = nn.Linear(6, 8), nn.Linear(8, 6), Scaled()

    def factor(self, *, scale: Any = 1.0, minus: bool = False) -> Any:
        return -scale if minus else scale

    def gain_of(self, gain: float = 1.0) -> float:
        return gain

    gain = property(gain_of)

    def forward(self, x: Tensor, *, more: float = 0.0) -> Tensor:
        y: Tensor = self.scaled(self.down(_with_keyword(torch.tanh(self.up(x))))) * self.factor() * self.gain
        return y + more


class Scaled:
    def __call__(self, x: Tensor, by: float = 1.0, *, plus: float = 0.0) -> Tensor:
        return x * by + plus


def _with_keyword(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@situation(STALE, slow=(2,))
def defaults_of_functions_are_replaced(loop: Loop) -> None:
    """Of keywords, in place too; of a property's function and of a `__call__`, which no attribute holds."""
    model = loop.model(Keyword())
    changes: list[tuple[Any, str, Any]] = [
        (Keyword.factor, "__kwdefaults__", {"scale": 2.0, "minus": False}),
        (Keyword.factor, "__kwdefaults__", {"scale": torch.full((6,), 1.5), "minus": True}),
        (Keyword.gain_of, "__defaults__", (3.0,)),
        (Keyword.forward, "__kwdefaults__", {"more": 0.5}),
        (Scaled.__call__, "__defaults__", (0.5,)),
        (Scaled.__call__, "__kwdefaults__", {"plus": 0.5}),
        (_with_keyword, "__kwdefaults__", {"scale": 2.0}),
        (Keyword.gain_of, "__code__", (lambda self, gain: gain + 1).__code__),
    ]
    before = [(function, name, getattr(function, name)) for function, name, _ in changes]
    for function, name, new in [*changes, *before[::-1]]:
        setattr(function, name, new)
        loss = model(torch.randn(3, 6)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    (_with_keyword.__kwdefaults__ or {})["scale"] = 0.5
    loop.see(last=model(torch.ones(3, 6)))
    (_with_keyword.__kwdefaults__ or {})["scale"] = 1.0
    loop.see_gradients(model)
