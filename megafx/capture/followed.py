"""One trace's view of Python state (`Trace`), and what the traces of one capture learn of it (`Followed`).

The first trace takes all state as it is. Where it shows that forward computes with numbers that it writes itself, that a list
only grows, or that a tensor outside of the parameters needs a gradient, the model is traced once more, with these followed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megafx.capture.eager_parts import by_values
from megafx.capture.hooks import storing
from megafx.capture.host_numbers import Computed, HostNumber, HostNumbers, made_of_counted, scaled
from megafx.capture.libraries.torch_functions import in_place_of
from megafx.capture.like_layers import LikeLayers
from megafx.capture.memos import Memos
from megafx.capture.reads import Reads
from megafx.capture.writes import GrowingList, Writes, watched
from megafx.errors import CaptureError
from megafx.ir.holders import Remembered
from megafx.ir.python_state import (
    NUMBERS,
    PLAIN,
    REPLACED_BY,
    Place,
    PythonState,
    leaf_places,
    parts_of,
    snapshot,
    whole,
)
from megafx.ir.source_lines import current_user_line, is_user_file
from megafx.ops.eager_call import matching


class TraceAgain(Exception):
    """What a trace has shown changes what the next one follows."""


@dataclass
class Followed:
    """What the traces of one capture have shown."""

    inputs: dict[str, Place] = field(default_factory=dict)  # state that enters the graph
    counters: dict[str, Place] = field(default_factory=dict)  # numbers that forward reads and writes
    growing: dict[str, Place] = field(default_factory=dict)  # lists that it extends
    queues: dict[str, Place] = field(default_factory=dict)  # lists that it changes and reads: their items are inputs
    dicts: dict[str, Place] = field(default_factory=dict)  # those whose items it changes
    computed: list[Computed] = field(default_factory=list)  # numbers made of counters that meet tensors
    # identities of hooks that store what forward reads: they are traced
    storing: set[Hashable] = field(default_factory=set)
    # globals, variables and items of lists that forward assigns to before it reads them
    replaced: dict[str, Place] = field(default_factory=dict)
    # objects that forward puts at places, in the trace that first showed it
    objects: dict[str, list[Any]] = field(default_factory=dict)
    read_first: set[str] = field(default_factory=set)  # those that forward reads before
    # places outside of modules' own tables that hold a parameter of the model (or that it has replaced), with its FQN:
    # the graph reads that one
    parameters: dict[str, tuple[Place, str]] = field(default_factory=dict)
    layer_by_layer: bool = False  # no call of a layer is a copy of another's (like_layers.py)
    decides: bool = False  # code needs the numbers that forward counts as numbers
    compared: bool = False  # code asks which arguments are the same tensor
    remembered: dict[str, Place] = field(default_factory=dict)  # calls of functions with functools.lru_cache

    def __post_init__(self) -> None:
        places = [place.outermost for place in self.inputs.values()]
        self.remembered |= {p.name: p for p in places if isinstance(p.holder, Remembered)}

    @property
    def each_layer(self) -> bool:
        """True if each layer has to be traced."""
        state = (
            self.inputs,
            self.counters,
            self.growing,
            self.queues,
            self.dicts,
            self.computed,
            self.storing,
            self.replaced,
            self.objects,
            self.parameters,
        )
        by_module = any(not isinstance(x, PLAIN) for p in self.remembered.values() for x in p.holder.leaves)
        return self.layer_by_layer or by_module or any(state)

    def all_inputs(self) -> dict[str, Any]:
        """Name -> what is read for it at each call, in the order of the graph's inputs."""
        return {**self.inputs, **{each.name: each for each in self.computed}}

    def values(self) -> dict[str, Any]:
        for place in self.remembered.values():
            place.holder.hold()
        return {name: whole(each.get()) for name, each in self.all_inputs().items()}

    def learn_hooks(self, trace: Trace, outside: Collection[nn.Module]) -> bool:
        """As `learn`, of hooks: also after a trace that has failed. outside: modules whose hooks are no matter of the graph."""
        if not trace.finished and self.replaced:
            self.read_first |= self.replaced.keys()
            self.replaced = {}
            return True
        new = storing(trace.reads.model, outside, trace.reads) - self.storing
        self.storing |= new
        return bool(new)

    def learn(self, trace: Trace) -> bool:
        """Take over what a trace has shown; True if the model has to be traced again."""
        if trace.compares_arguments():
            return True
        if trace.layers is not None and trace.layers.copied and trace.writes.found:
            self.layer_by_layer = True
            return True
        counters = {
            n: p for n, p in trace.writes.counters.items() if n not in self.inputs and isinstance(p.get(), NUMBERS)
        }
        growing = {n: w.place for n, w in trace.writes.found.items() if w.grows and n not in self.queues}
        new = growing.keys() - self.growing, trace.writes.dicts.keys() - self.dicts, counters.keys() - self.counters
        if any(new):
            self.growing |= growing
            self.dicts |= trace.writes.dicts
            if not new[1]:  # whether a dict's numbers are read at all shows in the next trace
                self.counters |= counters
            return True
        if trace.writes.objects.keys() - self.objects.keys():
            self.objects = trace.writes.objects | self.objects
            return True
        unseen = {n: w.place for n, w in trace.writes.found.items() if _is_unseen(w.place) and not w.grows}
        if added := unseen.keys() - self.replaced.keys() - self.read_first - self.inputs.keys():
            self.replaced |= {n: unseen[n] for n in added}
            return True
        if needed := {p.name: p for p in trace.need_gradients()}:
            self.inputs |= needed
            return True
        known = len(self.computed)
        self.computed = list(trace.numbers.inputs)
        return len(self.computed) != known


