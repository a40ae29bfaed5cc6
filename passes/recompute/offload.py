"""Let kept values wait for backward in host memory (`Config.cpu_offloading`).

Before:  %y = gelu(%x); %z = mm(%y, %w)                       # backward reads %y
After:   %y = gelu(%x); %h = offload(%y); %b = reloaded(reload(%h)); %a = again(%y, %b); %z = mm(%a, %w)
Legal because: copies have the same bits, and `megafx.again` leaves %y to forward and %b to backward.

With `cpu_offloading_num_layers`, these are the kept values of that many first layers; without it and without a budget, of all
layers but the last, whose backward comes at once. With a budget, they are as many as it takes to meet it: those whose ops take
longest per byte, as long as each copy ends before forward waits for it (schedule_offload.py), by the hardware profile. What
else the budget asks for is recomputed, or offloaded after all if it cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

from megafx.analysis.kept import Kept, is_given, is_value
from megafx.analysis.prices import bytes_of, seconds
from megafx.errors import ConfigError, PlanError
from megafx.ir.nodes import in_backward, storage_of
from megafx.ir.program import LAYER, RECOMPUTE, VAL, Program, new_call
from megafx.ops.again import AGAIN
from megafx.ops.offload import OFFLOAD, RELOAD, RELOADED
from megafx.passes.recompute.budget import NAME, model_places, whole
from megafx.planner.context import CompileContext

# Fraction of the link's rate that copies get beside a step.
BESIDE = 0.8


class Offload:
    """What goes to the host. away: values; they count as no longer kept."""

    def __init__(self, program: Program, context: CompileContext, kept: Kept, layer: Mapping[fx.Node, int]) -> None:
        self.program, self.context, self.kept, self.layer = program, context, kept, layer
        self.away: dict[fx.Node, None] = {}
        places = model_places(program, layer)
        if not places:
            raise ConfigError(
                "cpu_offloading=True, but this model has no layers (sibling modules with the same parameters)",
                fix="activation_memory_budget without cpu_offloading, or torch.utils.checkpoint",
            )
        count, last = context.config.cpu_offloading_num_layers, max(places.values())
        self.layers = {n for n, place in places.items() if (place < last if count is None else place < count)}
        outputs = {
            storage_of(r) for r, o in zip(program.results(), program.outputs, strict=True) if isinstance(r, fx.Node)
        }
        self.shared = outputs

    def may(self, node: fx.Node) -> bool:
        """True if offloading the value frees memory: not what the user holds, nor what is read for lazy outputs."""
        if not is_value(node) or is_given(node) or in_backward(node) or not bytes_of(self.program, node):
            return False
        readers = self.kept.readers.get(node, ())
        return storage_of(node) not in self.shared and not any(r in self.kept.lazy for r in readers)

    def choose(self, total: int, promise: int | None) -> None:
        """Fill `away`. total: bytes that are kept; promise: the budget in bytes."""
        found = [
            n
            for n in self.program.graph.nodes
            if n in self.kept.saved and self.layer.get(n) in self.layers and self.may(n)
        ]
        if promise is None or self.context.config.cpu_offloading_num_layers is not None:
            self.away |= dict.fromkeys(found)
            return
        link = _Link(self.program, self.context, self.layer)
        for node in sorted(found, key=link.price, reverse=True):
            if total <= promise:
                break
            if link.carries(node):
                self.away[node] = None
                total -= bytes_of(self.program, node)

    def further(self) -> Iterator[fx.Node]:
        """Kept values that may go too, even if the copies take time: the largest first."""
        left = [n for n in self.kept.saved if n not in self.away and self.may(n)]
        yield from sorted(left, key=lambda n: -bytes_of(self.program, n))


class _Link:
    """Copies to the host, one after the other, while forward computes; backward takes longer, so copies back hide as well."""

    def __init__(self, program: Program, context: CompileContext, layer: Mapping[fx.Node, int]) -> None:
        hardware = context.hardware
        if hardware.host_bytes_per_second is None:
            raise PlanError(
                f"cpu_offloading with a budget is priced by the link to the host, which the profile '{hardware.name}' lacks",
                fix="cpu_offloading_num_layers=..., or host_bytes_per_second in a profile of your own (Config(hardware=path))",
            )
        self.program, self.layer = program, layer
        self.rate = BESIDE * hardware.host_bytes_per_second
        self.seconds: dict[fx.Node, float] = {}
        self.made: dict[fx.Node, float] = {}  # when the value is there
        begin: dict[int, float] = {}  # when a layer begins
        end = 0.0
        for node in program.graph.nodes:
            if not in_backward(node):
                begin.setdefault(layer.get(node, 0), end)
                self.seconds[node] = seconds(program, node, hardware, context.t)
                end += self.seconds[node]
                self.made[node] = end
        # when forward waits for copies of a layer's values
        self.until = {n: min((b for m, b in begin.items() if m >= n + 2), default=end) for n in begin}
        self.copies: list[fx.Node] = []

    def price(self, node: fx.Node) -> float:
        """Seconds of the op that makes the value, for each of its bytes: cheap values are rather recomputed."""
        return self.seconds[whole(node)] / bytes_of(self.program, node)

    def carries(self, node: fx.Node) -> bool:
        """True if no copy is waited for if this one is added; adds it then."""
        copies, free = sorted([*self.copies, node], key=self.made.__getitem__), 0.0
        for copy in copies:
            free = max(free, self.made[copy]) + bytes_of(self.program, copy) / self.rate
            if free > self.until[self.layer[copy]]:
                return False
        self.copies = copies
        return True


def emit_offload(program: Program, values: Iterable[fx.Node], layer: Mapping[fx.Node, int]) -> int:
    """Put the copies into the graph; return the bytes that go to the host. Nodes get the number of their layer."""
    moved = 0
    for node, number in layer.items():
        node.meta[LAYER] = number
    for value in values:
        moved += bytes_of(program, value)
        cuda = value.meta[VAL].device.type == "cuda"
        readers = list(value.users)
        with program.fake_mode:
            on_host = torch.empty_like(value.meta[VAL], device="cpu")
        where = value.next
        host = new_call(where, OFFLOAD, (value,), on_host, value, NAME)
        back = new_call(where, RELOAD, (host, cuda), value.meta[VAL], value, NAME)
        done = new_call(where, RELOADED, (back,), value.meta[VAL], value, NAME)
        both = new_call(where, AGAIN, (value, done), value.meta[VAL], value, NAME)
        for node in (host, back, done, both):
            node.meta[LAYER] = value.meta.get(LAYER, 0)
        host.meta.pop(RECOMPUTE, None)
        for node in (back, done, both):
            node.meta[RECOMPUTE] = True
        for reader in readers:
            reader.replace_input_with(value, both)
    return moved
