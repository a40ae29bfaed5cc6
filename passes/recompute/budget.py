"""A budget in bytes: values are dropped one after the other, the cheapest per byte first, until what is kept fits.

The order does not depend on the budget, so a larger budget never costs more time: dropping only stops earlier. The price of a
value is the time to recompute it from what is kept or recomputed at that point.

At first nothing is recomputed across layer boundaries: the values that layers pass on stay, and a layer's values are back only
while its own backward runs. If that is not enough, boundaries within groups of 2 layers are lifted, then of 4, and so on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from megafx.analysis.communication import is_start
from megafx.analysis.kept import Kept, bytes_of, is_free, is_given, is_replayable, is_value, seconds, total_bytes
from megafx.analysis.layers import Layers
from megafx.errors import PlanError
from megafx.ir.nodes import in_backward
from megafx.ir.program import VAL, Program, fqn_of
from megafx.ops.again import when_repeated
from megafx.planner.context import Planner


def promised_bytes(budget: Any, without: int) -> int | None:
    """`Config.activation_memory_budget` in bytes. without: bytes kept without recomputation."""
    if isinstance(budget, float):
        return int(budget * without)
    return budget if isinstance(budget, int) else None


def allowed(program: Program, planner: Planner) -> Any:
    """Tells whether a node may be recomputed. Ranks that own experts need different values: collectives are not repeated."""
    axis = planner.solved.axis if not planner.owners else ""
    return lambda node: is_replayable(node, axis)


def whole(node: fx.Node) -> fx.Node:
    """The op that makes a value: that of one result among several, or the collective that a wait is for."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    several = isinstance(source, fx.Node) and (isinstance(source.meta.get(VAL), (tuple, list)) or is_start(source))
    return source if several else node  # type: ignore[return-value]


@dataclass(order=True)
class Step:
    """Values of one op, dropped together. price: seconds per byte freed.

    cone: the nodes recomputed for them; instead: values that are kept as inputs of the cone.
    """

    price: float
    chunk: int
    values: list[fx.Node]
    cone: list[fx.Node]
    instead: list[fx.Node]


class Offload(Protocol):
    """Values that wait on the host (offload.py): those chosen, and those that may go too."""

    away: dict[fx.Node, None]

    def further(self) -> Iterator[fx.Node]: ...


