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

from megafx.ir.python_state import ABSENT, Place, items_of, put_items


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


# Functions of torch that are Python code, before anybody put others there (but for what did so before megafx was imported).
FUNCTIONAL = {name: f for name, f in vars(torch.nn.functional).items() if isinstance(f, types.FunctionType)}


def replaced_functional() -> dict[str, Any]:
    """Those in whose place somebody has put others: the others."""
    now = vars(torch.nn.functional)
    return {name: now[name] for name, own in FUNCTIONAL.items() if now.get(name, own) is not own}


@contextlib.contextmanager
def own_functional() -> Iterator[None]:
    """Within, torch's own are there: patterns mean these."""
    others = replaced_functional()
    vars(torch.nn.functional).update({name: FUNCTIONAL[name] for name in others})
    try:
        yield
    finally:
        vars(torch.nn.functional).update(others)


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
