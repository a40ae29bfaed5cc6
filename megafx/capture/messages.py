"""What forward checks, prints, logs, warns and makes texts of while it is traced.

Checks of data that only raise or warn (`assert mask.all()`, `if labels.max() >= n: raise ...`) stay out of a graph. What such a
check decides depends on values that capture does not have; apart from its error it changes nothing. So it is taken to pass,
with a note. Any other decision that depends on data stays an error. The check is found by the instruction of the user's frame
that asks for the truth of a tensor: only a jump counts, not a call in the same statement.

Prints and logs stay off the terminal, with a note that names the line: a trace runs several times, and has no values. Warnings
of the user's code, of libraries and of torch.nn are kept, and shown once the capture is done, as Python shows them in the first
call of eager mode.

Torch prints a size of a trace as `s27`, and a number of a tensor's data as `zuf0`. In code of the user's, such a text
(`f"{loss.item():.3f}"`, `str(x.shape)`, `f"layer_{n}"`) would be kept for ever. There the text of a size is that of its value,
for which there is one graph each; of numbers and tensors there is none. Statements that only print, log or check are left as
they are: they do nothing in a trace.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import itertools
import linecache
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx.experimental.sym_node import SymNode
from torch.overrides import _get_current_function_mode_stack

from megafx.capture.libraries.expert_loops import ExpertLoops
from megafx.capture.program import ROOT
from megafx.errors import CaptureError, SourceLine, or_leave_eager
from megafx.ir.source_lines import current_user_line, frame_behind, is_user_file, line_of
from megafx.meanwhile import replacing

# Whose checks of arguments and values are taken to pass: on by default in distributions, of a variance in gaussian_nll_loss.
_CHECKS_ARGUMENTS = ("torch/distributions/", "torch/nn/functional.py")
_PLUMBING = tuple(
    os.path.join(os.path.dirname(torch.__file__), name) for name in ("fx", "_sympy", "utils", "__init__.py")
)
_PLUMBING += (os.path.dirname(os.path.dirname(__file__)),)
_MAKE_ZEROS = ("zeros", "new_zeros", "empty", "new_empty")
_LOGGERS = ("logger", "logging", "warnings", "_logger", "log")
A_FILE = "a file"
_ASKS_IN_COMPARE = 16  # bit of COMPARE_OP's argument, from Python 3.13 on
Place = tuple[int, int, int, int]  # line, end line, column, end column


@replacing
def passing_checks(
    decide: Callable[..., bool], note: Callable[[str], None], self: SymNode, file: str, line: int
) -> bool:
    """A `SymNode.guard_bool` for which the truth of a value that depends on data is what lets such a check pass."""
    found = None if self.has_hint() else _check_asking()
    if found is None:
        return decide(self, file, line)
    value, source = found
    note(f"a check of values is not in the graph: {source}")
    return value


def _check_asking() -> tuple[bool, SourceLine] | None:
    """(the truth with which it passes, its line) of the check that the user's code is making; None if it makes none."""
    frame = frame_behind(
        sys._getframe(2), lambda file: not (is_user_file(file) or any(x in file for x in _CHECKS_ARGUMENTS))
    )
    place = None if frame is None else _asked(frame)
    if frame is None or place is None:
        return None
    file, line = frame.f_code.co_filename, place[0]
    for statement in ast.walk(_tree(file)):
        # A constraint of torch.distributions gives its verdict early where one part does not hold.
        check = isinstance(statement, ast.If) and (
            _only_complains(statement.body) or file.endswith("torch/distributions/constraints.py")
        )
        if isinstance(statement, ast.Assert) or check:
            value = _operand(statement.test, isinstance(statement, ast.Assert), place)  # type: ignore[attr-defined]  # has one
            if value is not None:
                source = SourceLine(file, line, linecache.getline(file, line).strip())
                return value, source if is_user_file(file) else current_user_line() or source
    return None


