"""Define an operator of megafx in one place: schema, reference, Triton launcher, shapes, gradient, and its facts (ir/facts.py).

    define_op(
        "scale_rows(Tensor x, Tensor by) -> Tensor",
        rule="lin: ... c, ... -> ... c",                      # sharding rule (rules/grammar.py)
        reference=scale_rows_reference,                       # plain torch: the CPU path, and the oracle of the tests
        triton="scale_rows_triton:scale_rows",                # module of this package and its launcher, imported when needed
        fake=lambda x, by: new_like(x),
        samples=[(real(4, 6), real(4))],                      # calls on which check_rules tries the rule
    )
    define_gradient("scale_rows", backward, saves)

A call runs the launcher where `runs_triton(x)` holds for its first tensor, else the reference. The functions get the
arguments of the schema by position; give a schema no default values (the dispatcher drops trailing ones). Ops named
*_backward are the end: differentiating them is an error.

What a launcher does may depend on nothing but the form of its arguments and the rank (replay.py says what that is, and
repeats it without running the launcher again). Compiled graphs call `direct(op)`, which leaves out the dispatcher too.

Tracing (make_fx, torch.export) keeps the op whole. Inductor sees the Triton kernels instead of an opaque call: when
AOTAutograd functionalizes a graph, the launcher is traced, and each `launch` in it becomes a kernel-wrapper node, as with
torch.library.triton_op. That function itself is not used: it ignores the schema that it is given, traces the
implementation in place of a fake, and would also expand the reference on CPU, which may read a seed's value. Ops go
through torch.library.Library rather than custom_op, which costs twice the host time a call (measured, torch 2.11 and
2.13, forward without gradient: 9 to 17 us against 19 to 24 on a slow core).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import _C, Tensor
from torch._library import triton as _triton_registry
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode

from megafx.ir.facts import declare
from megafx.ir.holders import own_functional, replaces_torchs
from megafx.kernels.common import recording, replay
from megafx.rules.grammar import parse

HAVE_TRITON = importlib.util.find_spec("triton") is not None

_library = torch.library.Library("megafx", "FRAGMENT")
_tracing = threading.local()
_mode_count, _profiling = _C._len_torch_dispatch_stack, torch.autograd._profiler_enabled
# Where nothing but a backend is left to dispatch to: no mode, no subclass, no functionalization.
_BACKENDS = {_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)}
_implementations: dict[OpOverload, Callable[..., Any]] = {}
_called: dict[Callable[..., Any], Callable[..., Any]] = {}  # what `direct` and `writes_into` have made
_composites: set[OpOverload] = set()


def runs_triton(x: Tensor) -> bool:
    """CUDA with Triton; fp64 is the reference's everywhere: exact, and no kernel needs an fp64 variant."""
    return HAVE_TRITON and x.device.type == "cuda" and x.dtype != torch.float64


def new_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty contiguous tensor of x's shape, also where x is strided."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What references compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class InPlace(NamedTuple):
    """The form `name_` of an op, which writes the result over this operand. reference, triton: as for `define_op`."""

    operand: str
    reference: Callable[..., Any]
    triton: str | None = None


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    triton: str | None = None,
    launches: bool = False,
    ends: bool = False,
    inplace: InPlace | None = None,
    **facts: Any,
) -> OpOverload:
    """schema: 'name(...) -> ...'. -> torch.ops.megafx.name

    ends: the op has no gradient, as those named *_backward have none: differentiating it is an error.
    launches: the reference itself launches kernels where `runs_triton`, and Inductor is to see the op whole.
    facts: fields of `OpFacts`: rule, samples, cost, recompute, localize and so on.
    """
    name = _define(schema, facts)
    placed = "str axis)" in schema
    implementation = reference = _of_torchs_own(reference)
    if triton is not None or launches:
        implementation = _choice(reference, reference if triton is None else _Launcher(triton), placed)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megafx::{name}", fake, lib=_library)
    if triton is not None:
        _see_through(name, _Launcher(triton))
    op = getattr(torch.ops.megafx, name).default
    _implementations[op] = implementation
    if ends or name.endswith("_backward"):
        define_gradient(name, functools.partial(_no_second_gradient, name), lambda ctx, inputs, output: None)
    if inplace is not None:
        at = [a.name for a in op._schema.arguments].index(inplace.operand)
        head, _, result = schema.partition("->")
        head = head.replace(name, f"{name}_", 1).replace(f"Tensor {inplace.operand}", f"Tensor(a!) {inplace.operand}")
        writing = f"{head}->{result.replace('Tensor', 'Tensor(a!)')}"
        shown = lambda *args: args[at]
        declare(op, inplace=(at, define_op(writing, reference=inplace.reference, triton=inplace.triton, fake=shown)))
    return op


