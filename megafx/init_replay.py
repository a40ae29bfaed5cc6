"""The log of what a constructor computes (`init_log` writes it), run with memory for little more than one tensor.

A tensor's memory is taken when a step writes it and dropped after the last step that reads that value: weights that are drawn
twice (by a layer's constructor, then by the model's own initialisation) have none in between. Steps whose results are never
used are left out, except for those that draw: the generator has to pass through them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
Storage = int  # a number for each memory that a recorded tensor lies in


@dataclass(frozen=True)
class Ref:
    """A recorded tensor: a view of a numbered memory."""

    storage: Storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def row_major(self) -> bool:
        return self.offset == 0 and torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()


@dataclass(frozen=True, eq=False)
class Step:
    """One operation, the `number`th. Tensors in args and kwargs are Refs, or real where they were there before.

    reads, writes: memories; overwrites: those written in whole without a look at what was there. generator: what it draws from;
    seeded: the state that this generator was set to since the draw before.
    """

    number: int
    func: Any
    args: Any
    kwargs: Any
    outputs: tuple[Ref | None, ...]
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    overwrites: frozenset[Storage]
    generator: torch.Generator | None = None
    seeded: torch.Tensor | None = None

    @property
    def leaves_as_is(self) -> bool:
        """Whether what it writes stays uninitialised memory."""
        return self.func.overloadpacket in (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)


@dataclass
class Log:
    """steps in order. memories: bytes and device of each. final: states to which generators were set after their last draw."""

    steps: list[Step] = field(default_factory=list)
    memories: dict[Storage, tuple[int, torch.device]] = field(default_factory=dict)
    final: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """order: the steps that run. delivers: memories that have their final value after a step; frees: that are done with."""

    order: list[Step]
    delivers: dict[int, set[Storage]]
    frees: dict[int, set[Storage]]


def schedule(steps: Sequence[Step], wanted: Collection[Storage], keep: Callable[[Step], bool]) -> Schedule:
    """What has to run for the final values of `wanted`. keep: whether a draw runs although nothing needs its result."""
    live: set[Storage] = set()
    pending = set(wanted)
    order, delivers, frees = [], {}, {}
    for step in reversed(steps):
        final = step.writes & pending
        if not (step.writes & (live | final)) and not (step.generator is not None and keep(step)):
            continue
        order.append(step)
        delivers[step.number] = set(final)
        frees[step.number] = set((step.reads | step.writes) - live)
        pending -= final
        live = (live | final) - step.overwrites | step.reads
    return Schedule(order[::-1], delivers, frees)


Deliver = Callable[[Storage, torch.UntypedStorage], None]
Run = Callable[[Step, Any, Any], Any]


def draw_in_order(step: Step, args: Any, kwargs: Any) -> Any:
    """One step, its draws from the generators as they are."""
    if step.generator is not None and step.seeded is not None:
        step.generator.set_state(step.seeded)
    return step.func(*args, **kwargs)


def replay(log: Log, wanted: Collection[Storage], deliver: Deliver) -> int:
    """Run the log, all its draws, and call deliver(number, memory) for each wanted memory when it has its final value.

    Generators end in the states in which the constructor leaves them. Returns the most bytes that were held at once.
    """
    most = execute(log, schedule(log.steps, wanted, keep=lambda step: True), deliver, draw_in_order)
    for generator, state in log.final:
        generator.set_state(state)
    return most


@torch.no_grad()
def execute(log: Log, plan: Schedule, deliver: Deliver, run: Run) -> int:
    """Run a schedule; the most bytes that were held at once."""
    held: dict[Storage, torch.UntypedStorage] = {}
    most = 0

    def real(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        if x.storage not in held:
            nbytes, device = log.memories[x.storage]
            held[x.storage] = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        return view(held[x.storage], x)

    for step in plan.order:
        args, kwargs = tree_map(real, (step.args, step.kwargs), is_leaf=lambda x: isinstance(x, Ref))
        out = run(step, args, kwargs)
        for ref, value in zip(step.outputs, tree_leaves(out), strict=True):
            if ref is not None and ref.storage not in held:
                held[ref.storage] = _as_recorded(value, ref, log.memories[ref.storage][0])
        del args, kwargs, out
        most = max(most, sum(memory.nbytes() for memory in held.values()))
        for number in plan.delivers[step.number]:
            deliver(number, held[number])
        for number in plan.frees[step.number]:
            held.pop(number, None)
    return most


def _as_recorded(value: torch.Tensor, ref: Ref, nbytes: int) -> torch.UntypedStorage:
    """The memory of a result, laid out as the fake result was."""
    if tuple(value.stride()) == ref.stride and value.storage_offset() == ref.offset:
        return value.untyped_storage()
    memory = torch.empty(nbytes, dtype=torch.uint8, device=value.device).untyped_storage()
    view(memory, ref).copy_(value)
    return memory


def view(memory: torch.UntypedStorage, ref: Ref) -> torch.Tensor:
    """The recorded tensor in real memory."""
    return torch.empty(0, dtype=ref.dtype, device=memory.device).set_(memory, ref.offset, ref.size, ref.stride)
