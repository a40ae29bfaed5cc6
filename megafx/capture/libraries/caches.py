"""Key-value caches (transformers' `Cache` objects) as inputs and outputs of graphs. Does not import transformers.

A cache in a call becomes a `CacheState`: a pytree of its tensors, beside its form (classes, flags, which attributes are
tensors). In capture the state becomes a cache again, which the model updates and which leaves the graph as another state;
after the call that is written into the user's own object, or into a new one where the model made one.

Numbers that grow with every token (`cumulative_length`) would be another graph each if they were baked in: they travel as
the length of an empty tensor [n, 0], which is a symbol in the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafx.capture.libraries.records import put_together, register
from megafx.errors import CaptureError
from megafx.ir.call_spec import leaf_name
from megafx.ir.python_state import PythonState

Form = tuple[Any, ...]  # ("tensor",), ("same",), ("number",), ("value", x), ("object", class, ((name, form), ...)), ...

_GROWING = "cumulative_length"  # prefix of the attributes that count tokens
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, type, Enum)
_WAY_OUT = "generate with a DynamicCache (cache_implementation='dynamic', the default) or with use_cache=False"


@dataclass(frozen=True, eq=False)
class CacheState:
    """The tensors of a cache by their path ('layers.0.keys'), and the rest of it."""

    form: Form
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SameCache:
    """In an output: the call's own cache number `index`."""

    index: int


@dataclass(frozen=True)
class Updated:
    """An output, what the caches of the call hold afterwards, the tensors that forward left in Python objects, by name, and
    what it wrote into tensors that it was given, by the name of the input."""

    output: Any
    caches: tuple[CacheState, ...]
    written: dict[str, list[torch.Tensor]]
    arguments: dict[str, torch.Tensor]


class OutputKey(pytree.GetAttrKey):
    """Key of what the model returns, in `Updated` and `Ordered`."""


ORDER_KEY = OutputKey("last")


@dataclass(frozen=True)
class Ordered:
    """An output, and the order of the calls with effects in the graph, none of which may be left out (ops/eager_call.py)."""

    output: Any
    last: torch.Tensor


class CacheKey(pytree.MappingKey[str, Any]):
    """Key of a tensor in a `CacheState`."""


register(
    CacheState,
    lambda s: [(CacheKey(k), v) for k, v in s.tensors.items()],
    lambda s: (s.form, tuple(s.tensors)),
    lambda values, of: CacheState(of[0], dict(zip(of[1], values, strict=True))),
)
register(SameCache, lambda s: [], lambda s: s.index, lambda _, index: SameCache(index))
register(
    Updated,
    lambda u: [(OutputKey(n) if n == "output" else pytree.GetAttrKey(n), x) for n, x in vars(u).items()],
    lambda u: None,
    lambda values, _: Updated(*values),
)
register(
    Ordered,
    lambda o: [(OutputKey("output"), o.output), (ORDER_KEY, o.last)],
    lambda o: None,
    lambda values, _: Ordered(*values),
)


_PARTS = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")  # caches, and their layers
_ONLY_REPLACE = ("DynamicLayer", "DynamicSlidingWindowLayer")  # updates make new tensors, so that none is copied first


def is_cache(value: Any, bases: tuple[str, ...] = ("Cache",)) -> bool:
    """True if a value is one of transformers' caches."""
    return any(c.__name__ in bases and c.__module__.startswith("transformers") for c in type(value).__mro__)


def states_for_caches(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """(args, kwargs, the caches among them), with states in their places. A cache that is given twice is one cache twice."""
    found: list[Any] = []

    def swap(value: Any) -> Any:
        if not is_cache(value):
            return value
        found.append(value)
        return state_of(value)

    given, ordered = tuple(map(swap, args)), isinstance(kwargs, OrderedDict)
    in_order = sorted(kwargs) if not ordered and any(map(is_cache, (*args, *kwargs.values()))) else kwargs
    named = {k: swap(kwargs[k]) for k in in_order}  # sorted: the order of call_tree
    return given, OrderedDict(named) if ordered else named, found


def state_of(value: Any, inputs: frozenset[int] = frozenset()) -> CacheState:
    """A cache -> its state. inputs: ids of tensors that need not be given back, since they are those that came in."""
    tensors: dict[str, torch.Tensor] = {}
    return CacheState(_take_apart(value, "", tensors, inputs), tensors)


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor], inputs: frozenset[int]) -> Form:
    if isinstance(value, torch.Tensor):
        if id(value) in inputs:
            return ("same",)
        tensors[path] = value
        return ("tensor",)
    grows = isinstance(value, int) and not isinstance(value, bool) and path.rpartition(".")[2].startswith(_GROWING)
    if grows or isinstance(value, torch.SymInt):
        tensors[path] = torch.empty((value, 0), dtype=torch.uint8)
        return ("number",)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_take_apart(v, f"{path}.{i}", tensors, inputs) for i, v in enumerate(value)))
    if isinstance(value, dict):
        return (dict, *((k, _take_apart(v, f"{path}.{k}", tensors, inputs)) for k, v in value.items()))
    if is_cache(value, _PARTS):
        attributes = sorted(vars(value).items())
        prefix = f"{path}." if path else ""
        return ("object", type(value), *((k, _take_apart(v, prefix + k, tensors, inputs)) for k, v in attributes))
    if isinstance(value, _PLAIN):
        return ("value", type(value), value)
    kind = type(value)
    found = f"a cache holds '{path}', a {kind.__module__}.{kind.__qualname__}, which cannot enter a graph"
    raise CaptureError(found, fix=_WAY_OUT)


