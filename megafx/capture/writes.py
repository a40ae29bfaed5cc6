"""What forward leaves behind in Python objects: tensors in attributes, lists and dicts, counters.

`self.aux = h.square().mean()`, `self.norms.append(h.norm())`, `self.calls += 1`: after the traced forward the attributes of
modules, and of the objects and containers that they hold, are compared with those before it. Tensors become outputs of the
graph, which every call puts where forward would have put them; numbers are computed on the host (host_numbers.py). What a graph
cannot leave behind is an error.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from operator import is_
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import SymTypes
from torch.utils import _pytree as pytree

from megafx.capture.host_numbers import HostNumber
from megafx.capture.libraries.records import Kept, Record, Shape, is_record, kept
from megafx.capture.reads import IGNORED, Reads
from megafx.errors import CaptureError, SourceLine, or_leave_eager
from megafx.ir.call_spec import register_dataclasses
from megafx.ir.holders import MembersOf, OrderOf
from megafx.ir.python_state import (
    ABSENT,
    ARRAYS,
    NAMESPACES,
    NUMBERS,
    PLAIN,
    SEQUENCES,
    Place,
    has_attributes_for_parts,
    items_of,
    leave,
    parts_of,
    put_back,
    put_items,
    same,
)
from megafx.ir.source_lines import is_user_file


@dataclass(eq=False)
class Write:
    """Something that forward left at a place."""

    place: Place
    spec: pytree.TreeSpec
    # of its value; None represents what leaves the graph (a tensor, or a number of its data), a function a host number
    leaves: list[Any]
    grows: bool = False  # the value is a list of items that forward appended
    refills: bool = False  # the list was cleared before
    records: bool = False  # there are objects of the user's classes in it (caches.Record), made anew in each call

    def values(self, left: list[Any]) -> Any:
        """The value, from what left the graph in a call."""
        given = iter(left)
        leaves = [next(given) if leaf is None else leaf[0]() for leaf in self.leaves]
        made = pytree.tree_unflatten(leaves, self.spec)
        if self.records:
            made = pytree.tree_map(_instance, made, is_leaf=_is_made)
            for each in _dataclasses(made):
                leave(each)
        return made

    def left(self, value: Any) -> list[Any]:
        """The reverse of `values`, of what is at the place after a call in eager mode."""
        value = [*value][-self.spec.num_children :] if self.grows else value
        value = kept(value) if self.records else value
        pairs = zip(self.leaves, pytree.tree_leaves(value), strict=True)
        return [leaf for kept, leaf in pairs if kept is None]

    def give(self, value: Any) -> None:
        if self.grows or self.refills:
            held = self.place.get()
            if self.refills:
                held.clear()
            held.extend(value)
        else:
            self.place.set(value)


@dataclass
class Writes:
    """Compares what modules hold before and after forward. found: what differs."""

    reads: Reads
    found: dict[str, Write] = field(default_factory=dict)
    # numbers that forward read, and replaced by another number
    counters: dict[str, Place] = field(default_factory=dict)
    dicts: dict[str, Place] = field(default_factory=dict)  # whose items it changed
    before: list[tuple[dict[str, Any], str, dict[str, Any]]] = field(default_factory=list)
    containers: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # each with a copy
    globals: list[tuple[Place, Any]] = field(default_factory=list)
    tables: dict[int, dict[str, Any]] = field(default_factory=dict)  # of parameters and submodules, each as it was
    # Objects that forward has put somewhere: of an earlier trace, and of this one. Those that forward makes are others in each.
    earlier: Mapping[str, list[Any]] = field(default_factory=dict)
    queues: Collection[str] = ()  # names of lists and deques whose items of earlier calls forward reads or moves
    objects: dict[str, list[Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Remember what modules hold, and whether gradients are on."""
        self.compare(Place(_GRAD_MODE, "on", "torch.is_grad_enabled()"))
        for module in self.reads.model.modules():
            if (name := self.reads.names.get(id(module))) is not None:
                self._remember(vars(module), name)

    def compare(self, place: Place) -> None:
        """Remember what is at a place outside of the modules' attributes."""
        self._keep(place.get())
        self.globals.append((place, place.get()))

    def watch(self, place: Place) -> None:
        """Remember what a container holds that forward has come upon outside of the modules' attributes."""
        value = place.get()
        held = parts_of(value) is not None or isinstance(value, (*ARRAYS, io.IOBase))
        if held and id(_mutable(value)) not in self.containers:
            self.compare(place)

    def also(self, owner: Any, name: str) -> None:
        """Remember what an object holds that forward is about to read from."""
        if isinstance(getattr(owner, "__dict__", None), dict) and not isinstance(owner, logging.Handler):
            self._remember(vars(owner), name)

    def _remember(self, attributes: dict[str, Any], name: str) -> None:
        self.before.append((attributes, name, dict(attributes)))
        for table in ("_parameters", "_buffers", "_modules"):
            if isinstance(entries := attributes.get(table), dict):
                self.tables[id(entries)] = dict(entries)
        for key, value in attributes.items():
            if key not in IGNORED:
                self._keep(value)

    def _keep(self, value: Any) -> None:
        value = _mutable(value)
        if isinstance(value, ARRAYS) and (value.nbytes if isinstance(value, np.ndarray) else len(value)) <= _COPIED:
            self.containers.setdefault(id(value), (value, copy.copy(value)))
        if isinstance(value, io.IOBase):
            self.containers.setdefault(id(value), (value, _stream_state(value)))
        if not isinstance(value, (dict, list, deque, set)) or id(value) in self.containers:
            return
        plain: Any = list.copy if isinstance(value, list) else items_of if isinstance(value, dict) else copy.copy
        old: Any = plain(value)
        self.containers[id(value)] = value, old
        for part in old.values() if isinstance(old, dict) else old:
            self._keep(part)

    # -- after forward

    def finish(self) -> dict[str, list[Any]]:
        """Find what was written. Returns by its name what of each write leaves the graph."""
        left: dict[str, list[Any]] = {}
        for place, new, grows in [*self._changes()]:
            if place.name in self.found:
                raise self._unfollowed(place, new)
            write, given = self._write(place, new, grows)
            held = place.get()
            write.refills = isinstance(held, GrowingList) and held.cleared
            write.refills |= place.name in self.queues and id(_mutable(held)) in self.containers
            self.found[place.name] = write
            left[place.name] = given
        return left

    def _changes(self) -> Iterator[tuple[Place, Any, bool]]:
        self.compared: set[int] = set()  # containers: one may be at several places
        attributes_seen = {(id(attributes), key) for attributes, _, old in self.before for key in {**old, **attributes}}
        for attributes, name, old in self.before:
            for key in {**old, **attributes}:
                if key not in IGNORED or key == "training":
                    where = f"{name}.{key}" if name else key
                    yield from self._change(Place(attributes, key, where), old.get(key, ABSENT))
            for table in ("_parameters", "_modules"):
                if isinstance(attributes.get(table), dict):
                    self._check_table(attributes[table], name)
            buffers: dict[str, Any] = attributes.get("_buffers", {})
            was = self.tables.get(id(buffers), buffers)
            for key in [key for key in buffers if buffers[key] is not was.get(key)]:
                yield Place(buffers, key, f"{name}.{key}".lstrip(".")), buffers[key], False
        for place, old_value in self.globals:
            if (id(place.holder), place.key) not in attributes_seen:  # a tuple that was read, then replaced
                yield from self._change(place, old_value)

    def _check_table(self, table: dict[str, Any], name: str) -> None:
        """Raise if forward has made or taken away a parameter or submodule."""
        was = self.tables.get(id(table))
        if was is not None and was.keys() != table.keys():
            key = next(iter(was.keys() ^ table.keys()))
            raise self._unfollowed(Place(table, key, f"{name}.{key}".lstrip(".")), table.get(key))

    def _change(self, place: Place, old: Any) -> Iterator[tuple[Place, Any, bool]]:
        new, memos = place.get(), self.reads.memos
        if new is not old:
            if not same(new, old) and not (memos is not None and memos.is_one(new)):
                yield place, new, False
            return
        yield from self._inside(place, new)

    def _inside(self, place: Place, value: Any) -> Iterator[tuple[Place, Any, bool]]:
        """Changes of a container that is the same object as before."""
        value = _mutable(value)
        known = self.containers.get(id(value))
        if known is None or id(value) in self.compared:
            return
        self.compared.add(id(value))
        old = known[1]
        line = self._line(place)
        if isinstance(value, dict):
            held = items_of(value)
            if any(isinstance(key, FakeTensor) for key in held):
                raise CaptureError(
                    f"forward keeps a tensor as a key of '{place.name}': a graph does not know which tensor that is",
                    source=line,
                    fix="take id(tensor) as the key",
                )
            if any(isinstance(size, torch.SymInt) for size in pytree.tree_leaves([*held])):
                held = {_with_fixed_sizes(key): item for key, item in held.items()}
                put_items(value, held)
            for key in {**old, **held}:
                at = Place(None, key, f"{place.name}[{key!r}]", line, place)
                for change in self._change(at, old.get(key, ABSENT)):
                    if type(place.get()) in WATCHED:
                        self.dicts[place.name] = place
                    yield change
            order = [*(key for key in old if key in held), *(key for key in held if key not in old)]
            # of items that were moved, or taken out and put back, or are the only ones
            if order != [*held] or (isinstance(value, WatchedDict) and value.cleared):
                yield Place(OrderOf(place), "keys", f"order of {place.name}", line), (*held,), False
        elif isinstance(value, (list, deque)):
            here = Place(place.holder, place.key, place.name, line, place.within)
            now, was = [*(list.copy(value) if isinstance(value, list) else value)], [*cast(list[Any], old)]
            known_ids = {id(x) for x in was if not isinstance(x, PLAIN)}
            moved = any(id(x) in known_ids for x, before in zip(now, was, strict=False) if x is not before)
            if isinstance(value, GrowingList) and value.cleared:
                yield here, now, False
            elif len(now) == len(was) and not moved and not isinstance(value, deque):
                for i, part in enumerate(was):
                    yield from self._change(Place(None, i, f"{place.name}[{i}]", line, place), part)
            elif place.name in self.queues:
                for i, part in enumerate(was):
                    yield from self._inside(Place(None, i, f"{place.name}[{i}]", line, place), part)
                if len(now) != len(was) or not all(map(is_, now, was)):
                    yield here, now, False
            elif (added := _added(was, now, getattr(value, "maxlen", None))) is None:
                # the next trace shows whether it is cleared first, or what earlier calls left in it is read
                yield here, now, True
            elif added:
                yield here, now[-added:], True
        elif isinstance(value, (*ARRAYS, io.IOBase)):
            if _stream_state(value) != old if isinstance(value, io.IOBase) else not same(value, old):
                raise self._unfollowed(place, value)
        elif (members := _members(value)) is None and value != old:
            raise self._unfollowed(place, value)
        elif members != old:
            yield Place(MembersOf(place), "members", f"members of {place.name}", line), members, False

    def _write(self, place: Place, new: Any, grows: bool) -> tuple[Write, list[Any]]:
        key = id(place.holder), place.key
        while register_dataclasses(pytree.tree_leaves([new])):
            pass
        objects = [leaf for leaf in pytree.tree_leaves(new) if self._is_made_here(leaf)]
        if objects:
            earlier = self.earlier.get(place.name, [])
            known = {id(x) for name, some in self.objects.items() if name != place.name for x in some}
            if not known.isdisjoint(map(id, objects)) or any(a is b for a, b in zip(objects, earlier, strict=False)):
                raise self._unfollowed(place, objects[0])
            self.objects[place.name] = objects
        if records := bool(objects or _dataclasses(new)):
            new = kept(new)
        queued = {id(x): place.part(i) for i, x in self._before(place)} if place.name in self.queues else {}
        leaves, spec = pytree.tree_flatten(ABSENT if new is ABSENT else new, is_leaf=lambda x: id(x) in queued)
        given: list[Any] = []
        left: list[Any] = []
        for leaf in leaves:
            compute = leaf.compute if isinstance(leaf, HostNumber) else None
            if id(leaf) in queued:  # it stays, maybe at another place
                given.append((queued[id(leaf)].get,))
            elif isinstance(leaf, (Tensor, *SymTypes)):  # a size, or `loss.item()`
                given.append(None)
                left.append(leaf)
            elif compute is not None:
                given.append((compute,))
            elif isinstance(leaf, (set, frozenset)) and (members := _members(leaf)) is not None:
                given.append((functools.partial(type(leaf), members),))
            elif isinstance(leaf, PLAIN) or leaf is ABSENT or id(leaf) in self.reads.names or callable(leaf):
                given.append((_constant(leaf),))
                is_counter = isinstance(leaf, NUMBERS) and not isinstance(leaf, bool) and not grows
                if is_counter and (key in self.reads.places or place.within is not None):
                    self.counters[place.name] = place
            else:
                raise self._unfollowed(place, leaf)
        return Write(place, spec, given, grows, records=records), left

    def _before(self, place: Place) -> list[tuple[int, Any]]:
        """(index, item) of what a list or deque held before forward."""
        _, old = self.containers.get(id(_mutable(place.get())), (None, ()))
        return [(i, x) for i, x in enumerate(old) if not isinstance(x, PLAIN)]

    def _is_made_here(self, value: Any) -> bool:
        return (
            is_record(value) and id(value) not in self.reads.names and not isinstance(value, (HostNumber, *NAMESPACES))
        )

    def restore(self) -> None:
        """Put back what was there before forward. (prepare.py does so for buffers.)"""
        for container, old in self.containers.values():
            if isinstance(container, io.IOBase):
                _rewind(container, old)
            elif not isinstance(container, ARRAYS):
                put_back(container, old)
            elif not same(container, old):
                everything: Any = ... if isinstance(container, np.ndarray) else slice(None)
                container[everything] = old
        for attributes, _, old in self.before:
            for key in [*attributes]:
                if key not in IGNORED and key not in old:
                    del attributes[key]
            attributes.update({k: v for k, v in old.items() if k not in IGNORED})
        for place, old in self.globals:
            if place.get() is not old:
                place.set(old)

    def _line(self, place: Place) -> SourceLine | None:
        key = id(place.holder), place.key
        read = self.reads.places.get(key)
        return self.reads.written.get(key) or place.line or (read.line if read is not None else None)

    def _unfollowed(self, place: Place, value: Any) -> CaptureError:
        kind = type(value)
        owner = next((n for a, n, _ in self.before if a is place.holder), None)
        fix = "keep tensors, numbers, or lists and dicts of them; return other values from forward"
        if isinstance(value, nn.Module):
            fix = "make modules in __init__, or call the model once before it is parallelized"
        if isinstance(value, io.IOBase):
            fix = "append to a list (self.lines.append(...)), and write that in your loop"
        return CaptureError(
            f"forward changes '{place.name}' (to a {kind.__module__}.{kind.__qualname__}) in a way that a graph cannot follow",
            module=owner,
            source=self._line(place),
            fix=or_leave_eager(fix, owner),
        )