def _of_torchs_own(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of torch's own functions, where somebody has put others in their place."""

    @functools.wraps(reference)
    def call(*args: Any) -> Any:
        if not replaces_torchs():
            return reference(*args)
        with own_functional():
            return reference(*args)

    return call


def define_composite(schema: str, *, body: Callable[..., Any], **facts: Any) -> OpOverload:
    """An op that the planner sees whole, and autograd and the joint graph as what its body calls. facts: of `OpFacts`."""
    name = _define(schema, facts)
    _library.impl(name, body, "CompositeImplicitAutograd")
    op = getattr(torch.ops.megafx, name).default
    _composites.add(op)
    return op


def define_gradient(
    name: str, backward: Callable[..., Any], saves: Callable[[Any, tuple[Any, ...], Any], None] | slice
) -> None:
    """backward(ctx, *gradients of the results) -> one gradient (or None) for each argument of the schema.

    saves(ctx, inputs, output) puts aside what backward needs: ctx.save_for_backward for tensors, attributes for the rest. A
    slice: the inputs that are saved; those after it are `ctx.rest`.
    Registered here rather than by torch.library.register_autograd, whose wrapper takes host time at every call.
    """
    op = getattr(torch.ops.megafx, name).default
    implementation = _implementations[op]

    def compute(keys: Any, args: Sequence[Any]) -> Any:
        below = keys & _C._after_autograd_keyset
        with _C._AutoDispatchBelowAutograd():
            return implementation(*args) if below.raw_repr() in _BACKENDS else op.redispatch(below, *args)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keys = args
            output = compute(keys, inputs)
            if isinstance(saves, slice):
                ctx.save_for_backward(*inputs[saves])
                ctx.rest = inputs[saves.stop :]
            else:
                saves(ctx, tuple(inputs), output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = backward(ctx, *grads)
            return (*found, None) if isinstance(found, tuple) else (found, None)

    def autograd(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return Gradient.apply(*args, keys)
        return compute(keys, args)

    Gradient.__name__ = Gradient.__qualname__ = f"{name}_gradient"
    _library.impl(name, autograd, "Autograd", with_keyset=True)


def direct(op: Any) -> Callable[..., Any] | None:
    """What op(*args) computes without autograd, called without the dispatcher; None for what is not one of these ops.

    args: all arguments of the schema, of the schema's types. Under dispatch modes and profilers the op itself is called.
    """
    return _directly(op) if is_kernel(op) else None


def launcher_of(op: Any) -> Callable[..., Any] | None:
    """What launches the kernels of an op; None where it has none."""
    repeated = getattr(_implementations.get(op), "repeated", None)
    return None if repeated is None else repeated.launcher


def computes(target: Any) -> Callable[..., Any] | None:
    """What runs below the dispatcher for a node that calls one of these ops, directly or not; None for another node."""
    return _implementations.get(target) or _called.get(target)


def is_composite(op: Any) -> bool:
    """True if `define_composite` made it."""
    return op in _composites


def is_kernel(op: Any) -> TypeGuard[OpOverload]:
    """Whether `define_op` made it."""
    return isinstance(op, OpOverload) and op in _implementations


@functools.cache
def _directly(op: OpOverload) -> Callable[..., Any]:
    implementation = _implementations[op]

    def call(*args: Any) -> Any:
        if _mode_count() or _profiling() or type(args[0]) not in replay.PLAIN:
            return op(*args)
        return implementation(*args)

    call.__name__ = call.__qualname__ = op.name().partition("::")[2].partition(".")[0]
    _called[call] = implementation
    return call


@functools.cache
def writes_into(op: OpOverload) -> Callable[..., Any] | None:
    """call(memory, result, *args) -> op(*args), that result in this memory. None for what is not one of these ops.

    memory: of the result's shape and dtype, contiguous. Kernels whose launches are repeated (replay.py) write there in the
    first place; else the result is copied.
    """
    plain = direct(op)
    if plain is None:
        return None
    implementation = _implementations[op]

    def call(memory: Tensor, result: int, *args: Any) -> Any:
        repeated = getattr(implementation, "repeated", None)
        if (
            _mode_count()
            or type(args[0]) not in replay.PLAIN
            or repeated is None
            or not (runs_triton(args[0]) and replay.supported())
        ):
            found = plain(*args)
        else:
            found = repeated(*args, place=(result, memory))
        made = found if isinstance(found, Tensor) else found[result]
        if made.data_ptr() != memory.data_ptr():
            memory.copy_(made)
        return memory if isinstance(found, Tensor) else (*found[:result], memory, *found[result + 1 :])

    call.__name__ = call.__qualname__ = f"{plain.__name__}_into"
    _called[call] = lambda memory, result, *args: implementation(*args)
    return call


def tracing() -> bool:
    """True if Inductor traces: what is computed now are nodes of its graph."""
    return getattr(_tracing, "on", False)


def as_bytes(mask: Tensor) -> Tensor:
    """A bool mask as uint8: the same memory; in Inductor, which has no such view, a cast for it to fuse."""
    return mask.to(torch.uint8) if tracing() else mask.view(torch.uint8)


def launch(kernel: Any, grid: Sequence[int | torch.SymInt], like: Tensor, *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options) on the device of `like`; while Inductor traces, a node of its graph instead, and while
    launches are foreseen (ahead.py), an entry of their list."""
    if tracing():
        torch.library.wrap_triton(kernel)[tuple(grid)](*args, **options)
        return
    if (foreseen := recording.foreseen()) is not None:
        foreseen.append(recording.Foreseen(kernel, grid, like.device, args, options))
        return
    if like.device.type != "cuda" or like.device.index == torch.cuda.current_device():
        compiled = kernel[tuple(grid)](*args, **options)
    else:
        with torch.cuda.device(like.device):
            compiled = kernel[tuple(grid)](*args, **options)
    if (recorder := recording.recorder()) is not None:
        recorder.launched(kernel, compiled, grid, like.device, args, options)


# -- internals


class _Launcher:
    """'folder.module:function' of megafx.kernels; imports Triton at the first call. Iterates over the module's kernels."""

    def __init__(self, where: str) -> None:
        self.module, self.function = where.split(":")
        self.found: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.found is None:
            self.found = getattr(self._import(), self.function)
        return self.found(*args)

    def __iter__(self) -> Iterator[Any]:
        """What AOTAutograd's cache hashes, so that an edited kernel is compiled anew."""
        from triton.runtime.jit import JITFunction

        return (v for _, v in inspect.getmembers(self._import()) if isinstance(v, JITFunction))

    def _import(self) -> Any:
        return importlib.import_module(f"megafx.kernels.{self.module}")


def _no_second_gradient(name: str, ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(f"megafx::{name} has no autograd formula: there is no double backward through fused ops")


def _define(schema: str, facts: dict[str, Any]) -> str:
    name = schema.partition("(")[0].strip()
    if isinstance(facts.get("rule"), str):
        parse(facts["rule"])
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    declare(f"megafx.{name}.default", **facts)
    return name


def _choice(reference: Callable[..., Any], launcher: Callable[..., Any], placed: bool) -> Callable[..., Any]:
    repeated = replay.Replay(launcher, placed)

    def implementation(*args: Any) -> Any:
        if not runs_triton(args[0]):
            return reference(*args)
        return repeated(*args) if replay.supported() else launcher(*args)

    implementation.repeated = repeated  # type: ignore[attr-defined]  # mypy has none of functions
    return implementation


def _see_through(name: str, launcher: _Launcher) -> None:
    """Trace the launcher when a graph is functionalized for Inductor; torch.export keeps the op."""

    def expand(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if custom_triton_ops_decomposition_disabled() or not runs_triton(args[0]):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        before, _tracing.on = getattr(_tracing, "on", False), True
        try:
            with mode:
                return launcher(*args)
        finally:
            _tracing.on = before

    torch.library.register_torch_dispatch(f"megafx::{name}", FunctionalTensorMode, expand, lib=_library)
    # Declared for lists of kernels; torch iterates over a launcher as over one.
    kernels: dict[str, Any] = _triton_registry.triton_ops_to_kernels
    kernels[f"megafx::{name}"] = launcher
