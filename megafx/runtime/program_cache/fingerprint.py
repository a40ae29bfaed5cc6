"""What Python values mean, as text: equal texts in two processes mean that a model does the same with the values.

For the cache on disk (program_cache.py). A function is its code, and the files that code is in are hashed. An object of the
user is its class and a number, by which the same object at two places is known: what forward reads of it has a guard of its own
(capture/reads.py). Values that cannot be compared so raise `Unstorable`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import types
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from megafx.capture.reads import LIBRARIES
from megafx.ir.python_state import ABSENT, PLAIN, VARIES, Container
from megafx.ir.source_lines import is_installed
from megafx.ir.stored import Unstorable, named_in
from megafx.runtime.guards import DirectCall

LARGEST = 2**24  # elements of a tensor that is compared
_HEAP_TYPE = 1 << 9  # a class that Python code made


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return code_digest(value)
        return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)

    parts = (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return digest((*parts, code.co_argcount, code.co_kwonlyargcount, code.co_flags, [*map(constant, code.co_consts)]))


def class_code(cls: type) -> Any:
    """The functions that a class has now: (name, file, digest of the code) of each, also of those that decorators hold.

    Functions can be put into a class after its definition, and two classes may have one name: no file shows it. Raises
    Unstorable for a function whose variables are not those of the module that has its name: guards on them would look there.
    """
    rows: list[tuple[str, str, str]] = []
    seen: set[int] = set()

    def add(name: str, value: Any) -> None:
        for field in ("__func__", "fget", "fset", "func", "__wrapped__"):
            if (inner := getattr(value, field, None)) is not None and not isinstance(value, type):
                add(name, inner)
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            return
        seen.add(id(value))
        module = value.__globals__.get("__name__")
        if not isinstance(module, str) or vars(sys.modules.get(module, types)) is not value.__globals__:
            raise Unstorable(f"{cls.__qualname__}.{name}, code of another module '{module}' than the loaded one")
        rows.append((name, value.__code__.co_filename, code_digest(value.__code__)))
        for held in _variables(value):
            add(name, held)

    for name, value in [*vars(cls).items()]:
        add(name, value)
    return rows


class Fingerprint:
    """Texts of values that belong to one model. files: where the code that was met is."""

    def __init__(self, model: nn.Module) -> None:
        self.fqns = {id(m): fqn for fqn, m in model.named_modules()}
        held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.held = {id(x): name for name, x in held}
        self.files: set[str] = set()
        self.modules: set[str] = set()  # of classes
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._open: set[int] = set()

    def __call__(self, value: Any) -> Any:
        if value is ABSENT or value is VARIES:
            return repr(value)
        if isinstance(value, PLAIN):
            return [type(value).__name__, repr(value)]
        if isinstance(value, Container):
            parts: Iterable[Any] = ([self(k), self(v)] for k, v in value.parts.items())
            if issubclass(value.kind, (set, frozenset)):
                parts = sorted(map(repr, parts))
            return [self(value.kind), *parts]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(self, value)]
        if isinstance(value, dict):
            return [type(value).__name__, *([self(k), self(v)] for k, v in value.items())]
        if isinstance(value, type):
            self.modules.add(value.__module__)
            return ["class", value.__module__, value.__qualname__]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        for kinds, form in _FORMS:
            if isinstance(value, kinds):
                return form(self, value)
        return self._object(value)

    def _function(self, function: types.FunctionType, package: bool = False) -> Any:
        """package: what it wraps, a package's own."""
        code = function.__code__
        self.files.add(code.co_filename)
        name = ["function", function.__module__, function.__qualname__, code_digest(code)]
        if id(function) in self._open:
            return name
        self._open.add(id(function))
        try:
            package = package or _is_of_package(function)
            given = [] if package else [self.plain(function.__defaults__), self.plain(function.__kwdefaults__)]
            wrapped = getattr(function, "__wrapped__", None)
            # what the innermost function reads of its variables has guards
            form = self if wrapped is None else self.plain
            cells = [] if package else [form(value) for value in _variables(function)]
            return [*name, *given, cells, *([] if wrapped is None else [self._wrapped(wrapped, package)])]
        finally:
            self._open.discard(id(function))

    def _wrapped(self, value: Any, package: bool) -> Any:
        return self._function(value, package) if isinstance(value, types.FunctionType) else self(value)

    def plain(self, value: Any) -> Any:
        """The same without objects of the user: nobody guards what is read of them here."""
        known = len(self._numbers)
        form = self(value)
        if len(self._numbers) > known or "'object'" in repr(form):
            raise Unstorable("an object in a default, in a partial or in a decorator's variables")
        return form

    def _object(self, value: Any) -> Any:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__.partition(".")[0] in LIBRARIES or not kind.__flags__ & _HEAP_TYPE:
            raise Unstorable(f"a {name}, whose state cannot be compared with that of another process")
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
        return ["object", self(kind), self._numbers[id(value)]]

    def tensor(self, x: torch.Tensor) -> Any:
        if id(x) in self.held:
            return ["held", self.held[id(x)]]
        plain = type(x) in (torch.Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_quantized
        if not plain or x.numel() > LARGEST:
            raise Unstorable(f"a {type(x).__name__} of {x.numel()} elements")
        form = ["tensor", str(x.dtype), [*x.shape], x.device.type, x.requires_grad]
        return form if x.is_meta else [*form, hashlib.sha256(bytes_of(x)).hexdigest()]

    def module(self, module: nn.Module) -> Any:
        if id(module) not in self.fqns:
            raise Unstorable(f"a {type(module).__name__} outside of the model")
        return ["module", self.fqns[id(module)]]


def _is_of_package(function: types.FunctionType) -> bool:
    """True for a function that an installed package defines, and that is found there by its name."""
    found = named_in(function.__module__, function.__qualname__)
    return found is function and is_installed(function.__code__.co_filename)


def _variables(function: types.FunctionType) -> list[Any]:
    """Of enclosing functions. Recursive functions name themselves."""
    cells = (cell for cell in function.__closure__ or () if cell != types.CellType())
    return [cell.cell_contents for cell in cells]


def bytes_of(x: torch.Tensor) -> bytes:
    with torch.no_grad():
        flat = x.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _array(own: Fingerprint, x: np.ndarray[Any, Any]) -> Any:
    if x.dtype.hasobject:
        raise Unstorable("an array of objects")
    return ["array", str(x.dtype), [*x.shape], hashlib.sha256(x.tobytes()).hexdigest()]


_FORMS: list[tuple[Any, Any]] = [
    (nn.Module, Fingerprint.module),
    (torch.Tensor, Fingerprint.tensor),
    (np.ndarray, _array),
    (np.generic, lambda own, x: ["number", str(x.dtype), repr(x)]),
    (Enum, lambda own, x: [own(type(x)), x.name]),
    (DirectCall, lambda own, x: ["forward", own(x.own)]),
    (types.MethodType, lambda own, x: ["method", own(x.__func__), own.plain(x.__self__)]),
    (
        (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
        lambda own, x: [
            "builtin",
            getattr(x, "__module__", None) or "",
            x.__qualname__,
            *(
                []
                if isinstance(getattr(x, "__self__", None), (type(None), types.ModuleType, type))
                or not hasattr(x, "__self__")
                else [own(x.__self__)]
            ),
        ],
    ),
    (property, lambda own, x: ["property", own(x.fget), own(x.fset)]),
    ((staticmethod, classmethod), lambda own, x: [type(x).__name__, own(x.__func__)]),
    (functools.partial, lambda own, x: ["partial", own(x.func), own.plain(x.args), own.plain(x.keywords)]),
    (functools.cached_property, lambda own, x: ["property", own(x.func)]),
    (functools._lru_cache_wrapper, lambda own, x: ["cached", own(x.__wrapped__)]),
    (logging.Logger, lambda own, x: ["logger", x.name]),
    (types.ModuleType, lambda own, x: ["python module", x.__name__]),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), lambda own, x: ["op", str(x)]),
]
