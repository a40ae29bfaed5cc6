"""Python numbers that forward reads and writes itself (counters, schedules): computed anew at each call, on the host.

While a model is traced such a number is a `HostNumber`: it knows how it is computed from what the attributes hold before the
call. Arithmetic makes further ones. A decision (`if self.steps % 100 == 0`) is a condition under which the graph serves a
call. Where one meets a tensor, its value is an input of the graph: the trace, which finds that out on its way, is made once
more with an input for each.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megafx.ir.python_state import NUMBERS, Place

Compute = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Computed:
    """A number that follows from what places hold; read as a Place is."""

    name: str
    get: Compute


@dataclass
class HostNumbers:
    """Of one trace."""

    # a tensor for each of the first `len(given)` inputs, from a trace before
    given: list[Tensor] = field(default_factory=list)
    decisions: list[tuple[Compute, Any]] = field(default_factory=list)  # what a number was asked, and the answer
    inputs: list[Computed] = field(default_factory=list)  # those that met a tensor, in order
    decides: bool = False  # a graph holds for the numbers of one call: code needs them as numbers

    def of(self, place: Place, value: Any) -> HostNumber:
        return HostNumber(value, place.get, self, place.name)

    def as_tensor(self, number: HostNumber) -> Any:
        """The tensor that enters the graph for a number; in the first trace the number itself."""
        if self.decides:
            return number.decided()
        index = len(self.inputs)
        self.inputs.append(Computed(f"{number.name} #{index}", number.compute))
        return self.given[index] if index < len(self.given) else number.value


class HostNumber:
    """value: in this trace; compute(): at a call."""

    def __init__(self, value: Any, compute: Compute, owner: HostNumbers, name: str) -> None:
        self.value, self.compute, self.owner, self.name = value, compute, owner, name

    def decided(self) -> Any:
        """The value, for code that needs to know it: the graph holds for this one."""
        self.owner.decisions.append((self.compute, self.value))
        return self.value

    def entering(self) -> Any:
        """What code that stays eager is given (ops/eager_probes.py)."""
        return self.owner.as_tensor(self)

    def __bool__(self) -> bool:
        answer = bool(self.value)
        self.owner.decisions.append((lambda: bool(self.compute()), answer))
        return answer

    def __index__(self) -> int:
        return operator.index(self.decided())

    def __int__(self) -> int:
        return int(self.decided())

    def __float__(self) -> float:
        return float(self.decided())

    def __hash__(self) -> int:
        return hash(self.decided())

    def __repr__(self) -> str:
        return repr(self.decided())

    def __format__(self, spec: str) -> str:
        return format(self.decided(), spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def tensor(value: Any) -> Any:
            return value.owner.as_tensor(value) if isinstance(value, HostNumber) else value

        args, kwargs = torch.utils._pytree.tree_map(tensor, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


# Operand that a factor scales which torch takes as a number alone, by the name of the function.
_SCALED = {
    **{name: {"alpha": 1} for name in ("add", "add_", "sub", "sub_", "subtract", "subtract_")},
    **{name: {"value": 1} for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")},
    **{name: {"beta": 0, "alpha": 1} for name in ("addmm", "addmv", "addr", "baddbmm", "addbmm")},
}


def scaled(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of torch, whose factors that forward counts, or that are tensors, scale an operand."""
    found, options = [*args], dict(options)
    for option, at in _SCALED.get(name, {}).items():
        factor = options.get(option)
        if isinstance(factor, (HostNumber, Tensor)) and at < len(found):
            found[at] = found[at] * (factor.owner.as_tensor(factor) if isinstance(factor, HostNumber) else factor)
            del options[option]
    return tuple(found), options


def made_of_counted(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """What torch.tensor, or torch.full and its like, makes of a number that forward counts; None where there is none."""
    at = {"tensor": 0, "as_tensor": 0, "full": 1, "new_full": 2, "full_like": 1}.get(name)
    number = None if at is None or len(args) <= at else args[at]
    if at == 0 and isinstance(number, (list, tuple)) and any(isinstance(x, HostNumber) for x in number):
        parts = [x.owner.as_tensor(x) if isinstance(x, HostNumber) else x for x in number]
        if not any(isinstance(x, Tensor) for x in parts):
            return torch.tensor(parts, **options)
        whole = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in parts])
        integers = all(isinstance(getattr(x, "value", x), int) for x in number)
        return whole.to(**{"dtype": torch.int64 if integers else torch.get_default_dtype()} | options)
    if not isinstance(number, HostNumber) or number.owner.decides:
        return None
    options = dict(options)
    like = args[0] if name in ("new_full", "full_like") else None
    if options.get("dtype") is None:
        plain = {bool: torch.bool, int: torch.int64}.get(type(number.value), torch.get_default_dtype())
        options["dtype"] = plain if like is None else like.dtype
    value = number.owner.as_tensor(number)
    sizes = {"full": args[0], "new_full": args[1] if at == 2 else (), "full_like": getattr(like, "shape", ())}.get(
        name, ()
    )
    empty = torch.empty(sizes, **options) if like is None else torch.empty_like(like, **options).new_empty(sizes)
    with torch.no_grad():
        return empty.fill_(value)


def of_counted(function: Callable[..., Any], args: Sequence[Any]) -> HostNumber:
    """A function of numbers, some of which forward counts."""
    owner = next(x for x in args if isinstance(x, HostNumber))
    now = [x.compute if isinstance(x, HostNumber) else functools.partial(_itself, x) for x in args]
    values = [x.value if isinstance(x, HostNumber) else x for x in args]
    return HostNumber(function(*values), lambda: function(*(get() for get in now)), owner.owner, owner.name)


def _itself(x: Any) -> Any:
    return x


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[HostNumber, Any], Any]:
    def method(self: HostNumber, other: Any) -> Any:
        pair = (other, self) if swapped else (self, other)
        if isinstance(other, Tensor):
            return function(*(self.owner.as_tensor(self) if x is self else x for x in pair))
        return of_counted(function, pair) if isinstance(other, (HostNumber, *NUMBERS)) else NotImplemented

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *more: of_counted(function, (self, *more))


def _decides(function: Callable[[Any, Any], bool]) -> Callable[[HostNumber, Any], Any]:
    def method(self: HostNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return function(self.owner.as_tensor(self), other)
        made = of_counted(function, (self, other))
        self.owner.decisions.append((made.compute, made.value))
        return made.value

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(HostNumber, f"__{_name}__", _binary(getattr(operator, _name), False))
    setattr(HostNumber, f"__r{_name}__", _binary(getattr(operator, _name), True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(HostNumber, f"__{_name}__", _decides(getattr(operator, _name)))
for _name, _function in (
    ("neg", operator.neg), ("pos", operator.pos), ("abs", abs), ("round", round), ("floor", math.floor),
    ("ceil", math.ceil), ("trunc", math.trunc),
):  # fmt: skip
    setattr(HostNumber, f"__{_name}__", _unary(_function))
