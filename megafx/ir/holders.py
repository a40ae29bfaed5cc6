"""What represents a holder of state that is no dict, list or object of the user.

Names of attributes, what a context variable holds, settings of torch, sizes of a buffer, a class's own attributes, defaults of
arguments, variables of the environment.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from megafx.ir.python_state import ABSENT


@dataclass(frozen=True)
class NamesOf:
    """The names of an object's attributes."""

    attributes: Mapping[str, Any]

    @property
    def names(self) -> str:
        return " ".join(self.attributes)


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
    """A setting of torch that a function gives."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        return repr(self.function(*self.arguments))


_OF_TORCH = (
    "are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode"
)
_OF_TORCH += " get_float32_matmul_precision get_num_threads initial_seed is_autocast_cache_enabled"
_OF_SDPA = "flash_sdp_enabled math_sdp_enabled mem_efficient_sdp_enabled cudnn_sdp_enabled"
SETTINGS: tuple[Callable[[], Any], ...] = (
    *(getattr(torch, name) for name in _OF_TORCH.split()),
    *(getattr(torch.backends.cuda, name) for name in _OF_SDPA.split()),
)
BACKENDS = "torch.backends"


def is_backend(holder: Any) -> bool:
    name = holder.__name__ if isinstance(holder, types.ModuleType) else type(holder).__module__
    return name.startswith(BACKENDS)


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