def only_skips(answer: bool) -> bool:
    """Whether the code that asks about a number of rows only leaves out work where there are none. answer: where there are any.

    `if rows.numel() == 0: continue` does, as do `if n > 0: y[i] = f(x[i])` and `return x`; another value, or other work, for
    none does not. torch's own code is taken to.
    """
    frame = frame_behind(sys._getframe(2), lambda file: file.startswith(_PLUMBING))
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
    """True if a statement or expression is what work on no rows gives: what was there before, or zeros."""
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
    return None if None in place else place  # type: ignore[return-value]  # no None is left


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _only_complains(body: list[ast.stmt]) -> bool:
    """True if the statements at most make a message, and raise, warn of or log it."""
    *before, last = body
    complains = isinstance(last, ast.Raise) or is_message(last)
    return complains and all(isinstance(s, ast.Assign) or is_message(s) for s in before)


def _end(part: ast.stmt) -> tuple[int, int]:
    return part.end_lineno or part.lineno, part.end_col_offset or 0


def is_message(statement: ast.stmt) -> bool:
    """True if a statement only warns or logs."""
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


# -- what it prints, logs and warns


# Files of torch that run as part of the user's model; the others are those that trace it.
_WHERE = "nn functional.py distributions utils/checkpoint.py"
_OF_MODELS = tuple(os.path.join(os.path.dirname(torch.__file__), name) for name in _WHERE.split())


@dataclass(frozen=True)
class Warned:
    """A warning of forward. module: name of the module that holds the line; shown: what that module has warned of. category:
    None where the line prints or logs: the logger "megafx" says so, once."""

    text: str
    category: type[Warning] | None
    file: str
    line: int
    module: str
    shown: dict[Any, Any] = field(compare=False)

    def show(self) -> None:
        """Warn. Raises the warning where filters turn it into an error."""
        if self.category is None:
            if self not in _LOGGED:
                _LOGGED.append(self)
                logging.getLogger("megafx").warning("%s:%d: %s", self.file, self.line, self.text)
            return
        warnings.warn_explicit(self.text, self.category, self.file, self.line, self.module, self.shown)

    def note(self) -> str:
        if self.category is None:
            return f"{SourceLine(self.file, self.line, linecache.getline(self.file, self.line).strip())}: {self.text}"
        return (
            f"{os.path.basename(self.file)}:{self.line}: forward warns ({self.category.__name__}: {self.text}): shown when "
            "a graph is captured, and not in each call"
        )


_LOGGED: list[Warned] = []  # of category None


def unheard(note: Callable[[str], None], warned: list[Warned]) -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """(owner, name, its replacement in a trace, why). note: called with a text of each; warned: takes warnings."""

    @replacing
    def quiet(old: Callable[..., Any], /, *values: Any, **options: Any) -> Any:
        stream = options.get("file")
        if not (stream in (None, sys.__stdout__, sys.__stderr__) or isinstance(stream, _Muted)):
            return old(*values, **options)  # a write into what forward holds, which is seen afterwards (writes.py)
        # past what makes it this thread's
        frame = frame_behind(sys._getframe(2), lambda file: file == logging.__file__)
        source = line_of(frame, walk=False)
        if source is not None and "site-packages" not in source.file:
            text = "forward prints or logs here, and calls of a graph of megafx do neither: return the value, or "
            text += "print it in a forward hook"
            _add(Warned(text, None, source.file, source.line, "", {}), note, warned)
        return None

    why = (
        "partial graphs that export prints and logs stay off the terminal; warnings are shown once a model is captured"
    )
    table: list[tuple[Any, str, Callable[[Any], Any], str]] = [
        (owner, name, quiet, why) for owner, name in ((logging.Logger, "handle"), (builtins, "print"))
    ]
    table.append((warnings, "warn", lambda old: functools.partial(_warn, note, warned), why))
    table += [(sys, name, _Muted, why) for name in ("stdout", "stderr") if getattr(sys, name) is not None]
    return table


def _warn(
    note: Callable[[str], None],
    warned: list[Warned],
    message: Any,
    category: type[Warning] | None = None,
    stacklevel: int = 1,
    *_: Any,
    **__: Any,
) -> None:
    """A `warnings.warn` of a trace."""
    found = re.match(r"The tensor attributes? (.*?) (?:was|were) assigned during export", str(message))
    if found:
        names = found.group(1).replace(f"self.{ROOT}.", "")
        note(f"forward stores a tensor in {names}: a captured graph does not (register it as a buffer, or return it)")
    frame: FrameType | None = sys._getframe(2)  # past what makes it this thread's
    if frame is None or not (is_user_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_OF_MODELS)):
        return
    callers = stacklevel > 1
    while frame.f_back is not None and (stacklevel > 1 or (callers and not is_user_file(frame.f_code.co_filename))):
        frame, stacklevel = frame.f_back, stacklevel - 1  # past frames of the trace, too, between the model's
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    names = frame.f_globals
    module, shown = str(names.get("__name__", "<string>")), names.setdefault("__warningregistry__", {})
    _add(Warned(str(message), kind, frame.f_code.co_filename, frame.f_lineno, module, shown), note, warned)


