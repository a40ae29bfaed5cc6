"""`float(x.norm())`, `int(mask.sum())`, `bool(found.any())`: numbers of a tensor's data, as `.item()` reads them, and
`len(x[mask])`, as `.shape[0]` does. On data-parallel ranks also of sizes (`len(x)`, `math.sqrt(len(x))`), of which the batch's
has to stay one.

Python wants a number of these calls, and a trace has none. Where one fails, the model is traced once more with other code for
that function: the same, but for the names `float`, `int`, `bool` and `len` where it calls them. What they give of traced
tensors may leave the graph or be a size of it, and a decision by it is an error.

torch.export has a `max` and a `min` of its own while it traces. Of numbers of data these are `limits`. A `comparison` of sizes
is a bool for the code that compares.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import math
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import SymTypes

from megafx.capture.host_numbers import HostNumber, of_counted
from megafx.ir.source_lines import is_installed, is_user_file
from megafx.meanwhile import replacing
from megafx.ops.of_numbers import OF_NUMBERS
from megafx.progress import also_among_frozen


@dataclass
class Converting:
    """codes: code that is traced with conversions of ours -> whether those of sizes are, too. numbered: code of the user's that
    has made numbers of sizes in a trace. reads_sizes: a size that code needs as a number stays a size elsewhere, and
    has its own graph."""

    codes: dict[types.CodeType, bool] = field(default_factory=dict)
    numbered: dict[types.CodeType, None] = field(default_factory=dict)
    reads_sizes: bool = False

    def keep_sizes(self) -> bool:
        """From here on sizes stay sizes in all code that has made numbers of them, then, where that is not enough, beside all
        numbers; False where this is so already."""
        new = [code for code in self.numbered if not self.codes.get(code)]
        self.codes |= dict.fromkeys(new, True)
        before, self.reads_sizes = self.reads_sizes, self.reads_sizes or not new
        return bool(new) or not before


_NAMES = ("float", "int", "bool", "len")
_LOAD, _CONSTANT, _NULL, _NOP = (dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_CONST", "PUSH_NULL", "NOP"))


def conversions_of(error: BaseException) -> types.CodeType | None:
    """The code on the error's stack that calls one of the names on the line that failed: the user's deepest."""
    seen: BaseException | None = error
    while seen is not None:
        for frame, line in reversed([*traceback.walk_tb(seen.__traceback__)]):
            if is_user_file(frame.f_code.co_filename):
                code = original(frame.f_code)
                named = any(step.positions is not None and step.positions.lineno == line for step, _ in _calls(code))
                return code if named else None
        seen = seen.__cause__ or seen.__context__
    return None


def _calls(code: types.CodeType) -> Iterator[tuple[dis.Instruction, str]]:
    """Where code loads one of the names to call it."""
    for step in dis.get_instructions(code):
        if step.opcode == _LOAD and step.arg is not None and step.arg & 1 and step.argval in _NAMES:
            yield step, step.argval


def functions_with(code: types.CodeType) -> list[types.FunctionType]:
    """Functions that have this code, or make functions that have it (a comprehension, a lambda)."""
    return also_among_frozen(lambda: _functions_with(code))


def _functions_with(code: types.CodeType) -> list[types.FunctionType]:
    holders = gc.get_referrers(code)  # a look at everything in memory
    found = [f for f in holders if isinstance(f, types.FunctionType) and f.__code__ is code]
    tuples = [holder for holder in holders if type(holder) is tuple]
    around = [x for x in gc.get_referrers(*tuples) if isinstance(x, types.CodeType)] if tuples else []
    outer = [x for x in around if any(x.co_consts is holder for holder in tuples)]
    return found + [function for each in outer for function in _functions_with(each)]


def original(code: types.CodeType) -> types.CodeType:
    """The code that `with_conversions` has made this of."""
    return _MADE_OF.get(code, code)


def with_conversions(sizes: bool, code: types.CodeType) -> types.CodeType:
    """The code with conversions of traced numbers in place of Python's. sizes: also of sizes."""
    found = (new for new, old in _MADE_OF.items() if old is code and (new in _OF_SIZES) == sizes)
    made = next(found, None) or _with_conversions(sizes, code)
    _MADE_OF[made] = code
    if sizes:
        _OF_SIZES[made] = None
    return made


