"""What a call of a graph keeps until its backward, which may compute the call once more (bound_graph.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from megafx.distributed.parameters import Slot
from megafx.errors import UsageError
from megafx.ir.call_spec import CallSpec
from megafx.ir.program import Input
from megafx.units import bytes_text

KEPT_BYTES = 64 << 20  # of what a call writes is kept, as it was before, until backward


class Written(Protocol):
    """A graph (BoundGraph). changed: positions of the inputs that a call writes into, written: of the arguments among them.

    read_slots, read_inputs: what it only reads, parameters and others; read_names: their names, in this order.
    """

    inputs: list[Input]
    changed: list[int]
    written: set[int]
    read_slots: list[Slot]
    read_inputs: list[int]
    read_names: list[str]
    spec: CallSpec


class Again:
    """What it takes to compute a call once more: copies of what the call writes, as it was before, and how all else that it
    reads was.

    values: (kind, name) of an input -> what it was: with its history in autograd, if it is an argument. counters: numbers that
    forward writes, as they were. complete: False if
    there are more than KEPT_BYTES of that, of which nothing is copied unless outputs beside the loss have no gradients yet.
    """

    def __init__(self, graph: Written, inputs: list[Any], given: Mapping[int, torch.Tensor], seed: bool) -> None:
        """given: position of an input -> the user's own tensor. seed: random numbers are to be drawn as before."""
        self.graph, self.values = graph, dict[tuple[str, str], Any]()
        changed = [graph.inputs[i] for i in graph.changed]
        olds = [given[i] if i in graph.written else inputs[i] for i in graph.changed]
        self.complete = seed or sum(x.numel() * x.element_size() for x in olds) <= KEPT_BYTES
        if self.complete:
            self.values = {(spec.kind, spec.name): x.clone() for spec, x in zip(changed, olds, strict=True)}
        if seed:
            seeds = [(i, spec) for i, spec in enumerate(graph.inputs) if spec.kind == "seed"]
            self.values |= {(spec.kind, spec.name): inputs[i] for i, spec in seeds}
        self.counters = [(place, place.get()) for place in graph.spec.state.counters]
        parameters = [slot.module._parameters[slot.key] for slot in graph.read_slots]
        read = [*parameters, *(inputs[i] for i in graph.read_inputs)]
        self.versions = [None if not isinstance(x, torch.Tensor) or x.is_inference() else (x, x._version) for x in read]

    @property
    def what_is_changed(self) -> str:
        """For messages: what is not copied."""
        return f"more than {bytes_text(KEPT_BYTES)}: '{self.graph.inputs[self.graph.changed[0]].name}' first"

    def check(self, what: str, fix: str) -> None:
        """Raise where the call can no longer be computed as it was. what: is computed by it."""
        for name, of in zip(self.graph.read_names, self.versions, strict=True):
            if of is not None and of[0]._version != of[1]:
                raise UsageError(
                    f"'{name}' was changed in place between forward and backward, which computes the "
                    f"call once more for {what}",
                    fix=f"call backward before the change{fix}",
                )
