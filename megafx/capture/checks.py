"""Checks of data that only raise or warn (`assert mask.all()`, `if labels.max() >= n: raise ...`) stay out of a graph.

What such a check decides depends on values that capture does not have; apart from its error it changes nothing. So it is
taken to pass, with a note. Any other decision that depends on data stays an error. The statement is found by the instruction of
the user's frame that asks for the truth of a tensor: only a jump counts, not a call that happens to be in the same statement.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from torch.fx.experimental.sym_node import SymNode

from megafx.errors import SourceLine
from megafx.ir.source_lines import is_user_file

_LOGGERS = ("logger", "logging", "warnings", "_logger", "log")
Place = tuple[int, int, int, int]  # line, end line, column, end column


@contextlib.contextmanager
def checks_left_out(note: Callable[[str], None]) -> Iterator[None]:
    """Within: the truth of a traced value that depends on data is what lets such a check pass."""
    decide = SymNode.guard_bool

    def guard_bool(self: SymNode, file: str, line: int) -> bool:
        if not self.has_hint():
            found = _passing(_asking())
            if found is not None:
                value, source = found
                note(f"a check of values is not in the graph: {source}")
                return value
        return decide(self, file, line)

    SymNode.guard_bool = guard_bool  # type: ignore[method-assign]  # for the time of a trace
    try:
        yield
    finally:
        SymNode.guard_bool = decide  # type: ignore[method-assign]  # as it was


def _asking() -> tuple[FrameType, Place] | None:
    """The nearest frame of the user's and where in it the value is made whose truth its current instruction asks for."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    made = None if frame is None else _makers(frame.f_code).get(frame.f_lasti)
    if frame is None or made is None or None in made:
        return None
    return frame, made  # type: ignore[return-value]  # no None among them: asked above


@functools.lru_cache(maxsize=64)
def _makers(code: CodeType) -> dict[int, tuple[int | None, ...]]:
    """Offset of an instruction that asks for the truth of a value -> place of the expression that made the value."""
    found: dict[int, tuple[int | None, ...]] = {}
    before = None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("TO_BOOL", "UNARY_NOT") or "JUMP_IF" in name or "JUMP_FORWARD_IF" in name:
            found[instruction.offset] = tuple(before.positions) if before and before.positions else (None,)
        elif name == "COMPARE_OP" and "bool" in instruction.argrepr:  # Python 3.13 asks in the same instruction
            found[instruction.offset] = tuple(instruction.positions or (None,))
        before = instruction
    return found


def _passing(asking: tuple[FrameType, Place] | None) -> tuple[bool, SourceLine] | None:
    """(truth of the value that is asked for, line) with which the check passes; None: it is no such check."""
    if asking is None:
        return None
    frame, place = asking
    file, line = frame.f_code.co_filename, place[0]
    for statement in ast.walk(_tree(file)):
        if isinstance(statement, ast.Assert):
            wanted = True
        elif isinstance(statement, ast.If) and _only_complains(statement.body):
            wanted = False
        else:
            continue
        value = _operand(statement.test, wanted, place)
        if value is not None:
            return value, SourceLine(file, line, linecache.getline(file, line).strip())
    return None


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _only_complains(body: list[ast.stmt]) -> bool:
    """Whether the statements make a message at most, and raise it, warn of it or log it."""
    *before, last = body
    return all(isinstance(s, ast.Assign) or _logs(s) for s in before) and (isinstance(last, ast.Raise) or _logs(last))


def _logs(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    called = statement.value.func
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in _LOGGERS


def _operand(test: ast.expr, wanted: bool, place: Place) -> bool | None:
    """What the operand of `not`, `and` and `or` at this place has to be for the test to be as wanted; None: it is not there."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operand(test.operand, not wanted, place)
    if isinstance(test, ast.BoolOp):
        found = (_operand(value, wanted, place) for value in test.values)
        return next((value for value in found if value is not None), None)
    line, end_line, column, end_column = place
    assert test.end_lineno is not None and test.end_col_offset is not None
    starts = (test.lineno, test.col_offset) <= (line, column)
    return wanted if starts and (end_line, end_column) <= (test.end_lineno, test.end_col_offset) else None
