"""What a call of a graph keeps until its backward, which may compute the call once more (bound_graph.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megafx.capture.libraries.huggingface import caches_left_out
from megafx.distributed.parameters import Slot
from megafx.errors import UsageRuntimeError
from megafx.ir.call_spec import CallSpec, in_autocast, user_name
from megafx.ir.program import Input, Program
from megafx.meanwhile import in_modes
from megafx.runtime.keys import Call
from megafx.units import bytes_text

KEPT_BYTES = 64 << 20  # of what a call writes is kept, as it was before, until backward


class Written(Protocol):
    """A graph (BoundGraph)."""

    inputs: list[Input]
    places: list[list[Slot]]  # of each parameter that it reads
    changed: list[int]  # positions of the inputs that a call writes into
    written: set[int]  # of the arguments among them
    read: list[int]  # those that it only reads
    spec: CallSpec


class Again:
    """What it takes to compute a call once more: copies of what the call writes, as it was before, and how all else that it
    reads was.

    values: (kind, name) of an input -> what it was: with its history in autograd, if it is an argument. counters: numbers that
    forward writes, as they were. complete: False if there are more than KEPT_BYTES of that, of which nothing is copied unless
    outputs beside the loss have no gradients yet.
    """

    def __init__(
        self, graph: Written, inputs: list[Any], given: Mapping[int, torch.Tensor], parameters: list[Any], seed: bool
    ) -> None:
        """given: position of an input -> the user's own tensor. parameters: at the graph's `places`. seed: random numbers are
        to be drawn as before."""
        self.graph, self.held, self.values = graph, parameters, dict[tuple[str, str], Any]()
        changed = [graph.inputs[i] for i in graph.changed]
        olds = [given[i] if i in graph.written else inputs[i] for i in graph.changed]
        self.complete = seed or sum(x.numel() * x.element_size() for x in olds) <= KEPT_BYTES
        if self.complete:
            self.values = {(spec.kind, spec.name): x.clone() for spec, x in zip(changed, olds, strict=True)}
        if seed:
            seeds = [(i, spec) for i, spec in enumerate(graph.inputs) if spec.kind == "seed"]
            self.values |= {(spec.kind, spec.name): inputs[i] for i, spec in seeds}
        self.counters = [(place, place.get()) for place in graph.spec.state.counters]
        self.read: list[torch.Tensor] = [inputs[i] for i in graph.read]  # with the version counters of what they are of
        self.versions = _versions(self.read)

    @property
    def what_is_changed(self) -> str:
        """For messages: what is not copied."""
        names = [f"'{self.graph.inputs[i].name}'" for i in self.graph.changed]
        return f"more than {bytes_text(KEPT_BYTES)}: {', '.join(names[:3])}"

    @contextlib.contextmanager
    def parameters(self) -> Iterator[None]:
        """Within, parameters replaced since the call (by torch.func.functional_call, `m.weight = ...`) are the call's."""
        pairs = [(slot, p) for slots, p in zip(self.graph.places, self.held, strict=True) for slot in slots]
        replaced = [(slot, now, p) for slot, p in pairs if (now := slot.module._parameters.get(slot.key)) is not p]
        for slot, _, p in replaced:
            slot.put(p)
        try:
            yield
        finally:
            for slot, now, _ in replaced:
                slot.put(now)

    def check(self, what: str, fix: str) -> None:
        """Raise where the call can no longer be computed as it was. what: is computed by it."""
        for i, now, was in zip(self.graph.read, _versions(self.read), self.versions, strict=True):
            if now != was:
                raise UsageRuntimeError(
                    f"'{self.graph.inputs[i].name}' was changed in place between forward and backward, which computes the "
                    f"call once more for {what}",
                    fix=f"call backward before the change{fix}",
                )


def _versions(tensors: list[torch.Tensor]) -> list[int | None]:
    """Of each its version; those made in inference mode have none."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return [None if x.is_inference() else x._version for x in tensors]


class EntersGrad(Exception):
    """A call under torch.no_grad() has outputs that require a gradient, since forward enters torch.enable_grad()."""


def enters_grad(program: Program) -> frozenset[str]:
    """Names of the outputs that forward computes and that require a gradient."""
    pairs = zip(program.outputs, program.results(), strict=True)
    found = (o.name for o, node in pairs if o.kind == "user" and o.requires_grad and node.op != "placeholder")
    return frozenset(found)


def in_eager_mode(
    runtime: Any, call: Call, why: str, autocast: Sequence[dict[str, Any]], training: Mapping[nn.Module, bool]
) -> Any:
    """What the user's own code makes of a call of a `Runtime`, with autograd. training: the mode of each module."""
    text = f"{why}: such calls are computed once more, in eager mode"
    if runtime.mesh is not None:
        size = sum(p.numel() * p.element_size() for p in {id(p): p for p in runtime.parameters.all()}.values())
        text += f": all of each on every rank, with whole parameters ({bytes_text(size)}) gathered for it"
    runtime.note("gradients", text)
    given = zip(call.names(), call.leaves, strict=True)
    asked = any(user_name(name) == "use_cache" and x is not None for name, x in given)
    left_out = caches_left_out(runtime.model, runtime.configs, asked)
    with in_modes(training), runtime.turns.capture(), in_autocast(autocast), left_out:
        return runtime.as_written(call)
