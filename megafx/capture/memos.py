"""Functions with functools.lru_cache that forward calls: a graph has what eager mode finds in their caches, stale or not.

Such a function is called for real, outside of the trace, and what it gives is state that forward reads, as an attribute is
(`Remembered`): each call of the model looks it up again, so that `cache_clear()` and arguments that were replaced are noticed.
What is given tensors that the graph computes is traced, since eager mode finds nothing in a cache for a tensor that is new.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import SymTypes
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.capture.code_names import chains, codes
from megafx.capture.host_numbers import HostNumber
from megafx.errors import CaptureError
from megafx.ir.call_spec import ambient_autocast
from megafx.ir.holders import Remembered
from megafx.ir.python_state import PLAIN, Place
from megafx.ir.source_lines import is_user_file, line_of
from megafx.meanwhile import meanwhile
from megafx.ops.eager_call import in_eager_code

MEMO = type(lru_cache(lambda: None))
_OF_NUMBERS = frozenset(["torch", "math", "builtins", "functools", "itertools", "operator", "cmath"])  # libraries
_NOT_REPEATED = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "seed", "poisson", "exponential")


class NeedsRealSizes(Exception):
    """A trace has other sizes than the call, and code needs to know the call's."""


class Memos:
    """The calls of such functions in one trace.

    reads: of the trace. calls: by name, of this trace and those before it. begin(): a trace has to begin again. note(text):
    tells the user.
    """

    def __init__(
        self, reads: Any, calls: dict[str, Place], begin: Callable[[], None], note: Callable[[str], None]
    ) -> None:
        self.reads, self.calls, self.begin, self.note = reads, calls, begin, note
        self.names: dict[str, tuple[Any, ...]] = {}
        self.found: dict[int, Callable[..., Any]] = {}
        self.put: list[tuple[Place, Any]] = []
        self.places: dict[int, Place] = {}  # by id of a fake: the parameter, buffer or state that it represents
        self.given: dict[int, bool] = {}  # ids of inputs of the call; True if one is a number
        self.modules: dict[int, str] = {}
        self.sizes_are_real = True  # and not those of the trace alone
        self.on = False

    # -- where they are

    def find(self, found: Any, place: Place) -> bool:
        """Put what is called in a trace where code finds this one. False if nothing can be put there."""
        called = self.called(memo_of(found))
        try:
            place.set(called if isinstance(found, MEMO) else type(found)(called))
        except (TypeError, AttributeError):
            return False
        self.put.append((place, found))
        return True

    def of_attribute(self, value: Any) -> Any:
        """What code gets that reads this value of an attribute."""
        if isinstance(value, MEMO):
            return self.called(value)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, MEMO):
            return types.MethodType(self.called(value.__func__), value.__self__)
        return value

    def called(self, memo: Any) -> Callable[..., Any]:
        """What is called in its place."""
        thread = threading.get_ident()

        @functools.wraps(memo)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on or in_eager_code() or threading.get_ident() != thread:
                return memo(*args, **kwargs)
            return self._call(memo, args, kwargs)

        for name in ("cache_clear", "cache_info", "cache_parameters"):
            setattr(call, name, getattr(memo, name))
        return self.found.setdefault(id(memo), call)

    def is_one(self, function: Any) -> bool:
        """True of what is called in the place of a function."""
        return any(function is each for each in self.found.values())

    @contextlib.contextmanager
    def running(self, model: nn.Module, state: dict[int, Place]) -> Iterator[None]:
        """Around the model's forward. state: by id of a fake, what it represents."""
        self.modules = {id(m): fqn for fqn, m in model.named_modules()}
        for fqn, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, x in table.items():
                    if x is not None:
                        self.places.setdefault(id(x), Place(table, name, f"{fqn}.{name}".lstrip(".")))
        self.places |= state
        with meanwhile(self, on=True):
            yield

    def undo(self) -> None:
        """Give the places of `find` back what was there."""
        for place, found in reversed(self.put):
            place.set(found)
        self.put.clear()

    # -- calls

    def _call(self, memo: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        line = line_of(sys._getframe(2))
        own = [self.places.get(id(x)) if isinstance(x, FakeTensor) else None for x in leaves]
        of_graph = [x for x, place in zip(leaves, own, strict=True) if isinstance(x, FakeTensor) and place is None]
        plain = all(isinstance(x, (*PLAIN, *SymTypes, HostNumber)) for x in leaves)
        if of_graph:
            if any(self.given.get(id(x)) for x in of_graph):
                raise CaptureError("a function with functools.lru_cache is given a number that varies", source=line)
            if any(id(x) in self.given for x in of_graph):
                self.note(
                    f"{line}: {memo.__name__} is cached by functools.lru_cache, and is given a tensor of the call: graphs "
                    f"compute it in each call, also where eager mode would find the same tensor object in its cache"
                )
        sized = plain and any(isinstance(x, SymTypes) for x in leaves) and _is_of_arguments(memo.__wrapped__)
        if of_graph or sized:
            self.reads.look_through(memo.__wrapped__)
            return memo.__wrapped__(*args, **kwargs)
        if any(isinstance(x, SymTypes) for x in leaves) and not self.sizes_are_real:
            raise NeedsRealSizes(f"{memo.__name__} is cached for each size by functools.lru_cache")
        leaves = [place or _number(x) for x, place in zip(leaves, own, strict=True)]
        place = self._place(memo, leaves, spec, line)
        if place.name not in self.calls:
            self.calls[place.name] = place
            if not plain or not self._made_here(place.holder):
                self.begin()
        place = self.calls[place.name]
        self.reads.take_call(place)
        return place.get()

    def _place(self, memo: Any, leaves: list[Any], spec: pytree.TreeSpec, line: Any) -> Place:
        key = (memo, *(("place", x.name) if isinstance(x, Place) else x for x in leaves), spec)
        shown = ", ".join(map(self._text, leaves))
        name, number = f"{memo.__name__}({shown})", 1
        while self.names.setdefault(name, key) != key:
            number += 1
            name = f"{memo.__name__}({shown}) ({number})"
        return Place(Remembered(memo, leaves, spec, torch.is_grad_enabled(), ambient_autocast()), "value", name, line)

    def _text(self, leaf: Any) -> str:
        if isinstance(leaf, Place):
            return leaf.name
        if isinstance(leaf, nn.Module):
            return f"<{self.modules.get(id(leaf)) or type(leaf).__name__}>"
        return repr(leaf) if isinstance(leaf, PLAIN) else f"<{type(leaf).__name__}>"

    def _made_here(self, holder: Remembered) -> bool:
        """Call the function within the trace, where it is given plain values. False if it meets the trace all the same."""
        off = meanwhile(self, on=False), meanwhile(self.reads, on=False)
        with off[0], off[1], _disable_current_modes(), torch._C.DisableTorchFunction():
            holder.hold()
        if not any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(holder.value)):
            return True
        holder.release()
        holder.memo.cache_clear()  # no other code may find a tensor without values
        return False


