"""The Python state that a graph depends on: what forward reads while it is captured, other than its arguments and parameters.

Attributes of modules and of objects that they hold, globals, entries of dicts and lists: a capture bakes in what it finds
there. A `Place` says where a value is. A `PythonState` belongs to a graph: it tells whether all places still hold what they
held (the graph serves a call only then), and reads those that are inputs of the graph instead: numbers that vary between calls,
and tensors that were replaced.

The check of a call compares identities in a few calls of built-in functions, 40 ns a place. Only where one differs are values
compared.
"""

from __future__ import annotations

import array
import ast
import contextlib
import copy
import ctypes
import gc
import random
import re
import types
import weakref
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, contains, getitem
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from megafx.errors import SourceLine
from megafx.ir.source_lines import is_user_file

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
NUMBERS = (int, float)
# Whose attributes are their parts.
NAMESPACES = (
    *(types.SimpleNamespace, Namespace, ChainMap, UserDict, UserList),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
_OF_C: Any = ctypes.c_int.__mro__[-2]  # of all numbers, arrays and structures
ARRAYS = (np.ndarray, bytearray, array.array)
BUFFERS = (*ARRAYS, _OF_C)  # compared by their bytes
SEQUENCES = (list, tuple, deque)
REPLACED_BY = "_megafx_replaced_by"  # attribute of a parameter: the one that the model has in its place
FIRST_ADDRESS = "_megafx_first_address"  # attribute of a parameter: id() of the one that the user has made
OF_PARAMETERS = "_megafx_of_parameters"  # attribute of a tensor
_left: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()
VARIES: Any = type("Varies", (), {"__repr__": lambda self: "an input"})()


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is: item `key` of a dict or list, or attribute `key` of another object.

    The attributes of an instance are items of its `__dict__`, and a container is read past what its class overrides, so
    that a check runs no code of the user.
    """

    holder: Any
    key: Any
    name: str  # for messages, as in 'blocks.0.scale', "adapter.scaling['default']", 'train.STEP'
    line: SourceLine | None = None  # where forward reads it
    within: Place | None = None  # the holder is what that place holds at the time

    def part(self, key: Any) -> Place:
        """The place of one part of the container that is here."""
        return Place(None, key, part_name(self.name, self.get(), key), self.line, self)

    def container(self) -> Any:
        """What holds the value."""
        if self.within is None:
            return self.holder
        found = parts_of(self.within.get())
        return None if found is None else found[0]

    def get_in(self, model: Any) -> Any:
        """The value at this place of a copy of the model; of this place itself where no model holds it, as a global."""
        found = model
        for item, attribute in re.findall(r"\[(.*?)\](?=[\[.]|$)|([^.\[\]]+)", self.name):
            if attribute and not hasattr(found, attribute):
                return self.get()
            found = getattr(found, attribute) if attribute else found[ast.literal_eval(item)]
        return found

    @property
    def outermost(self) -> Place:
        """The place of the outermost container that this one is part of."""
        return self if self.within is None else self.within.outermost

    @property
    def is_item(self) -> bool:
        return isinstance(self.container(), (dict, *SEQUENCES))

    def can_be_input(self) -> bool:
        """True if a number or a tensor is there, and another could be put in its place."""
        value = self.get()
        kept = isinstance(value, NUMBERS) and not isinstance(value, bool)
        return (kept or isinstance(value, torch.Tensor)) and not isinstance(self.container(), tuple)

    def get(self) -> Any:
        """The value there now, ABSENT where there is none."""
        holder = self.container()
        try:
            kind = next((kind for kind in (dict, *SEQUENCES) if isinstance(holder, kind)), None)
            if kind is None:
                return getattr(holder, self.key, ABSENT)
            return item(holder, self.key) if kind is dict else kind.__getitem__(holder, self.key)
        except (KeyError, IndexError, TypeError):  # the last where a list is now in place of a dict
            return ABSENT
        except ValueError:
            if isinstance(holder, types.CellType):  # of a variable that has no value yet
                return ABSENT
            raise

    def set(self, value: Any) -> None:
        """Put a value there; ABSENT takes away what is there."""
        holder = self.container()
        kind = next((kind for kind in (OrderedDict, dict, list, deque) if isinstance(holder, kind)), None)
        if kind is None:
            delattr(holder, self.key) if value is ABSENT else setattr(holder, self.key, value)
        elif value is not ABSENT:
            kind.__setitem__(holder, self.key, value)
        elif isinstance(holder, dict):
            (OrderedDict if kind is OrderedDict else dict).pop(holder, self.key, None)


def item(holder: dict[Any, Any], key: Any) -> Any:
    """An item, ABSENT where there is none: a defaultdict or Counter would make it, even by dict.__getitem__."""
    return dict.get(holder, key, ABSENT)


@dataclass(frozen=True)
class Referent:
    """What a weak reference refers to. Guards may not keep it."""

    reference: weakref.ReferenceType[Any]

    @property
    def alive(self) -> bool:
        return self.reference() is not None


def same(a: Any, b: Any) -> bool:
    """True if two values mean the same to code: the same object, or equal plain values of one type (0.0 is not -0.0)."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, BUFFERS):
        return bytes(a) == bytes(b) and getattr(a, "typecode", "") == getattr(b, "typecode", "")
    return isinstance(a, PLAIN) and (repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b))


