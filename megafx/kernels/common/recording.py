"""What replay.py repeats: the steps of a launcher, and what writes them down while it runs."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # as Inductor's code allocates
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.ir.nodes import aten_ops

ALLOCATIONS = aten_ops("empty.memory_format empty_like empty_strided new_empty new_empty_strided")
# Deterministic, and the form of the result follows from that of the operands.
CALLS = aten_ops("_assert_async.msg _to_copy cat clone copy_ fill_.Scalar full new_zeros ones zero_ zeros zeros_like")
ALIGNMENT = 16  # bytes; Triton compiles for starts that it divides
QUESTIONS = aten_ops("promote_types result_type.Tensor")  # answered by the form alone

_local = threading.local()


def recorder() -> Recorder | None:
    """What records the launches of this thread now."""
    return getattr(_local, "recorder", None)


@contextmanager
def foreseeing() -> Iterator[list[Foreseen]]:
    """Within, launches on fake tensors are written down (ahead.py)."""
    found: list[Foreseen] = []
    _local.foreseen = found
    try:
        yield found
    finally:
        del _local.foreseen


def foreseen() -> list[Foreseen] | None:
    """Where launches of this thread are written down, and not made."""
    return getattr(_local, "foreseen", None)


@functools.cache
def triton_runtime() -> tuple[Any, Any]:
    """Its driver and its knobs of the runtime; imported when the first recording plays."""
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs.runtime


# -- what a recording is made of. Each step gets the tensors so far (operands, then what was made) and their addresses.


@dataclass(slots=True)
class Make:
    """Memory, its contents undefined."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def run(self, tensors: list[Tensor], starts: list[int], stream: int) -> None:
        if self.device.type == "cuda":  # the current one
            made = _empty_strided_cuda(self.size, self.stride, self.dtype)
        else:
            made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        tensors.append(made)
        starts.append(made.data_ptr())


@dataclass(slots=True)
class View:
    """Memory of tensor `which`, seen otherwise. offset: elements from its start."""

    which: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: list[Tensor]) -> Tensor:
        base = tensors[self.which]
        if base.shape == self.size and base.stride() == self.stride and not self.offset:
            return base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def _real(x: Any, tensors: list[Tensor]) -> Any:
    if isinstance(x, (list, tuple)):
        return [_real(y, tensors) for y in x]
    return x.of(tensors) if isinstance(x, View) else x


@dataclass(slots=True)
class Call:
    """An operator of CALLS. makes: its result is new memory."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: bool

    def run(self, tensors: list[Tensor], starts: list[int], stream: int) -> None:
        kwargs = {k: _real(x, tensors) for k, x in self.kwargs.items()}
        result = self.op(*[_real(x, tensors) for x in self.args], **kwargs)
        if self.makes:
            tensors.append(result)
            starts.append(result.data_ptr())


@dataclass(slots=True)
class Address:
    """Replaces a tensor where Triton asks for its address alone, or for what it compiles for."""

    start: int
    dtype: torch.dtype | None = None

    def data_ptr(self) -> int:
        return self.start


class Foreseen:
    """A launch that has not been made: its kernel can be compiled. key: distinguishes it from others."""

    def __init__(
        self, kernel: Any, grid: Sequence[Any], device: torch.device, args: Sequence[Any], options: Any
    ) -> None:
        self.kernel, self.grid, self.device = kernel, tuple(grid), device
        self.args = [_without_memory(x) for x in args]
        self.options = {name: _without_memory(x) for name, x in options.items()}
        names = [p.name for p in kernel.params]
        given = dict(zip(names, self.args, strict=False)) | self.options
        constant = {p.name for p in kernel.params if p.is_constexpr}
        forms = [(n, x if n in constant or n not in names else _specialised(x)) for n, x in given.items()]
        self.key = id(kernel), self.device, repr(forms)

    def compile(self) -> None:
        """And load it onto the device: a launch finds it there."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            _ = self.kernel.warmup(*self.args, grid=self.grid, **self.options).run


def _without_memory(x: Any) -> Any:
    """A fake argument of a kernel as what Triton reads of it. Memory starts where 16 bytes divide."""
    if isinstance(x, Tensor):
        return Address(int(x.storage_offset()) * x.element_size(), x.dtype)
    if hasattr(x, "block_shape"):
        shown = copy.copy(x)
        shown.base = _without_memory(x.base)
        return shown
    return x


def _specialised(x: Any) -> Any:
    """What Triton compiles for."""
    if isinstance(x, Address):
        return x.dtype, x.start % ALIGNMENT == 0
    if hasattr(x, "block_shape"):
        return x.base.dtype, x.block_shape
    if type(x) is int:
        return x if x == 1 else (x % ALIGNMENT == 0, -(2**31) <= x < 2**31, x < 2**63)
    return type(x) if isinstance(x, float) else x


