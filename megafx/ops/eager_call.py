"""Submodules that stay eager inside of a captured graph (`Config.eager_modules`): what torch.export cannot trace.

A call of such a module is one node of the graph:

    megafx.eager_call(Tensor[] inputs and parameters, seed, op id, key) -> Tensor[]

which runs the module's own code when the graph runs. It has no sharding rule: every rank computes it alike, on whole operands,
and has complete gradients of its parameters. Its gradient runs the module once more, with autograd: buffers must not change,
and random numbers come from the seed of the step.

Export has to know the sizes of its results: the module is run twice, on made-up inputs of two sets of sizes. A dim of a result
is a product of dims of the inputs, times a number, that holds for both.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.errors import CaptureError, ConfigError, UsageError
from megafx.ir.call_spec import ambient_autocast

MADE_UP = ((5, 7, 11, 13, 17, 19, 23), (29, 31, 37, 41, 43, 47, 53))  # sizes of the two runs, one for each symbol
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
class EagerCall:
    """One call of one module. The first tensors are leaves of (args, kwargs), the others its parameters.

    leaves: of the arguments, with None where a tensor goes. results: dtype and sizes of each tensor that it returns, and what
    stands in the other places of its output. random: whether it draws numbers.
    """

    module: weakref.ReferenceType[nn.Module]
    fqn: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    autocast: tuple[dict[str, Any], ...]
    results: tuple[tuple[torch.dtype, tuple[ResultSize, ...]], ...] = ()
    out_spec: pytree.TreeSpec | None = None
    out_leaves: tuple[Any, ...] = ()
    random: bool = False

    def run(self, tensors: Sequence[Tensor], buffers: dict[str, Tensor] | None = None) -> Any:
        """The module's output, with these tensors as inputs and parameters."""
        module = self.module()
        assert module is not None, f"the model that '{self.fqn}' belongs to is gone"
        values = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(values) if x is None else x.value for x in self.leaves], self.spec)
        own = {n: b.clone() for n, b in module.named_buffers()} if buffers is None else buffers
        state = dict(zip(self.names, values, strict=True)) | own
        with contextlib.ExitStack() as stack:
            for context in self.autocast:
                stack.enter_context(torch.autocast(**context))
            versions = {name: b._version for name, b in own.items()}
            output = torch.func.functional_call(module, state, args, kwargs)
        for name, before in versions.items():
            if own[name]._version != before:
                raise UsageError(
                    f"this module is left eager and changes its buffer '{name}', which would happen twice in training",
                    module=self.fqn,
                    fix="let it return the new value, or capture the module",
                )
        return output


@dataclass(frozen=True)
class Constant:
    """A leaf that is no tensor."""

    value: Any


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


class LeftEager:
    """A submodule whose calls are nodes of what is traced. calls: how many there were."""

    def __init__(self, module: nn.Module, fqn: str) -> None:
        self.module, self.fqn, self.calls = module, fqn, 0
        self.buffers = dict(module.named_buffers())  # as they are before capture makes fakes of them

    def forward_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What the module's forward is while a model is traced."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            vars(self.module)["forward"] = original
            try:
                call, tensors = _probed_call(self.module, self.fqn, self.buffers, args, kwargs)
            finally:
                vars(self.module)["forward"] = forward
            self.calls += 1
            return as_node(call, tensors)

        return forward

    def note(self, whole: int) -> str:
        """What was left eager. whole: the number of the model's parameters."""
        own = sum(p.numel() for p in self.module.parameters())
        return (
            f"left eager: {self.calls} calls run its own code on every rank, on whole tensors; {own} parameters "
            f"({own / max(whole, 1):.1%} of the model's) are stored whole"
        )


def _probed_call(
    module: nn.Module, fqn: str, buffers: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[EagerCall, list[Tensor]]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves):
        what = "a module that is left eager gets a number that depends on sizes"
        raise CaptureError(what, module=fqn, fix="let it read the size from a tensor")
    inputs = [x for x in leaves if isinstance(x, Tensor)]
    parameters = dict(module.named_parameters())
    constants = tuple(None if isinstance(x, Tensor) else Constant(x) for x in leaves)
    call = EagerCall(weakref.ref(module), fqn, spec, constants, tuple(parameters), tuple(ambient_autocast()))
    tensors = [*inputs, *parameters.values()]
    return _probed(call, tensors, buffers), tensors


