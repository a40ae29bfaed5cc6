"""Submodules that stay eager inside of a captured graph (`Config.eager_modules`): what torch.export cannot trace.

A call of such a module is one node of the graph:

    megafx.eager_call(Tensor[] inputs and parameters, after, seed, op id, key) -> Tensor[]

which runs the module's own code when the graph runs. It has no sharding rule: every rank computes it alike, on whole operands,
and has complete gradients of its parameters; data-parallel ranks run code that computes each row by itself on their own rows.
Autograd differentiates it, from a tape (ops/tapes.py): the second result is its handle. Random numbers come from the seed of
the step. The first result is for order: a call that takes that of another runs after it.

Export has to know the sizes of its results: the code is run before (ops/eager_probes.py). A function can take the module's
place (capture/eager_parts.py).
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.errors import ConfigError, UsageError
from megafx.ir.call_spec import in_autocast
from megafx.ir.data_sizes import size_named
from megafx.ir.facts import declare
from megafx.meanwhile import meanwhile
from megafx.ops import tapes

_library = torch.library.Library("megafx", "FRAGMENT")


@dataclass(frozen=True)
class ResultSize:
    """A dim of a result: factor times the product of these (input, dim)."""

    factor: sympy.Rational
    dims: tuple[tuple[int, int], ...]

    def of(self, tensors: Sequence[Tensor]) -> Any:
        size = math.prod(tensors[i].shape[d] for i, d in self.dims)
        return size * int(self.factor.p) // int(self.factor.q)


@dataclass(frozen=True)
class DataSize:
    """A dim of a result that the code decides by data: the number-th of the call."""

    number: int


@dataclass(frozen=True)
class Size:
    """A leaf of the arguments that is a size of one of the tensors."""

    size: ResultSize


class OpsRun(TorchDispatchMode):
    """Notes the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ByRows:
    """Of code that computes each row by itself (ops/eager_rows.py).

    rule: of the call on axes that cut a batch. linear: whether what comes back is linear in the gradients that come in.
    ops: the names of those that it runs.
    """

    rule: str
    linear: bool
    ops: frozenset[str]


# Ops that autograd, autocast or a copy add to those of the code, and that mix no rows.
_ADDED = frozenset(
    [
        "detach",
        "clone",
        "alias",
        "_to_copy",
        "copy_",
        "add",
        "add_",
        "zeros_like",
        "empty_like",
        "view",
        "new_empty_strided",
    ]
)


