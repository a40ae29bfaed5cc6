"""Which names a function's code loads and stores, by its instructions; what attributes are; whose code a file holds."""

from __future__ import annotations

import dis
import functools
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from megafx.errors import SourceLine
from megafx.ir.source_lines import is_user_file

_LOADS = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "free", "LOAD_CLASSDEREF": "free"}
_STORES = {"STORE_GLOBAL": "stored", "DELETE_GLOBAL": "stored", "STORE_DEREF": "freed"}
_STORES |= {"STORE_ATTR": "assigned", "DELETE_ATTR": "assigned"}


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of the functions and comprehensions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Names of attributes, globals and variables of enclosing functions."""
    return frozenset(name for part in codes(code) for name in (*part.co_names, *part.co_freevars))


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(kind, names) of each name that code loads, with the attributes that follow ('global', ('options', 'scale')), and of
    each that it stores. Captures of one model look at the same code again and again."""
    return tuple((kind, tuple(names)) for kind, names in _chains(code))


def _chains(code: types.CodeType) -> Iterator[tuple[str, list[str]]]:
    kind, chain = "", list[str]()
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(each.argval))
            continue
        if each.opname == "COPY" and chain:  # `helper.calls += 1`
            continue
        if chain:
            yield kind, chain
        kind = _LOADS.get(each.opname, "")
        chain = [str(each.argval)] if kind else []
        if each.opname in _STORES:
            yield _STORES[each.opname], [str(each.argval)]
    if chain:
        yield kind, chain


@functools.lru_cache(maxsize=4096)
def compares(code: types.CodeType) -> bool:
    """True if it asks whether two objects are the same (`labels is ids`), of which none is None, a class or a module's."""
    for part in codes(code):
        last = ""  # what loads the right one
        for each in dis.get_instructions(part):
            if each.opname == "IS_OP" and last not in ("LOAD_CONST", "LOAD_GLOBAL"):
                return True
            last = last if each.opname in ("LOAD_ATTR", "LOAD_METHOD") else each.opname
        if "is_" in part.co_names:  # of `operator`
            return True
    return False


def writes_attributes_of(code: types.CodeType) -> Iterator[str]:
    """The variable of whose attributes one is written, '' where it is another value, for each such place."""
    last = ""
    for each in dis.get_instructions(code):
        if each.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield last
        loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        last = str(loaded[-1]) if each.opname.startswith("LOAD_FAST") else ""


def names_of(module: nn.Module) -> set[str]:
    """Names that a module's forward reads, through its decorators."""
    found: set[str] = set()
    function: Any = type(module).forward
    while function is not None:
        found.update(getattr(getattr(function, "__code__", None), "co_names", ()))
        function = getattr(function, "__wrapped__", None)
    return found


def names_layerdrop(module: nn.Module) -> bool:
    return any(name.endswith("layerdrop") for name in names_of(module))


def computes(cls: type, name: str) -> type | None:
    """The class that an attribute comes from which is a method, property or the like."""
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            is_slot = isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType))
            return base if hasattr(type(found), "__get__") and not is_slot else None
    return None


def from_getattr(cls: type, name: str) -> bool:
    return not any(name in vars(base) for base in cls.__mro__)


def is_looked_at(file: str) -> bool:
    """True if code in a file may name state of the user (or of a model library). "<string>": of `exec` and `python -c`."""
    if file == "<string>":
        return True
    return is_user_file(file) and ("site-packages" in file or not file.startswith(_STDLIB))


_STDLIB = os.path.dirname(os.__file__) + os.sep
OF_ENVIRON = (os.getenv.__code__.co_filename, Mapping.get.__code__.co_filename)


def names_at_classes(
    function: types.FunctionType, cls: type | None, others: Iterable[type]
) -> Iterator[tuple[type, str, SourceLine]]:
    """(class, name that may be of an attribute of it, line), where code may ask `type(self).calls`. cls: whose method the
    function is; others: classes that one which is no method may look at."""
    for part in codes(function.__code__):
        of = [cls] if cls is not None else []
        if cls is None and not _AT_CLASSES.isdisjoint(part.co_names):
            of = [*dict.fromkeys(others)]
        for kind in of:
            yield from ((kind, name, SourceLine(part.co_filename, part.co_firstlineno)) for name in part.co_names)


_AT_CLASSES = frozenset(["type", "__class__"])


def functions_of_class(cls: type) -> Iterator[Any]:
    """What code can call of a class without an instance."""
    found = (f for base in cls.__mro__ for f in [*vars(base).values()])
    return (f.__func__ for f in found if isinstance(f, (classmethod, staticmethod)))


def dict_of(owner: Any) -> Any:
    """The `__dict__` of an object, past what its class overrides; None where it has none."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


_METHODS = "call get getattr getitem setitem contains iter next len bool enter exit mul rmul add radd sub truediv set"
_PROTOCOL = frozenset(f"__{name}__" for name in _METHODS.split())


def run_by_python(bases: Iterable[type]) -> Iterator[Any]:
    """Methods and descriptors of classes that Python runs where no code names them, past `__getattribute__`."""
    for base in bases:
        for name, held in [*vars(base).items()]:
            if name in _PROTOCOL or (hasattr(type(held), "__get__") and not isinstance(held, types.FunctionType)):
                yield held
