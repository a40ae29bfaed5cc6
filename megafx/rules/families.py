"""Rules of ops whose dims depend on their arguments: a family of ops has a function OpCall -> rule string.

Each family writes the same factor strings as the table (dims are f0, f1, ... by position), so that one binder serves all.
Families that move, cut and reduce dims are in rules/families_dims.py; products, norms, indices, attention in
rules/families_math.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Arg(NamedTuple):
    """A tensor argument."""

    shape: Shape
    active: bool = True
    cut: int = -1  # the dim known to be sharded (type checking on local shapes), or -1
    zero: bool = False  # 0 by construction
    mask: bool = False  # as an index it replaces as many dims as it has


class OpCall(NamedTuple):
    """One call of an op by schema: argument names, values (Arg, numbers, tuples, strings for the rest), result shapes."""

    op: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    results: tuple[Any, ...]  # Shape, or None for a result that is no tensor
    several: bool = False  # a tuple of results

    def get(self, name: str, default: Any = None) -> Any:
        return self.values[self.names.index(name)] if name in self.names else default

    @property
    def first(self) -> Arg:
        """The first tensor argument."""
        return next(v for v in self.values if isinstance(v, Arg))

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """A dim argument, counted from the front."""
        ndim = len(self.first.shape) if ndim is None else ndim
        return int(self.get(name, 0)) % max(ndim, 1)


class Part(NamedTuple):
    """A dim that holds elements [start, end) of factor `factor`."""

    factor: str
    start: int
    end: int


@dataclass(frozen=True)
class RuleText:
    """A rule string with what strings cannot say."""

    text: str
    # factor -> reason why it is not sharded (with or without '!' in the string)
    why: dict[str, str] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)  # operand (-1: result) -> Part
    # further rows (operands that are partial, 'P' or 'R' for each result)
    partials: tuple[tuple[tuple[int, ...], str], ...] = ()
    # of several results, those that are made of some operands alone -> the operands
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)


Family = Callable[[OpCall], "RuleText | str | None"]
FAMILIES: dict[str, Family] = {}


def family(*ops: str) -> Callable[[Family], Family]:
    def register(function: Family) -> Family:
        FAMILIES.update({op if "." in op.partition(".")[2] else op + ".default": function for op in ops})
        return function

    return register


def dims(shape: Shape, whole: Any = (), start: int = 0) -> str:
    """'f0 f1! f2' for a shape; `whole` are the positions marked '!'."""
    return " ".join(f"f{i + start}" + ("!" if i in whole else "") for i in range(len(shape)))


_VIEW_OPS = (
    "view.default reshape.default _unsafe_view.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims "
    "flatten.using_ints unflatten.int ravel.default view_as.default reshape_as.default view_copy.default "
    "_reshape_alias.default"
)
VIEWS = frozenset(f"aten.{op}" for op in _VIEW_OPS.split())  # mapped by views.py, not by factors
