"""Checks of data that only raise or warn (`assert mask.all()`, `if labels.max() >= n: raise ...`) stay out of a graph.

What such a check decides depends on values that capture does not have; apart from its error it changes nothing. So it is
taken to pass, with a note. Any other decision that depends on data stays an error. The check is found by the instruction of
the user's frame that asks for the truth of a tensor: only a jump counts, not a call in the same statement.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections.abc import Callable
from types import FrameType

from torch.fx.experimental.sym_node import SymNode

from megafx.errors import SourceLine
from megafx.ir.source_lines import current_user_line, is_user_file

_CHECKS_ARGUMENTS = "torch/distributions/"  # its checks of arguments and values are on by default
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

    def logs(statement: ast.stmt) -> bool:
        called = getattr(getattr(statement, "value", None), "func", None)
        owner = getattr(called, "value", None)
        return isinstance(statement, ast.Expr) and isinstance(owner, ast.Name) and owner.id in _LOGGERS

    *before, last = body
    return all(isinstance(s, ast.Assign) or logs(s) for s in before) and (isinstance(last, ast.Raise) or logs(last))


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