def _is_unseen(place: Place) -> bool:
    """True if nothing notes when a place is read: a variable, a global, an item of a list."""
    holder = place.container()
    return isinstance(holder, (types.CellType, list)) or (isinstance(holder, dict) and "__name__" in holder)


def _in_tuples(place: Place, value: Any) -> tuple[Place, Any]:
    """The place, and where it is a part of a tuple, the innermost one around it that is none, with the tuple of this part."""
    while isinstance(held := place.container(), tuple) and place.within is not None:
        parts = [*held[: place.key], value, *held[place.key + 1 :]]
        value = held._make(parts) if hasattr(held, "_make") else type(held)(parts)
        place = place.within
    return place, value


class _Freezing:
    """Parameters that forward freezes for a part of itself: `self.critic.requires_grad_(False)`, and True again after it.

    A graph differentiates with respect to a parameter, not to its uses. So what uses a frozen one meanwhile is given it
    detached. changed() is called before a change.
    """

    def __init__(self, changed: Callable[[], None], is_argument: Callable[[Tensor], bool]) -> None:
        self.changed, self.is_argument = changed, is_argument
        self.frozen: dict[int, tuple[Tensor, Tensor]] = {}

    def sees(self, function: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with which a function of torch is to be called."""
        setter = name == "__set__" and getattr(function, "__self__", None) is Tensor.requires_grad
        if (name == "requires_grad_" or setter) and isinstance(args[0], FakeTensor):
            self._set(args[0], bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
        elif self.frozen and name not in ("__get__", "size", "dim"):
            given = lambda x: self.frozen[id(x)][1] if id(x) in self.frozen else x
            args, kwargs = pytree.tree_map_only(nn.Parameter, given, (tuple(args), kwargs))
        return args, kwargs

    def _set(self, parameter: Tensor, wanted: bool) -> None:
        if parameter.requires_grad == wanted:
            return
        if not isinstance(parameter, nn.Parameter):
            if self.is_argument(parameter):
                raise CaptureError(
                    f"forward calls requires_grad_({wanted}) of an argument, which the caller's tensor would not see",
                    source=current_user_line(),
                    fix="call it before the call of the model, or let forward use x = x.detach().requires_grad_()",
                )
            return
        self.changed()
        if not wanted:
            self.frozen[id(parameter)] = parameter, parameter.detach()
        elif self.frozen.pop(id(parameter), None) is None:
            raise CaptureError(
                "forward lets a parameter require a gradient that does not when the model is called",
                source=current_user_line(),
                fix="call requires_grad_(True) before the call of the model, and let forward freeze it where it is not trained",
            )

    def finish(self) -> None:
        if self.frozen:
            raise CaptureError(
                "forward freezes parameters (requires_grad_(False)) that are still frozen when it returns",
                fix="freeze them between calls of the model; or call requires_grad_(True) before forward returns",
            )


class _OutsideWrites(TorchFunctionMode):
    """Calls written(x) before code writes in place into a tensor x that is not of the trace, and read(x) where code takes its
    values out of it. Gives what is known of values."""

    def __init__(
        self,
        written: Callable[[Tensor], None],
        read: Callable[[Tensor], None],
        freezing: _Freezing,
        note: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.written, self.read, self.freezing, self.note = written, read, freezing, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _as_numbers(args[1], args[0].shape, name == "__setitem__"), *args[2:])
        args, kwargs = self.freezing.sees(func, name, args, kwargs or {})
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, GrowingList):  # torch reads lists past what their class overrides
                iter(each)
        if kwargs and len(args) > 1:
            args, kwargs = scaled(name, args, kwargs)
        if (made := made_of_counted(name, args, kwargs or {})) is not None:
            return made
        if (known := by_values(name, func, args, kwargs or {})) is not None:
            return known
        if (made := in_place_of(name, func, args, kwargs or {}, self.note)) is not None:
            return made
        if name in ("tolist", "numpy", "__array__") and type(args[0]) is Tensor and not args[0].is_inference():
            self.read(args[0])
        target = args[0] if args and _is_in_place(name) else (kwargs or {}).get("out")
        statistics = _running_statistics(name, args, kwargs or {}) if name in _NORMS else []
        for x in statistics or [target]:
            if type(x) is Tensor:
                self.written(x)
        torch.autograd.graph.increment_version([x for x in statistics if isinstance(x, FakeTensor)])
        if getattr(func, "__module__", "") == nn.init.__name__:  # it switches gradients off where no mode sees it
            with torch.no_grad():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _as_numbers(index: Any, shape: Sequence[Any], written: bool) -> Any:
    """An index with whole numbers that are tensors or are counted, `buffer[pointer % 3]`: torch reads them as Python's."""
    if not isinstance(index, tuple):
        return _as_number(index, shape[0]) if shape else index
    kinds = (int, slice, HostNumber, FakeTensor, torch.SymInt, type(None), type(...))
    if written or not all(isinstance(each, kinds) for each in index):
        return index  # torch takes no number of data beside slices where it writes
    if any(isinstance(each, FakeTensor) and (each.dim() or each.dtype == torch.bool) for each in index):
        return index  # beside an index of several elements, one of a single element is such an index, too
    dims = [each for each in index if each is not None and each is not ...]
    if len(dims) > len(shape):
        return index
    sizes, found = [*shape], list[Any]()
    for each in index:
        if each is ...:
            sizes = sizes[len(sizes) - (len(dims) - len([x for x in found if x is not None])) :]
        found.append(each if each is None or each is ... else _as_number(each, sizes.pop(0)))
    return tuple(found)


def _as_number(index: Any, size: Any) -> Any:
    if isinstance(index, HostNumber) and isinstance(index.value, int):
        index = index.owner.as_tensor(index)
    whole = isinstance(index, FakeTensor) and index.dim() == 0 and not index.dtype.is_floating_point
    if not whole or index.dtype == torch.bool:
        return index
    number = torch.where(index < 0, index + size, index).item()  # numbers that are read count from the start
    if isinstance(number, int) and isinstance(size, int) and not 0 <= number < size:
        return index  # of a loop over what was hit: that of an expert that there is not, which eager mode never takes
    torch._check(number >= 0)
    torch._check(number < size)
    return number


_NORMS = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}