# -- what a value is made of


def leave(record: Any) -> None:
    """Note that a call has left this object of a class of the user's behind: its attributes are its parts, as the next call
    will leave another one."""
    if hasattr(record, "__dict__"):
        with contextlib.suppress(TypeError):  # of a class that has no weak references
            _left[id(record)] = record


def has_attributes_for_parts(value: Any) -> bool:
    return isinstance(value, NAMESPACES) or (value is not None and _left.get(id(value)) is value)


@dataclass(frozen=True, eq=False)
class Container:
    """A dict, list, tuple, deque, set, namespace or object that a call has left behind, as it was: its type, and its parts by
    key."""

    kind: type
    parts: Mapping[Any, Any]


def parts_of(value: Any) -> tuple[Any, Mapping[Any, Any]] | None:
    """(what holds the parts, key -> part) of a container; None for other values. A set's members are its keys."""
    if isinstance(value, types.MappingProxyType) and type(held := gc.get_referents(value)[0]) is dict:
        value = held
    if isinstance(value, dict):
        return value, items_of(value)
    if isinstance(value, SEQUENCES) and not isinstance(value, torch.Size):
        return value, dict(enumerate(list.copy(value) if isinstance(value, list) else value))
    if has_attributes_for_parts(value):
        return vars(value), vars(value)
    if isinstance(value, (set, frozenset)):
        return value, dict.fromkeys(value)
    return None


