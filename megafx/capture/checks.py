"""Checks of data that only raise or warn (`assert mask.all()`, `if labels.max() >= n: raise ...`) stay out of a graph.

What such a check decides depends on values that capture does not have; apart from its error it changes nothing. So it is
taken to pass, with a note. Any other decision that depends on data stays an error. The check is found by the instruction of
the user's frame that asks for the truth of a tensor: only a jump counts, not a call in the same statement.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.sym_node import SymNode

from megafx.errors import SourceLine
from megafx.ir.source_lines import current_user_line, is_user_file

_CHECKS_ARGUMENTS = "torch/distributions/"  # its checks of arguments and values are on by default
_PLUMBING = tuple(
    os.path.join(os.path.dirname(torch.__file__), name) for name in ("fx", "_sympy", "utils", "__init__.py")
)
_PLUMBING += (os.path.dirname(os.path.dirname(__file__)),)
_MAKE_ZEROS = ("zeros", "new_zeros", "empty", "new_empty")
_LOGGERS = ("logger", "logging", "warnings", "_logger", "log")
_ASKS_IN_COMPARE = 16  # bit of COMPARE_OP's argument, from Python 3.13 on
Place = tuple[int, int, int, int]  # line, end line, column, end column


def passing_checks(decide: Callable[..., bool], note: Callable[[str], None]) -> Callable[..., bool]:
    """A `SymNode.guard_bool` for which the truth of a value that depends on data is what lets such a check pass."""

    def guard_bool(self: SymNode, file: str, line: int) -> bool:
        found = None if self.has_hint() else _check_asking()
        if found is None:
            return decide(self, file, line)
        value, source = found
        note(f"a check of values is not in the graph: {source}")
        return value

    return guard_bool


def _check_asking() -> tuple[bool, SourceLine] | None:
    """(the truth with which it passes, its line) of the check that the user's code is making; None if it makes none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (is_user_file(file := frame.f_code.co_filename) or _CHECKS_ARGUMENTS in file):
        frame = frame.f_back
    place = None if frame is None else _asked(frame)
    if frame is None or place is None:
        return None
    file, line = frame.f_code.co_filename, place[0]
    for statement in ast.walk(_tree(file)):
        # A constraint of torch.distributions gives its verdict early where one part does not hold.
        check = isinstance(statement, ast.If) and (
            _only_complains(statement.body) or file.endswith(f"{_CHECKS_ARGUMENTS}constraints.py")
        )
        if isinstance(statement, ast.Assert) or check:
            value = _operand(statement.test, isinstance(statement, ast.Assert), place)  # type: ignore[attr-defined]
            if value is not None:
                source = SourceLine(file, line, linecache.getline(file, line).strip())
                return value, source if is_user_file(file) else current_user_line() or source
    return None


def only_skips(answer: bool) -> bool:
    """Whether the code that asks about a number of rows only leaves out work where there are none. answer: where there are any.

    `if rows.numel() == 0: continue` does, as do `if n > 0: y[i] = f(x[i])` and `return x`; another value, or other work, for
    none does not. torch's own code is taken to.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
        frame = frame.f_back
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return True
    place = _asked(frame)
    for statement in ast.walk(_tree(frame.f_code.co_filename)) if place is not None else ():
        if isinstance(statement, (ast.If, ast.IfExp)):
            value = _operand(statement.test, True, place)  # type: ignore[arg-type]  # there is one
            if value is not None:
                taken: Any = statement.orelse if value == answer else statement.body  # where there are none
                return all(map(_does_nothing, taken)) if isinstance(taken, list) else _makes_zeros(taken)
    return False


def _does_nothing(part: ast.AST) -> bool:
    """Whether a statement or expression is what work on no rows gives: what was there before, or zeros."""
    if isinstance(part, (ast.Return, ast.Expr)):
        return part.value is None or _does_nothing(part.value)
    if isinstance(part, ast.Tuple):
        return all(map(_does_nothing, part.elts))
    if isinstance(part, ast.stmt) and is_message(part):
        return True
    return isinstance(part, (ast.Continue, ast.Pass, ast.Name, ast.Raise)) or _makes_zeros(part)


def _makes_zeros(part: ast.AST) -> bool:
    return isinstance(part, ast.Call) and getattr(part.func, "attr", "").startswith(_MAKE_ZEROS)


def _asked(frame: FrameType) -> Place | None:
    """The position of the expression whose truth the frame's current instruction asks for; None if it asks for none."""
    code, at = frame.f_code.co_code, frame.f_lasti
    name = dis.opname[code[at]]
    positions = list(frame.f_code.co_positions())
    if name == "COMPARE_OP" and sys.version_info >= (3, 13) and code[at + 1] & _ASKS_IN_COMPARE:
        place = positions[at // 2]
    elif name in ("TO_BOOL", "UNARY_NOT") or "JUMP_IF" in name or "JUMP_FORWARD_IF" in name:
        place = positions[at // 2 - 1]  # of the instruction before, which made the value
    else:
        return None
    return None if None in place else place  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _only_complains(body: list[ast.stmt]) -> bool:
    """Whether the statements at most make a message, and raise, warn of or log it."""
    *before, last = body
    complains = isinstance(last, ast.Raise) or is_message(last)
    return complains and all(isinstance(s, ast.Assign) or is_message(s) for s in before)


def _end(part: ast.stmt) -> tuple[int, int]:
    return part.end_lineno or part.lineno, part.end_col_offset or 0


def is_message(statement: ast.stmt) -> bool:
    """Whether a statement only warns or logs."""
    called = getattr(getattr(statement, "value", None), "func", None)
    owner = getattr(called, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(owner, ast.Name) and owner.id in _LOGGERS


def statement_at(frame: FrameType) -> ast.stmt | None:
    """The innermost statement that a frame runs."""
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or column is None:
        return None
    found: ast.stmt | None = None
    for each in ast.walk(_tree(frame.f_code.co_filename)):  # a statement is met before those that it holds
        if isinstance(each, ast.stmt) and (each.lineno, each.col_offset) <= (line, column) < _end(each):
            found = each
    return found


def _operand(test: ast.expr, wanted: bool, place: Place) -> bool | None:
    """What the operand of `not`, `and` and `or` at this place must be for the test to be as wanted; None: it is not there."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operand(test.operand, not wanted, place)
    if isinstance(test, ast.BoolOp):
        found = (_operand(value, wanted, place) for value in test.values)
        return next((value for value in found if value is not None), None)
    line, end_line, column, end_column = place
    assert test.end_lineno is not None and test.end_col_offset is not None
    starts = (test.lineno, test.col_offset) <= (line, column)
    return wanted if starts and (end_line, end_column) <= (test.end_lineno, test.end_col_offset) else None