def _running_statistics(norm: str, args: Any, options: Mapping[str, Any]) -> list[Any]:
    """Arguments of F.batch_norm and F.instance_norm that they write."""
    names = ("input", "running_mean", "running_var", "weight", "bias", _NORMS[norm][0])
    given = {**dict(zip(names, args, strict=False)), **options}
    found = [x for x in (given.get("running_mean"), given.get("running_var")) if x is not None]
    return found if given.get(*_NORMS[norm]) else []


def _is_in_place(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_")


class _Unread:
    """In place of what forward replaces before it reads it. All that it could be used for fails."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__" and not is_user_file(sys._getframe(1).f_code.co_filename):
            return _Unread
        raise TypeError(f"'{object.__getattribute__(self, '_name')}' is read before it is replaced")


def _fails(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("what is here is read before it is replaced")


_USES = (
    "bool len iter next getitem setitem contains call eq ne lt le gt ge hash int float index str repr format enter exit"
)
_USES += (
    " add sub mul truediv floordiv mod pow matmul neg abs radd rsub rmul rtruediv rmatmul iadd isub imul torch_function"
)
for _use in _USES.split():
    setattr(_Unread, f"__{_use}__", _fails)


class Trace:
    """The Python state of one trace. tensors: those that forward leaves behind, by the name of the place."""

    def __init__(self, model: nn.Module, followed: Followed, eager: Sequence[str], note: Callable[[str], None]) -> None:
        left = {m for module in matching(model, eager).values() for m in module.modules()}
        self.followed, self.reads = followed, Reads(model, frozenset(left))
        self.writes, self.numbers = Writes(self.reads, earlier=followed.objects), HostNumbers(decides=followed.decides)
        self.writes.queues = followed.queues
        self.reads.met, self.reads.taken, self.reads.assigned = self.writes.also, self._taken, self.writes.compare
        self.memos = self.reads.memos = Memos(self.reads, followed.remembered, self._begin, note)
        self.reads.left = self._left
        self.own = {id(p): fqn for fqn, p in model.named_parameters(remove_duplicate=False)}
        self.learned, self.note = False, note
        self.tensors: dict[str, list[Tensor]] = {}
        self.finished = False
        self.watched: dict[str, Any] = {}  # dicts and namespaces that forward changes
        self.layers: LikeLayers | None = None

    @contextlib.contextmanager
    def running(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Around the model's forward in a trace. state: the tensors of the inputs."""
        followed = self.followed
        self.numbers.given = [state[each.name] for each in followed.computed]
        replaced: list[tuple[Place, Any]] = []

        def put(place: Place, value: Any) -> None:
            old = place.get()
            places = [place] + ([p for p in self._attributes() if p.get() is old] if parts_of(old) is not None else [])
            for each in places:
                replaced.append((each, old))
                each.set(value)

        try:
            for name, place in followed.counters.items():
                if name not in followed.inputs:
                    put(place, self.numbers.of(place, place.get()))
            for name, place in followed.inputs.items():
                put(*_in_tuples(place, state[name]))
            for place in followed.growing.values():
                put(place, GrowingList(place.get(), functools.partial(self._learn_queue, place, place.get())))
            for name, place in followed.dicts.items():
                self.watched[name] = watched(place.get())
                put(place, self.watched[name])
            for name, place in followed.replaced.items():
                put(place, _Unread(name))
            for place, fqn in followed.parameters.values():
                mutable, value = _in_tuples(place, self.reads.model.get_parameter(fqn))
                put(mutable, value)
            freezing = _Freezing(self._learn_freezing, lambda x: id(x) in self.reads.asked.names)
            entering = {id(state[name]): place for name, place in followed.inputs.items()}
            with (
                self.reads.recording(self._start),
                _OutsideWrites(self._learn_write, self._note_version, freezing, self.note),
                self.memos.running(self.reads.model, entering),
            ):
                yield
            freezing.finish()
            self.finished = True
            for one in self.watched.values():
                one.on = False
            self.tensors = self.writes.finish()
        finally:
            self.writes.restore()
            for place, value in reversed(replaced):
                place.set(value)
            for place in followed.remembered.values():
                place.holder.release()

    def _attributes(self) -> Iterator[Place]:
        """All attributes of modules. (Several may hold one list.)"""
        for module in self.reads.model.modules():
            for name in vars(module):
                yield Place(vars(module), name, name)

    def _left(self) -> dict[str, Any]:
        """What forward has written so far, by name, with what distinguishes two writes."""
        buffers = {name: (id(x), x._version) for name, x in self.reads.model.named_buffers()}
        lists = {name: list.__len__(x) for name, p in self.followed.growing.items() if isinstance(x := p.get(), list)}
        return {**buffers, **lists, **{name: None for _, name in self.reads.written}}

    def _begin(self) -> None:
        raise TraceAgain

    def _start(self) -> None:
        """All names that code reads have been found."""
        if self.learned or self.compares_arguments():
            raise TraceAgain
        self.writes.start()

    def compares_arguments(self) -> bool:
        """True if code may ask which arguments are the same tensor, some are, and this trace has taken them for others."""
        given = self.reads.asked.real.values()
        new = self.reads.compared and not self.followed.compared and len({*map(id, given)}) < len(given)
        self.followed.compared |= new
        return new

    def _taken(self, place: Place) -> None:
        """Code reads what is at a place. Parameters of the model are found wherever they are held; raises TraceAgain for them,
        for other sharded tensors, which enter the graph whole, and for the very tensors that are arguments of the call."""
        self.writes.watch(place)
        known = self.followed.parameters.keys() | self.followed.inputs.keys()
        given = {id(x) for x in self.reads.asked.real.values() if x.is_floating_point()}
        for at, value in leaf_places(place, snapshot(place.get(), place.name)):
            if not isinstance(value, Tensor) or at.name in known:
                continue
            fqn = self.own.get(id(value))
            if fqn is None and (by := getattr(value, REPLACED_BY, None)) is not None:
                fqn = self.own.get(id(by))
            if fqn is not None:
                self.followed.parameters[at.name] = at, fqn
            elif at.can_be_input() and (isinstance(value, DTensor) or id(value) in given):
                self.followed.inputs[at.name] = at
            elif id(value) in given:
                raise CaptureError(
                    f"forward reads in {at.name} the very tensor that the call gives it, which a graph would take for another",
                    fix="keep it in an attribute, list or dict of its own, not in a tuple",
                )
            else:
                continue
            self.learned = True
        if self.learned and self.reads.on:
            raise TraceAgain

    def _note_version(self, x: Tensor) -> None:
        self.numbers.decisions.append((lambda: x._version, x._version))

    def _learn_freezing(self) -> None:
        if self.layers is not None:
            self.followed.layer_by_layer = True
            raise TraceAgain

    def _learn_write(self, written: Tensor) -> None:
        """Raise TraceAgain, with a tensor that modules or containers hold as an input: forward is about to write into it."""
        found = [leaf for place, value in self.guards() for leaf in leaf_places(place, value)]
        memory = written.untyped_storage()._cdata
        for place, value in found:
            if type(value) is Tensor and value.untyped_storage()._cdata == memory and place.can_be_input():
                self.followed.inputs[place.name] = place
                raise TraceAgain

    def _learn_queue(self, place: Place, held: Any) -> None:
        """Forward reads a list that it extends, or moves what is in it: a graph for each length, and the items are inputs."""
        del self.followed.growing[place.name]
        self.followed.queues[place.name] = place
        for at, item in leaf_places(place, snapshot(held, place.name)):
            if isinstance(item, Tensor):
                self.followed.inputs[at.name] = at
            elif at.can_be_input():
                self.followed.counters[at.name] = at
        raise TraceAgain

    def need_gradients(self) -> list[Place]:
        """Tensors that are no parameters, were read, and require a gradient."""
        if not torch.is_grad_enabled():
            return []
        found = [leaf for place, value in self.guards() for leaf in leaf_places(place, value)]
        own = self.followed.parameters
        return [p for p, value in found if isinstance(value, Tensor) and value.requires_grad and p.name not in own]

    def guards(self) -> list[tuple[Place, Any]]:
        """Of a dict that forward changes only the items that it reads."""
        followed = self.followed
        varies = frozenset([*followed.inputs, *followed.counters, *followed.growing, *followed.replaced])
        watched = {name: w for name, w in self.watched.items() if not w.read_whole}
        found = self.reads.guards(varies | watched.keys())
        for name, one in watched.items():
            places = [followed.dicts[name].part(key) for key in one.read]
            found += [(p, snapshot(p.get(), p.name, varies)) for p in places if p.name not in varies]
        return found

    def state(self) -> PythonState:
        """Of the graph; to be asked after the trace, when all is as before."""
        inputs, decisions = self.followed.all_inputs(), self.numbers.decisions
        counters = [place for name, place in self.followed.counters.items() if name not in self.followed.inputs]
        functions = [*self.reads.functions]
        return PythonState(self.guards(), inputs, self.writes.found, decisions, self.reads.latest, counters, functions)
