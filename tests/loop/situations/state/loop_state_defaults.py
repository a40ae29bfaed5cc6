"""Defaults of arguments, code of functions, and attributes of classes, that are replaced between calls."""

from __future__ import annotations

from collections.abc import Callable
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


class Measure:
    """Is reached by the class that an attribute of the model holds."""

    scale, table = 2.0, {"shift": 1.0}

    @classmethod
    def scaled(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.scale

    @staticmethod
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + Measure.table["shift"]


class Finer(Measure):
    pass


class Rated(nn.Module):
    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * type(self).rate


class Slow(Rated):
    rate = 0.5


class Fast(Rated):
    rate = 2.0


class OfClasses(Rated):
    def __init__(self) -> None:
        super().__init__()
        self.parts, self.measure = nn.Sequential(Slow(), Fast()), Finer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.measure.shifted(self.measure.scaled(self.parts(x)))
        return x * _rate_of(self)


def _rate_of(model: nn.Module) -> Any:
    return model.rate * model.__class__.rate  # type: ignore[operator]  # numbers


@situation(STALE, like="descriptors_compute_what_forward_reads")
def classes_are_reached_by_attributes_functions_and_by_their_relatives(loop: Loop) -> None:
    changes: list[Callable[[], object]] = [
        lambda: setattr(Measure, "scale", 3.0),
        lambda: Measure.table.update(shift=2.0),
        lambda: setattr(Fast, "rate", 3.0),
        lambda: setattr(OfClasses, "rate", 0.25),
        lambda: setattr(OfClasses, "rate", 0.5),
        lambda: setattr(Fast, "rate", 4.0),
    ]
    model = loop.model(OfClasses())
    for change in changes:
        y = model(torch.randn(3, 6))
        y.square().sum().backward()
        loop.see(y=y)
        change()
    loop.see_gradients(model)
    Measure.scale, Fast.rate, OfClasses.rate, Measure.table["shift"] = 2.0, 2.0, 1.0, 1.0


class Gained:
    """A descriptor that has a gain of its own, and one of its class."""

    common = 1.0

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else owner.__dict__["value"] * self.gain * Gained.common


class Holder:
    factor = Gained(2.0)

    def __init__(self) -> None:
        self.value = 1.0


class OfDescriptors(nn.Module):
    factor = Gained(3.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.value, self.holder = nn.Linear(6, 6), 1.0, Holder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor + self.holder.factor


@situation(STALE)
def descriptors_compute_what_forward_reads(loop: Loop) -> None:
    model = loop.model(OfDescriptors())
    changes: list[Callable[[], object]] = [
        lambda: setattr(Gained, "common", 2.0),
        lambda: setattr(Holder.__dict__["factor"], "gain", 5.0),
        lambda: setattr(OfDescriptors.__dict__["factor"], "gain", 4.0),
        lambda: setattr(model, "value", 0.5),
        lambda: setattr(model, "value", 0.25),
        lambda: setattr(Gained, "common", 0.5),
        lambda: setattr(model.holder, "value", 3.0),
    ]
    for change in changes:
        y = model(torch.randn(3, 6))
        y.square().sum().backward()
        loop.see(y=y)
        change()
    loop.see_gradients(model)
    Gained.common, Holder.__dict__["factor"].gain, OfDescriptors.__dict__["factor"].gain = 1.0, 2.0, 3.0
