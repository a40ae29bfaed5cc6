"""Which graph serves a call: everything that capture bakes in, and nothing that it leaves dynamic.

A key holds the structure of the call, the kinds of its tensors and its Python values, train/eval of each module, grad mode,
autocast state, and dtype, device and requires_grad of each parameter. Sizes are not in it: `CallSpec.mismatch` compares
those that a graph is specialised on, and the Python state that forward read (ir/python_state.py).
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import math
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sympy
import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megafx.capture.errors import is_other_form, refuse_forms, refuse_leaves
from megafx.capture.libraries.caches import CacheState, states_for_caches
from megafx.capture.libraries.records import LEAVES, is_leaf, put_together, taken_apart
from megafx.distributed.board import AUTOCAST, GRADIENTS, TRAINING, WANTED
from megafx.distributed.tensor import TPTensor
from megafx.errors import CaptureError, UsageError
from megafx.ir.call_spec import (
    CallSpec,
    Flat,
    ambient_autocast,
    call_tree,
    comparable,
    leaf_name,
    register_dataclasses,
    user_name,
)
from megafx.ir.program import Input, Program
from megafx.ir.python_state import of_parameters, whole, without_gradient
from megafx.runtime.cache_shard import CacheShard


@dataclass(frozen=True)
class Call:
    """One call of the model, normalised; names, leaves and spec of `call_spec.call_tree`; the caches that it was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_inputs: dict[str, Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    caches: list[Any]
    part: str = ""  # the FQN of the submodule that is called, '' for the whole model
    # what Python objects hold that is an input of the graph that serves the call, once that is known
    state: Mapping[str, Any] | None = None
    under_no_grad: bool = False  # gradients are off but where forward switches them on
    # how names begin of inputs that ranks do not compare, as each has its own part of them; '' where there are none
    received: str = ""

    @staticmethod
    def of(
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss_inputs: Mapping[str, Any] | None = None,
        part: str = "",
        received: str = "",
    ) -> Call:
        args, kwargs, caches = states_for_caches(args, kwargs)
        tree = call_tree(args, kwargs, loss_inputs)
        leaves, spec = pytree.tree_flatten(tree)
        while register_dataclasses(leaves):
            leaves, spec = pytree.tree_flatten(tree)
        if not all([isinstance(x, LEAVES) for x in leaves]):
            tree = taken_apart(tree)
            leaves, spec = pytree.tree_flatten(tree)
        if any([isinstance(x, (DTensor, np.generic)) for x in leaves]):
            tree = pytree.tree_map(_plain, tree)
            leaves, spec = pytree.tree_flatten(tree)
        if any(map(is_other_form, leaves)):
            paths, _ = pytree.tree_flatten_with_path(tree)
            refuse_forms((user_name(leaf_name(path)), x) for path, x in paths)
        if not all([isinstance(x, LEAVES) or is_leaf(x) for x in leaves]):
            paths, _ = pytree.tree_flatten_with_path(tree)
            refuse_leaves((leaf_name(path), x) for path, x in paths)
        return Call(*tree, leaves, spec, caches, part, received=received)

    @property
    def tree(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        return self.args, self.kwargs, self.loss_inputs

    @property
    def flat(self) -> Flat:
        return self.leaves, self.spec

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with the caches that were given, and objects."""
        caches = iter(self.caches)
        back = lambda x: next(caches) if isinstance(x, CacheState) else x
        args, kwargs = put_together((self.args, self.kwargs), back, (CacheState,))
        return args, kwargs

    def without_gradients(self) -> Call:
        """The same call, of whose tensors no gradient is wanted."""
        leaves = [without_gradient(x) for x in self.leaves]
        args, kwargs, loss_inputs = pytree.tree_unflatten(leaves, self.spec)
        return replace(self, args=args, kwargs=kwargs, loss_inputs=loss_inputs, leaves=leaves)

    def names(self) -> list[str]:
        paths, _ = pytree.tree_flatten_with_path((self.args, self.kwargs, self.loss_inputs))
        return [leaf_name(path) for path, _ in paths]

    def differentiable(self) -> frozenset[str]:
        """Names of the tensors that require a gradient; the others are data."""
        pairs = zip(self.names(), self.leaves, strict=True)
        return frozenset(n for n, x in pairs if isinstance(x, torch.Tensor) and x.requires_grad)

    def numbers(self) -> list[int]:
        """What ranks compare of each call apart from its text: sizes, Python numbers, and values where they are on the CPU."""
        return numbers_of(x for _, x in self._compared()) if self.received else numbers_of(self.leaves)

    def labels(self) -> list[str]:
        """Names of these."""
        return [label for name, value in self._compared() for label in labels_of({name: value})]

    def _compared(self) -> list[tuple[str, Any]]:
        """(name as the user wrote it, leaf) of those that ranks compare."""
        pairs = zip(map(user_name, self.names()), self.leaves, strict=True)
        return [(name, x) for name, x in pairs if not self.received or not name.startswith(self.received)]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name as the user wrote it, tensor): 'ids' rather than 'kwargs[ids]'. Without shards of caches."""
        return [(n, v) for n, v in self._compared() if isinstance(v, torch.Tensor) and not isinstance(v, CacheShard)]


def numbers_of(values: Iterable[Any]) -> list[int]:
    """Sizes of tensors, hashes of their values where they are on the CPU, and hashes of Python numbers."""
    found: list[int] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += value.shape
            if type(value) is torch.Tensor and value.device.type == "cpu":
                few = value.detach().reshape(-1)[:COMPARED].contiguous()  # a column of a matrix is not
                found.append(zlib.crc32(few.view(torch.uint8).numpy().data))
        elif _is_number(value):
            found.append(hash(value))
    return found


def labels_of(named: Mapping[str, Any]) -> list[str]:
    """Names of what `numbers_of` finds."""
    found: list[str] = []
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            found += [f"size {dim} of '{name}'" for dim in range(value.dim())]
            if type(value) is torch.Tensor and value.device.type == "cpu":
                found.append(f"the hash of the values of '{name}'")
        elif _is_number(value):
            found.append(f"the hash of '{name}'")
    return found


def bind_sizes(spec: CallSpec, call: Call) -> dict[sympy.Symbol, int]:
    """The sizes of this call for each symbol of the graph."""
    bound: dict[sympy.Symbol, int] = {}
    for leaf, value in zip(spec.leaves, call.leaves, strict=False):  # state, which comes last, has fixed sizes
        for dim, size in enumerate(leaf.dims):
            if isinstance(size, sympy.Symbol):
                bound[size] = value.shape[dim]
    return bound


class Normalizer:
    """Spellings of one call become one: positional arguments by name, arguments left at None as if not given.

    forward: bound, so that `self` is none of its arguments.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())
        kinds = {p.kind for p in parameters}
        self.by_name = inspect.Parameter.VAR_POSITIONAL not in kinds and inspect.Parameter.POSITIONAL_ONLY not in kinds
        self.named = frozenset(p.name for p in parameters)
        self.positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self.takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        self.none_by_default = frozenset(p.name for p in parameters if p.default is None)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.by_name and len(args) <= len(self.positional):
            given = dict(zip(self.positional, args, strict=False))
            if not given.keys() & kwargs.keys():  # given twice: forward itself complains
                args, kwargs = (), given | kwargs
        kwargs = {k: v for k, v in kwargs.items() if v is not None or k not in self.none_by_default}
        more = [name for name in kwargs if name not in self.named] if self.takes_any else []
        if more != sorted(more):  # forward(**options) may go through them in the order in which they are given
            kwargs = OrderedDict((name, kwargs[name]) for name in (*sorted(kwargs.keys() - {*more}), *more))
        return args, kwargs


COMPARED = 512  # elements of an input, its first ones: a few microseconds


def _plain(value: Any) -> Any:
    """A parameter, or what was computed of some, whole; a number of numpy (a length that a loader took) as Python's."""
    return value.item() if isinstance(value, np.generic) else whole(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum))


def exact(number: Any) -> Hashable:
    """Equal for equal numbers alone: 0.0 and -0.0 are not."""
    return (number, math.copysign(1.0, number)) if isinstance(number, float) and number == 0 else number


def _leaf_kind(value: Any, grad: bool) -> Hashable:
    if isinstance(value, torch.Tensor):
        where = value.placement if isinstance(value, CacheShard) else None
        of = of_parameters(value)
        return "tensor", value.dtype, value.dim(), value.device, grad and value.requires_grad, where, of
    of_slice = isinstance(value, slice)  # of which Python 3.11 has no hash
    return type(value), repr(value) if of_slice else comparable(value)


@dataclass
class Numbers:
    """Which Python numbers vary between calls, by skeleton (the key without numbers) of the call.

    A number is baked in at first. When one is seen with a second value it becomes a 0-d input; where capture cannot do that,
    it stays baked in, one graph a value.
    """

    seen: dict[Hashable, list[Any]] = field(default_factory=dict)
    varying: dict[Hashable, set[int]] = field(default_factory=dict)
    baked: dict[Hashable, set[int]] = field(default_factory=dict)

    def classify(self, skeleton: Hashable, leaves: Sequence[Any]) -> set[int]:
        """Positions of the leaves that vary."""
        first = self.seen.setdefault(skeleton, [v if _is_number(v) else None for v in leaves])
        varying = self.varying.setdefault(skeleton, set())
        baked = self.baked.get(skeleton, set())
        for i, (old, new) in enumerate(zip(first, leaves, strict=True)):
            if old is not None and i not in varying and i not in baked and exact(old) != exact(new):
                varying.add(i)
        return varying

    def bake(self, skeleton: Hashable) -> None:
        """Give up on 0-d inputs for this skeleton."""
        self.baked.setdefault(skeleton, set()).update(self.varying.pop(skeleton, set()))


class KeyMaker:
    """Keys for the calls of one model."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self._states: dict[Hashable, int] = {}
        self._last: tuple[Hashable, int] = (None, -1)

    def intern(self, state: Hashable) -> int:
        """A small number for a long state; equal states get the same."""
        if state != self._last[0]:  # by identity of bools and dtypes, element by element: no hashing in a steady loop
            self._last = state, self._states.setdefault(state, len(self._states))
        return self._last[1]

    def skeleton(self, call: Call, state: Hashable, grad: bool) -> Hashable:
        """The key without the values of numbers."""
        kinds = tuple(type(v) if _is_number(v) else _leaf_kind(v, grad) for v in call.leaves)
        ambient = autocast_state(), torch.get_default_dtype(), default_device()
        return call.part, call.under_no_grad, call.spec, kinds, grad, self.intern(state), *ambient

    def key(self, skeleton: Hashable, call: Call) -> tuple[Hashable, frozenset[int]]:
        """(key, positions of leaves that enter as 0-d tensors)."""
        varying = frozenset(self.numbers.classify(skeleton, call.leaves))
        baked = tuple(exact(v) if _is_number(v) and i not in varying else None for i, v in enumerate(call.leaves))
        return (skeleton, baked, varying), varying


def autocast_state() -> Hashable:
    """The autocast contexts that are on."""
    return tuple([tuple(context.values()) for context in ambient_autocast()])


def default_device() -> torch.device | None:
    """Where the caller's tensors are made, if that was set (`torch.set_default_device`, `with torch.device(...)`)."""
    if not torch._C._len_torch_function_stack():
        return None
    for mode in torch.overrides._get_current_function_mode_stack():
        if type(mode).__module__.partition(".")[0] not in ("torch", "megafx"):
            raise UsageError(
                f"a call within a TorchFunctionMode ({type(mode).__qualname__}): a graph calls no functions of torch that it "
                "could see or replace",
                fix="leave the mode for the call; a TorchDispatchMode sees the ops of graphs, and forward hooks see values",
            )
    return torch.get_default_device()


def module_state(modules: Sequence[nn.Module], configs: Sequence[Any]) -> tuple[tuple[bool, ...], tuple[Any, ...]]:
    """train/eval of each module; whether transformers' configs ask for a cache."""
    return tuple([m.training for m in modules]), tuple([vars(c).get("use_cache") for c in configs])


def describe(
    call: Call, modules: Sequence[nn.Module], configs: Sequence[Any], params: Mapping[str, torch.Tensor], grad: bool
) -> str:
    """What a key holds, in lines that ranks compare, where they may have other devices than one another. params: by FQN."""
    named = list(zip(call.names(), call.leaves, strict=True))
    tensors = {n: v for n, v in named if isinstance(v, torch.Tensor)}
    values = [(n, v.type if isinstance(v, torch.device) else comparable(v)) for n, v in named if n not in tensors]
    kinds = [(n, v.dtype, v.dim(), v.device.type, getattr(v, "placement", None)) for n, v in tensors.items()]
    training, cached = module_state(modules, configs)
    asking = [c for c in cached if c is not None]  # ranks that imported transformers have one config more (`announce`)
    autocast = " and ".join(
        f"{c['device_type']} as {c['dtype']}{'' if c['cache_enabled'] else ' without a cache'}"
        for c in ambient_autocast()
    )
    frozen = [n for n, p in params.items() if not p.requires_grad]
    lines = [
        f"{call.part}{call.names()}",
        f"{values}",
        f"inputs {kinds}",
        f"{GRADIENTS}{'on where forward enters them' if call.under_no_grad else 'on' if grad else 'off'}",
        f"{TRAINING}of {sum(training)} of {len(training)} modules ({_digest(training)})",
        f"use_cache {_digest(asking)}",
        f"{AUTOCAST}{autocast or 'off'}",
        f"torch's default dtype {torch.get_default_dtype()}",
        f"{WANTED}the inputs: {', '.join(n for n, v in tensors.items() if grad and v.requires_grad)}",
        f"{WANTED}all parameters but {len(frozen)} ({_digest(frozen)}): {', '.join(frozen[:NAMED])}",
        f"parameters {_digest([(p.dtype, p.is_cuda) for p in params.values()])}",
    ]
    return "\n".join(lines)


NAMED = 200  # parameters whose names ranks tell each other: a text of some kilobytes a graph


def _digest(value: Any) -> str:
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()


def parameter_state(params: Sequence[torch.Tensor]) -> Hashable:
    """What of the parameters is baked into a graph: requires_grad, dtype, on CUDA or not."""
    return tuple([x for p in params for x in (p.requires_grad, p.dtype, p.is_cuda)])


class Wanted(set[str]):
    """Names of the inputs whose gradient is wanted."""

    def __call__(self, spec: Input) -> bool:
        return not self.isdisjoint((spec.name, *spec.aliases))


def want_state(wants: Any, program: Program, grad: bool, *, reduced: bool) -> None:
    """Add tensors in Python objects that a capture has made inputs. wants: `Wanted`; None where nothing required a gradient.
    reduced: data-parallel ranks reduce gradients, of the model's parameters alone."""
    state = program.call.state.inputs if grad and program.call is not None else {}
    found = {n: p for n, p in state.items() if isinstance(x := p.get(), torch.Tensor) and x.requires_grad}
    for name, place in found.items():
        if wants is None or (reduced and place.get().is_leaf):
            why = "data-parallel ranks would not reduce its gradient" if reduced else "no parameter and no input does"
            raise CaptureError(
                f"forward reads '{name}', which requires a gradient and is no parameter of the model; {why}",
                source=getattr(place, "line", None),
                fix="register it (model.register_parameter, or the module that holds it as a submodule)",
            )
    if isinstance(wants, Wanted):
        wants.update(f"state[{name}]" for name in found)


# -- calls inside of torch.func's transforms: graphs know backward alone, so they take no part in these

_TRANSFORMS = {"Vmap": "torch.func.vmap", "Grad": "torch.func.grad, vjp or jacrev", "Jvp": "torch.func.jvp or jacfwd"}
TRANSFORM_FIX = (
    "use a copy of the model that is not parallelized, with the values of megafx.full_state_dict(model); on one rank without "
    "a process group such calls work as they are"
)


def transform_around() -> str | None:
    """The transform of torch.func within which this call is made."""
    inner = peek_interpreter_stack()
    return None if inner is None else _TRANSFORMS.get(inner.key().name, "a transform of torch.func")


def refuse_tangents(named: Callable[[], Sequence[tuple[str, torch.Tensor]]]) -> None:
    """Raise where a tensor carries a tangent of forward-mode automatic differentiation."""
    for name, tensor in named() if forward_ad._current_level >= 0 else ():
        if not isinstance(tensor, TPTensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UsageError(
                f"forward-mode automatic differentiation: '{name}' is a dual tensor, and a graph would drop its tangent",
                fix="torch.autograd.functional.jvp, which takes two backwards instead (on one rank)",
            )


MANY = 8  # graphs for calls of one form, before the next one is noted; torch.compile makes no more


def warn_of_many(last: CallSpec, call: Call) -> None:
    """last: of the graph that was made before the one for this call."""
    why = last.mismatch(*call.tree) or "it is in no graph"
    warnings.warn(
        f"megafx has captured this model {MANY + 1} times for calls of one form, each for as long as the first: {why}. Let "
        "forward compute with what changes in each call, as a number or a tensor, and make texts, integers (int(...)), keys "
        "and objects of it outside of forward",
        stacklevel=2,
    )
