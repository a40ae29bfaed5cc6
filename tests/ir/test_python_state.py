"""Covers: megafx/ir/python_state.py. What counts as a change of the state that a graph depends on."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from megafx.ir.python_state import Place, PythonState, same, snapshot


def guarded(attributes: dict[str, Any], varies: frozenset[str] = frozenset()) -> PythonState:
    places = [Place(attributes, key, key) for key in attributes]
    return PythonState([(p, snapshot(p.get(), p.name, varies)) for p in places])


CHANGES: dict[str, tuple[Any, Any]] = {
    "number": (1.0, 2.0),
    "type of number": (1, 1.0),
    "flag for number": (1, True),
    "sign of zero": (0.0, -0.0),
    "list": ([1, 2], [1, 3]),
    "length": ([1, 2], [1, 2, 3]),
    "tuple for list": ([1], (1,)),
    "nested": ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 4]}}),
    "key": ({"a": 1}, {"b": 1}),
    "set": ({1, 2}, {1, 3}),
    "namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "array": (np.arange(3), np.arange(3) + 1),
    "function": (torch.relu, torch.tanh),
    "tensor": (torch.ones(2), torch.ones(2)),
    "none": (None, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(name: str) -> None:
    before, after = CHANGES[name]
    attributes = {"other": 1, "x": before}
    state = guarded(attributes)
    assert state.holds()
    attributes["x"] = after
    assert not state.holds()
    assert [p.name.partition("[")[0].partition(".")[0] for p in state.changed()] == ["x"]
    attributes["x"] = before
    assert state.holds()


@pytest.mark.parametrize("name", ["list", "nested", "set", "namespace", "array"])
def test_a_change_in_place_is_noticed(name: str) -> None:
    value = {
        "list": lambda: [1, 2], "nested": lambda: {"a": {"b": [1, 2]}}, "set": lambda: {1, 2},
        "namespace": lambda: types.SimpleNamespace(a=1), "array": lambda: np.arange(3),
    }[name]()  # fmt: skip
    change = {
        "list": lambda: value.append(3), "nested": lambda: value["a"]["b"].__setitem__(1, 5),
        "set": lambda: (value.remove(1), value.add(4)), "namespace": lambda: setattr(value, "a", 2),
        "array": lambda: value.__setitem__(0, 7),
    }[name]  # fmt: skip
    state = guarded({"x": value})
    change()
    assert not state.holds()


def test_equal_values_in_other_objects_are_the_same_and_are_followed_further() -> None:
    attributes: dict[str, Any] = {"scale": float("1.5"), "names": ["a", "b"], "late": 1}
    state = guarded(attributes)
    attributes |= {"scale": float("1.5"), "names": ["a", "b"]}
    assert state.holds()
    attributes["names"].append("c")
    assert not state.holds()
    del attributes["late"]
    assert {p.name for p in state.changed()} == {"names", "late"}


def test_what_is_missing_is_noticed_when_it_comes() -> None:
    attributes: dict[str, Any] = {"a": 1}
    place = Place(attributes, "b", "b")
    state = PythonState([(place, place.get())])
    attributes["c"] = 1
    assert state.holds()
    attributes["b"] = 1
    assert not state.holds()


def test_parts_that_are_inputs_may_change() -> None:
    attributes: dict[str, Any] = {"scaling": {"default": 1.0, "other": 2.0}}
    state = guarded(attributes, frozenset(["scaling['default']"]))
    attributes["scaling"]["default"] = 5.0
    assert state.holds()
    attributes["scaling"]["other"] = 5.0
    assert [p.name for p in state.changed()] == ["scaling['other']"]


def test_a_part_is_found_in_what_its_container_is_then() -> None:
    attributes: dict[str, Any] = {"scaling": {"default": 1.0}}
    part = Place(attributes, "scaling", "scaling").part("default")
    attributes["scaling"] = {"default": 3.0}
    assert part.get() == 3.0
    part.set(4.0)
    assert attributes == {"scaling": {"default": 4.0}}


def test_same() -> None:
    assert same(1.5, float("1.5")) and same("ab", "".join(["a", "b"])) and same(float("nan"), float("nan"))
    assert not same([1], [1]) and not same(torch.ones(1), torch.ones(1))
