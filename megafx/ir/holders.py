"""What represents a holder of state that is no dict, list or object of the user.

Names of attributes, what a context variable holds, settings of torch, sizes of a buffer, a class's own attributes, defaults of
arguments, variables of the environment.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafx.ir.call_spec import in_autocast
from megafx.ir.python_state import ABSENT, Place, items_of, put_items
from megafx.ir.source_lines import is_installed


@dataclass(frozen=True)
class NamesOf:
    """The names of an object's attributes."""

    attributes: Mapping[str, Any]

    @property
    def names(self) -> str:
        return " ".join(self.attributes)


@dataclass(eq=False)
class OrderOf:
    """The keys of the dict at a place, in their order."""

    place: Place

    @property
    def keys(self) -> tuple[Any, ...]:
        return (*items_of(self.place.get()),)

    @keys.setter
    def keys(self, new: tuple[Any, ...]) -> None:
        items = items_of(self.place.get())
        put_items(self.place.get(), {key: items[key] for key in new})


@dataclass(eq=False)
class MembersOf:
    """What is in the set at a place."""

    place: Place

    @property
    def members(self) -> frozenset[Any]:
        return frozenset(self.place.get())

    @members.setter
    def members(self, new: frozenset[Any]) -> None:
        held = self.place.get()
        held.clear()
        held.update(new)


@dataclass(unsafe_hash=True)
class Current:
    """What a context variable holds."""

    variable: ContextVar[Any]

    @property
    def value(self) -> Any:
        return self.variable.get(ABSENT)

    @value.setter
    def value(self, new: Any) -> None:
        self.variable.set(new)


@dataclass(frozen=True)
class Setting:
    """A setting of torch that a function gives, as it is where the call is made."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        answers = getattr(_of_call, "answers", {})
        return answers[self] if self in answers else self.function(*self.arguments)

    @property
    def text(self) -> str:
        return repr(self.value)


_OF_TORCH = (
    "are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode "
    "get_float32_matmul_precision get_num_threads get_num_interop_threads initial_seed is_warn_always_enabled"
)
_LEFT = "is_inference_mode_enabled is_anomaly_enabled is_anomaly_check_nan_enabled is_autocast_cache_enabled"
_OF_SDPA = "flash_sdp_enabled math_sdp_enabled mem_efficient_sdp_enabled cudnn_sdp_enabled"
BACKENDS = "torch.backends"


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(map(torch.get_autocast_dtype, ("cpu", "cuda")))


# Functions that give settings, by name.
SETTINGS: Mapping[str, Setting] = {
    **{name: Setting(getattr(torch, name)) for name in (*_OF_TORCH.split(), *_LEFT.split())},
    **{name: Setting(getattr(torch.backends.cuda, name)) for name in _OF_SDPA.split()},
    **{f"get_autocast_{kind}dtype": Setting(_autocast_dtypes) for kind in ("", "cpu_", "gpu_")},
}
# Of those, and of the flags of torch.backends, the ones that a capture changes for a time.
LEFT_BY_CAPTURES = {name: SETTINGS[name] for name in _LEFT.split()}
_FLAGS_LEFT = [Setting(getattr, (module, "enabled")) for module in (torch.backends.mkldnn, torch.backends.cudnn)]
_of_call = threading.local()


@contextlib.contextmanager
def as_of_the_call() -> Iterator[None]:
    """Within, these settings have the values that they have now, outermost."""
    if hasattr(_of_call, "answers"):
        yield
        return
    _of_call.answers = {setting: setting.value for setting in (*LEFT_BY_CAPTURES.values(), *_FLAGS_LEFT)}
    try:
        yield
    finally:
        del _of_call.answers


def flag_of_the_call(module: Any, plain: Callable[[], Any]) -> Any:
    """The flag `enabled` of a module of torch.backends, which plain() reads."""
    setting = Setting(getattr, (module, "enabled"))
    return setting.value if setting in getattr(_of_call, "answers", {}) else plain()


def is_backend(holder: Any) -> bool:
    name = holder.__name__ if isinstance(holder, types.ModuleType) else type(holder).__module__
    return name.startswith(BACKENDS)


def _is_of_torch(found: Any) -> bool:
    function = getattr(found, "fget", getattr(found, "__func__", found))
    return not isinstance(function, types.FunctionType) or function.__module__.partition(".")[0] == "torch"


def _functions(owner: Any) -> dict[str, Any]:
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    return {name: f for name, f in vars(owner).items() if isinstance(f, kinds) and _is_of_torch(f)}


# What torch itself has in modules and classes (but for functions that others put there before megafx was imported).
FUNCTIONAL = _functions(torch.nn.functional)
_OWN: dict[Any, dict[str, Any]] = {
    owner: {n: f for n, f in vars(owner).items() if _is_of_torch(f)} for owner in (torch.Tensor, nn.Module)
}
_OWN |= {torch.nn.functional: FUNCTIONAL, torch: _functions(torch)}
_LOOKED_AT = (torch.Tensor, nn.Module)  # in each call; guards name the functions of torch's modules
# What captures replace for a time, which other threads see.
_METHODS = (
    "data register_hook retain_grad backward __repr__ __format__ is_inference __getattribute__ __setattr__ _apply"
)
_FOR_A_TIME = frozenset(_METHODS.split())


class OfTorch:
    """Methods of torch's classes in whose place somebody has put others."""

    def __init__(self) -> None:
        self.known: list[dict[Any, Any]] = [{}]
        self.last: dict[Any, dict[str, Any]] = {}
        self.of_last = 0

    @property
    def number(self) -> int:
        """Equal where the same are there: 0 for torch's own alone."""
        if not self.last or not all([before == vars(owner) for owner, before in self.last.items()]):
            self.last = {owner: dict(vars(owner)) for owner in _LOOKED_AT}
            found = {(owner, n): f for owner in _LOOKED_AT for n, f in replaced_in(owner).items()}
            if found not in self.known:
                self.known.append(found)
            self.of_last = self.known.index(found)
        return self.of_last