class Spender:
    """Drops what a `Kept` keeps. offload: what has gone to the host, and what may."""

    def __init__(self, program: Program, planner: Planner, kept: Kept, offload: Offload | None = None) -> None:
        self.program, self.planner, self.kept, self.offload = program, planner, kept, offload
        self.away = {} if offload is None else offload.away
        self.allowed = allowed(program, planner)
        self.total = total_bytes(program, (n for n in kept.saved if n not in self.away))
        self.layer = layers_of(program)
        self.times: dict[fx.Node, float] = {}
        self.dropped: list[fx.Node] = []

    def spend(self, promise: int) -> list[fx.Node]:
        """The nodes that backward makes again so that at most `promise` bytes are kept. Raises PlanError if none suffice."""
        count = max(self.layer.values(), default=0) + 1
        size = 1
        while self.total > promise:
            while self._spend(promise, size if size < count else 0):
                pass  # what was kept instead of something else may be dropped in its turn
            if size >= count:
                break
            size *= 2
        for node in self.offload.further() if self.offload is not None else ():
            if self.total <= promise:
                break
            self.away[node] = None
            self.total -= bytes_of(self.program, node)
        if self.total > promise:
            worst = max(self.kept.saved, key=lambda n: bytes_of(self.program, n))
            raise PlanError(
                f"activation_memory_budget={self.planner.config.activation_memory_budget!r} is {promise:,} bytes at the sizes "
                f"that are priced, but backward needs {self.total:,} that cannot be made again",
                fix=f"a budget of at least {self.total:,} bytes; the largest value that must stay is %{worst.name}",
                module=fqn_of(worst),
            )
        return self.dropped

    def _spend(self, promise: int, size: int) -> bool:
        """Whether anything was dropped. size: layers in a chunk, within which values may be recomputed; 0: all of them."""
        before = len(self.dropped)
        chunks: dict[int, list[fx.Node]] = {}
        for node in self.kept.saved:
            if is_value(node) and node not in self.away:
                chunks.setdefault(self._chunk(node, size), []).append(whole(node))
        makers = {chunk: dict.fromkeys(nodes) for chunk, nodes in chunks.items()}
        heap = [step for chunk in makers if (step := self._next(makers[chunk], chunk, size)) is not None]
        heapq.heapify(heap)
        while heap and self.total > promise:
            step = heapq.heappop(heap)
            self._drop(step)
            following = self._next(makers[step.chunk], step.chunk, size)
            if following is not None:
                heapq.heappush(heap, following)
        return len(self.dropped) > before

    def _chunk(self, node: fx.Node, size: int) -> int:
        return self.layer.get(node, -1) // size if size else 0

    def _next(self, makers: dict[fx.Node, None], chunk: int, size: int) -> Step | None:
        """The cheapest step inside of a chunk."""
        found: Step | None = None
        for maker in list(makers):
            here = [n for n in (maker, *maker.users) if n in self.kept.saved and n not in self.away]
            values = [n for n in here if whole(n) is maker]
            step = self._step(values, chunk, size) if values else None
            if not values:
                del makers[maker]
            elif step is not None and (found is None or step.price < found.price):
                found = step
        return found

    def _step(self, values: list[fx.Node], chunk: int, size: int) -> Step | None:
        if size and not all(self._chunk(reader, size) == chunk for v in values for reader in self._readers(v)):
            return None
        cone, instead = self._cone(values, chunk, size)
        gain = total_bytes(self.program, values) - total_bytes(self.program, instead)
        if gain <= 0 or not cone:
            return None
        return Step(sum(map(self._seconds, cone)) / gain, chunk, values, cone, instead)

    def _readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """What needs the value; a reader that is free to recompute is replaced by its own readers."""
        for reader in self.kept.readers.get(value, ()):
            if reader in self.kept.again and is_free(reader, self.kept.parameters):
                yield from self._readers(reader)
            else:
                yield reader

    def _cone(self, values: list[fx.Node], chunk: int, size: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """(nodes to recompute for these values, values to keep for that because they may not be recomputed)"""
        cone: dict[fx.Node, None] = {}
        instead: dict[fx.Node, None] = {}
        todo = list(values)
        while todo:
            node = todo.pop()
            if node in cone or is_given(node) or node in self.kept.again or _is_size(node):
                continue
            if node in self.kept.saved and node not in values:
                continue
            inside = not size or not is_value(node) or self._chunk(node, size) == chunk
            if (inside and self.allowed(whole(node))) or is_free(node, self.kept.parameters):
                cone[node] = None
                todo += when_repeated(node)
            elif is_value(node):
                instead[node] = None
        return list(cone), list(instead)

    def _drop(self, step: Step) -> None:
        kept = self.kept
        for value in step.values:
            kept.saved.pop(value, None)
        kept.saved |= dict.fromkeys(step.instead)
        for node in step.cone:
            kept.again[node] = None
            for operand in when_repeated(node):
                kept.readers.setdefault(operand, {})[node] = None
        self.dropped += step.cone
        self.total -= total_bytes(self.program, step.values) - total_bytes(self.program, step.instead)

    def _seconds(self, node: fx.Node) -> float:
        if node not in self.times:
            self.times[node] = seconds(self.program, node, self.planner.hardware, self.planner.t)
        return self.times[node]


def _is_size(node: fx.Node) -> bool:
    return not isinstance(node.meta.get(VAL), (torch.Tensor, tuple, list))


def layers_of(program: Program) -> dict[fx.Node, int]:
    """Node -> the number of its layer, in order of use; what is before, between and after layers is numbered too.

    A backward node is in the layer of its module, else in that of the forward values it reads. In a model without layers, all
    nodes have number 0.
    """
    layers = model_layers(program)
    found: dict[fx.Node, int] = {}
    if not layers.paths:
        return dict.fromkeys(program.graph.nodes, 0)
    number: dict[str, int] = {}
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    forward = [n for n in nodes if not in_backward(n)]
    for node, region in zip(forward, layers.regions(map(fqn_of, forward)), strict=True):
        found[node] = number.setdefault(region, len(number))
    of_module = {fqn_of(n): found[n] for n in forward if fqn_of(n)}
    for node in nodes:
        if node not in found:
            operands = [found[a] for a in node.all_input_nodes if a in found]
            of_layer = number.get(layers.layer_of(fqn_of(node)), of_module.get(fqn_of(node)))
            found[node] = max(operands, default=0) if of_layer is None else of_layer
    return found


def model_places(program: Program, layer: Mapping[fx.Node, int]) -> dict[int, int]:
    """Number of a layer among all parts of a model (`layers_of`) -> its place among the layers."""
    layers = model_layers(program)
    numbers = sorted({number for node, number in layer.items() if layers.layer_of(fqn_of(node))})
    return {number: place for place, number in enumerate(numbers)}


def model_layers(program: Program) -> Layers:
    """The layers of the model, by the local shapes of its parameters."""
    return Layers.of(
        {i.name: tuple(map(str, n.meta[VAL].shape)) for n, i in program.input_nodes() if i.kind == "param"}
    )