class Revived:
    """The caches of a call while it is captured: live again, on the tensors that are traced."""

    def __init__(self) -> None:
        self.caches: list[Any] = []
        self.inputs: list[torch.Tensor] = []  # kept alive: their ids are compared

    def revive(self, tree: Any) -> Any:
        """Every state in a tree of arguments -> a cache, and every Record -> an object."""

        def one(value: Any) -> Any:
            if not isinstance(value, CacheState):
                return value
            self.inputs += value.tensors.values()
            self.caches.append(_write(value.form, iter(value.tensors.values()), None, copies=True))
            return self.caches[-1]

        return put_together(tree, one, (CacheState,))

    def result(self, returned: Any, written: dict[str, list[torch.Tensor]], arguments: dict[str, torch.Tensor]) -> Any:
        """What leaves the graph: `returned`, its caches as states; what the call's own caches hold; what forward wrote."""

        def one(value: Any) -> Any:
            if not is_cache(value):
                return value
            index = next((i for i, c in enumerate(self.caches) if c is value), None)
            return state_of(value) if index is None else SameCache(index)

        returned = pytree.tree_map(one, returned, is_leaf=is_cache)
        if not self.caches and not written and not arguments:
            return returned
        known = frozenset(map(id, self.inputs))
        return Updated(returned, tuple(state_of(c, known) for c in self.caches), written, arguments)


def written_arguments(out_spec: pytree.TreeSpec) -> tuple[str, ...]:
    """Names of the inputs that forward writes into."""
    result = pytree.tree_unflatten([*range(out_spec.num_leaves)], out_spec)
    result = result.output if isinstance(result, Ordered) else result
    return tuple(result.arguments) if isinstance(result, Updated) else ()


def give_back(result: Any, caches: Sequence[Any], state: PythonState, arguments: Mapping[str, torch.Tensor]) -> Any:
    """The output of a call in the user's terms: his caches and what forward writes updated, states of new caches made into
    caches. arguments: the tensors that forward writes into, by name."""
    if isinstance(result, Ordered):
        result = result.output
    own: dict[int, torch.Tensor] = {}  # what the model returns of them
    if isinstance(result, Updated):
        for name, value in result.arguments.items():
            given = arguments[name]
            given.copy_(value)
            own[id(value)] = given
    state.give(result.written if isinstance(result, Updated) else {})
    if isinstance(result, Updated):
        for given, held in zip(caches, result.caches, strict=True):
            _write(held.form, iter(held.tensors.values()), given)
        result = result.output
    return _as_the_model_returns(result, own, caches)


def _as_the_model_returns(result: Any, own: Mapping[int, torch.Tensor], caches: Sequence[Any]) -> Any:
    """The result with the caller's own tensors and caches. own: id of a value -> the argument that forward wrote it into."""

    def one(value: Any) -> Any:
        if id(value) in own:
            return own[id(value)]
        if isinstance(value, SameCache):
            return caches[value.index]
        return _write(value.form, iter(value.tensors.values()), None) if isinstance(value, CacheState) else value

    return put_together(result, one, (CacheState, SameCache))


def _write(form: Form, tensors: Iterator[torch.Tensor], old: Any, copies: bool = False) -> Any:
    """The value that `form` describes, in `old` itself where that is an object or list of this kind.

    copies: tensors that layers change in place are copied.
    """
    kind, *rest = form
    if kind == "tensor":
        return next(tensors)
    if kind == "same":
        return old
    if kind == "number":
        return next(tensors).shape[0]
    if kind == "value":
        return rest[1]
    if kind in (list, tuple):
        before = list(old) if isinstance(old, (list, tuple)) else []
        before += [None] * (len(rest) - len(before))
        items = [_write(f, tensors, o, copies) for f, o in zip(rest, before, strict=False)]
        if kind is list and isinstance(old, list):
            old[:] = items
            return old
        return kind(items)
    if kind is dict:
        return {k: _write(f, tensors, (old or {}).get(k), copies) for k, f in rest}
    made, *attributes = rest
    new = old if type(old) is made else made.__new__(made)
    for name, of in attributes:
        value = _write(of, tensors, vars(new).get(name), copies)
        if copies and isinstance(value, torch.Tensor) and made.__name__ not in _ONLY_REPLACE:
            value = value.clone()
        vars(new)[name] = value
    return new


def growing_dims(tree: Any) -> dict[str, tuple[int, ...]]:
    """Path of each tensor of the states in a tree of arguments -> its dims that grow with the sequence.

    Keys and values [batch, heads, sequence, head dim] of layers without a fixed length, and numbers.
    """
    dims: dict[str, tuple[int, ...]] = {}
    paths, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, CacheState))
    for path, state in paths:
        if isinstance(state, CacheState):
            top = leaf_name(path)
            fixed = {p.rpartition(".")[0] for p in _paths(state.form, "", "max_cache_len")}
            for name, tensor in state.tensors.items():
                owner, _, attribute = name.rpartition(".")
                if attribute.startswith(_GROWING):
                    dims[f"{top}[{name}]"] = (0,) if tensor.dim() == 2 and tensor.shape[0] else ()
                else:
                    grows = tensor.dim() == 4 and attribute in ("keys", "values") and owner not in fixed
                    dims[f"{top}[{name}]"] = (2,) if grows else ()
    return dims


def _paths(form: Form, path: str, attribute: str) -> Iterator[str]:
    """Paths of the attributes of one name in a form."""
    kind, *rest = form
    if kind in (list, tuple):
        for i, item in enumerate(rest):
            yield from _paths(item, f"{path}.{i}", attribute)
    elif kind is dict or kind == "object":
        prefix = f"{path}." if path else ""
        for name, item in rest if kind is dict else rest[1:]:
            if name == attribute:
                yield f"{prefix}{name}"
            yield from _paths(item, f"{prefix}{name}" if kind == "object" else f"{path}.{name}", attribute)
