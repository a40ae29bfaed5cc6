"""A budget in bytes: values are dropped one after the other, the cheapest per byte first, until what is kept fits.

The order does not depend on the budget, and the last value is the one that takes the least time of those that free enough. So a
larger budget never costs more time. The price of a value is the time to recompute it from what is kept or recomputed then.

At first nothing is recomputed across layer boundaries, except from inputs: the values that layers pass on stay, and a layer's
values are back only while its own backward runs. If that is not enough, values within groups of 2 layers are passed on anew,
then of 4, and so on:

Before:  %h = gelu(mm(%x, ..)); %y = mm(%h, ..)     # layer 1, which passes %y on; %x is kept, backward makes %h again
After:   %h' = gelu(mm(%x, ..)); %y' = mm(%h', ..); %y'' = again(%y, %y')    # copies for backward, which reads %y''

The copies are freed at once, where %h itself would wait for the backward of layer 1. So the layer runs twice more in place of
once, and at the peak there are the values that layers pass on, as before, and one layer's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from megafx.analysis.communication import is_start
from megafx.analysis.kept import Kept, is_free, is_given, is_replayable, is_value, total_bytes
from megafx.analysis.layers import Layers
from megafx.analysis.prices import bytes_of, seconds
from megafx.errors import PlanError
from megafx.ir.nodes import in_backward
from megafx.ir.program import RECOMPUTE, VAL, Program, fqn_of, inherit, new_call
from megafx.ir.sizes import is_size
from megafx.ops.again import AGAIN, when_repeated
from megafx.placements.data_axis import CONTEXT_AXIS
from megafx.planner.context import CompileContext

NAME = "choose_kept"


def promised_bytes(budget: Any, without: int) -> int | None:
    """`Config.activation_memory_budget` in bytes. without: bytes kept without recomputation."""
    if isinstance(budget, float):
        return int(budget * without)
    return budget if isinstance(budget, int) else None


def allowed(program: Program, context: CompileContext) -> Any:
    """-> function: True if a node may be recomputed. Ranks that own experts need different values: collectives run once."""
    axes = () if context.owners else (context.solved.axis, CONTEXT_AXIS)
    return lambda node: is_replayable(node, *axes)


def whole(node: fx.Node) -> fx.Node:
    """The op that makes a value: that of one result among several, or the collective that a wait is for."""
    source: Any = node.args[0] if node.op == "call_function" and node.args else None
    several = isinstance(source, fx.Node) and (isinstance(source.meta.get(VAL), (tuple, list)) or is_start(source))
    return source if several else node


@dataclass(order=True)
class Drop:
    """Values of one op, dropped together."""

    price: float  # seconds per byte freed
    chunk: int
    values: list[fx.Node]
    cone: list[fx.Node]  # the nodes recomputed for them
    instead: list[fx.Node]  # values that are kept as inputs of the cone
    copied: bool  # whether copies of the cone are recomputed
    gain: int  # bytes freed

    @property
    def seconds(self) -> float:
        return self.price * self.gain


class Offload(Protocol):
    """Values that wait on the host (offload.py): those chosen, and those that may go too."""

    away: dict[fx.Node, None]

    def further(self) -> Iterator[fx.Node]: ...


class Spender:
    """Drops what a `Kept` keeps. offload: what has gone to the host, and what may."""

    def __init__(self, program: Program, context: CompileContext, kept: Kept, offload: Offload | None = None) -> None:
        self.program, self.context, self.kept, self.offload = program, context, kept, offload
        self.away = {} if offload is None else offload.away
        self.allowed = allowed(program, context)
        self.total = total_bytes(program, (n for n in kept.saved if n not in self.away))
        self.layer = layers_of(program)
        self.count = max(self.layer.values(), default=0) + 1
        self.passed_on: set[fx.Node] = set()  # `megafx.again` nodes of values that layers pass on anew
        self.times: dict[fx.Node, float] = {}
        self.dropped: list[fx.Node] = []

    def spend(self, promise: int) -> list[fx.Node]:
        """The nodes that backward recomputes so that at most `promise` bytes are kept.

        Where none suffice, a budget in bytes raises PlanError; of a fraction, as much as there can be is met, with a note.
        """
        size = 1
        while self.total > promise:
            while self._spend(promise, size if size < self.count else 0):
                pass  # what was kept instead of something else may be dropped in its turn
            if size >= self.count:
                break
            size *= 2
        for node in self.offload.further() if self.offload is not None else ():
            if self.total <= promise:
                break
            self.away[node] = None
            self.total -= bytes_of(self.program, node)
        if self.total > promise:
            worst = max(self.kept.saved, key=lambda n: bytes_of(self.program, n))
            budget = self.context.config.activation_memory_budget
            found = (
                f"activation_memory_budget={budget!r} is {promise:,} bytes at the sizes that are priced, but backward needs "
                f"{self.total:,} that cannot be recomputed"
            )
            if isinstance(budget, int) or self.context.fits:
                fix = f"a budget of at least {self.total:,} bytes; the largest value that must stay is %{worst.name}"
                raise PlanError(found, fix=fix, module=fqn_of(worst))
            self.program.note(NAME, f"{found}: they are kept, the largest here", worst)
        return self.dropped

    def _spend(self, promise: int, size: int) -> bool:
        """True if anything was dropped. size: layers in a chunk, within which values may be recomputed; 0: all of them."""
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
            if self.total - step.gain <= promise:  # the last one
                steps = (s for chunk in makers for s in self._steps(makers[chunk], chunk, size))
                enough = [s for s in steps if self.total - s.gain <= promise]
                step = min(enough, key=lambda s: (s.seconds, s.gain, s.chunk))
            self._drop(step)
            following = self._next(makers[step.chunk], step.chunk, size)
            if following is not None:
                heapq.heappush(heap, following)
        return len(self.dropped) > before

    def _chunk(self, node: fx.Node, size: int) -> int:
        return self.layer.get(node, -1) // size if size else 0

    def _next(self, makers: dict[fx.Node, None], chunk: int, size: int) -> Drop | None:
        """The cheapest step inside of a chunk."""
        return min(self._steps(makers, chunk, size), key=lambda step: step.price, default=None)

    def _steps(self, makers: dict[fx.Node, None], chunk: int, size: int) -> Iterator[Drop]:
        for maker in list(makers):
            here = [n for n in (maker, *maker.users) if n in self.kept.saved and n not in self.away]
            values = [n for n in here if whole(n) is maker]
            step = self._step(values, chunk, size) if values else None
            if not values:
                del makers[maker]
            elif step is not None:
                yield step

    def _step(self, values: list[fx.Node], chunk: int, size: int) -> Drop | None:
        readers = [reader for v in values for reader in self._readers(v)]
        copied = size != 1 and self.count > 1 and not any(r.op == "output" for r in readers)
        cone, instead = self._cone(values, chunk, size, copied)
        if size and any(self._chunk(r, size) != chunk for r in readers) and not self._from_inputs(cone, instead):
            return None
        gain = total_bytes(self.program, values) - total_bytes(self.program, instead)
        if gain <= 0 or not cone:
            return None
        return Drop(sum(map(self._seconds, cone)) / gain, chunk, values, cone, instead, copied, gain)

    def _from_inputs(self, cone: list[fx.Node], instead: list[fx.Node]) -> bool:
        """True if nothing else is needed for the cone (an embedding): then readers may be in any layer."""
        operands = {a for n in cone for a in when_repeated(n)}
        return not instead and all(a in cone or is_given(a) or is_size(a) for a in operands)

    def _readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """What needs the value in the end; a reader that is recomputed is replaced by its own readers."""
        todo, seen = [value], {value}
        while todo:
            for reader in self.kept.readers.get(todo.pop(), ()):
                if reader not in self.kept.again:
                    yield reader
                elif reader not in seen:
                    seen.add(reader)
                    todo.append(reader)

    def _cone(self, values: list[fx.Node], chunk: int, size: int, copied: bool) -> tuple[list[fx.Node], list[fx.Node]]:
        """(nodes to recompute for these values, values to keep for that because they may not be recomputed). copied: also nodes
        of the chunk that are recomputed anyway."""
        cone: dict[fx.Node, None] = {}
        instead: dict[fx.Node, None] = {}
        todo = list(values)
        while todo:
            node = todo.pop()
            if node in cone or is_given(node) or is_size(node):
                continue
            if node in self.kept.saved and node not in values:
                continue
            again = node in self.kept.again
            if again and not (copied and self._chunk(node, size) == chunk and node not in self.passed_on):
                continue
            inside = not size or not is_value(node) or self._chunk(node, size) == chunk
            if (inside and self.allowed(whole(node))) or is_free(node, self.kept.parameters):
                cone[node] = None
                todo += when_repeated(node)
            elif is_value(node) and not again:
                instead[node] = None
        return list(cone), list(instead)

    def _drop(self, step: Drop) -> None:
        kept = self.kept
        for value in step.values:
            kept.saved.pop(value, None)
        kept.saved |= dict.fromkeys(step.instead)
        made = self._copy(step) if step.copied else step.cone
        for node in made:
            kept.again[node] = None
            for operand in when_repeated(node):
                kept.readers.setdefault(operand, {})[node] = None
        self.dropped += made
        self.total -= total_bytes(self.program, step.values) - total_bytes(self.program, step.instead)

    def _copy(self, step: Drop) -> list[fx.Node]:
        """Copies of the cone, and `megafx.again` of each value and its copy, which all read instead of the value."""
        graph, cone, made = self.program.graph, {*step.cone}, []
        copies: dict[fx.Node, fx.Node] = {}
        last = whole(step.values[0])
        for node in [n for n in graph.nodes if n in cone]:
            if node.target is AGAIN:
                (other,) = when_repeated(node)
                copies[node] = copies.get(other, other)
                continue
            with graph.inserting_after(last):
                last = graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node] = inherit(last, node, NAME)
            made.append(last)
            self.layer[last] = self.layer.get(node, -1)
        for value in step.values:
            where = last if value is whole(value) else value
            both = new_call(where.next, AGAIN, (value, copies[value]), value.meta[VAL], value, NAME)
            for reader in [n for n in value.users if n is not both and n.op != "output"]:
                reader.replace_input_with(value, both)
            self.layer[both] = self.layer.get(value, -1)
            self.kept.readers[both] = self.kept.readers.pop(value, {})
            self.passed_on.add(both)
            made.append(both)
        for node in made:
            node.meta[RECOMPUTE] = True
        return made

    def _seconds(self, node: fx.Node) -> float:
        if node not in self.times:
            self.times[node] = seconds(self.program, node, self.context.hardware, self.context.t)
        return self.times[node]


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
