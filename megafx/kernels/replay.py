"""Run a launcher of Triton kernels once for each form of call, then only repeat what it did.

What a launcher does (which memory it allocates, which kernels it starts on which grids with which numbers) is a function of
the form of its operands: shapes, strides, dtypes, devices, starts modulo 16 bytes, numbers, and this rank's place on the
axis that is named last. `Replay` runs it as it is at the first call of a form, records it at the second, and from then on
repeats the recording: allocations, and compiled kernels started with new addresses. That leaves out the launcher's Python
and Triton's dispatch, which are most of the host time of a call (benchmarks/host_overhead.py --kernels).

Forms are finer than Triton's specialisation (dtypes, starts and numbers that 16 divides, numbers equal to 1, 64-bit
numbers): calls of one form start the same compiled kernel. What a recording cannot hold (an operator that is not in CALLS,
results that are views of other memory, anything that reads a value) is not recorded, and runs as it is each time. So do
calls under a torch dispatch mode, with tensor subclasses, with hooks on Triton's launches, or in Triton's interpreter.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # as Inductor's code allocates
from torch.utils._python_dispatch import TorchDispatchMode

from .. import collectives

aten = torch.ops.aten

# Versions whose compiled kernels are started as below: the first, and the first that nobody has tried.
KNOWN_TRITON = ((3, 6), (3, 10))
MOST_FORMS = 4096  # of one op; then all are forgotten
ALIGNMENT = 16  # bytes; Triton compiles for starts that it divides

ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Deterministic, and the form of the result follows from that of the operands.
CALLS = {
    aten._assert_async.msg,
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.full.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.zero_.default,
    aten.zeros.default,
    aten.zeros_like.default,
}

QUESTIONS = {aten.promote_types.default, aten.result_type.Tensor}  # answered by the form alone

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_mode_count = torch._C._len_torch_dispatch_stack
_local = threading.local()


class Replay:
    """launcher(*operands), repeated from a recording where there is one. placed: the last operand names a mesh axis."""

    def __init__(self, launcher: Callable[..., Any], placed: bool = False) -> None:
        self.launcher, self.placed = launcher, placed
        self.forms: dict[Any, Recording | str] = {}  # or 'once' (called once), or why it is not recorded

    def __call__(self, *operands: Any) -> Any:
        if _mode_count():
            return self.launcher(*operands)
        tensors: list[Tensor] = []
        form: list[Any] = []
        for x in operands:
            kind = type(x)
            if kind in _PLAIN:
                if x.is_neg():  # kernels read memory, where the sign is not
                    return self(*[y.resolve_neg() if isinstance(y, Tensor) else y for y in operands])
                tensors.append(x)
                form.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT))
            elif kind in _NUMBERS:
                form.append(x)
            elif isinstance(x, list) and all(type(n) is int for n in x):
                form.append(tuple(x))
            else:
                return self.launcher(*operands)
        if self.placed and operands[-1]:
            form.append(collectives.place_on(operands[-1]))
        key = tuple(form)
        found = self.forms.get(key)
        if type(found) is Recording:
            return found.play(tensors) if _unhooked() else self.launcher(*operands)
        if found is None:
            if len(self.forms) >= MOST_FORMS:
                self.forms.clear()
            self.forms[key] = "once"
        elif found == "once":
            recorder = Recorder(tensors)
            result = recorder.run(self.launcher, operands)
            self.forms[key] = recorder.finish(result)
            return result
        return self.launcher(*operands)


def recorder() -> Recorder | None:
    """What records the launches of this thread now."""
    return getattr(_local, "recorder", None)


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


@dataclass(slots=True)
class Call:
    """An operator of CALLS. makes: its result is new memory."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: bool

    def run(self, tensors: list[Tensor], starts: list[int], stream: int) -> None:
        def real(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [real(y) for y in x]
            return x.of(tensors) if isinstance(x, View) else x

        result = self.op(*[real(x) for x in self.args], **{k: real(x) for k, x in self.kwargs.items()})
        if self.makes:
            tensors.append(result)
            starts.append(result.data_ptr())


@dataclass(slots=True)
class Address:
    """Stands in for a tensor where Triton asks for its address alone."""

    start: int

    def data_ptr(self) -> int:
        return self.start


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
            values[i] = shown = object.__new__(type(descriptor))  # copy.copy takes 1 us more
            shown.__dict__.update(descriptor.__dict__, base=Address(starts[which] + offset))
        self.start(*self.grid, stream, self.function, self.metadata, None, None, None, *values)


class Recording:
    """steps; results: the tensor's number, None for None; one `alone` or a tuple. device: of memory and launches."""

    def __init__(self, steps: list[Any], results: list[int | None], alone: bool, device: int | None) -> None:
        self.steps, self.results, self.alone, self.device = steps, results, alone, device

    def play(self, tensors: list[Tensor]) -> Any:
        if self.device is None:
            return self._play(tensors, 0)
        driver = _triton()[0].active
        stream = driver.get_current_stream(self.device)
        if self.device == driver.get_current_device():
            return self._play(tensors, stream)
        with torch.cuda.device(self.device):
            return self._play(tensors, stream)

    def _play(self, tensors: list[Tensor], stream: int) -> Any:
        starts = [x.data_ptr() for x in tensors]
        for step in self.steps:
            step.run(tensors, starts, stream)
        if self.alone:
            return tensors[self.results[0]]  # type: ignore[index]
        return tuple([None if i is None else tensors[i] for i in self.results])


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
        self.reason = ""

    def run(self, launcher: Callable[..., Any], operands: Sequence[Any]) -> Any:
        own = iter(self.operands)
        given = [next(own) if isinstance(x, Tensor) else x for x in operands]
        _local.recorder = self
        try:
            with torch._C._AutoDispatchBelowADInplaceOrView(), self:
                return launcher(*given)
        finally:
            _local.recorder = None

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

    def finish(self, result: Any) -> Recording | str:
        """The recording, or why there is none."""
        made: list[Any] = []
        if not self.reason:
            self._try(self._finished, result, made)
        if self.reason:
            return self.reason
        return Recording(self.steps, made, isinstance(result, Tensor), self.device)

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
        self.steps.append(
            Launch(
                compiled,
                (sizes[0], sizes[1], sizes[2]),
                values,
                addresses,
                descriptors,
                compiled.run,
                compiled.function,
                compiled.packed_metadata,
            )
        )

    def _address(self, x: Tensor) -> tuple[int, int]:
        """(tensor, bytes from its start)."""
        which = self._which(x)
        return which, x.data_ptr() - self.tensors[which].data_ptr()

    def _finished(self, result: Any, made: list[Any]) -> None:
        """Fills `made` with the numbers of the results."""
        for x in (result,) if isinstance(result, Tensor) else result:
            which = None if x is None else self._which(x)
            if which is not None and (which < len(self.operands) or which in made):
                raise _CannotRecord("its results share memory with operands or with each other")
            made.append(which)
            if which is None or _geometry(x) == _geometry(self.tensors[which]):
                continue
            # A view of the whole, such as a transposed one: allocated so in the first place.
            step = next(s for i, s in self._makers() if i == which)
            span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
            whole = not x.storage_offset() and span * x.element_size() == x.untyped_storage().nbytes()
            if not (isinstance(step, Make) and whole and x.dtype == step.dtype):
                raise _CannotRecord("a result is a view of some memory of its own")
            step.size, step.stride = tuple(x.shape), x.stride()

    def _makers(self) -> list[tuple[int, Any]]:
        """(tensor, step that makes it)."""
        steps = [s for s in self.steps if isinstance(s, Make) or (isinstance(s, Call) and s.makes)]
        return list(enumerate(steps, len(self.operands)))


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.storage_offset()


# -- Triton


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Its driver and its knobs of the runtime; imported when the first recording plays."""
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs.runtime


def _unhooked() -> bool:
    """Whether nobody waits to be told of launches (profilers do)."""
    runtime = _triton()[1]
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return (enter is None or not getattr(enter, "calls", True)) and (leave is None or not getattr(leave, "calls", True))


@functools.cache
def supported() -> bool:
    """Whether this Triton's compiled kernels are started as above; says so if not."""
    import triton

    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    known = KNOWN_TRITON[0] <= version < KNOWN_TRITON[1]
    if not known:
        warnings.warn(
            f"megafx has not been tried with Triton {triton.__version__}: calls of fused ops go through Triton's own "
            "dispatch, and take more host time",
            stacklevel=2,
        )
    return known and torch.version.hip is None and not triton.knobs.runtime.interpret
