"""Texts of what a trace has no value for: `f"{loss.item():.3f}"`, `str(x.shape)`, `f"layer_{n}"`.

Torch prints a size of a trace as `s27`, and a number of a tensor's data as `zuf0`. In code of the user's, such a text would be
kept for ever. There the text of a size is that of its value, for which there is one graph each; of numbers and tensors there is
none. Statements that only print, log or check are left as they are: they do nothing in a trace.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.overrides import _get_current_function_mode_stack

from megafx.capture.checks import is_message, statement_at
from megafx.capture.expert_loops import ExpertLoops
from megafx.errors import CaptureError, or_leave_eager
from megafx.ir.source_lines import is_user_file, line_of

_DEPTH = 2  # of the frame that asks: behind what makes a replacement this thread's


def _asking() -> tuple[FrameType | None, bool]:
    """(The user's frame that asks for a text that is kept; whether a text is for a message, in which it is `?`)."""
    frame: FrameType | None = sys._getframe(_DEPTH + 1)
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return None, False
    statement = statement_at(frame)
    return (frame, False) if statement is None or not _says(statement) else (None, is_message(statement))


def _says(statement: ast.stmt) -> bool:
    """Whether a statement only prints a text, or raises an error with it: `check(n == m, f"{n} is not {m}")`."""
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


def text_of_number(old: Callable[..., str]) -> Callable[..., str]:
    """A `__repr__` or `__format__` of SymInt, SymFloat or SymBool."""

    def text(self: Any, *spec: str) -> str:
        frame, message = _asking()
        if frame is None:
            return "?" if message or (spec and spec[0]) else old(self, *spec)
        if not self.node.has_hint():
            raise _refused("a number of a tensor's data", frame)
        value = int(self) if isinstance(self, torch.SymInt) else self.node.guard_bool("", 0)
        return format(value, *spec) if spec else repr(value)

    return text


def text_of_tensor(old: Callable[..., str]) -> Callable[..., str]:
    """A `__repr__` or `__format__` of tensors."""

    def text(self: Any, *spec: Any, **kwargs: Any) -> str:
        frame, message = _asking() if isinstance(self, FakeTensor) else (None, False)
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, ExpertLoops) and (index := mode.index_of(self)) is not None:
                return format(index, *spec)
        if frame is not None:
            raise _refused("a tensor", frame)
        if message or (isinstance(self, FakeTensor) and spec and spec[0]):
            return "?"
        return old(self, *spec, **kwargs)

    return text