def memo_of(value: Any) -> Any:
    """The function with a cache that this is, or that a static method or a method of a class is; None for others."""
    inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return inner if isinstance(inner, MEMO) else None


def _number(x: Any) -> Any:
    """A leaf as it is in a call of eager mode: a graph holds for this size, and for this number that forward counts."""
    if isinstance(x, HostNumber):
        return x.decided()
    kinds = (bool, int, float)
    return next((kind(x) for kind, of in zip(kinds, _SYMBOLIC, strict=True) if isinstance(x, of)), x)


_SYMBOLIC = (torch.SymBool, torch.SymInt, torch.SymFloat)


def _is_of_arguments(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """True if what a function gives follows from its arguments alone, as its code shows."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function.__closure__ or function in seen:
        return False
    names = function.__globals__
    for kind, (first, *rest) in (each for code in codes(function.__code__) for each in chains(code)):
        if kind not in ("global", "assigned") or any(n.startswith(_NOT_REPEATED) for n in (first, *rest)):
            return False
        if kind == "assigned" or first not in names:
            if first in ("globals", "open", "input", "id", "getattr", "setattr", "vars", "exec", "eval"):
                return False
            continue
        value = names[first]
        library = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None) or ""
        if library.partition(".")[0] in _OF_NUMBERS and not isinstance(value, (Tensor, nn.Module)):
            continue
        inner = isinstance(value, (types.FunctionType, MEMO)) and is_user_file(
            inspect.unwrap(value).__code__.co_filename
        )
        if not inner or not _is_of_arguments(getattr(value, "__wrapped__", value), seen | {function}):
            return False
    return True