def eager_call_of(module: nn.Module, name: str, args: tuple[Any, ...]) -> Any:
    """module(*args) as one node of what is traced. The module has to live as long as the graph; name: for messages."""
    return as_node(*_probed_call(module, name, {}, args, {}))


def as_node(call: EagerCall, tensors: list[Tensor]) -> Any:
    """The results of a node that makes this call."""
    key = f"{call.fqn}@{next(_numbers)}"
    _calls[key] = call
    values = iter(torch.ops.megafx.eager_call(tensors, None, 0 if call.random else -1, key))
    assert call.out_spec is not None
    return pytree.tree_unflatten([next(values) if x is None else x.value for x in call.out_leaves], call.out_spec)


# -- what comes out


def _probed(call: EagerCall, tensors: list[Tensor], buffers: dict[str, Tensor]) -> EagerCall:
    """The call with what it returns, found by running it on made-up tensors."""
    runs = []
    state = torch.get_rng_state()
    try:
        for sizes in MADE_UP:
            values = made_up(tensors, sizes)
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                meta = {n for n, b in buffers.items() if b.device.type == "meta"}
                own = {n: torch.ones_like(b, device="cpu") if n in meta else b.clone() for n, b in buffers.items()}
                before = torch.get_rng_state()
                output = call.run(values, own)
                random = not torch.equal(before, torch.get_rng_state())
            leaves, spec = pytree.tree_flatten(output)
            runs.append((values, leaves, spec))
    finally:
        torch.set_rng_state(state)
    (first, leaves, spec), (second, others, other_spec) = runs
    if spec != other_spec:
        what = "a module that is left eager returns another structure for other inputs"
        raise CaptureError(what, module=call.fqn, fix="return as many tensors in every case")
    results: list[tuple[torch.dtype, tuple[ResultSize, ...]]] = []
    out_leaves: list[Constant | None] = []
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, Tensor):
            dims = zip(a.shape, b.shape, strict=True) if a.dim() == b.dim() else [(1, -1)]
            results.append((a.dtype, tuple(_size(call, m, n, first, second) for m, n in dims)))
            out_leaves.append(None)
        else:
            out_leaves.append(Constant(a))
    return replace(call, results=tuple(results), out_spec=spec, out_leaves=tuple(out_leaves), random=random)


