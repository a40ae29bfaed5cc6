"""Objects that torch.export takes for no containers, as such: of classes of the user, dicts and lists of classes of their own.

In a call and in what forward returns each of them is a `Record`, a pytree of its attributes and items. In the trace, and after
a call, that is an object of the user's class again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafx.errors import CaptureError
from megafx.ir.call_spec import comparable, register_dataclasses
from megafx.ir.python_state import ABSENT, PLAIN, items_of, put_items, same

LEAVES = (torch.Tensor, Enum, torch.memory_format, torch.layout, *PLAIN)  # of the arguments of a call, beside sets
_STRUCTURE = (torch.dtype, torch.device, torch.layout, torch.memory_format, type, Enum)
_OF_OTHERS = ("torch", "transformers", "numpy", "builtins", "megafx")  # whose objects are no records of tensors


@dataclass(frozen=True)
class Kept:
    """A value that torch.export takes for none. It is part of the structure."""

    value: Any


@dataclass(frozen=True)
class Shape:
    """In an output: a torch.Size, which would be a tuple."""

    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class Record:
    """An object of a class of the user's, a SimpleNamespace, a UserDict, a distribution; a dict or list of its own class.

    names: of its attributes; keys: of its items; values: of both."""

    kind: type[Any]
    names: tuple[str, ...]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def instance(self, one: Callable[[Any], Any]) -> Any:
        """A new object. one: makes a value that of the user."""
        values = [*map(one, self.values)]
        items = values[len(self.names) :]
        base: Any = next(base for base in (*_CONTAINERS, SimpleNamespace, object) if issubclass(self.kind, base))
        made: Any = base.__new__(self.kind, *([items] if base is tuple else []))
        if base is list:
            list.extend(made, items)
        elif isinstance(made, dict):
            put_items(made, dict(zip(self.keys, items, strict=True)))
        for name, value in zip(self.names, values, strict=False):
            if isinstance(slot := getattr(self.kind, name, None), MemberDescriptorType):
                slot.__set__(made, value)
            else:
                vars(made)[name] = value
        return made


@dataclass(frozen=True)
class Withheld:
    """In place of what an argument holds beside its tensors and plain values: a tokenizer's own view of a batch."""

    name: str
    kind: str

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"forward reads {self.name} of an argument, a {self.kind}, which cannot enter a graph",
            fix="compute what forward needs of it before the call, and pass that",
        )

    __getattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __contains__ = _refuse


_CONTAINERS = (OrderedDict, dict, list, tuple)


def is_record(value: Any) -> bool:
    """True if this is an object whose attributes are all that it is: of a plain class of the user's, and its like."""
    kind = type(value)
    known = kind in pytree.SUPPORTED_NODES or isinstance(value, (torch.Tensor, type, Enum, BaseException))
    if kind is SimpleNamespace or kind.__module__.startswith("torch.distributions."):
        return True
    if known or callable(value) or kind.__new__ is not object.__new__ or attributes_of(value) is None:
        return False
    return kind.__module__.partition(".")[0] not in _OF_OTHERS and "Cache" not in kind.__name__


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object holds in its `__dict__` and in slots; None if it can hold nothing."""
    classes = type(value).__mro__
    slots = [name for each in classes for name, x in vars(each).items() if isinstance(x, MemberDescriptorType)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return dict(getattr(value, "__dict__", {})) | {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _is_of_its_own(value: Any) -> bool:
    """True of a dict, list or tuple of another class that pytree does not know, and of a UserDict, as tokenizers give."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES or isinstance(value, (torch.Size, defaultdict)):
        return False
    return isinstance(value, UserDict) or (isinstance(value, _CONTAINERS) and not kind.__module__.startswith("megafx"))


