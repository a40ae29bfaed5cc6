"""What masks can be, and what ops do to them: positions compared, triangles, padding. mask_reader.py reads graphs.

    Index        integers that count positions: sum of coefficient * position in a dim, plus a constant
    Choice       one number where a condition holds, another elsewhere
    Sum          a Choice plus a tensor (a bias with a causal mask)
    Leaf         any other tensor; which dim of the value each of its dims is

Conditions are trees of `le` (an Index is at most 0), boolean leaves, and, or, not. Dims count from the right (-1: keys, -2:
queries), so that broadcasting moves none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.program import VAL


class Index(NamedTuple):
    """sum of c * position in dim d, over (d, c) of `terms`, plus `constant`."""

    terms: tuple[tuple[int, int], ...]
    constant: int

    def plus(self, other: Index, sign: int = 1) -> Index:
        terms = dict(self.terms)
        for d, c in other.terms:
            terms[d] = terms.get(d, 0) + sign * c
        left = tuple(sorted((d, c) for d, c in terms.items() if c))
        return Index(left, self.constant + sign * other.constant)

    def times(self, factor: int) -> Index:
        return Index(tuple((d, c * factor) for d, c in self.terms if factor), self.constant * factor)


class Leaf(NamedTuple):
    """A tensor. dims: for each of its dims the dim of the value, or None where it has length 1."""

    node: fx.Node
    dims: tuple[int | None, ...]


class Cond(NamedTuple):
    """kind: 'true', 'le' (of an Index), 'leaf', 'not', 'and', 'or'."""

    kind: str
    of: tuple[Any, ...] = ()


class Choice(NamedTuple):
    """`on` where the condition holds, else `off`. A boolean tensor is Choice(c, True, False)."""

    where: Cond
    on: Any
    off: Any


class Sum(NamedTuple):
    """A mask plus tensors: `mask.on` is 0."""

    mask: Choice
    rest: tuple[Leaf, ...]


Value = Index | Choice | Sum | Leaf
TRUE = Cond("true")
HARD_FILL = -5000.0  # as kernels/attention/masked_softmax.py has it


def negated(c: Cond) -> Cond:
    if c.kind == "not":
        return c.of[0]
    if c.kind == "le":  # not (x <= 0) is 1 - x <= 0 for integers
        return Cond("le", (Index((), 1).plus(c.of[0], -1),))
    return Cond("not", (c,))


def both(a: Cond, b: Cond) -> Cond:
    if a in (TRUE, b):
        return b
    return a if b == TRUE else Cond("and", (a, b))


def either(a: Cond, b: Cond) -> Cond:
    return TRUE if TRUE in (a, b) else a if a == b else Cond("or", (a, b))


def at_most_zero(x: Index) -> Cond:
    """Positions are not negative: some comparisons always hold."""
    if all(c < 0 for _, c in x.terms) and x.constant <= 0:
        return TRUE
    if not x.terms:
        return Cond("not", (TRUE,))
    return Cond("le", (x,))


def conjuncts(c: Cond, positive: bool = True) -> list[Cond] | None:
    """The conditions that all have to hold; None where there is an 'or' among them."""
    if c == TRUE:
        return [] if positive else None
    if c.kind == "not":
        return conjuncts(c.of[0], not positive)
    if c.kind == ("and" if positive else "or"):
        parts = [conjuncts(part, positive) for part in c.of]
        return None if None in parts else [x for part in parts for x in part]  # type: ignore[union-attr]
    if c.kind in ("and", "or"):
        return None
    return [c if positive else negated(c)]


def number_of(value: Value | None) -> Any:
    """The number that all elements are, or None."""
    return value.on if isinstance(value, Choice) and value.where == TRUE else None


def index_of(value: Value | None) -> Index | None:
    """Integers as an Index; a constant too."""
    if isinstance(value, Index):
        return value
    number = number_of(value)
    whole = isinstance(number, (int, float)) and not isinstance(number, bool) and number == int(number)
    return Index((), int(number)) if whole else None


def condition_of(value: Value | None) -> Cond | None:
    """A boolean value as a condition."""
    if isinstance(value, Leaf) and value.node.meta[VAL].dtype == torch.bool:
        return Cond("leaf", (value,))
    if isinstance(value, Choice) and isinstance(value.on, bool):
        if value.on == value.off:
            return TRUE if value.on else Cond("not", (TRUE,))
        return value.where if value.on else negated(value.where)
    return None


def truth(c: Cond) -> Choice:
    return Choice(c, True, False)


def chosen(c: Cond, a: Value | None, b: Value | None) -> Value | None:
    """a where c, else b."""
    on, off = number_of(a), number_of(b)
    if on is not None and off is not None:
        return Choice(c, on, off)
    if off is None:
        return chosen(negated(c), b, a) if on is not None else None
    if isinstance(a, Choice) and a.off == off:
        return Choice(both(c, a.where), a.on, off)
    if isinstance(a, Choice) and hides(a.off) and hides(off) and a.on == 0:
        return Choice(both(c, a.where), a.on, off)
    if isinstance(a, Leaf) and hides(off) and a.node.meta[VAL].is_floating_point():
        return Sum(Choice(c, 0.0, off), (a,))
    if isinstance(a, Sum) and hides(off):
        return Sum(Choice(both(c, a.mask.where), 0.0, off), a.rest)
    return None


def hides(number: Any) -> bool:
    """Whether a key with this number in an additive mask has no weight beside keys that are seen."""
    return isinstance(number, (int, float)) and number <= HARD_FILL


def combined(op: Callable[[Any, Any], Any], by: str, a: Value | None, b: Value | None) -> Value | None:
    """Arithmetic on choices: with a number; of two masks; of a mask and a tensor."""
    on, off = number_of(a), number_of(b)
    if isinstance(a, Choice) and off is not None:
        return _checked(a, lambda number: op(number, off))
    if isinstance(b, Choice) and on is not None:
        return _checked(b, lambda number: op(on, number))
    if isinstance(a, Choice) and isinstance(b, Choice):
        if by == "mul" and a.off == 0 and b.off == 0:
            return Choice(both(a.where, b.where), a.on * b.on, 0)
        a, b = _mask_form(a), _mask_form(b)
        if by == "add" and a is not None and b is not None:
            return Choice(both(a.where, b.where), 0.0, a.off)
        return None
    if by != "add":
        return None

    def as_sum(value: Value | None) -> Sum | None:
        if isinstance(value, Leaf):
            return Sum(Choice(TRUE, 0.0, 0.0), (value,)) if value.node.meta[VAL].is_floating_point() else None
        form = _mask_form(value) if isinstance(value, Choice) else None
        return Sum(form, ()) if form is not None else value if isinstance(value, Sum) else None

    x, y = as_sum(a), as_sum(b)
    if x is None or y is None or (isinstance(a, Leaf) and isinstance(b, Leaf)):
        return None
    form = Choice(both(x.mask.where, y.mask.where), 0.0, min(x.mask.off, y.mask.off))
    return Sum(form, (*x.rest, *y.rest))


def _checked(choice: Choice, change: Callable[[Any], Any]) -> Choice | None:
    """The choice with both numbers changed; None where that cannot be computed."""
    try:
        return Choice(choice.where, change(choice.on), change(choice.off))
    except (ArithmeticError, TypeError):
        return None


def _mask_form(value: Choice) -> Choice | None:
    """An additive mask: 0 where it shows, a number that hides elsewhere."""
    if value.on == 0 and hides(value.off):
        return value
    return Choice(negated(value.where), value.off, value.on) if value.off == 0 and hides(value.on) else None


def moved(value: Value | None, to: Callable[[int], int | None], shift: Mapping[int, int] | None = None) -> Value | None:
    """The value with its dims renamed, and positions counted from `shift` on. None where a dim that matters is gone.

    A floating tensor (a bias) is taken as it is after the view.
    """
    if isinstance(value, Leaf) and value.node.meta[VAL].is_floating_point():
        return None
    try:
        return _rename(value, to, shift or {})
    except KeyError:
        return None


def _rename(value: Any, to: Callable[[int], int | None], shift: Mapping[int, int]) -> Any:
    if isinstance(value, Index):
        terms = [(to(d), c) for d, c in value.terms]
        if any(d is None for d, _ in terms):
            raise KeyError(value)
        constant = value.constant + sum(c * shift.get(d, 0) for d, c in value.terms)
        return Index(tuple(sorted(terms)), constant)  # type: ignore[arg-type]  # no None: asked above
    if isinstance(value, Leaf):
        dims = tuple(None if d is None else to(d) for d in value.dims)
        if any(d is not None and (n is None or shift.get(d)) for d, n in zip(value.dims, dims, strict=True)):
            raise KeyError(value)
        return Leaf(value.node, dims)
    if isinstance(value, (Cond, Choice, Sum)):
        parts = [_rename(p, to, shift) for p in (value.of if isinstance(value, Cond) else value)]
        return Cond(value.kind, tuple(parts)) if isinstance(value, Cond) else type(value)(*parts)
    return tuple(_rename(p, to, shift) for p in value) if isinstance(value, tuple) else value


def cut(value: Any, dim: int) -> bool:
    """Whether a slice along the dim would take a part of a tensor."""
    if isinstance(value, Leaf):
        return dim in value.dims
    if isinstance(value, (Cond, Choice, Sum)):
        return any(cut(p, dim) for p in (value.of if isinstance(value, Cond) else value))
    return isinstance(value, tuple) and not isinstance(value, Index) and any(cut(p, dim) for p in value)