_COPIED = 16 << 20  # bytes of an array that is compared after forward


class _GradMode:
    """What `torch.set_grad_enabled` sets without a context."""

    @property
    def on(self) -> bool:
        return torch.is_grad_enabled()

    @on.setter
    def on(self, value: bool) -> None:
        torch.set_grad_enabled(value)


_GRAD_MODE = _GradMode()


def _mutable(value: Any) -> Any:
    """What holds the parts of a container."""
    return vars(value) if has_attributes_for_parts(value) else value


def _stream_state(stream: io.IOBase) -> Any:
    """(content in memory, position) of a stream; None where it is closed, or has no position, or where others write, too."""
    if stream.closed or not stream.seekable() or _is_shared(stream):
        return None
    if isinstance(stream, (io.StringIO, io.BytesIO)):
        return stream.getvalue(), stream.tell()
    try:
        return None, stream.tell()
    except OSError:  # while code goes through its lines
        return None


def _is_shared(stream: io.IOBase) -> bool:
    """True for standard streams, and for the files to which they are redirected."""
    if any(stream is each for each in (sys.stdin, sys.stdout, sys.stderr)):
        return True
    try:
        own = os.fstat(stream.fileno())
        return any(os.path.samestat(own, os.fstat(standard)) for standard in (1, 2))
    except OSError:  # it is of memory, or one of the two is closed
        return False


