"""Objects of classes of the user's that forward makes and keeps: records in lists and dicts, states for the next call."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafx.errors import CaptureError

RECORDS = "https://discuss.pytorch.org/t/how-can-i-extract-intermediate-layer-output-from-loaded-cnn-model/77301"
STATE = "https://github.com/pytorch/pytorch/issues/115774"


class Record:
    def __init__(self, values: Any, number: Any) -> None:
        self.values, self.number = values, number


@dataclasses.dataclass
class State:
    h: Tensor
    number: int = 0
    more: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Keeping(nn.Module):
    """What `keep` makes of (the module, hidden values, outputs) stays behind."""

    def __init__(self, keep: Callable[[Any, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(6, 8), nn.Linear(8, 6), keep
        self.kept: Any = None
        self.many: list[Any] = []
        self.named: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        y: Tensor = self.down(h)
        self.keep(self, h, y)
        return y


def train(loop: Loop, keep: Callable[[Any, Tensor, Tensor], None], read: Callable[[Any], Any]) -> None:
    model = loop.model(Keeping(keep))
    for _ in range(3):
        y, found = model(torch.randn(3, 6)), None
        found = read(model)
        terms = [x.square().mean() for x in pytree.tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
        (y.square().mean() + sum(terms)).backward()
        loop.see(found=found)
        loop.see_gradients(model)


@situation(RECORDS)
def objects_are_kept_and_appended(loop: Loop) -> None:
    def keep(m: Any, h: Tensor, y: Tensor) -> None:
        m.many.append(Record(h, 1))
        m.kept = Record(State(h, 2, Pair(y, h)), [Record({"y": y * 2}, m.up), y.dtype])
        m.named["last"] = State(y, len(y.shape), (Record(h * 3, "text"),))

    def read(m: Any) -> Any:
        one, (two, kind), last = m.kept.values, m.kept.number, m.named["last"]
        assert [type(x) for x in (m.kept, one, one.more, two, m.many[-1])] == [Record, State, Pair, Record, Record]
        assert two.number is m.up and kind == torch.float64
        return [
            m.many[-1].values,
            len(m.many),
            one.h,
            *one.more,
            two.values["y"],
            last.h,
            last.number,
            last.more[0].values,
        ]

    train(loop, keep, read)


@situation(STATE)
def a_state_in_an_object_is_passed_on(loop: Loop) -> None:
    """One graph from the third call on; only what forward reads of it has a history."""

    class Passing(nn.Module):
        def __init__(self, made: Callable[..., Any]) -> None:
            super().__init__()
            self.up, self.made = nn.Linear(6, 6), made
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.up(x)
            if self.state is not None:
                h = h + torch.tanh(self.state.h) * self.state.number
            self.state = self.made(h.detach(), h.mean())
            return h

    def plain(h: Tensor, mean: Tensor) -> Any:
        made = Record({"mean": [mean]}, 2)
        made.h = h  # type: ignore[attr-defined]  # one more attribute
        return made

    for made in (plain, lambda h, mean: State(h, 2, mean)):
        model = loop.model(Passing(made))
        for _ in range(4):
            y = model(torch.randn(3, 6))
            y.square().sum().backward()
            loop.see(y=y, h=model.state.h)
        loop.see_gradients(model)
        if not loop.eager:
            assert model.megafx.captures <= 3


CHOICES = [Record(1.0, 2), Record(3.0, 4)]


@situation(STATE)
def an_object_of_before_is_put_somewhere_else(loop: Loop) -> None:
    """It stays the same object; one that is put at two places is an error that names the line."""

    def chosen(m: Any, h: Tensor, y: Tensor) -> None:
        m.kept = CHOICES[1]

    def twice(m: Any, h: Tensor, y: Tensor) -> None:
        m.kept = Record(h, 1)
        m.named["also"] = m.kept

    model = loop.model(Keeping(chosen))
    loop.see(y=model(torch.randn(3, 6)), same=model.kept is CHOICES[1])
    model = loop.model(Keeping(twice))
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"a \S+Record\) in a way that a graph cannot follow"):
            model(torch.randn(3, 6))


@situation(STATE)
def namespaces_and_tuples_are_states(loop: Loop) -> None:
    """Forward writes attributes of namespaces, reads those of the call before, and passes a recurrent cell's tuple on."""

    def keep(m: Any, h: Tensor, y: Tensor) -> None:
        space = m.kept
        if space.last is not None:
            m.many = [(h * space.last).mean()]
        space.last, space.calls = h.detach().mean(0), space.calls + 1
        space.twice = space.calls * 2

    for kind in (types.SimpleNamespace, argparse.Namespace):
        model = loop.model(Keeping(keep))
        model.kept = space = kind(last=None, calls=0)
        for _ in range(4):
            model(torch.randn(3, 6)).square().sum().backward()
            loop.see(last=space.last, calls=space.calls, twice=space.twice, many=model.many)
        loop.see_gradients(model)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.state = nn.LSTMCell(6, 5), None

        def forward(self, x: Tensor) -> Tensor:
            self.state: Any = self.cell(x, self.state)
            return self.state[0]

    model = loop.model(Recurrent())
    for number in range(4):
        y = model(torch.randn(3, 6))
        y.square().sum().backward()
        loop.see(y=y, cell=model.state[1])
        model.state = None if number == 2 else tuple(x.detach() for x in model.state)
    loop.see_gradients(model)


class Slots:
    __slots__ = ("scale", "shift")

    def __init__(self, scale: Any, shift: Any) -> None:
        self.scale, self.shift = scale, shift


@dataclasses.dataclass(slots=True)
class Running:
    mean: Any
    count: int = 0


class OfSlots(nn.Module):
    """Two objects of one class, and a state that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.first, self.second = nn.Linear(6, 6), Slots(1.0, 2.0), Slots(3.0, torch.ones(6))
        self.state: Any = Running(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = self.up(x) * self.first.scale + self.first.shift
        y = y * self.second.scale + self.second.shift
        self.state = dataclasses.replace(
            self.state, mean=self.state.mean + y.detach().mean(), count=self.state.count + 1
        )
        return y * self.state.mean, Slots(y, {"count": self.state.count})


@situation(STATE)
def objects_with_slots_are_read_and_replaced(loop: Loop) -> None:
    model = loop.model(OfSlots())
    for number in range(4):
        y, slots = model(torch.randn(3, 6))
        (y.square().sum() + slots.scale.sum()).backward()
        loop.see(y=y, slots=[slots.scale, slots.shift], mean=model.state.mean, count=model.state.count)
        model.second.scale, model.second.shift = float(number), torch.full((6,), float(number))
        model.first.scale = 2.0 if number == 2 else 1.0
    loop.see_gradients(model)


@situation(STATE, ranks=(1,))
def a_container_of_another_kind_takes_the_place(loop: Loop) -> None:
    class Matching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.options = nn.Linear(6, 6), {"scale": 2.0}

        def forward(self, x: Tensor) -> Tensor:
            match self.options:
                case {"scale": scale}:
                    return self.linear(x) * scale
                case [scale, shift]:
                    return self.linear(x) * scale + shift
            return self.linear(x)

    model, x = loop.model(Matching()), torch.randn(3, 6)
    for options in ({"scale": 3.0}, {"scale": 4.0}, [2.0, 1.0], (3.0, 1.0), {}, {"scale": 5.0}):
        model.options = options
        loop.see(y=model(x))