OF_TORCH = OfTorch()


def replaced_in(owner: Any) -> dict[str, Any]:
    """What others have put into a class of torch, or in the place of functions of a module of torch."""
    own, now = _OWN[owner], vars(owner)
    found = {n: now.get(n, ABSENT) for n, f in own.items() if now.get(n) is not f}
    if isinstance(owner, type):  # transformers adds a method to nn.Module when it initialises weights
        added = {n: f for n, f in now.items() if n not in own and not _is_of_package(f)}
        # Not what was put back after a replacement, nor what Python and Dynamo note of a class in its attributes.
        found |= {n: f for n, f in added.items() if f is not _inherited(owner, n) and not _is_note(n, f)}
    return {n: f for n, f in found.items() if n not in _FOR_A_TIME and not _wraps(n, f)}


def _is_note(name: str, found: Any) -> bool:
    """Python notes the slots of a class whose objects are copied; Dynamo, whether it has wrapped its constructor."""
    return name.startswith("__") and not callable(found) and not hasattr(found, "__get__")


def _wraps(name: str, found: Any) -> bool:
    """torch wraps some functions when others of its modules are imported, and Dynamo the constructors of modules."""
    return _is_of_torch(found) and (
        _name(found) == name or getattr(found, "__module__", None) == "torch._dynamo.mutation_guard"
    )


def _is_of_package(found: Any) -> bool:
    function = getattr(found, "fget", getattr(found, "__func__", found))
    return isinstance(function, types.FunctionType) and is_installed(function.__code__.co_filename)


def _inherited(owner: type, name: str) -> Any:
    return next((vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), ABSENT)


def _name(found: Any) -> str:
    return str(getattr(found, "__name__", ""))


def own_method(name: str) -> Any:
    """torch's own method of tensors; None where it has none."""
    return _OWN[torch.Tensor].get(name, getattr(torch._C.TensorBase, name, None))


def replaces_torchs() -> bool:
    """True if somebody has put others in the place of torch's methods or functions, when a model was compiled or since."""
    return bool(_seen or OF_TORCH.of_last)


_seen: list[str] = []  # names of such functions


@contextlib.contextmanager
def own_functional() -> Iterator[None]:
    """Within, torch's own are there: megafx's code and patterns mean these."""
    others = [(owner, name, f) for owner in _OWN for name, f in replaced_in(owner).items()]
    _seen[:] = _seen or [name for _, name, _ in others]
    for owner, name, _ in others:
        _put(owner, name, _OWN[owner].get(name, ABSENT))
    try:
        yield
    finally:
        for owner, name, other in others:
            _put(owner, name, other)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


class Remembered:
    """What a function with functools.lru_cache gives for these arguments: `value` calls it, in the modes in which forward does.

    leaves, spec: of (args, kwargs), with a Place for each tensor that the model holds.
    """

    def __init__(
        self, memo: Any, leaves: list[Any], spec: pytree.TreeSpec, grad: bool, autocast: list[dict[str, Any]]
    ) -> None:
        self.memo, self.leaves, self.spec, self.grad, self.autocast = memo, leaves, spec, grad, autocast
        self.held: Any = ABSENT  # while a model is traced

    @property
    def value(self) -> Any:
        return self._found() if self.held is ABSENT else self.held

    @value.setter
    def value(self, new: Any) -> None:
        self.held = new

    def hold(self) -> None:
        """Look it up, and keep it until `release`."""
        self.held = self._found()

    def release(self) -> None:
        """Look it up at each use again."""
        self.held = ABSENT

    def _found(self) -> Any:
        leaves = [x.get() if isinstance(x, Place) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.set_grad_enabled(self.grad), in_autocast(self.autocast):
            return self.memo(*args, **kwargs)


@dataclass(frozen=True)
class SizesOf:
    """The sizes of a buffer. table: of its module."""

    table: Mapping[str, Any]
    name: str

    @property
    def sizes(self) -> Any:
        buffer = self.table.get(self.name)
        return None if buffer is None else buffer.shape


class OwnAttributes:
    """Those that a class itself has, not its bases."""

    def __init__(self, cls: type) -> None:
        vars(self)["cls"] = cls

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self.cls)[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.cls, name)


@dataclass(eq=False)
class Default:
    """The default of an argument."""

    function: types.FunctionType
    name: str
    position: int | None

    @staticmethod
    def all_of(function: types.FunctionType) -> Iterator[Default]:
        """Those of a function."""
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from (Default(function, name, i) for i, name in enumerate(names))
        yield from (Default(function, name, None) for name in function.__kwdefaults__ or ())

    @property
    def value(self) -> Any:
        if self.position is None:
            return (self.function.__kwdefaults__ or {}).get(self.name, ABSENT)
        return (self.function.__defaults__ or ())[self.position]

    @value.setter
    def value(self, new: Any) -> None:
        if self.position is None:
            (self.function.__kwdefaults__ or {})[self.name] = new
            return
        defaults = [*(self.function.__defaults__ or ())]
        defaults[self.position] = new
        self.function.__defaults__ = tuple(defaults)


class _Environment:
    """Variables of the environment as attributes."""

    def __getattr__(self, name: str) -> str:
        try:
            return os.environ[name]
        except KeyError:
            raise AttributeError(name) from None


ENVIRONMENT = _Environment()