def _add(one: Warned, note: Callable[[str], None], warned: list[Warned]) -> None:
    if one not in warned:
        warned.append(one)
        note(one.note())


class _Muted:
    """A stream that takes nothing from the thread that made it, and passes on what others write."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- texts of what has no value


_DEPTH = 2  # of the frame that asks: behind what makes a replacement this thread's


def _asking() -> tuple[FrameType | None, bool]:
    """(The user's frame that asks for a text that is kept; whether a text is for a message, in which it is `?`)."""
    frame: FrameType | None = sys._getframe(_DEPTH + 1)
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return None, False
    statement = statement_at(frame)
    return (frame, False) if statement is None or not _says(statement) else (None, is_message(statement))


def _says(statement: ast.stmt) -> bool:
    """True if a statement only prints a text, or raises an error with it: `check(n == m, f"{n} is not {m}")`."""
    if is_message(statement) or isinstance(statement, (ast.Raise, ast.Assert)):
        return True
    called = getattr(statement.value, "func", None) if isinstance(statement, ast.Expr) else None
    name = getattr(called, "id", "") or getattr(called, "attr", "")
    return name == "print" or not {"check", "assert"}.isdisjoint(name.lower().split("_"))


def _refused(what: str, frame: FrameType) -> CaptureError:
    return CaptureError(
        f"{what} becomes a text while the model is captured, when it has no value",
        source=line_of(frame),
        fix=or_leave_eager("return the value, and make the text of it in your loop", None),
    )


@replacing
def text_of_number(old: Callable[..., str], self: Any, *spec: str) -> str:
    """A `__repr__` or `__format__` of SymInt, SymFloat or SymBool."""
    frame, message = _asking()
    if frame is None:
        return "?" if message or (spec and spec[0]) else old(self, *spec)
    if not self.node.has_hint():
        raise _refused("a number of a tensor's data", frame)
    value = int(self) if isinstance(self, torch.SymInt) else self.node.guard_bool("", 0)
    return format(value, *spec) if spec else repr(value)


@replacing
def text_of_tensor(old: Callable[..., str], /, self: Any, *spec: Any, **kwargs: Any) -> str:
    """A `__repr__` or `__format__` of tensors."""
    frame, message = _asking() if isinstance(self, FakeTensor) else (None, False)
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, ExpertLoops) and (index := mode.index_of(self)) is not None:
            return format(index, *spec)
    if frame is not None:
        raise _refused("a tensor", frame)
    if message or (isinstance(self, FakeTensor) and spec and spec[0]):
        return "?"
    return old(self, *spec, **kwargs)


def not_repeatable(what: str, line: SourceLine | None) -> CaptureError:
    """The error for what cannot be looked at again."""
    if what == A_FILE:
        return CaptureError(
            f"forward opens {what}: calls of a graph would neither read nor write it",
            source=line,
            fix="read it before the call, and give forward what it holds; return what is to be written, and write it "
            "in your loop",
        )
    fix = "give the number to forward as an argument, by which code may decide (`if drop:`); or draw with torch what scales or "
    fix += "selects (torch.rand, torch.randint: a graph draws anew at each call)"
    return CaptureError(f"forward reads {what}: a graph would have the same at every call", source=line, fix=fix)


def sets_a_slot(value: Any, owner: str, name: str, line: SourceLine | None) -> CaptureError:
    """The error for an attribute that is no item of a `__dict__`. value: that has it, called `owner`."""
    return CaptureError(
        f"forward sets '{owner}.{name}', a slot of a {type(value).__qualname__}: calls of a graph would not",
        source=line,
        fix="leave __slots__ (slots=True of a dataclass) out of the class; or set the attribute that holds the object to a new "
        "one (dataclasses.replace)",
    )