def _rewind(stream: io.IOBase, state: Any) -> None:
    """Put a stream back to a state. What is written in a file stays there."""
    if state is None or _stream_state(stream) == state:
        return
    content, position = state
    if content is not None:
        stream.seek(0)
        stream.truncate()
        cast(Any, stream).write(content)
    if content is not None or not stream.writable():
        stream.seek(position)


def _dataclasses(value: Any) -> list[Any]:
    """The instances of dataclasses in a value."""
    found: list[Any] = []

    def one(value: Any) -> bool:
        if is_dataclass(value):
            found.append(value)
        return False

    pytree.tree_leaves(value, is_leaf=one)
    return found


def _is_made(value: Any) -> bool:
    return isinstance(value, (Record, Kept, Shape))


def _instance(value: Any) -> Any:
    """The user's value for one of `kept`."""
    if isinstance(value, Kept):
        return value.value
    if isinstance(value, Shape):
        return torch.Size(value.sizes)
    if isinstance(value, Record):
        made = value.instance(lambda part: pytree.tree_map(_instance, part, is_leaf=_is_made))
        if not isinstance(made, (dict, *SEQUENCES)):
            leave(made)
        return made
    return value


def _with_fixed_sizes(tree: Any) -> Any:
    """Sizes, also in tuples, as the numbers that they are in this graph alone: it was asked for their hash."""
    return pytree.tree_map_only(torch.SymInt, int, tree)


