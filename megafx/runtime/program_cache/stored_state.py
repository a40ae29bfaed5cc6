"""The Python state that a graph depends on, for another process: where each value is, as a path, and what it is, as text.

A path starts at a module of the model, at the globals of a Python module, or at a class, and goes on through what is found
there: each guard's value is a start for others. State that no path leads to raises `Unstorable`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from megafx.capture.reads import LIBRARIES, TABLES
from megafx.errors import SourceLine
from megafx.ir.holders import ENVIRONMENT, OF_TORCH, Default, OwnAttributes, Remembered, SizesOf
from megafx.ir.python_state import ABSENT, Container, Place, PythonState, parts_of, snapshot
from megafx.ir.source_lines import is_installed
from megafx.ir.stored import Unstorable, named_in
from megafx.runtime.program_cache.fingerprint import Fingerprint

_KEYS = (str, int, bool, type(None))


def state_form(state: PythonState, model: nn.Module, own: Fingerprint) -> Any:
    """The state as JSON. Raises Unstorable."""
    if state.writes or state.decisions:
        raise Unstorable(f"forward writes {', '.join(map(repr, [*state.writes][:3]))}")
    for name, place in state.inputs.items():
        if not isinstance(place, Place):
            raise Unstorable(f"'{name}', which is computed")
    paths = _Paths(state, model)
    guards = [[paths.place(place), _text(own, place, wanted)] for place, wanted in state.guards]
    inputs = {n: paths.place(p) for n, p in state.inputs.items() if isinstance(p, Place)}
    functions = [paths.path_of(function, function.__qualname__) for function in state.functions]
    return {"guards": guards, "inputs": inputs, "functions": functions}


def state_of(form: Any, model: nn.Module, own: Fingerprint) -> PythonState | str:
    """The state of a graph in this process; the name of what differs where it is not the same."""
    finder = _Finder(form["guards"], model)
    varies = frozenset(form["inputs"])
    guards = []
    for number, (_, text) in enumerate(form["guards"]):
        place = finder.guarded(number)
        if place is None:
            return "what is read where it was"
        wanted = snapshot(place.get(), place.name, varies)
        try:
            same = _text(own, place, wanted) == text
        except Unstorable:
            same = False
        if not same:
            return f"'{place.name}'"
        guards.append((place, wanted))
    inputs = {name: finder.place(where) for name, where in form["inputs"].items()}
    if None in inputs.values():
        return "a number that varies"
    functions = [found for path in form["functions"] if (found := finder.at(path)) is not None]
    return PythonState(guards, {n: p for n, p in inputs.items() if p is not None}, functions=functions)


def _text(own: Fingerprint, place: Place, wanted: Any) -> Any:
    """What a value is, as text. The order of an installed package's own table is left out: some are filled from sets, whose
    order differs between processes (transformers' table of installed packages)."""
    file = place.holder.get("__file__") if isinstance(place.holder, dict) and "__name__" in place.holder else None
    if is_installed(file or "") and isinstance(wanted, Container) and issubclass(wanted.kind, dict):
        wanted = Container(wanted.kind, dict(sorted(wanted.parts.items(), key=lambda part: repr(part[0]))))
    return own(wanted)


class _Paths:
    """Paths of the holders of all guards. known: id of a holder -> its path."""

    def __init__(self, state: PythonState, model: nn.Module) -> None:
        self.known: dict[int, Any] = {}
        self.alive: list[Any] = []
        for fqn, module in model.named_modules():
            path = ["module", fqn]
            self._know(module, path)
            for name in TABLES:
                self._know(vars(module)[name], ["part", ["vars", path], name])
            for level, cls in enumerate(type(module).__mro__):
                if cls.__module__.partition(".")[0] not in LIBRARIES:
                    self._class(cls, ["mro", path, level])
        waiting = [*enumerate(place for place, _ in state.guards)]
        while waiting:
            left = [(i, place) for i, place in waiting if not self._reached(i, place)]
            if len(left) == len(waiting):
                raise Unstorable(f"'{left[0][1].name}', which no path leads to")
            waiting = left

    def place(self, place: Place) -> Any:
        if not isinstance(place.key, _KEYS):
            raise Unstorable(f"'{place.name}', an item whose key is a {type(place.key).__name__}")
        line = None if place.line is None else [place.line.file, place.line.line, place.line.code]
        if place.within is not None:
            return [["within", self.place(place.within)], place.key, place.name, line]
        return [self._path(place), place.key, place.name, line]

    def _reached(self, number: int, place: Place) -> bool:
        try:
            self.place(place)
        except Unstorable:
            return False
        self._know(place.get(), ["guard", number])
        return True

    def _path(self, place: Place) -> Any:
        holder = place.holder
        if isinstance(holder, SizesOf) and id(holder.table) in self.known:
            return ["sizes", self.known[id(holder.table)], holder.name]
        if isinstance(holder, Default):
            return ["default", self.path_of(holder.function, place.name), holder.name, holder.position]
        if isinstance(holder, OwnAttributes):
            return ["own", self._path(Place(holder.cls, place.key, place.name))]
        if holder is ENVIRONMENT:
            return ["environment"]
        if holder is OF_TORCH and not OF_TORCH.number:
            return ["torch"]
        if isinstance(holder, Remembered) and not holder.autocast:
            plain = all(isinstance(x, (*_KEYS, float)) for x in holder.leaves)
            if plain and (path := self.known.get(id(holder.memo))) is not None:
                return ["remembered", path, pytree.treespec_dumps(holder.spec), holder.leaves, holder.grad]
        if id(holder) in self.known:
            return self.known[id(holder)]
        name = holder.get("__name__") if isinstance(holder, dict) else None
        if isinstance(name, str) and vars(sys.modules.get(name, types)) is holder:
            return ["globals", name]
        if isinstance(holder, type) and named_in(holder.__module__, holder.__qualname__) is holder:
            return ["class", holder.__module__, holder.__qualname__]
        return self.path_of(holder, place.name)

    def path_of(self, value: Any, name: str) -> Any:
        """The path of what is known. Raises Unstorable."""
        if id(value) not in self.known:
            raise Unstorable(f"'{name}', which no path leads to")
        return self.known[id(value)]

    def _know(self, value: Any, path: Any) -> None:
        if id(value) in self.known or isinstance(value, (*_KEYS, float)) or value is ABSENT:
            return
        if isinstance(value, type):
            return self._class(value, path)
        self.known[id(value)] = path
        self.alive.append(value)
        if isinstance(inspect.unwrap(value) if callable(value) else None, types.FunctionType):
            self._cells(value, path)
        elif (found := parts_of(value)) is not None:
            for key, part in found[1].items():
                if isinstance(key, _KEYS):
                    self._know(part, ["part", path, key])
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            self.known.setdefault(id(attributes), ["vars", path])
            for level, cls in enumerate(type(value).__mro__):
                if cls.__module__.partition(".")[0] not in LIBRARIES:
                    self._class(cls, ["mro", path, level])

    def _class(self, cls: type, path: Any) -> None:
        if "<locals>" not in cls.__qualname__:
            path = ["class", cls.__module__, cls.__qualname__]
        if self.known.setdefault(id(cls), path) is path:
            self.alive.append(cls)
            for name, value in vars(cls).items():
                if isinstance(function := _function_of(value), types.FunctionType):
                    self._cells(function, ["method", path, name])

    def _cells(self, function: types.FunctionType, path: Any) -> None:
        function = inspect.unwrap(function)
        self.known.setdefault(id(function), ["unwrapped", path])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.known.setdefault(id(cell), ["cell", path, name])
            self.alive.append(cell)


class _Finder:
    """What is at a path now. Returns None where there is nothing."""

    def __init__(self, guards: Any, model: nn.Module) -> None:
        self.guards, self.modules = guards, dict(model.named_modules())
        self.places: dict[int, Place | None] = {}

    def guarded(self, number: int) -> Place | None:
        if number not in self.places:
            self.places[number] = self.place(self.guards[number][0])
        return self.places[number]

    def place(self, form: Any) -> Place | None:
        path, key, name, line = form
        source = None if line is None else SourceLine(*line)
        if path[0] == "within":
            within = self.place(path[1])
            return None if within is None or parts_of(within.get()) is None else Place(None, key, name, source, within)
        holder = self.at(path)
        return None if holder is None else Place(holder, key, name, source)

    def at(self, path: Any) -> Any:
        """What is at a path; None where nothing is."""
        kind, *rest = path
        if kind == "module":
            return self.modules.get(rest[0])
        if kind == "globals":
            return None if (module := python_module(rest[0])) is None else vars(module)
        if kind == "class":
            return named_in(*rest) if python_module(rest[0]) is not None else None
        if kind == "guard":
            place = self.guarded(rest[0])
            return None if place is None or place.get() is ABSENT else place.get()
        if kind == "environment":
            return ENVIRONMENT
        if kind == "torch":
            return OF_TORCH
        if (inside := self.at(rest[0])) is None:
            return None
        if kind == "unwrapped":
            return inspect.unwrap(inside) if callable(inside) else None
        if kind == "default":
            return Default(inside, rest[1], rest[2]) if isinstance(inside, types.FunctionType) else None
        if kind == "sizes":
            return SizesOf(inside, rest[1])
        if kind == "own":
            return OwnAttributes(inside)
        if kind == "remembered":
            return Remembered(inside, rest[2], pytree.treespec_loads(rest[1]), rest[3], [])
        if kind == "vars":
            return getattr(inside, "__dict__", None)
        if kind == "part":
            found = parts_of(inside)
            return None if found is None else found[1].get(rest[1])
        if kind == "mro":
            return type(inside).__mro__[rest[1]] if rest[1] < len(type(inside).__mro__) else None
        if kind == "method":
            return _function_of(vars(inside).get(rest[1]))
        if kind == "cell" and isinstance(inside, types.FunctionType):
            function = inspect.unwrap(inside)
            return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)).get(rest[1])
        return None


def _function_of(value: Any) -> Any:
    return getattr(value, "fget", getattr(value, "__func__", value))


def python_module(name: str) -> types.ModuleType | None:
    """A loaded module, or one of a package that is loaded: forward may import it."""
    if name not in sys.modules and name.partition(".")[0] in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)


def lines(form: Any) -> Iterator[str]:
    """Files that guards name."""
    for (_, _, _, line), _ in form["guards"]:
        if line is not None:
            yield line[0]