def items_of(holder: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of what a dict holds, in its order. Its class may give out something else: transformers' `ACT2FN[name]` makes a
    module of the class that is there."""
    if type(holder).__iter__ is dict.__iter__:  # asks no key for its hash: a trace has sizes there
        return dict.copy(holder)
    keys = OrderedDict.keys(holder) if isinstance(holder, OrderedDict) else dict.keys(holder)
    return {key: dict.__getitem__(holder, key) for key in keys}


def put_items(holder: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Make a dict hold these, past what its class overrides."""
    kind = OrderedDict if isinstance(holder, OrderedDict) else dict
    kind.clear(holder)
    for key, value in items.items():
        kind.__setitem__(holder, key, value)


def content_of(container: Any) -> Any:
    """A copy of what a dict, list, deque or set holds; another value itself."""
    if isinstance(container, dict):
        return items_of(container)
    return copy.copy(container) if isinstance(container, (list, deque, set)) else container


def put_back(container: Any, content: Any) -> None:
    """Make it hold that again, past what the class of a dict overrides: diffusers' configs refuse to be changed."""
    if isinstance(container, dict):
        put_items(container, content)
        return
    container.clear()
    container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


@contextlib.contextmanager
def unchanged(places: Iterable[Place]) -> Iterator[None]:
    """What is at these places now is there again afterwards, contents of containers included."""
    before = [(place, value, content_of(value)) for place in places for value in [place.get()]]
    try:
        yield
    finally:
        for place, value, content in before:
            if place.get() is not value:
                place.set(value)
            if isinstance(value, (dict, list, deque, set)):
                put_back(value, content)


def part_name(name: str, value: Any, key: Any) -> str:
    """The name of a part: 'scaling['default']', 'options.scale', 'table[Linear #1]'."""
    if has_attributes_for_parts(value):
        return f"{name}.{key}"
    if isinstance(key, torch.nn.Module):  # its text is that of all that is in it
        return f"{name}[{type(key).__name__} #{next((i for i, x in enumerate(value) if x is key), None)}]"
    return f"{name}[{key!r}]"


def snapshot(value: Any, name: str = "", varies: frozenset[str] = frozenset()) -> Any:
    """A value as it is now: containers copied, part by part, VARIES for what is named in `varies`; other values themselves."""
    if name and name in varies:
        return VARIES
    if isinstance(value, BUFFERS):
        return type(value).from_buffer_copy(value) if isinstance(value, _OF_C) else copy.copy(value)
    found = parts_of(value)
    if found is None:
        return value
    parts = {key: snapshot(part, part_name(name, value, key), varies) for key, part in found[1].items()}
    return Container(type(value), parts)


def _differences(place: Place, value: Any, wanted: Any) -> Iterator[Place]:
    """The places at and below this one that hold something else than the snapshot."""
    if wanted is VARIES:
        return
    if not isinstance(wanted, Container):
        if not same(value, wanted):
            yield place
        return
    found = parts_of(value)
    if found is None or type(value) is not wanted.kind:
        yield place
        return
    keys, wanted_keys = [*found[1]], [*wanted.parts]
    if isinstance(value, (set, frozenset)):
        if {*keys} != {*wanted_keys}:
            yield place
    elif keys != wanted_keys:  # another order, too: forward may go through a dict
        yield place
    else:
        for key, part in found[1].items():
            yield from _differences(place.part(key), part, wanted.parts[key])


def leaf_places(place: Place, wanted: Any) -> Iterator[tuple[Place, Any]]:
    """Each place at and below this one that holds no container, with its value in the snapshot."""
    if not isinstance(wanted, Container):
        yield place, wanted
        return
    for key, part in wanted.parts.items() if parts_of(place.get()) is not None else ():
        if not issubclass(wanted.kind, (set, frozenset)):
            yield from leaf_places(place.part(key), part)


# -- the state of a graph


@dataclass
class _Items:
    """Items of containers that `read` reads, and what they were. Their addresses are compared as one array of objects, which
    takes two thirds of the time of `map(is_, ...)`."""

    read: Callable[[Any, Any], Any]
    holders: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    addresses: bytes = b""

    def add(self, holder: Any, key: Any, value: Any) -> None:
        self.holders.append(holder)
        self.keys.append(key)
        self.values.append(value)

    def close(self) -> None:
        """No more are added."""
        self.addresses = np.fromiter(self.values, object, len(self.values)).tobytes()

    def are_the_same(self) -> bool:
        now = np.fromiter(map(self.read, self.holders, self.keys), object, len(self.values))
        return now.tobytes() == self.addresses


class Readable(Protocol):
    """What has a value at each call: a Place, or a number that is computed."""

    def get(self) -> Any: ...


class Writable(Protocol):
    """Something that forward leaves behind (capture/writes.py)."""

    place: Place

    leaves: list[Any]

    def values(self, left: list[Any]) -> Any: ...

    def left(self, value: Any) -> list[Any]: ...

    def give(self, value: Any) -> None: ...


@dataclass
class PythonState:
    """What a graph read at capture (guards: each place and a snapshot), and where its state inputs are read at each call."""

    guards: list[tuple[Place, Any]] = field(default_factory=list)
    inputs: Mapping[str, Readable] = field(default_factory=dict)  # by name; their values are leaves of the call
    writes: Mapping[str, Writable] = field(default_factory=dict)  # what forward leaves behind, by name
    # each a computation with numbers that forward writes, and its outcome
    decisions: Sequence[tuple[Callable[[], Any], Any]] = ()
    # how many hooks had run when forward last read the attribute of that name
    latest: Mapping[str, int] = field(default_factory=dict)
    counters: Sequence[Place] = ()  # where these numbers are
    functions: Sequence[types.FunctionType] = ()  # that forward may call: their code and their defaults count

    def __post_init__(self) -> None:
        self._without_gradient = [p for p in self.inputs.values() if not _requires_grad(p.get())]
        read = [x for place, wanted in self.guards for _, x in leaf_places(place, wanted)]
        self._constants = [x for x in read if isinstance(x, torch.Tensor) and not x.requires_grad]
        self._bind()

    def __deepcopy__(self, memo: Any) -> PythonState:
        return self  # of one model: a copy of that is captured anew

    def _bind(self) -> None:
        """Lay out what `holds` compares."""
        self._in_dicts, self._in_sequences = _Items(dict.__getitem__), _Items(getitem)
        self._in_defaults = _Items(item)
        self._objects: list[tuple[Any, str, Any]] = []
        self._absent: tuple[list[Any], list[Any]] = ([], [])
        self._containers: list[Any] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._sets: list[tuple[Any, Any]] = []
        self._orders: list[tuple[Any, list[Any]]] = []
        for place, wanted in self.guards:
            self._add(place.container(), place.key, place.get(), wanted, place.is_item)
        self._in_dicts.close()
        self._in_sequences.close()
        self._in_defaults.close()
        self._lengths = [*map(len, self._containers)]
        functions = {id(f): (Place(f, "__code__", f"{f.__qualname__}.__code__"), f) for f in self.functions}
        functions |= {id(f): (place, f) for place, wanted in self.guards if (f := _function(wanted)) is not None}
        self._functions = [*functions.values()]
        self._code = [_CODE(f) for _, f in self._functions]
        self._just_functions = [f for _, f in self._functions]
        self._without = [*{id(holder): holder for holder in self._absent[0]}.values()]
        self._sizes = [*map(len, self._without)]

    def _add(self, holder: Any, key: Any, value: Any, wanted: Any, is_item: bool) -> None:
        if wanted is VARIES:
            return
        if not is_item:
            self._objects.append((holder, key, value))
        elif value is ABSENT:
            self._absent[0].append(holder)
            self._absent[1].append(key)
        elif hasattr(type(holder), "__missing__"):
            self._in_defaults.add(holder, key, value)
        else:
            (self._in_dicts if isinstance(holder, dict) else self._in_sequences).add(holder, key, value)
        if isinstance(value, BUFFERS):
            self._arrays.append((value, wanted))
        found = parts_of(value)
        if found is None or not isinstance(wanted, Container):
            return
        inside, parts = found
        self._containers.append(inside)
        if isinstance(value, (set, frozenset)):
            self._sets.append((value, frozenset(wanted.parts)))
            return
        if isinstance(inside, dict) and len(parts) > 1:
            self._orders.append((inside, [*parts]))
        for part_key, part in parts.items():
            self._add(inside, part_key, part, wanted.parts[part_key], True)

    def holds(self) -> bool:
        """True if every place holds what it held at capture, and numbers that forward writes lead to the same decisions.
        Tensors require a gradient only if they did."""
        if torch.is_grad_enabled() and (
            any([_requires_grad(place.get()) for place in self._without_gradient])
            or any([x.requires_grad for x in self._constants])
        ):
            return False
        return (self._is_the_same() or not self.changed()) and all([same(now(), was) for now, was in self.decisions])

    def _is_the_same(self) -> bool:
        try:
            return (
                self._in_dicts.are_the_same()
                and self._in_sequences.are_the_same()
                and self._in_defaults.are_the_same()
                and ([*map(len, self._without)] == self._sizes or self._still_absent())
                and all([(now := getattr(o, k, ABSENT)) is v or same(now, v) for o, k, v in self._objects])
                and [*map(len, self._containers)] == self._lengths
                and [*map(_CODE, self._just_functions)] == self._code
                and all([same(x, wanted) for x, wanted in self._arrays])
                and all([members == wanted for members, wanted in self._sets])
                and all([[*table] == keys for table, keys in self._orders])
            )
        except (KeyError, IndexError, ValueError):  # the last of a variable without a value
            return False

    def _still_absent(self) -> bool:
        """True if what was not there is not there now, though dicts have grown or shrunk."""
        if any(map(contains, *self._absent)):
            return False
        self._sizes = [*map(len, self._without)]
        return True

    def changed(self) -> list[Place]:
        """The places that hold something else, those inside of containers by themselves."""
        found = [p for place, wanted in self.guards for p in _differences(place, place.get(), wanted)]
        found += [p for (p, f), was in zip(self._functions, self._code, strict=True) if _CODE(f) != was]
        if not found:  # equal, in other objects
            self._bind()
        return found

    def changed_by_hooks(self, before: Mapping[str, Any]) -> list[Place]:
        """The places that hold something else now than when the call began, and that forward may read after a hook has run.
        before: the values of the inputs then."""
        found = [] if self._is_the_same() else self.changed()
        read = [(p, before[name]) for name, p in self.inputs.items() if isinstance(p, Place) and name in before]
        found += [p for p, was in read if not same(now := p.get(), was) and not isinstance(now, DTensor)]
        return [p for p in found if self.latest.get(p.outermost.name, 1) > 0]

    def values(self) -> dict[str, Any]:
        """Of the inputs, now."""
        return {name: whole(place.get()) for name, place in self.inputs.items()}

    def give(self, written: Mapping[str, list[Any]]) -> None:
        """Leave behind what forward would have. Numbers follow from what was there before, so all are computed first."""
        values = [(write, write.values(written.get(name, []))) for name, write in self.writes.items()]
        for write, value in values:
            write.give(value)


_CODE = attrgetter("__code__", "__defaults__")


def _function(value: Any) -> types.FunctionType | None:
    """The function of the user that a value is, or the method of: tools that reload code put other code into it."""
    function = getattr(value, "__func__", value)
    return (
        function if isinstance(function, types.FunctionType) and is_user_file(function.__code__.co_filename) else None
    )


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def whole(value: Any) -> Any:
    """A sharded tensor as a plain one (collective), which is noted as `of_parameters`; other values as they are."""
    if not isinstance(value, DTensor):
        return value
    found = value.full_tensor()
    vars(found)[OF_PARAMETERS] = True
    return found


def without_gradient(value: Any) -> Any:
    """A plain tensor that requires a gradient, detached; other values as they are."""
    if type(value) is not torch.Tensor or not value.requires_grad:
        return value
    found = value.detach()
    vars(found).update({OF_PARAMETERS: True} if of_parameters(value) else {})
    return found


def of_parameters(value: Any) -> bool:
    """True of a parameter, and of what `whole` has made of one: its dims are no batch's, whatever their sizes."""
    return isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and OF_PARAMETERS in vars(value))


def names(places: Sequence[Place]) -> str:
    """'a', 'b' and 3 more."""
    shown = ", ".join(f"'{p.name}'" for p in places[:3])
    return shown if len(places) <= 3 else f"{shown} and {len(places) - 3} more"


# -- generators of numbers other than torch's


def generator_state(value: Any) -> Any:
    """The state of a generator, or of that which a bound method draws from; None for other values."""
    if isinstance(value, types.BuiltinMethodType):
        value = value.__self__
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return repr(value.getstate()) if isinstance(value, random.Random) else None


def generator_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def states_differ(before: tuple[Any, Any], after: tuple[Any, Any]) -> str | None:
    if before[0] != after[0]:
        return "a random number of Python's `random`"
    (_, keys, *rest), (_, now, *others) = before[1], after[1]
    return None if rest == others and np.array_equal(keys, now) else "a random number of numpy"
