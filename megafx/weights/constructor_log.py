"""Record what a model's constructor computes, and replay it to fill shards.

Recording: the constructor runs on fake tensors, without memory and without drawing. Every operation on tensors becomes a
`LogEntry`, whatever code calls it. Where the constructor reads the value of a tensor (torch's `trunc_normal_` does, to redraw
what is out of range), the steps that the value depends on run right then, and draw what the replay will draw.

Replay: the steps run with memory for little more than one tensor, allocated when a step writes it and freed after the last
step that reads it. Steps whose results are never used are skipped, except draws, which have to advance the generator.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from megafx.errors import UsageError
from megafx.ir.source_lines import current_user_line
from megafx.meanwhile import meanwhile

aten = torch.ops.aten
Storage = int  # numbers the storages of recorded tensors


@dataclass(frozen=True)
class Ref:
    """A recorded tensor: a view of a numbered storage."""

    storage: Storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def row_major(self) -> bool:
        return self.offset == 0 and torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()


@dataclass(frozen=True, eq=False)
class LogEntry:
    """Operation `number` of the log. Tensors in args and kwargs are Refs; those made before the constructor ran are real."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    outputs: tuple[Ref | None, ...]
    reads: frozenset[Storage]  # reads, writes: storages
    writes: frozenset[Storage]
    overwrites: frozenset[Storage]  # those written completely, without being read
    generator: torch.Generator | None = None  # what it draws from
    seeded: torch.Tensor | None = None  # the state that this generator was set to since its previous draw


@dataclass
class Log:
    """memories: bytes and device of each storage. final: states to which generators were set after their last draw.

    refs: name -> parameter or buffer of the model, aliases included; real tensors are stored as they are.
    """

    steps: list[LogEntry] = field(default_factory=list)
    memories: dict[Storage, tuple[int, torch.device]] = field(default_factory=dict)
    final: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    refs: dict[str, Ref | torch.Tensor] = field(default_factory=dict)


Deliver = Callable[[Storage, torch.UntypedStorage], None]
Run = Callable[[LogEntry, Any, Any], Any]


def record(factory: Callable[[], Any], run: Run | None = None) -> Log:
    """Run `factory` on fake tensors; torch's generators are left as they were.

    run: how to run steps whose values the constructor reads; default: drawing from the generators. Raises UsageError where
    shapes depend on values, tensors are changed that the constructor did not make, or no model is returned.
    """
    recorder = _Recorder(run)
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), recorder, _swapping_fakes():
            model = factory()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"the constructor makes something of the values of a tensor ({error.func}); it is recorded without values",
            fix="compute it with Python numbers, or build the model with memory and parallelize that",
        ) from error
    finally:
        recorder.finish()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the factory made a {type(model).__name__}", fix="let it return the model")
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    recorder.log.refs = {name: recorder.ref(x) or x.detach() for name, x in named}
    return recorder.log