def _members(value: set[Any] | frozenset[Any]) -> frozenset[Any] | None:
    """Those of a set as a graph leaves them behind: plain values, and tuples of them; None where there are others."""
    leaves, spec = pytree.tree_flatten(_with_fixed_sizes([*value]))
    if not all(isinstance(leaf, (*PLAIN, Enum)) for leaf in leaves):
        return None
    return frozenset(pytree.tree_unflatten(leaves, spec))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class GrowingList(list[Any]):
    """Replaces a list or deque that forward extends, in a trace that finds out whether it reads it, too, or moves what earlier
    calls left in it. is_read() is called then, and ends the trace."""

    def __init__(self, items: Any, is_read: Callable[[], Any]) -> None:
        super().__init__(items)
        self.is_read, self.cleared = is_read, False

    def clear(self) -> None:
        """What earlier calls left is of no importance any more."""
        super().clear()
        self.cleared = True


def _added(before: list[Any], now: list[Any], most: int | None) -> int | None:
    """How many items were put at the end of a list or deque; a maxlen pushes out as many at its begin. None where more has
    been done with it."""
    full = most is not None and len(now) == most
    for added in range(len(now) + 1):
        kept = now[: len(now) - added]
        if (full or len(kept) == len(before)) and all(map(is_, kept, before[len(before) - len(kept) :])):
            return added if len(kept) <= len(before) else None
    return None


