"""Deep copies of models whose functions refer to the copy, as those of the model refer to the model.

`copy.deepcopy` keeps functions as they are: a lambda in an attribute, or a forward that somebody has wrapped, would go on
computing with the parameters of the model that was copied.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn


def deep_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy, with functions that hold parts of the model in variables or defaults. memo: as of copy.deepcopy."""
    memo = {} if memo is None else memo
    own = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    made: list[tuple[types.FunctionType, types.FunctionType]] = []
    cells: dict[int, tuple[types.CellType, types.CellType]] = {}  # by id of a variable: the model's, the copy's
    for function in _functions(model):
        if id(function) not in memo and _reaches(function, own, set()):
            closure = function.__closure__ or ()
            for cell in closure:
                if _is_filled(cell) and _reaches(cell.cell_contents, own, set()):
                    cells.setdefault(id(cell), (cell, types.CellType()))
            closure = tuple(cells.get(id(cell), (cell, cell))[1] for cell in closure)
            new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
            functools.update_wrapper(new, function, updated=())
            memo[id(function)] = new
            made.append((function, new))
    copied = copy.deepcopy(model, memo)
    for function, new in made:
        new.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        new.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        new.__dict__.update(copy.deepcopy(vars(function), memo))
    for cell, new_cell in cells.values():
        new_cell.cell_contents = copy.deepcopy(cell.cell_contents, memo)
    return copied


def _functions(model: nn.Module) -> Iterator[types.FunctionType]:
    """Functions that modules hold in attributes and hooks, and those in the variables of such functions."""
    seen: set[int] = set()
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        value = waiting.pop()
        if id(value) not in seen and not isinstance(value, nn.Module):
            seen.add(id(value))
            if isinstance(value, types.FunctionType) and not str(value.__module__).startswith("megafx."):
                yield value
            waiting.extend(_parts(value))


def _parts(value: Any) -> list[Any]:
    """What a function, a method, a partial or a container holds."""
    if isinstance(value, types.FunctionType):
        held = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        return [*held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple, set)) else []


def _reaches(value: Any, own: set[int], seen: set[int]) -> bool:
    if id(value) in own:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_reaches(part, own, seen) for part in _parts(value))


def _is_filled(cell: types.CellType) -> bool:
    """False for a variable that has no value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
