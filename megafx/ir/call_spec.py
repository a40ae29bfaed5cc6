"""How a call of the model maps to the inputs and outputs of its graph, and the autocast state that it is made in."""

from __future__ import annotations

import contextlib
import math
import operator
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from megafx.errors import UsageError
from megafx.ir.block_masks import with_mask_arguments
from megafx.ir.python_state import PythonState, names, same


@dataclass(frozen=True)
class Leaf:
    """One leaf of (args, kwargs, loss_inputs)."""

    name: str
    tensor: bool
    dtype: torch.dtype | None = None
    dims: tuple[sympy.Expr, ...] = ()  # the size or symbol of each dim of a tensor
    scalar: bool = False  # a Python number that enters the graph as a 0-d tensor of `dtype`
    value: Any = None  # a baked constant
    asked: tuple[tuple[str, Any], ...] = ()  # (question in `ANSWERS`, answer) of what forward asked
    same: int | None = None  # the place of an earlier leaf that is the same tensor, None where none is


def same_tensors(leaves: Sequence[Any], compared: bool) -> dict[int, int]:
    """Place of a floating tensor among leaves -> that of the first one that is the same object, where code may ask `x is y`.
    compared: the model's own code does so, of any tensors."""
    first: dict[int, int] = {}
    tensors = ((i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    places = ((i, x) for i, x in tensors if compared or x.dtype.is_floating_point)
    return {i: at for i, x in places if (at := first.setdefault(id(x), i)) != i}


@dataclass(frozen=True, eq=False)
class Identity:
    """A tensor itself, without keeping it: equal to that of the same one while it is there, as its address may be another's."""

    of: weakref.ReferenceType[torch.Tensor]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.of() is other.of() is not None

    def __hash__(self) -> int:
        return hash(Identity)

    def __repr__(self) -> str:
        return "that of one tensor"


# What code may ask of a tensor, beside its shape and dtype.
ANSWERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "is_contiguous": lambda x: x.is_contiguous(),
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: None if x.grad_fn is None else type(x.grad_fn).__name__,
    "id": lambda x: Identity(weakref.ref(x)),
}


# What Python computes of numbers, by name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{n}": f for n, f in vars(operator).items() if callable(f) and not n.startswith("_")},
    **{f"builtins.{f.__name__}": f for f in (abs, pow, round, divmod)},
    **{f"math.{n}": f for n, f in vars(math).items() if callable(f)},
    **{f"torch.{n}": f for n, f in vars(torch).items() if n.startswith(("sym_", "_sym_")) and callable(f)},
}
FUNCTION_NAMES = {function: name for name, function in FUNCTIONS.items()}


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the model's output: element `index` of the graph's user outputs, or (index < 0) the constant `value`.

    number: the value says how a number is computed: ("of", index of the user output that holds it), ("is", constant),
    ("call", name of a function in FUNCTIONS, of such, ...), or ("host", () -> one that forward counts, before `give`).
    """

    index: int
    value: Any = None
    number: bool = False

    def of(self, outputs: Sequence[Any]) -> Any:
        """The leaf, from the graph's user outputs."""
        if self.index >= 0:
            return outputs[self.index]
        return _number(self.value, outputs) if self.number else self.value


def _number(form: tuple[Any, ...], outputs: Sequence[Any]) -> Any:
    kind, *rest = form
    if kind == "of":
        value = outputs[rest[0]]
        return value.item() if isinstance(value, torch.Tensor) else value
    if kind == "host":
        return rest[0]()
    return rest[0] if kind == "is" else FUNCTIONS[rest[0]](*(_number(each, outputs) for each in rest[1:]))


Flat = tuple[list[Any], pytree.TreeSpec]  # leaves and structure of a `call_tree`