class WatchedDict(dict[Any, Any]):
    """Replaces a dict that forward changes: knows which items it reads before it writes them."""

    def __init__(self, items: dict[Any, Any]) -> None:
        super().__init__(items)
        self.read: set[Any] = set()
        self.written: set[Any] = set()
        self.read_whole = self.cleared = False
        self.on = True  # while forward runs

    def note(self, key: Any) -> None:
        if self.on and not self.cleared and key not in self.written:
            self.read.add(key)

    def clear(self) -> None:
        """What earlier calls left is of no importance any more."""
        super().clear()
        self.cleared |= self.on

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _with_fixed_sizes(key)
        self.written.add(key)
        super().__setitem__(key, value)


_NOTES = ("on", "read", "read_whole", "written")


class _Watched:
    """Replaces a namespace that forward changes, as WatchedDict a dict."""

    __slots__ = ()
    on: bool
    read: set[str]
    written: set[str]
    read_whole: bool

    def __getattribute__(self, name: str) -> Any:
        plain = object.__getattribute__
        if name == "__dict__" and is_user_file(sys._getframe(1).f_code.co_filename):  # also by vars()
            self.read_whole |= self.on
        elif not name.startswith("__") and name not in _NOTES and self.on and name not in self.written:
            self.read.add(name)
        return plain(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _NOTES:
            self.written.add(name)
        object.__setattr__(self, name, value)


class _WatchedSimple(_Watched, SimpleNamespace):
    __slots__ = _NOTES


class _WatchedArguments(_Watched, Namespace):
    __slots__ = _NOTES


WATCHED: Mapping[type, type] = {dict: WatchedDict, SimpleNamespace: _WatchedSimple, Namespace: _WatchedArguments}


def watched(value: Any) -> Any:
    """A dict or namespace of the same items that knows which of them forward reads before it writes them."""
    made: Any = WATCHED[type(value)]
    if made is WatchedDict:
        return WatchedDict(value)
    new = made.__new__(made)
    for name, start in (("on", True), ("read", set()), ("written", set()), ("read_whole", False)):
        setattr(new, name, start)
    vars(new).update(vars(value))
    return new


def _added_to(self: GrowingList, other: list[Any]) -> list[Any]:
    return [*other, *self]


def _reads_list(name: str) -> Callable[..., Any]:
    plain = getattr(list, name, _added_to)  # __radd__, which lists leave to each other; what deques alone have

    def method(self: GrowingList, *args: Any, **options: Any) -> Any:
        if not self.cleared:
            if name not in ("__setitem__", "__delitem__") or args[0] != slice(None):
                self.is_read()
            self.clear()
            return self.extend(*args[1:] or ((),))
        return plain(self, *args, **options)

    return method


def _reads_item(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: WatchedDict, key: Any, *args: Any) -> Any:
        key = _with_fixed_sizes(key)
        self.note(key)
        return plain(self, key, *args)

    return method


def _reads_dict(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: WatchedDict, *args: Any) -> Any:
        self.read_whole |= self.on and not self.cleared
        return plain(self, *args)

    return method


_READS = "__getitem__ __iter__ __len__ __contains__ __reversed__ __add__ __radd__ __mul__ __rmul__ __eq__ __repr__"
_REARRANGES = "__setitem__ __delitem__ __imul__ insert pop remove reverse sort appendleft extendleft popleft rotate"
for _name in (*_READS.split(), *_REARRANGES.split(), "copy", "index", "count"):
    setattr(GrowingList, _name, _reads_list(_name))
for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault", "__delitem__"):
    setattr(WatchedDict, _name, _reads_item(_name))
for _name in ("__iter__", "__len__", "__reversed__", "__eq__", "__or__", "__ror__", "__repr__"):
    setattr(WatchedDict, _name, _reads_dict(_name))
for _name in ("keys", "values", "items", "copy", "popitem"):
    setattr(WatchedDict, _name, _reads_dict(_name))
