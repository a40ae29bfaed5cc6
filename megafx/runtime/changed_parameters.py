"""Parameters that users replace, add, remove, tie or untie between calls.

Graphs know which names share a parameter, the shape of each, and how ranks have cut it. A change of these is another key. On
several ranks a new parameter is cut as the one whose place it takes, if it has the same shape, and else stored whole; graphs to
come take all parameters as they are stored then, also those that have changed places.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafx.distributed import agreement
from megafx.distributed.parameters import Slot, parameter_slots, planned_as, replicate_parameters, shard_parameters
from megafx.distributed.tensor import TPTensor
from megafx.errors import UsageError
from megafx.placements.types import I, Placement


class ParametersNow:
    """Parameters as they were at the last look. current: in the order of the slots. layout: the number of what graphs know of
    them. recuts: how often a place of the plan was taken by a parameter that is cut in another way."""

    def __init__(self) -> None:
        self.current: list[nn.Parameter | None] = []
        self.layout = self.recuts = 0
        self._layouts: dict[Hashable, int] = {}

    def look(self, slots: Mapping[str, Slot]) -> None:
        self.current = [slot.get() for slot in slots.values()]
        first: dict[int, int] = {}
        of_each = [None if p is None else (first.setdefault(id(p), len(first)), p.shape) for p in self.current]
        layout = self.recuts, tuple(zip(slots, of_each, strict=True))
        self.layout = self._layouts.setdefault(layout, len(self._layouts))

    def same(self, slots: Mapping[str, Slot]) -> bool:
        """True if the slots hold what they held at the last look."""
        try:
            return all(map(is_, [s.module._parameters[s.key] for s in slots.values()], self.current))
        except KeyError:
            return False

    def all(self) -> list[nn.Parameter]:
        return [p for p in self.current if p is not None]


def take_new_parameters(runtime: Any) -> None:
    """Look up the parameters of a `Runtime` again. Collective where ranks have new ones."""
    held = zip(runtime.state.slots, runtime.parameters.current, strict=True)
    before = {name: p.shape for name, p in held if p is not None}
    found = {name: p for name, slot in parameter_slots(runtime.model) if (p := slot.get()) is not None}
    if runtime.mesh is not None:
        new = [name for name, p in found.items() if not isinstance(p, TPTensor) or _moved_expert(runtime, name, p)]
        if new:
            _replicate(runtime, new, runtime.mesh)
        if runtime.params is not None:
            kept = {n for n in new if before.get(n) == found[n].shape}
            _cut(runtime, {n: p for n, p in runtime.params.items() if n in kept}, new)
    runtime.parameters_changed()


def _moved_expert(runtime: Any, name: str, param: TPTensor) -> bool:
    """True if data-parallel ranks hold a parameter as that of another expert than the one whose place it has taken."""
    plan = None if runtime.params is None else runtime.settled.plan
    return plan is not None and planned_as(param)[1] != plan.experts.get(name)


def _replicate(runtime: Any, new: list[str], mesh: DeviceMesh) -> None:
    experts = {} if runtime.settled.plan is None else runtime.settled.plan.experts
    moved = [name for name, p in runtime.model.named_parameters() if name in new and isinstance(p, TPTensor)]
    if runtime.params is not None and runtime.meshes.data is not None and (moved or not experts.keys().isdisjoint(new)):
        raise UsageError(
            f"{len(new)} parameters were added after megafx.parallelize, or have taken the places of others that ranks hold "
            f"otherwise, the first of them '{new[0]}'",
            module=new[0].rpartition(".")[0],
            fix="where data-parallel ranks share out experts, change the experts of the model first, then parallelize it",
        )
    agreement.check_same("the parameters that were added", str(new), runtime.everyone)
    replicate_parameters(runtime.model, mesh, added=True)
    for name in agreement.agree_on_weights(runtime.model, runtime.everyone, new):
        runtime.note("agreement", f"'{name}' differed between ranks: rank 0's value is used")


def _cut(runtime: Any, placements: Mapping[str, Placement], new: list[str]) -> None:
    """Cut new parameters, and let the plan have all as they are stored."""
    assert runtime.params is not None and runtime.settled.plan is not None
    with torch.inference_mode(False):
        shard_parameters(runtime.model, placements, runtime.meshes, added=new)
    stored: list[tuple[str, Any]] = [(name, slot.get()) for name, slot in parameter_slots(runtime.model)]
    params = {name: planned_as(p)[0] for name, p in stored if isinstance(p, TPTensor)}
    runtime.parameters.recuts += any(p != runtime.params.get(n, I) for n, p in params.items())
    runtime.params, runtime.settled.plan = params, replace(runtime.settled.plan, params=dict(params))