def call_tree(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss_inputs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """The pytree that is flattened. The order of keywords matters only in an OrderedDict (runtime/keys.py)."""
    kwargs, loss_inputs = kwargs or {}, loss_inputs or {}
    named = kwargs.copy() if isinstance(kwargs, OrderedDict) else {k: kwargs[k] for k in sorted(kwargs)}
    named.update((name, with_mask_arguments(value)) for name, value in named.items())
    return tuple(map(with_mask_arguments, args)), named, {k: loss_inputs[k] for k in sorted(loss_inputs)}


def register_dataclasses(values: Iterable[Any]) -> bool:
    """Let pytree flatten those of these values that are instances of dataclasses; True if it now knows a further class."""
    kinds = {k for k in map(type, values) if hasattr(k, "__dataclass_fields__") and k not in pytree.SUPPORTED_NODES}
    for kind in kinds:
        register_dataclass(kind)
    return bool(kinds)


def register_dataclass(kind: type[Any]) -> None:
    """As torch's, which leaves out fields that are None: in a call they are constants."""
    names = [each.name for each in fields(kind) if each.init]
    pytree.register_pytree_node(
        kind,
        lambda value: ([getattr(value, name) for name in names], names),
        lambda parts, names: kind(**dict(zip(names, parts, strict=True))),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda value: ([(pytree.GetAttrKey(name), getattr(value, name)) for name in names], names),
    )


def leaf_name(path: Sequence[Any]) -> str:
    """Key path of `call_tree` -> 'args[0]', 'kwargs[labels]', 'loss_inputs[target]', 'kwargs[batch][ids]'."""
    top = ("args", "kwargs", "loss_inputs", "state")[path[0].idx]
    keys = (getattr(k, "idx", getattr(k, "key", getattr(k, "name", k))) for k in path[1:])
    return top + "".join(f"[{k}]" for k in keys)


def user_name(name: str) -> str:
    """Of an input as the user wrote it: 'ids' for 'kwargs[ids]'."""
    return re.sub(r"^kwargs\[(.*?)\]", r"\1", name)


@dataclass(frozen=True)
class CallSpec:
    """One captured call structure. ranges and conditions: the sizes, per symbol, that the graph is valid for."""

    in_spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    out_spec: pytree.TreeSpec
    out_leaves: tuple[OutputLeaf, ...]
    ranges: dict[sympy.Symbol, tuple[int, int]] = field(default_factory=dict)
    conditions: tuple[sympy.Basic, ...] = ()
    # what the model's code asked of sizes, as conditions; for sizes of 0 and 1 they count too
    decided: tuple[sympy.Basic, ...] = ()
    names: Mapping[sympy.Symbol, str] = field(default_factory=dict)  # of dims
    # number of ranks over which a size is cut; the model's code sees the whole
    parts: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    written: tuple[str, ...] = ()  # names of the inputs that forward writes into
    compared: bool = False  # forward may ask which of its arguments are the same tensor
    # (function of the leaves of a call, answer) of what the model's code asked of their values (capture/asked.py)
    questions: tuple[tuple[Callable[[Sequence[Any]], bool], bool], ...] = field(default=(), compare=False, repr=False)
    listing: Any = field(default=None, compare=False, repr=False)  # of the captured graph
    # sizes of 0 and 1 that the conditions exclude, and at which the model was found to compute the same -> that call
    proven: dict[frozenset[tuple[str, int]], CallSpec] = field(default_factory=dict, compare=False, repr=False)
    # the Python state that it is valid for. Values of that which are inputs of the graph are the last leaves
    state: PythonState = field(default_factory=PythonState, compare=False, repr=False)
    _verdicts: dict[tuple[int, ...], str | None] = field(default_factory=dict, compare=False, repr=False)

    def mismatch(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        loss_inputs: Mapping[str, Any] | None = None,
        flat: Flat | None = None,
    ) -> str | None:
        """Why this graph cannot serve the call, or None if it can. flat: the call's leaves and structure, where known."""
        problem = self.structure_mismatch(args, kwargs, loss_inputs, flat)
        if problem is None and not self.state.holds():
            return f"forward reads {names(self.state.changed() or self.state.counters)}, which changed"
        if problem is None and self.questions:
            leaves = pytree.tree_leaves(call_tree(args, kwargs, loss_inputs)) if flat is None else flat[0]
            if any(question(leaves) != answer for question, answer in self.questions):
                return "forward decides otherwise by the values of its arguments"
        return problem

    def structure_mismatch(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        loss_inputs: Mapping[str, Any] | None = None,
        flat: Flat | None = None,
    ) -> str | None:
        """The same without the Python state that is no input."""
        problem, bound = self._bind(args, kwargs, loss_inputs, flat)
        if problem is not None:
            return problem
        key = tuple(bound.values())
        if key not in self._verdicts:
            problem = self._size_mismatch(bound)
            if problem is None and (small := self._undecided(bound)):
                same = self.proven.get(frozenset(small.items()))
                if same is None:
                    problem = f"the model may compute something else at {small}, which the trace took for at least 2"
                else:
                    problem = same.structure_mismatch(args, kwargs, loss_inputs)
            self._verdicts[key] = problem
        return self._verdicts[key]

    def undecided(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, loss_inputs: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """Names of dims of 0 and 1 for which alone it is not known whether this graph serves the call; {} for other calls."""
        problem, bound = self._bind(args, kwargs, loss_inputs)
        if problem is not None or self._size_mismatch(bound) is not None:
            return {}
        small = self._undecided(bound)
        return {} if frozenset(small.items()) in self.proven else small

    def prove(self, small: Mapping[str, int], other: CallSpec) -> bool:
        """Let the graph serve calls with these sizes of 0 and 1 if `other`, captured for them alone, is the same graph."""
        sizes = {symbol: small[name] for symbol, name in self.names.items() if name in small}
        if other.in_spec != self.in_spec or self.listing.at(sizes) != other.listing.at({}):
            return False
        self.proven[frozenset(small.items())] = other
        self._verdicts.clear()
        return True

    def _bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        loss_inputs: Mapping[str, Any] | None,
        flat: Flat | None = None,
    ) -> tuple[str | None, dict[sympy.Symbol, int]]:
        """(what differs other than sizes, the size of each symbol)."""
        given, spec = flat or pytree.tree_flatten(call_tree(args, kwargs, loss_inputs))
        if spec.children() != self.in_spec.children()[:-1]:
            return "the structure of the call differs", {}
        leaves = [*given, *self.state.values().values()]
        bound: dict[sympy.Symbol, int] = {}  # symbol that is some dim by itself -> size of the first such dim
        for leaf, value in zip(self.leaves, leaves, strict=True):
            if isinstance(value, torch.Tensor) and value.dim() == len(leaf.dims):
                for want, size in zip(leaf.dims, value.shape, strict=True):
                    if isinstance(want, sympy.Symbol):
                        bound.setdefault(want, size)
        for leaf, value in zip(self.leaves, leaves, strict=True):
            problem = _leaf_mismatch(leaf, value, bound)
            if problem:
                return problem, bound
        if same_tensors(leaves, self.compared) != {
            i: leaf.same for i, leaf in enumerate(self.leaves) if leaf.same is not None
        }:
            return "other arguments are the same tensor", bound
        return None, bound

    def _size_mismatch(self, bound: dict[sympy.Symbol, int]) -> str | None:
        whole = {symbol: size * self.parts.get(symbol, 1) for symbol, size in bound.items()}
        for symbol, size in whole.items():
            least, greatest = self.ranges.get(symbol, (0, size))
            if not least <= size <= greatest:
                return f"size {size} is outside of [{least}, {greatest}], for which the graph is valid"
        condition = violated(self.conditions, whole, self.decided)
        if condition is None and self.parts:  # ops compute with the sizes of one rank
            condition = violated([c for c in self.conditions if c not in self.decided], bound, self.decided)
        return None if condition is None else f"the trace assumed {condition}, which does not hold for {bound}"

    def _undecided(self, bound: Mapping[sympy.Symbol, int]) -> dict[str, int]:
        """Names of dims of size 0, and of those of size 1 at which the model's code decides otherwise than in the trace."""
        small = {s: n for s, n in bound.items() if n < 2 and s in self.names and s not in self.parts}
        if not small:
            return {}
        whole = {symbol: sympy.Integer(size * self.parts.get(symbol, 1)) for symbol, size in bound.items()}
        others = (c for c in self.decided if _at(c, whole) != sympy.true)
        asked = {symbol for condition in others for symbol in condition.free_symbols}
        return {self.names[s]: n for s, n in small.items() if n == 0 or s in asked}

    def flatten(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        loss_inputs: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        flat: Flat | None = None,
    ) -> list[torch.Tensor]:
        """The tensors of a call in placeholder order (contiguous, as the graph was traced). state: the Python state that is an
        input, where the call was made before (default: as it is now). flat: as of `mismatch`."""
        problem = self.structure_mismatch(args, kwargs, loss_inputs, flat) if state is None else None
        if problem:
            raise UsageError(f"this call is not the one that was captured: {problem}")
        tensors = []
        given = pytree.tree_leaves(call_tree(args, kwargs, loss_inputs)) if flat is None else flat[0]
        values = self.state.values() if state is None else state
        for leaf, value in zip(self.leaves, [*given, *values.values()], strict=True):
            if leaf.scalar:
                tensors.append(torch.tensor(value, dtype=leaf.dtype))
            elif leaf.tensor:
                tensors.append(value if value.is_contiguous() else value.contiguous())
        return tensors

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's output from the graph's user outputs."""
        return pytree.tree_unflatten([leaf.of(outputs) for leaf in self.out_leaves], self.out_spec)


def _leaf_mismatch(leaf: Leaf, value: Any, bound: dict[sympy.Symbol, int]) -> str | None:
    if leaf.scalar:
        return None if isinstance(value, (int, float)) else f"{leaf.name} is no longer a number"
    if not leaf.tensor:
        return (
            None
            if same(comparable(value), comparable(leaf.value))
            else f"{leaf.name} is {value!r}, captured as {leaf.value!r}"
        )
    if not isinstance(value, torch.Tensor):
        return f"{leaf.name} is not a tensor"
    if value.dtype != leaf.dtype:
        return f"{leaf.name} is {value.dtype}, captured as {leaf.dtype}"
    if value.dim() != len(leaf.dims):
        return f"{leaf.name} has {value.dim()} dims, captured with {len(leaf.dims)}"
    for question, answer in leaf.asked:
        if (now := ANSWERS[question](value)) != answer:
            return f"forward asks for {question} of {leaf.name}: {now!r}, captured as {answer!r}"
    for dim, (want, size) in enumerate(zip(leaf.dims, value.shape, strict=True)):
        if isinstance(want, sympy.Symbol):
            want = bound[want]
        elif not want.is_Integer:
            want = want.xreplace({s: sympy.Integer(n) for s, n in bound.items()})
        if int(want) != size:
            return f"dim {dim} of {leaf.name} is {size}, captured as {want}"
    return None


def comparable(value: Any) -> Any:
    """A set as text, in an order of its own; another constant itself."""
    sets = isinstance(value, (set, frozenset))
    return f"{type(value).__name__} of {', '.join(sorted(map(repr, value)))}" if sets else value


def violated(
    conditions: Sequence[sympy.Basic], bound: Mapping[sympy.Symbol, int], decided: Collection[sympy.Basic]
) -> sympy.Basic | None:
    """The first condition that is false for these sizes. decided: those that the model's code asked about.

    Of the other ones all but equations are tried at 2 for sizes of 0 and 1: they are ops' own, and say how memory is laid out.
    """
    least_2 = {symbol: sympy.Integer(max(size, 2)) for symbol, size in bound.items()}
    sizes = {symbol: sympy.Integer(size) for symbol, size in bound.items()}
    exact = lambda c: c.is_Equality or c in decided
    return next((c for c in conditions if _at(c, sizes if exact(c) else least_2) == sympy.false), None)


def _at(condition: sympy.Basic, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> sympy.Basic:
    """The condition at these sizes. False where torch's Mod refuses a negative number (torch 2.11)."""
    try:
        return condition.xreplace(sizes)
    except AssertionError:
        return sympy.false


# -- autocast: part of what a call means. Off wherever graphs are made or run, since they hold its casts as nodes: an op that
# ran under it once more would compute in another dtype than the graph says.

_DEVICE_TYPES = ("cpu", "cuda")


def ambient_autocast() -> list[dict[str, Any]]:
    """The autocast contexts that the caller is in, as arguments of torch.autocast."""
    caches = torch.is_autocast_cache_enabled()
    enabled = [kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    return [{"device_type": d, "dtype": torch.get_autocast_dtype(d), "cache_enabled": caches} for d in enabled]


@contextlib.contextmanager
def in_autocast(contexts: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within these contexts, as `ambient_autocast` gives them, whatever the caller is in."""
    with contextlib.ExitStack() as stack:
        if ambient_autocast() != [*contexts]:
            stack.enter_context(no_autocast())
            for context in contexts:
                stack.enter_context(torch.autocast(**context))
        yield


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Autocast off, whatever the caller is in."""
    with contextlib.ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