@contextlib.contextmanager
def _swapping_fakes() -> Iterator[None]:
    """For `module.double()` and the like: torch refuses to swap fake parameters, since a fake mode has weak references to them.
    Here the old parameter takes over the new one's memory instead."""
    swap = torch.utils.swap_tensors
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy of a layer does

    def take_over(old: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(old, FakeTensor) and isinstance(new, FakeTensor):
            old.data = new.data
            old.fake_device = new.fake_device
        else:
            swap(old, new)

    with meanwhile(torch.utils, swap_tensors=take_over):
        yield


_DRAWS = ("normal", "uniform", "random", "exponential", "log_normal", "cauchy", "geometric", "bernoulli")
_OVERWRITING = frozenset(f"aten::{name}_" for name in (*_DRAWS, "fill", "zero", "copy"))


class _Recorder(TorchDispatchMode):
    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.log = Log()
        self.numbers: dict[int, Storage] = {}
        self.alive: list[torch.UntypedStorage] = []  # so that no address is reused
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        generators = [torch.default_generator, *(torch.cuda.default_generators if on_cuda else ())]
        self.start = [(g, g.get_state()) for g in generators]
        self.seen = {id(g): state for g, state in self.start}  # state of each generator at its last draw
        self.users: dict[int, torch.Generator] = {}
        self.values = _Values(self.log, run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and (ref := self.ref(args[0])) is not None:
            with _disable_current_modes():
                return self.values.of(ref)
        given = tree_map(lambda x: (isinstance(x, torch.Tensor) and self.ref(x)) or x, (tuple(args), dict(kwargs)))
        written, whole = self._written(func, args, kwargs)
        known = len(self.log.memories)
        out = func(*args, **kwargs)
        outputs = tuple(self.ref(x) if isinstance(x, torch.Tensor) else None for x in tree_leaves(out))
        made = {r.storage for r in outputs if r is not None and r.storage >= known}
        # of all operands but the first
        others = {r.storage for r in tree_leaves((given[0][1:], given[1])) if isinstance(r, Ref)}
        reads = {r.storage for r in tree_leaves(given) if isinstance(r, Ref)} - made - (whole - others)
        generator = self._generator(func, kwargs, outputs)
        seeded = None if generator is None else self._seeded(generator)
        memories = frozenset(reads), frozenset(written | made), frozenset(whole | made)
        step = LogEntry(len(self.log.steps), func, given[0], given[1], outputs, *memories, generator, seeded)
        if step.writes or generator is not None:
            self.log.steps.append(step)
        return out

    def finish(self) -> None:
        """Leave torch's generators as they were, and note what the constructor set them to at its end."""
        generators = {id(g): g for g, _ in self.start} | self.users
        for key, generator in generators.items():
            state = generator.get_state()
            if not torch.equal(state, self.seen[key]):
                self.log.final.append((generator, state))
        for generator, state in self.start:
            generator.set_state(state)

    def ref(self, x: torch.Tensor) -> Ref | None:
        """The Ref of a fake tensor; None for a real one."""
        if not isinstance(x, FakeTensor):
            return None
        storage, memories = x.untyped_storage(), self.log.memories
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(memories)
            memories[len(memories)] = (storage.nbytes(), x.fake_device)
            self.alive.append(storage)
        return Ref(self.numbers[storage._cdata], x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def _generator(self, func: Any, kwargs: Any, outputs: tuple[Ref | None, ...]) -> torch.Generator | None:
        """The generator that an operation draws from; None where it draws nothing."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        if kwargs.get("generator") is not None:
            return kwargs["generator"]
        device = next((self.log.memories[r.storage][1] for r in outputs if r is not None), torch.device("cpu"))
        if device.type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        return torch.default_generator

    def _seeded(self, generator: torch.Generator) -> torch.Tensor | None:
        """The generator's state if it was set since its previous draw, else None. (Fake draws do not change it.)"""
        with _disable_current_modes():
            last, state = self.seen.get(id(generator)), generator.get_state()
            same = last is not None and torch.equal(last, state)
        self.seen[id(generator)], self.users[id(generator)] = state, generator
        return None if same else state

    def _written(self, func: Any, args: Any, kwargs: Any) -> tuple[set[Storage], set[Storage]]:
        """(storages written in place, those of them that are overwritten completely)"""
        written: set[Storage] = set()
        whole: set[Storage] = set()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            for x in tree_leaves(value):
                if not isinstance(x, torch.Tensor):
                    continue
                if (ref := self.ref(x)) is None:
                    found = f"{func} writes a tensor that was there before the constructor ran"
                    raise UsageError(found, source=current_user_line(), fix="let the constructor make what it changes")
                written.add(ref.storage)
                dense = torch.empty_strided(ref.size, ref.stride, device="meta")
                size = dense.numel() * ref.dtype.itemsize
                if func._schema.name in _OVERWRITING and ref.offset == 0 and size == self.log.memories[ref.storage][0]:
                    whole |= {ref.storage} if aten.is_non_overlapping_and_dense.default(dense) else set()
        return written, whole


class _Values:
    """Values that the constructor reads while it is recorded. Every draw runs once, to learn its generator's state before it;
    draws that a value depends on run again from that state."""

    def __init__(self, log: Log, run: Run | None) -> None:
        self.log, self.run = log, run
        self.states: dict[int, torch.Tensor] = {}  # number of a draw -> state before it
        self.now: dict[int, torch.Tensor] = {}  # generator -> state after the draws so far
        self.passed = 0

    def of(self, ref: Ref) -> Any:
        """The value of a 0-d tensor after the steps so far, as a Python number."""
        found: list[Any] = []
        new = self.passed if self.run is None else len(self.log.steps)
        plan = schedule(self.log.steps, {ref.storage}, keep=lambda step: step.number >= new)
        generators = {id(g): g for s in plan.order if (g := s.generator) is not None}
        before = {key: g.get_state() for key, g in generators.items()}
        try:
            execute(self.log, plan, lambda _, memory: found.append(view(memory, ref).item()), self.run or self._draw)
        finally:
            for key, generator in generators.items():
                generator.set_state(before[key])
        self.passed = len(self.log.steps)
        (value,) = found
        return value

    def _draw(self, step: LogEntry, args: Any, kwargs: Any) -> Any:
        if (generator := step.generator) is None:
            return step.func(*args, **kwargs)
        known = step.number in self.states
        if not known:
            now = self.now.get(id(generator))
            start = now if now is not None else generator.get_state()
            self.states[step.number] = start if step.seeded is None else step.seeded
        generator.set_state(self.states[step.number])
        out = step.func(*args, **kwargs)
        if not known:
            self.now[id(generator)] = generator.get_state()
        return out


@dataclass(frozen=True)
class Schedule:
    """order: the steps to run. delivers: step number -> storages that have their final value after it; frees: step number ->
    storages that nothing needs after it."""

    order: list[LogEntry]
    delivers: dict[int, set[Storage]]
    frees: dict[int, set[Storage]]


def schedule(steps: Sequence[LogEntry], wanted: Collection[Storage], keep: Callable[[LogEntry], bool]) -> Schedule:
    """The steps that the final values of `wanted` need. keep: whether a draw runs although nothing needs its result."""
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


def draw_in_order(step: LogEntry, args: Any, kwargs: Any) -> Any:
    """Run one step; its generator is set first where the constructor set it."""
    if step.generator is not None and step.seeded is not None:
        step.generator.set_state(step.seeded)
    return step.func(*args, **kwargs)


def replay(log: Log, wanted: Collection[Storage], deliver: Deliver) -> int:
    """Run all draws and what `wanted` needs; call deliver(number, memory) as each wanted storage gets its final value.

    Generators end in the states in which the constructor leaves them. Returns the peak of bytes held.
    """
    most = execute(log, schedule(log.steps, wanted, keep=lambda step: True), deliver, draw_in_order)
    for generator, state in log.final:
        generator.set_state(state)
    return most


@torch.no_grad()
def execute(log: Log, plan: Schedule, deliver: Deliver, run: Run) -> int:
    """Run a schedule; return the peak of bytes held."""
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
            if ref is None or ref.storage in held:
                continue
            if tuple(value.stride()) == ref.stride and value.storage_offset() == ref.offset:
                held[ref.storage] = value.untyped_storage()
            else:  # laid out as the fake result was
                memory = torch.empty(log.memories[ref.storage][0], dtype=torch.uint8, device=value.device)
                held[ref.storage] = memory.untyped_storage()
                view(held[ref.storage], ref).copy_(value)
        del args, kwargs, out
        most = max(most, sum(memory.nbytes() for memory in held.values()))
        for number in plan.delivers[step.number]:
            deliver(number, held[number])
        for number in plan.frees[step.number]:
            held.pop(number, None)
    return most


def view(memory: torch.UntypedStorage, ref: Ref) -> torch.Tensor:
    """The recorded tensor in real memory."""
    return torch.empty(0, dtype=ref.dtype, device=memory.device).set_(memory, ref.offset, ref.size, ref.stride)