def made_up(tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
    """Real tensors like these; their k-th symbol is sizes[k]. Numbers are normal, indices 0, truth values True."""
    symbols: dict[sympy.Symbol, int] = {}
    made = []
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors:
            shape = []
            for size in tensor.shape:
                if isinstance(size, torch.SymInt):
                    expr = size.node.expr
                    for symbol in sorted(expr.free_symbols, key=str):
                        symbols.setdefault(symbol, sizes[len(symbols) % len(sizes)])
                    shape.append(int(expr.xreplace({s: sympy.Integer(n) for s, n in symbols.items()})))
                else:
                    shape.append(int(size))
            if tensor.dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(tensor.dtype)
            else:
                value = torch.full(shape, int(tensor.dtype == torch.bool), dtype=tensor.dtype)
            made.append(value.to(tensor.device))
    return made


def _size(call: EagerCall, a: int, b: int, first: list[Tensor], second: list[Tensor]) -> ResultSize:
    """What dim is a for the first tensors and b for the second."""
    if a == b:
        return ResultSize(sympy.Rational(a), ())
    varying: dict[tuple[int, int], tuple[int, int]] = {}
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        for d, pair in enumerate(zip(x.shape, y.shape, strict=True)):
            if pair[0] != pair[1] and pair not in varying.values():
                varying[i, d] = pair
    for count in range(1, len(varying) + 1):
        for dims in itertools.combinations(varying, count):
            one, two = (math.prod(varying[k][j] for k in dims) for j in (0, 1))
            if a * two == b * one:
                return ResultSize(sympy.Rational(a, one), dims)
    raise CaptureError(
        f"the size of a result depends on data: {a} and {b} for made-up inputs",
        module=call.fqn,
        fix="only modules whose results have sizes that the inputs decide can be left eager: return whole tensors and a mask",
    )


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


def _forward(tensors: list[Tensor], seed: Tensor | None, op_id: int, key: str) -> list[Tensor]:
    call = _calls[key]
    with torch.no_grad(), _drawing(call, seed, op_id, tensors):
        results = [x for x in pytree.tree_leaves(call.run(tensors)) if isinstance(x, Tensor)]
    for result, (dtype, sizes) in zip(results, call.results, strict=True):
        wanted = tuple(size.of(tensors) for size in sizes)
        if (result.dtype, tuple(result.shape)) != (dtype, wanted):
            raise UsageError(
                f"a module that is left eager returned {result.dtype} {tuple(result.shape)}, in the trace {dtype} {wanted}",
                module=call.fqn,
                fix="only modules whose results have sizes that the inputs decide can be left eager",
            )
    given = {x.untyped_storage().data_ptr() for x in tensors}
    return [x.contiguous().clone() if x.untyped_storage().data_ptr() in given else x.contiguous() for x in results]


def _backward(
    grads: list[Tensor],
    of: list[int],
    wanted: list[int],
    tensors: list[Tensor],
    seed: Tensor | None,
    op_id: int,
    key: str,
) -> list[Tensor]:
    call = _calls[key]
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    with torch.enable_grad(), _drawing(call, seed, op_id, tensors):
        results = [x for x in pytree.tree_leaves(call.run(leaves)) if isinstance(x, Tensor)]
    pairs = [(results[i], g) for i, g in zip(of, grads, strict=True) if results[i].requires_grad]
    into = [leaves[i] for i in wanted]
    if not pairs:
        return [torch.zeros_like(x) for x in into]
    found = torch.autograd.grad([r for r, _ in pairs], into, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(into, found, strict=True)]


def _fake_results(tensors: list[Tensor], seed: Tensor | None, op_id: int, key: str) -> list[Tensor]:
    shapes = [(dtype, [size.of(tensors) for size in sizes]) for dtype, sizes in _calls[key].results]
    return [torch.empty(shape, dtype=dtype, device=tensors[0].device) for dtype, shape in shapes]


def _fake_gradients(
    grads: list[Tensor], of: list[int], wanted: list[int], tensors: list[Tensor], *rest: Any
) -> list[Tensor]:
    return [torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device=tensors[i].device) for i in wanted]


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, seed, ctx.op_id, ctx.key = inputs
    ctx.wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
    ctx.save_for_backward(*tensors, *([] if seed is None else [seed]))
    ctx.count = len(tensors)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = [*ctx.saved_tensors]
    tensors, seed = saved[: ctx.count], (saved[ctx.count] if len(saved) > ctx.count else None)
    of = [i for i, g in enumerate(grads) if g is not None]
    given = [g for g in grads if g is not None]
    into: list[Tensor | None] = [None] * ctx.count
    if given and ctx.wanted:
        op = torch.ops.megafx.eager_call_backward
        for i, g in zip(ctx.wanted, op(given, of, ctx.wanted, tensors, seed, ctx.op_id, ctx.key), strict=True):
            into[i] = g
    return into, None, None, None


_CALL = "Tensor[] tensors, Tensor? seed, int op_id, str key"
for _name, _taken, _implementation, _fake in (
    ("eager_call", _CALL, _forward, _fake_results),
    ("eager_call_backward", f"Tensor[] grads, int[] of, int[] wanted, {_CALL}", _backward, _fake_gradients),
):
    _library.define(f"{_name}({_taken}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megafx::{_name}", _fake, lib=_library)
torch.library.register_autograd("megafx::eager_call", _differentiate, setup_context=_saves, lib=_library)