@dataclass(slots=True)
class Launch:
    """A compiled kernel. addresses: (parameter, tensor, bytes from its start); descriptors: and the tensor descriptor."""

    compiled: Any
    grid: tuple[int, int, int]
    values: list[Any]
    addresses: list[tuple[int, int, int]]
    descriptors: list[tuple[int, int, int, Any]]
    start: Callable[..., None]
    function: Any
    metadata: Any

    def run(self, tensors: list[Tensor], starts: list[int], stream: int) -> None:
        values = self.values.copy()
        for i, which, offset in self.addresses:
            values[i] = starts[which] + offset
        for i, which, offset, descriptor in self.descriptors:
            values[i] = shown = object.__new__(type(descriptor))  # cheaper than copy.copy
            shown.__dict__.update(descriptor.__dict__, base=Address(starts[which] + offset))
        self.start(*self.grid, stream, self.function, self.metadata, None, None, None, *values)


class Recording:
    """steps; results: the tensor's number, None for None; one `alone` or a tuple. device: of memory and launches.
    operands: how many tensors a call gives."""

    def __init__(
        self, steps: list[Any], results: list[int | None], alone: bool, device: int | None, operands: int
    ) -> None:
        self.steps, self.results, self.alone, self.device = steps, results, alone, device
        makers = [i for i, s in enumerate(steps) if isinstance(s, Make) or (isinstance(s, Call) and s.makes)]
        # step of each result
        self.maker = [None if n is None or n < operands else makers[n - operands] for n in results]

    def play(self, tensors: list[Tensor], place: tuple[int, Tensor] | None = None) -> Any:
        """place: a result, by number, and memory that `fits` it: the result is made there."""
        if self.device is None:
            return self._play(tensors, 0, place)
        driver = triton_runtime()[0].active
        stream = driver.get_current_stream(self.device)
        if self.device == driver.get_current_device():
            return self._play(tensors, stream, place)
        with torch.cuda.device(self.device):
            return self._play(tensors, stream, place)

    def fits(self, result: int, memory: Tensor) -> bool:
        """True if that result may be made in this memory: the recording allocates such memory for it."""
        maker = self.maker[result]
        step = None if maker is None else self.steps[maker]
        if not isinstance(step, Make) or memory.data_ptr() % ALIGNMENT:
            return False
        wanted = step.size, step.stride, step.dtype, step.device
        return wanted == (tuple(memory.shape), memory.stride(), memory.dtype, memory.device)

    def _play(self, tensors: list[Tensor], stream: int, place: tuple[int, Tensor] | None) -> Any:
        starts = [x.data_ptr() for x in tensors]
        for i, step in enumerate(self.steps):
            if place is not None and i == self.maker[place[0]]:
                tensors.append(place[1])
                starts.append(place[1].data_ptr())
            else:
                step.run(tensors, starts, stream)
        results = [None if i is None else tensors[i] for i in self.results]
        return results[0] if self.alone else tuple(results)


# -- recording


class _CannotRecord(Exception):
    """Says why."""