def taken_apart(tree: Any, structure: bool = False, around: frozenset[int] = frozenset()) -> Any:
    """A tree with a Record for each object that is one. structure: as in `kept`. around: objects that are being taken apart."""

    def one(value: Any) -> Any:
        if structure and isinstance(value, torch.Size):
            return Shape(tuple(value))
        if id(value) in around or not (is_record(value) or _is_of_its_own(value)):
            return Kept(value) if structure and isinstance(value, _STRUCTURE) else value
        kind, attributes = type(value), attributes_of(value) or {}
        if isinstance(value, UserDict):
            of = {
                n: f"'{n}'"
                for n, x in attributes.items()
                if n != "data" and not all(map(is_leaf, pytree.tree_leaves(x)))
            }
            attributes |= {n: Kept(Withheld(name, kind.__qualname__)) for n, name in of.items()}
        items: Mapping[Any, Any] = items_of(value) if isinstance(value, dict) else {}
        if isinstance(value, (list, tuple)):
            items = dict(enumerate([*super(kind, value).__iter__()]))
        parts = [*attributes.values(), *items.values()]
        while register_dataclasses(pytree.tree_leaves(parts)):
            pass
        inside = around | {id(value)}
        return Record(kind, (*attributes,), (*items,), tuple(taken_apart(x, structure, inside) for x in parts))

    return pytree.tree_map(one, tree, is_leaf=lambda x: structure and isinstance(x, torch.Size))


def kept(output: Any) -> Any:
    """An output with what torch.export would refuse in it (dtypes, devices, members of an Enum, objects) as structure."""
    return taken_apart(output, structure=True)


def put_together(tree: Any, others: Callable[[Any], Any] = lambda x: x, kinds: tuple[type, ...] = ()) -> Any:
    """The reverse of `taken_apart`, with new objects. others: what is made of other leaves. kinds: of nodes that are leaves."""

    def one(value: Any) -> Any:
        if isinstance(value, Record):
            return value.instance(lambda part: put_together(part, others, kinds))
        if isinstance(value, Shape):
            return torch.Size(value.sizes)
        return value.value if isinstance(value, Kept) else others(value)

    return pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, (Record, Kept, Shape, *kinds)))


def is_leaf(value: Any) -> bool:
    """True of a leaf that an argument of a call may have."""
    return isinstance(value, LEAVES) or (
        isinstance(value, (set, frozenset)) and all(isinstance(x, LEAVES[1:]) for x in value)
    )


# -- what forward changes of its arguments


class Given:
    """The arguments of a call, as they are before forward runs."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.leaves = tree, _by_path(tree)

    def refuse_changes(self) -> None:
        """Raise if forward has changed a container or object that it was given: calls of a graph would not."""
        now = _by_path(self.tree)
        for path in {**self.leaves, **now}:
            if not same(now.get(path, ABSENT), self.leaves.get(path, ABSENT)):
                raise self._changed(path)

    def _changed(self, path: tuple[Any, ...]) -> CaptureError:
        held, keys = self.tree, list[Any]()
        with contextlib.suppress(LookupError, AttributeError):  # what is not there any more
            for key in path:
                part = key.get(held)
                if len(keys) > 1 and key is path[-1] and not isinstance(part, set):
                    break  # a leaf, of the container that has changed
                held = part
                keys.append(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))))
        kind = type(held).__name__
        _, top, *rest = keys
        name = (f"'{top}'" if isinstance(top, str) else f"number {top}") + "".join(f"[{key!r}]" for key in rest)
        how = f"{kind}(...)" if kind in ("list", "dict") else "copy.copy(...)"
        return CaptureError(
            f"forward changes its argument {name}, a {kind} of the caller's",
            fix=f"change a copy of it ({how}), and return what is to be seen outside",
        )


def _by_path(tree: Any) -> dict[Any, Any]:
    leaves = pytree.tree_flatten_with_path(taken_apart(tree))[0]
    return {path: comparable(x) for path, x in leaves}


def register(kind: type[Any], parts: Callable[[Any], list[Any]], rest: Callable[[Any], Any], make: Any) -> None:
    """parts: (key, value) of each part; rest: what is structure; make: of the parts' values and that."""
    pytree.register_pytree_node(
        kind,
        lambda x: ([value for _, value in parts(x)], rest(x)),
        make,
        flatten_with_keys_fn=lambda x: (parts(x), rest(x)),
    )


register(Kept, lambda k: [], lambda k: k.value, lambda _, value: Kept(value))
register(
    Shape,
    lambda s: [(pytree.SequenceKey(i), n) for i, n in enumerate(s.sizes)],
    lambda s: None,
    lambda sizes, _: Shape(tuple(sizes)),
)
register(
    Record,
    lambda r: [*zip((*map(pytree.GetAttrKey, r.names), *map(pytree.MappingKey, r.keys)), r.values, strict=True)],
    lambda r: (r.kind, r.names, r.keys),
    lambda values, of: Record(of[0], of[1], of[2], tuple(values)),
)
