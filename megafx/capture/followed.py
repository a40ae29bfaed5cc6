"""One trace's view of Python state (`Trace`), and what the traces of one capture learn of it (`Followed`).

The first trace takes all state as it is. Where it shows that forward computes with numbers that it writes itself, that a list
only grows, or that a tensor outside of the parameters needs a gradient, the model is traced once more, with these followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megafx.capture.host_numbers import Computed, HostNumbers
from megafx.capture.reads import Reads
from megafx.capture.writes import GrowingList, WatchedDict, Writes
from megafx.ir.python_state import NUMBERS, Place, PythonState, leaf_places, parts_of, snapshot
from megafx.ops.eager_call import matching


@dataclass
class Followed:
    """inputs: state that enters the graph. counters: numbers that forward reads and writes. growing: lists that it extends.

    dicts: those whose items it changes. computed: numbers made of counters that meet tensors.
    """

    inputs: dict[str, Place] = field(default_factory=dict)
    counters: dict[str, Place] = field(default_factory=dict)
    growing: dict[str, Place] = field(default_factory=dict)
    dicts: dict[str, Place] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)

    def all_inputs(self) -> dict[str, Any]:
        """Name -> what is read for it at each call, in the order of the graph's inputs."""
        return {**self.inputs, **{each.name: each for each in self.computed}}

    def values(self) -> dict[str, Any]:
        return {name: each.get() for name, each in self.all_inputs().items()}

    def learn(self, trace: Trace) -> bool:
        """Take over what a trace has shown; True if the model has to be traced again."""
        counters = {
            n: p for n, p in trace.writes.counters.items() if n not in self.inputs and isinstance(p.get(), NUMBERS)
        }
        growing = {n: w.place for n, w in trace.writes.found.items() if w.grows}
        new = growing.keys() - self.growing, trace.writes.dicts.keys() - self.dicts, counters.keys() - self.counters
        if any(new):
            self.growing |= growing
            self.dicts |= trace.writes.dicts
            if not new[1]:  # whether a dict's numbers are read at all shows in the next trace
                self.counters |= counters
            return True
        if needed := {p.name: p for p in trace.need_gradients()}:
            self.inputs |= needed
            return True
        known = len(self.computed)
        self.computed = list(trace.numbers.inputs)
        return len(self.computed) != known


class Trace:
    """The Python state of one trace. tensors: those that forward leaves behind, by the name of the place."""

    def __init__(self, model: nn.Module, followed: Followed, eager: Sequence[str]) -> None:
        left = {m for module in matching(model, eager).values() for m in module.modules()}
        self.followed, self.reads = followed, Reads(model, frozenset(left))
        self.writes, self.numbers = Writes(self.reads), HostNumbers()
        self.reads.met, self.reads.taken, self.reads.assigned = self.writes.also, self.writes.watch, self.writes.compare
        self.tensors: dict[str, list[Tensor]] = {}
        self.watched: dict[str, WatchedDict] = {}

    @contextlib.contextmanager
    def running(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Around the model's forward in a trace. state: the tensors of the inputs."""
        followed = self.followed
        self.numbers.given = [state[each.name] for each in followed.computed]
        replaced: list[tuple[Place, Any]] = []

        def put(place: Place, value: Any) -> None:
            old = place.get()
            places = [place] + ([p for p in self._attributes() if p.get() is old] if parts_of(old) is not None else [])
            for each in places:
                replaced.append((each, old))
                each.set(value)

        try:
            for name, place in followed.counters.items():
                if name not in followed.inputs:
                    put(place, self.numbers.of(place, place.get()))
            for name, place in followed.inputs.items():
                put(place, state[name])
            for place in followed.growing.values():
                put(place, GrowingList(place.get(), place))
            for name, place in followed.dicts.items():
                self.watched[name] = WatchedDict(place.get())
                put(place, self.watched[name])
            with self.reads.recording(self.writes.start):
                yield
            for one in self.watched.values():
                one.on = False
            self.tensors = self.writes.finish()
        finally:
            self.writes.restore()
            for place, value in reversed(replaced):
                place.set(value)

    def _attributes(self) -> Iterator[Place]:
        """All attributes of modules. (Several may hold one list.)"""
        for module in self.reads.model.modules():
            for name in vars(module):
                yield Place(vars(module), name, name)

    def need_gradients(self) -> list[Place]:
        """Tensors that are no parameters, were read, and require a gradient."""
        if not torch.is_grad_enabled():
            return []
        found = [leaf for place, value in self.guards() for leaf in leaf_places(place, value)]
        return [p for p, value in found if isinstance(value, Tensor) and value.requires_grad]

    def guards(self) -> list[tuple[Place, Any]]:
        """Of a dict that forward changes only the items that it reads."""
        followed = self.followed
        varies = frozenset([*followed.inputs, *followed.counters, *followed.growing])
        watched = {name: w for name, w in self.watched.items() if not w.read_whole}
        found = self.reads.guards(varies | watched.keys())
        for name, one in watched.items():
            places = [followed.dicts[name].part(key) for key in one.read]
            found += [(p, snapshot(p.get(), p.name, varies)) for p in places if p.name not in varies]
        return found

    def state(self) -> PythonState:
        """Of the graph; to be asked after the trace, when all is as before."""
        return PythonState(self.guards(), self.followed.all_inputs(), self.writes.found, self.numbers.decisions)