@dataclass(frozen=True)
class EagerCall:
    """One call of one module. The first tensors are leaves of (args, kwargs), the others its parameters."""

    module: weakref.ReferenceType[nn.Module]
    fqn: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # of the arguments, with None where a tensor goes
    names: tuple[str, ...]
    autocast: tuple[dict[str, Any], ...]
    wanted: tuple[bool, ...] = ()  # which of the tensors require a gradient
    # dtype and sizes of each tensor that it returns
    results: tuple[tuple[torch.dtype, tuple[ResultSize | DataSize, ...]], ...] = ()
    out_spec: pytree.TreeSpec | None = None
    out_leaves: tuple[Any, ...] = ()  # its output, with None where a tensor goes
    random: bool = False  # whether it draws numbers
    # what the graph calls the sizes of results that data decides, once it has names for them
    named: tuple[str, ...] = ()
    on_host: tuple[bool, ...] = field(default=(), kw_only=True)  # which results are on the CPU
    # is called in place of the module, which then is its first argument that is one
    function: Callable[..., Any] | None = field(default=None, kw_only=True)
    by_rows: ByRows | None = field(default=None, kw_only=True)
    cut: bool = field(default=False, kw_only=True)  # whether data-parallel ranks run it on their own rows

    copies: ClassVar[bool] = False  # whether the code gets copies of the tensors

    def found(self) -> nn.Module:
        module = self.module()
        assert module is not None, f"the model that '{self.fqn}' belongs to is gone"
        return module

    @property
    def what(self) -> str:
        """What is run, in words."""
        name = self.function.__name__ if self.function is not None else None
        return f"the function {name} stays eager" if name else f"the module '{self.fqn}' stays eager"

    def refuse(self, result: str, traced: str) -> UsageError:
        """The error for a result that is not what the graph was made for."""
        return UsageError(
            f"a module that is left eager returned {result}, in the trace {traced}",
            module=self.fqn,
            fix="only modules whose results have sizes that the inputs decide can be left eager",
        )

    @contextlib.contextmanager
    def watched_rows(self) -> Iterator[None]:
        """Raises after ops that were not among those by which the code was found to compute each row by itself."""
        if not self.cut or self.by_rows is None:
            yield
            return
        with OpsRun() as ran:
            yield
        if other := sorted(ran.names - self.by_rows.ops - _ADDED):
            raise UsageError(
                f"code that stays eager computes otherwise than when the graph was made (aten.{other[0]}), and data-parallel "
                "ranks run it on their own rows",
                module=self.fqn,
                fix="choose between ways to compute before the call, by a number that forward reads; or use "
                "Config(data_parallel_loss='average'), with which it sees each rank's own batch",
            )

    def run(self, tensors: Sequence[Tensor], buffers: dict[str, Tensor] | None = None) -> Any:
        """The module's output, with these tensors as inputs and parameters. buffers: in place of its own, which it changes."""
        module = self.found()
        values = iter(tensors)
        leaves = [next(values) if x is None else leaf_value(x, tensors) for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        if self.function is not None:
            return self._run_function(leaves, args, kwargs)
        state = dict(zip(self.names, values, strict=True)) | (buffers or {})
        with in_autocast(self.autocast), meanwhile(_here, inside=True):
            return torch.func.functional_call(module, state, args, kwargs)

    def run_writing(self, tensors: Sequence[Tensor]) -> Any:
        """As `run`, of a module in a call of the user's: buffers that it changes or replaces stay changed."""
        if self.copies or self.function is not None or not (held := dict(self.found().named_buffers())):
            with self.watched_rows():
                return self.run(tensors) if self.function is None else self.run_watched(tensors)
        run = tapes.current()
        if not run.writes:  # a simulated rank, or a call that is computed once more
            return self.run(tensors, {name: b.clone() for name, b in held.items()})
        before = {name: (b, b._version) for name, b in held.items()}
        output = self.run(tensors)
        now = dict(self.found().named_buffers())
        for name, (buffer, version) in before.items():
            if now.get(name) is buffer and buffer._version == version:
                continue
            run.wrote.append(f"{self.fqn}.{name}")
            if run.wrote[-1] in run.read:
                raise UsageError(
                    f"this module is left eager and changes its buffer '{name}', which captured code reads",
                    module=self.fqn,
                    fix="let it return the new value, or capture the module",
                )
        return output

    def run_watched(self, tensors: Sequence[Tensor]) -> Any:
        """As `run`, of a function: with autograd on, which shows whether it reads a parameter."""
        with tapes.autograd_on():
            return self.run(tensors)

    def _run_function(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.function is not None
        versions = [x._version for x in leaves if isinstance(x, Tensor)]
        with meanwhile(_here, inside=True):
            output = self.function(*args, **kwargs)
        after, spec = pytree.tree_flatten((args, kwargs))
        same = spec == self.spec and all(a is b for a, b in zip(after, leaves, strict=True))
        if not same or versions != [x._version for x in leaves if isinstance(x, Tensor)]:
            what = f"{self.fqn} is left eager and changes one of its arguments"
            raise UsageError(what, fix="let it return what it makes")
        if any(x.requires_grad for x in pytree.tree_leaves(output) if isinstance(x, Tensor)):
            what = f"{self.fqn} is left eager and reads a parameter, whose gradient would be lost"
            raise UsageError(what, fix="pass it the parameter as an argument")
        return output


@dataclass(frozen=True)
class Constant:
    """A leaf that is no tensor."""

    value: Any


@dataclass(frozen=True)
class Held:
    """A leaf that is a module of the model's."""

    module: weakref.ReferenceType[nn.Module]

    @property
    def value(self) -> nn.Module:
        found = self.module()
        assert found is not None, "the model that code left eager belongs to is gone"
        return found


def leaf_value(leaf: Constant | Held | Size, tensors: Sequence[Tensor]) -> Any:
    return leaf.size.of(tensors) if isinstance(leaf, Size) else leaf.value


def size_leaf(value: torch.SymInt, tensors: Sequence[Tensor]) -> Size | None:
    """A size as what it is of these tensors."""
    for i, tensor in enumerate(tensors):
        for d, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                return Size(ResultSize(sympy.Integer(1), ((i, d),)))
    return None


class _Here(threading.local):
    inside = False


_here = _Here()


def in_eager_code() -> bool:
    """True if this thread runs code of a module that is left eager: its submodules run their own."""
    return _here.inside


_calls: dict[str, EagerCall] = {}
_numbers = itertools.count()


def matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """FQN -> module of the outermost submodules that a glob of `patterns` matches; ConfigError where one matches none."""
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [n for n, _ in model.named_modules() if n and fnmatch.fnmatchcase(n, pattern)]
        if not names:
            what = f"Config.eager_modules: '{pattern}' matches no submodule"
            raise ConfigError(what, fix="name it as in model.named_modules()")
        found |= {n: model.get_submodule(n) for n in names}
    return {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}


def differentiable(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which of these require a gradient where they are used now."""
    return tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)


class Order:
    """The order of calls with effects: each takes what the one before gave. last: of the last one. count: of the calls."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.count = 0


def as_node(call: EagerCall, tensors: list[Tensor], order: Order | None = None) -> Any:
    """The results of a node that makes this call. order: it runs after the last call of that."""
    key = f"{call.fqn}@{next(_numbers)}"
    _calls[key] = call
    after = None if order is None else order.last
    first, _, *results = torch.ops.megafx.eager_call(tensors, after, None, 0 if call.random else -1, key)
    if order is not None:
        order.last = first
        order.count += 1
    values = iter(results)
    assert call.out_spec is not None
    return pytree.tree_unflatten([next(values) if x is None else x.value for x in call.out_leaves], call.out_spec)


def find_call(key: str) -> EagerCall:
    return _calls[key]


def cut_rows(key: str) -> None:
    """From here on, data-parallel ranks run the call on their own rows."""
    _calls[key] = replace(_calls[key], cut=True)


def _by_rows(call: Any) -> str:
    """The rule of a call on axes that cut a batch."""
    found = _calls[call.get("key")].by_rows
    return "none: " if found is None else found.rule


declare("megafx.eager_call.default", outer=_by_rows)


def name_sizes(key: str, shapes: list[list[Any]], name: Callable[[sympy.Symbol], str]) -> None:
    """From here on, sizes of results that data decides have names. shapes: of the results in the trace, ints and SymNodes."""
    named: list[str] = []
    for (_, sizes), shape in zip(_calls[key].results, shapes, strict=True):
        named += [name(n._expr) for size, n in zip(sizes, shape, strict=True) if isinstance(size, DataSize)]
    _calls[key] = replace(_calls[key], named=tuple(named))


# -- the operator


@contextlib.contextmanager
def _drawing(call: EagerCall, seed: Tensor | None, op_id: int, tensors: Sequence[Tensor]) -> Iterator[None]:
    """torch's generators as the seed of the step says, and back as they were."""
    if not call.random:
        yield
        return
    assert seed is not None
    devices = sorted({x.device.index for x in tensors if x.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed((int(seed) + 0x9E3779B97F4A7C15 * (op_id + 1)) % 2**63)
        yield


def _generators(tensors: Sequence[Tensor]) -> list[Any]:
    """The states of the default generators of torch, Python and numpy."""
    devices = sorted({x.device.index for x in tensors if x.device.type == "cuda"})
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in devices)]
    return [*(x.numpy().tobytes() for x in of_torch), random.getstate(), str(np.random.get_state())]


def _forward(tensors: list[Tensor], after: Tensor | None, seed: Tensor | None, op_id: int, key: str) -> list[Tensor]:
    call, run = _calls[key], tapes.current()
    watched = run.ranks > 1 and not call.copies
    before = _generators(tensors) if watched else None
    with _drawing(call, seed, op_id, tensors):
        output, results, handle = tapes.record(call.run_writing, tensors, call.wanted, copy=call.copies, fqn=call.fqn)
    if watched and _generators(tensors) != before:
        raise UsageError(
            "a module that is left eager draws random numbers, which its runs on made-up inputs did not show: each rank would "
            "draw others",
            module=call.fqn,
            fix="draw with torch in every call (`torch.randn_like(x)`), or draw before the call, alike on all ranks, and pass "
            "the numbers as an argument",
        )
    wanted = [
        (
            dtype,
            tuple(
                n if isinstance(size, DataSize) else size.of(tensors) for n, size in zip(x.shape, sizes, strict=False)
            ),
        )
        for x, (dtype, sizes) in zip(results, call.results, strict=False)
    ]
    if pytree.tree_structure(output) != call.out_spec:
        raise call.refuse(str(pytree.tree_structure(output)), str(call.out_spec))
    for result, (dtype, shape) in zip(results, wanted, strict=True):
        if (result.dtype, tuple(result.shape)) != (dtype, shape):
            raise call.refuse(f"{result.dtype} {tuple(result.shape)}", f"{dtype} {shape}")
    for value, traced in zip(pytree.tree_leaves(output), call.out_leaves, strict=True):
        if isinstance(value, Tensor) != (traced is None) or (traced is not None and not _same(value, traced.value)):
            raise call.refuse(repr(value)[:100], "a tensor" if traced is None else repr(traced.value)[:100])
    with torch.no_grad():
        given = {x.untyped_storage().data_ptr() for x in tensors}
        results = [x.detach().contiguous() for x in results]
        own = [x.clone() if call.copies or x.untyped_storage().data_ptr() in given else x for x in results]
    if run.agree is not None and not call.copies:
        own = run.agree(call.fqn, own, True)
    return [torch.zeros((), dtype=torch.int64), handle, *own]


def _same(a: Any, b: Any) -> bool:
    return a is b or isinstance(b, torch.SymInt) or (type(a) is type(b) and bool(a == b))


def _backward(
    grads: list[Tensor], of: list[int], wanted: list[int], tensors: list[Tensor], handle: Tensor, key: str
) -> list[Tensor]:
    call, run = _calls[key], tapes.current()
    given_to = [(i, g) for i, g in zip(of, grads, strict=True) if run.comes_to(key, i)]
    of_given = [i for i, _ in given_to]
    found = tapes.gradients(handle, [g for _, g in given_to], of_given, wanted, call.watched_rows)
    run.used[key] = {i for i, g in zip(wanted, found, strict=True) if g is not None}
    given = {x.untyped_storage().data_ptr() for x in grads}
    made = [torch.zeros_like(tensors[i]) if g is None else g.detach() for i, g in zip(wanted, found, strict=True)]
    if run.agree is not None and not call.copies:
        made = run.agree(call.fqn, made, False)
    return [x.contiguous().clone() if x.untyped_storage().data_ptr() in given else x.contiguous() for x in made]


def _fake_results(
    tensors: list[Tensor], after: Tensor | None, seed: Tensor | None, op_id: int, key: str
) -> list[Tensor]:
    call = _calls[key]

    def of(size: ResultSize | DataSize) -> Any:
        if isinstance(size, ResultSize):
            return size.of(tensors)
        named = call.named
        return size_named(tensors[0], named[size.number]) if named else torch.library.get_ctx().new_dynamic_size()

    shapes = [(dtype, [*map(of, sizes)]) for dtype, sizes in call.results]
    numbers = [torch.empty((), dtype=torch.int64) for _ in range(2)]
    devices = ["cpu" if host else tensors[0].device for host in call.on_host or [False] * len(shapes)]
    made = [torch.empty(shape, dtype=dtype, device=d) for (dtype, shape), d in zip(shapes, devices, strict=True)]
    return [*numbers, *made]


def _fake_gradients(
    grads: list[Tensor], of: list[int], wanted: list[int], tensors: list[Tensor], handle: Tensor, key: str
) -> list[Tensor]:
    return [torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device=tensors[i].device) for i in wanted]


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, _, _, ctx.key = inputs
    ctx.wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *tensors, handle = ctx.saved_tensors
    of = [i for i, g in enumerate(grads[2:]) if g is not None]
    given = [g for g in grads[2:] if g is not None]
    into: list[Tensor | None] = [None] * len(tensors)
    if given and ctx.wanted:
        op = torch.ops.megafx.eager_call_backward
        for i, g in zip(ctx.wanted, op(given, of, ctx.wanted, tensors, handle, ctx.key), strict=True):
            into[i] = g
    return into, None, None, None, None


_BACK = "Tensor[] grads, int[] of, int[] wanted, Tensor[] tensors, Tensor handle, str key"
for _name, _taken, _implementation, _fake in (
    ("eager_call", "Tensor[] tensors, Tensor? after, Tensor? seed, int op_id, str key", _forward, _fake_results),
    ("eager_call_backward", _BACK, _backward, _fake_gradients),
):
    _library.define(f"{_name}({_taken}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megafx::{_name}", _fake, lib=_library)
torch.library.register_autograd("megafx::eager_call", _differentiate, setup_context=_saves, lib=_library)