def _with_conversions(sizes: bool, code: types.CodeType) -> types.CodeType:
    constants = [with_conversions(sizes, x) if isinstance(x, types.CodeType) else x for x in code.co_consts]
    text = bytearray(code.co_code)
    for step, name in _calls(code):
        if len(constants) > 255:  # no room for it: the error stays
            break
        load = [_CONSTANT, len(constants)]
        constants.append(_CONVERSIONS[name, sizes])
        end = step.offset + 2 + 2 * _caches(_LOAD)
        start = step.offset - (2 if step.arg is not None and step.arg > 255 else 0)
        # The callable is behind the NULL up to Python 3.12, and before it later.
        new = [_NULL, 0, *load] if sys.version_info < (3, 13) else [*load, _NULL, 0]
        text[start:end] = bytes([*new, *([_NOP, 0] * ((end - start - len(new)) // 2))])
    return code.replace(co_code=bytes(text), co_consts=tuple(constants))


def _caches(opcode: int) -> int:
    return dis._inline_cache_entries[opcode]  # type: ignore[attr-defined]  # no public name has it in Python 3.11


def _converted(name: str, sizes: bool, *args: Any, **kwargs: Any) -> Any:
    """What a conversion gives in a trace."""
    value = args[0] if len(args) == 1 and not kwargs else None
    if sizes and name == "len" and isinstance(value, FakeTensor) and value.dim():
        return value.shape[0]
    if sizes and name in ("int", "float") and isinstance(value, torch.SymInt):
        return value if name == "int" else torch.sym_float(value)
    if isinstance(value, FakeTensor):
        value = value.item() if name != "len" else value.shape[0] if value.dim() else None
    if not _of_data(value):
        return getattr(builtins, name)(*args, **kwargs)
    if name == "len":
        return value
    if name == "bool":
        return value if isinstance(value, torch.SymBool) else value != 0
    if isinstance(value, torch.SymBool):
        value = torch.sym_ite(value, 1, 0)
    return torch.sym_float(value) if name == "float" else torch.sym_int(value)


@replacing
def made_number(numbered: dict[types.CodeType, None], old: Callable[[torch.SymInt], Any], self: torch.SymInt) -> Any:
    """`__index__`, `__int__` or `__float__` of sizes."""
    code = sys._getframe(2).f_code  # behind _here_alone
    if is_user_file(code.co_filename):
        numbered[original(code)] = None
    return old(self)


@replacing
def comparison(old: Callable[[torch.SymInt, Any], Any], self: torch.SymInt, other: Any) -> Any:
    """A `__gt__` or another comparison of sizes: a bool where the user's code compares, as torch's functions want one
    (`is_causal=queries > 1`); elsewhere, and of a tensor's data, as before."""
    found = old(self, other)
    if not isinstance(found, torch.SymBool) or not found.node.has_hint():
        return found
    return bool(found) if is_user_file(sys._getframe(2).f_code.co_filename) else found  # behind _here_alone


@replacing
def hash_for_users(old: Callable[[torch.SymInt], int], self: torch.SymInt) -> int:
    """The hash of a size where the user's code asks for it; elsewhere, in torch itself, as before."""
    file = sys._getframe(2).f_code.co_filename  # behind _here_alone
    return hash(int(self)) if is_user_file(file) or file.startswith("<") else old(self)


OF_NUMPY = ("sqrt", "log", "log2", "log10", "exp")


def as_numpy_asks(name: str) -> Callable[[Any], Callable[[Any], float]]:
    """A method of sizes that numpy calls for its function of this name (`np.log(x.shape[1])`). Each size has its own graph."""
    return lambda old: lambda self: getattr(math, name)(float(self))


@replacing
def quotient(turned: bool, old: Callable[[Any, Any], Any], self: Any, other: Any) -> Any:
    """`__truediv__` of sizes, or `__rtruediv__` (`turned`), whose result knows of what it is one."""
    found = old(self, other)
    if isinstance(found, torch.SymFloat) and isinstance(other, (int, torch.SymInt)):
        found.of_sizes = (other, self) if turned else (self, other)  # type: ignore[attr-defined]  # ours, not torch's
    return found


@replacing
def rounded(up: bool, old: Callable[[Any], Any], self: Any) -> Any:
    """`__ceil__`, or `__floor__`, of a quotient of sizes: by whole numbers, as torch has no node for its own form in backward
    (`math.ceil(length / window)`)."""
    if (sizes := getattr(self, "of_sizes", None)) is None:
        return old(self)
    above, below = sizes
    return -(-above // below) if up else above // below


@replacing
def limits(old: Callable[..., Any], /, *args: Any, tensor_callable: Any, **kwargs: Any) -> Any:
    """torch.export's `_tensor_min_max`, also for numbers of data."""
    among = args if len(args) > 1 else [*args[0]] if args and isinstance(args[0], (list, tuple)) else []
    if (
        {*kwargs} > {"real_callable"}
        or not any(map(_of_data, among))
        or any(isinstance(x, torch.Tensor) for x in among)
    ):
        return old(*args, tensor_callable=tensor_callable, **kwargs)
    of_sizes = torch.sym_max if tensor_callable is torch.maximum else torch.sym_min

    def two(a: Any, b: Any) -> Any:
        if _whole(a) and _whole(b):
            return _limited(a, b, tensor_callable)
        return of_sizes(a, b)

    return functools.reduce(two, among)


@replacing
def of_numbers(
    name: str, numbered: dict[types.CodeType, None], old: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """A function of `math`, also of numbers of data and of those that forward counts. That of one number that was read from a
    tensor is computed by torch, in fp64, as it may meet tensors: where `math` raises an error (the logarithm of 0) it has an
    infinity or NaN. Others are numbers alone."""
    counted = any(isinstance(x, HostNumber) for x in args)
    if len(args) == 1 and isinstance(args[0], (torch.SymInt, torch.SymFloat)) and not _of_data(args[0]):
        code = sys._getframe(2).f_code  # behind _here_alone
        if name == "sqrt" and code in _OF_SIZES:  # export takes no other one
            return torch.sym_sqrt(args[0])
        numbered[original(code)] = None
        return old(*args, **kwargs)
    if kwargs or not 1 <= len(args) <= 2 or not (counted or any(map(_of_data, args))):
        return old(*args, **kwargs)
    if counted:
        return old(*args) if any(isinstance(x, SymTypes) for x in args) else of_counted(old, args)
    if len(args) == 1 and name in _TORCH and args[0].node.expr.is_symbol:
        return getattr(torch, name)(torch.scalar_tensor(args[0], dtype=torch.float64)).item()
    return OF_NUMBERS(name, *args).item()


_TORCH = ("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "tanh", "atan", "erf")
MATH = (
    *_TORCH,
    *("acos", "acosh", "asin", "asinh", "atan2", "atanh", "cbrt", "copysign", "cosh", "degrees", "erfc", "exp2"),
    *("fabs", "fmod", "gamma", "hypot", "isclose", "isfinite", "isinf", "isnan", "lgamma", "pow", "radians"),
    *("remainder", "sinh"),
)


_Named = list[tuple[str, str]]


@dataclass
class _Looked:
    """Which functions of a library modules have. again: modules that are looked at each time."""

    modules: list[int] = field(default_factory=list)  # addresses of all
    installed: dict[str, tuple[types.ModuleType, _Named]] = field(default_factory=dict)
    found: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)  # in installed ones
    again: list[types.ModuleType] = field(default_factory=list)


_LOOKED: dict[str, _Looked] = {}


def imported_by_name(
    library: types.ModuleType, wanted: Collection[str], libraries: Collection[str]
) -> list[tuple[dict[str, Any], str, str]]:
    """(globals, name there, name in the library) of functions of a library that modules have imported by name.
    libraries: packages left out. An installed module is looked through once."""
    functions = {id(getattr(library, name)): name for name in wanted if hasattr(library, name)}
    looked = _LOOKED.setdefault(library.__name__, _Looked())
    if (modules := [*map(id, [*sys.modules.values()])]) != looked.modules:
        looked.modules, looked.again, installed = modules, [], dict[str, tuple[types.ModuleType, _Named]]()
        for name, module in [*sys.modules.items()]:
            seen = looked.installed.get(name)
            if seen is None or seen[0] is not module:
                left_out = name.partition(".")[0] in libraries
                loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
                if not left_out and (loading or not is_installed(getattr(module, "__file__", None) or "")):
                    looked.again.append(module)
                    continue
                seen = module, [] if left_out else _named(module, functions)
            installed[name] = seen
        looked.installed = installed
        looked.found = [(vars(m), own, name) for m, has in installed.values() for own, name in has]
    return looked.found + [(vars(m), own, name) for m in looked.again for own, name in _named(m, functions)]


def _named(module: types.ModuleType, functions: Mapping[int, str]) -> _Named:
    """(name in the module, name in the library) of functions that it has."""
    # Most modules have none of the functions, which a look at all values at once finds faster than one by one.
    if functions.keys().isdisjoint(map(id, [*vars(module).values()])):
        return []
    return [(own, functions[id(x)]) for own, x in [*vars(module).items()] if id(x) in functions]


def _whole(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _limited(a: Any, b: Any, limit: Callable[..., Any]) -> Any:
    """Of two whole numbers, by a tensor: among sizes, which are taken to be at least 1, `max(n, 1)` would be n."""
    return limit(*(torch.scalar_tensor(x, dtype=torch.int64) for x in (a, b))).item()


_CONVERSIONS = {(name, of): functools.partial(_converted, name, of) for name in _NAMES for of in (False, True)}
_MADE_OF: dict[types.CodeType, types.CodeType] = {}
_OF_SIZES: dict[types.CodeType, None] = {}  # code whose sizes stay sizes


def _of_data(value: Any) -> bool:
    return isinstance(value, SymTypes) and not value.node.has_hint()