class Recorder(TorchDispatchMode):
    """Runs a launcher, and keeps what it allocates, calls and launches."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        # An own object for each operand: the same tensor may be given twice, and be another one at the next call.
        self.operands = [x.detach() for x in operands]
        self.tensors: list[Tensor] = list(self.operands)  # operands, then what was made: kept, so that ids stay theirs
        self.views: list[Tensor] = []
        self.number = {id(x): i for i, x in enumerate(self.tensors)}
        self.steps: list[Any] = []
        self.device: int | None = None
        self.result: Any = None
        self.reason = ""

    def run(self, launcher: Callable[..., Any], operands: Sequence[Any]) -> Any:
        own = iter(self.operands)
        given = [next(own) if isinstance(x, Tensor) else x for x in operands]
        _local.recorder = self
        try:
            with torch._C._AutoDispatchBelowADInplaceOrView(), self:
                result = self.result = launcher(*given)
        finally:
            _local.recorder = None
        # Operators that write in place return an operand: the caller's, not its substitute.
        real = {id(own): x for own, x in zip(given, operands, strict=True) if isinstance(own, Tensor)}
        return real.get(id(result), result) if isinstance(result, Tensor) else tuple(real.get(id(x), x) for x in result)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in CALLS and func._can_decompose():  # into what the sets above name
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if not self.reason:
            self._try(self._called, func, args, kwargs, result)
        return result

    def launched(
        self, kernel: Any, compiled: Any, grid: Sequence[Any], device: torch.device, args: Sequence[Any], options: Any
    ) -> None:
        """A kernel was launched."""
        if not self.reason:
            self._try(self._launched, kernel, compiled, grid, device, args, options)

    def finish(self) -> Recording | str:
        """The recording, or why there is none."""
        made: list[Any] = []
        if not self.reason:
            self._try(self._finished, self.result, made)
        if self.reason:
            return self.reason
        return Recording(self.steps, made, isinstance(self.result, Tensor), self.device, len(self.operands))

    def _try(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except _CannotRecord as e:
            self.reason = str(e)
            self.tensors, self.views, self.steps = [], [], []  # what was kept is freed

    def _called(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in QUESTIONS:
            return
        if func in ALLOCATIONS:
            if result.layout != torch.strided or result.is_pinned():
                raise _CannotRecord(f"{func} of unusual memory")
            if result.is_cuda:
                self._on(result.device)
            self.steps.append(Make(tuple(result.shape), result.stride(), result.dtype, result.device))
            self._made(result)
        elif func.is_view and isinstance(result, Tensor):
            which = self._which(args[0])
            if result.untyped_storage()._cdata != self.tensors[which].untyped_storage()._cdata:
                raise _CannotRecord(f"{func} copies")
            self.number[id(result)] = which
            self.views.append(result)
        elif func in CALLS:
            makes = isinstance(result, Tensor) and id(result) not in self.number
            seen = {k: self._seen(x) for k, x in kwargs.items()}
            self.steps.append(Call(func, tuple(self._seen(x) for x in args), seen, makes))
            if makes:
                self._made(result)
        else:
            raise _CannotRecord(f"it calls {func}")

    def _on(self, device: torch.device) -> None:
        index = device.index or 0
        if self.device not in (None, index):
            raise _CannotRecord("it works on several devices")
        self.device = index

    def _made(self, result: Tensor) -> None:
        self.number[id(result)] = len(self.tensors)
        self.tensors.append(result)

    def _which(self, x: Tensor) -> int:
        if id(x) not in self.number:
            raise _CannotRecord("it uses a tensor of unknown origin")
        return self.number[id(x)]

    def _seen(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._seen(y) for y in x]
        if not isinstance(x, Tensor):
            return x
        which = self._which(x)
        base = self.tensors[which]
        if x.dtype != base.dtype:
            raise _CannotRecord("it calls an operator on memory seen as another dtype")
        return View(which, tuple(x.shape), x.stride(), int(x.storage_offset() - base.storage_offset()))

    def _launched(
        self, kernel: Any, compiled: Any, grid: Sequence[Any], device: torch.device, args: Sequence[Any], options: Any
    ) -> None:
        from triton.runtime.jit import JITFunction

        if type(kernel) is not JITFunction or kernel.pre_run_hooks or not hasattr(compiled, "packed_metadata"):
            raise _CannotRecord(f"a launch of {kernel} gives no compiled kernel")
        self._on(device)
        values: list[Any] = []
        addresses, descriptors = [], []
        for i, parameter in enumerate(kernel.params):
            value = args[i] if i < len(args) else options.get(parameter.name, parameter.default)
            if isinstance(value, Tensor):
                addresses.append((i, *self._address(value)))
            elif hasattr(value, "block_shape"):
                descriptors.append((i, *self._address(value.base), copy.copy(value)))
                descriptors[-1][-1].base = None
            elif isinstance(value, (tuple, list)):
                raise _CannotRecord("it launches a kernel with a tuple")
            values.append(None if isinstance(value, Tensor) or hasattr(value, "block_shape") else value)
        sizes = (*grid, 1, 1)[:3]
        how = (compiled.run, compiled.function, compiled.packed_metadata)
        self.steps.append(Launch(compiled, (sizes[0], sizes[1], sizes[2]), values, addresses, descriptors, *how))

    def _address(self, x: Tensor) -> tuple[int, int]:
        """(tensor, bytes from its start)."""
        which = self._which(x)
        return which, x.data_ptr() - self.tensors[which].data_ptr()

    def _finished(self, result: Any, made: list[Any]) -> None:
        """Fills `made` with the numbers of the results."""
        for x in (result,) if isinstance(result, Tensor) else result:
            which = None if x is None else self._which(x)
            made.append(which)
            if which is None:
                continue
            whole = _geometry(x) == _geometry(self.tensors[which])
            if made.count(which) > 1 or (which < len(self.operands) and not whole):
                raise _CannotRecord("its results share memory with operands or with each other")
            if whole:
                continue
            # A view of the whole, such as a transposed one: allocated so in the first place.
            makers = [s for s in self.steps if isinstance(s, Make) or (isinstance(s, Call) and s.makes)]
            step = makers[which - len(self.operands)]
            span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
            all_of_it = not x.storage_offset() and span * x.element_size() == x.untyped_storage().nbytes()
            if not (isinstance(step, Make) and all_of_it and x.dtype == step.dtype):
                raise _CannotRecord("a result is a view of some memory of its own")
            step.size, step.stride = tuple(x.shape), x.stride()


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.storage_offset()
