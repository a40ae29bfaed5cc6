"""What forward prints, logs and warns while it is traced.

Prints and logs stay off the terminal, with a note that names the line: a trace runs several times, and has no values. Warnings
of the user's code, of libraries and of torch.nn are kept, and shown once the capture is done, as Python shows them in the first
call of eager mode.
"""

from __future__ import annotations

import builtins
import functools
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

from megafx.capture.program import ROOT
from megafx.ir.source_lines import is_user_file, line_of

# Files of torch that run as part of the user's model; the others are those that trace it.
_OF_MODELS = tuple(
    os.path.join(os.path.dirname(torch.__file__), name) for name in ("nn", "functional.py", "distributions")
)


@dataclass(frozen=True)
class Warned:
    """A warning of forward. module: name of the module that holds the line; shown: what that module has warned of."""

    text: str
    category: type[Warning]
    file: str
    line: int
    module: str
    shown: dict[Any, Any] = field(compare=False)

    def show(self) -> None:
        """Warn. Raises the warning where filters turn it into an error."""
        warnings.warn_explicit(self.text, self.category, self.file, self.line, self.module, self.shown)

    def note(self) -> str:
        return (
            f"{os.path.basename(self.file)}:{self.line}: forward warns ({self.category.__name__}: {self.text}): shown when "
            "a graph is captured, and not in each call"
        )


def unheard(note: Callable[[str], None], warned: list[Warned]) -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """(owner, name, its replacement in a trace, why). note: called with a text of each; warned: takes warnings."""

    def nothing(*_: Any, **__: Any) -> None:
        frame: FrameType | None = sys._getframe(2)  # past what makes it this thread's
        while frame is not None and frame.f_code.co_filename == logging.__file__:
            frame = frame.f_back
        source = line_of(frame, walk=False)
        if source is not None and "site-packages" not in source.file:
            note(f"{source}: calls of a graph print and log nothing; return the value, or print it in a forward hook")

    why = (
        "partial graphs that export prints and logs stay off the terminal; warnings are shown once a model is captured"
    )
    table: list[tuple[Any, str, Callable[[Any], Any], str]] = [
        (owner, name, lambda old: nothing, why) for owner, name in ((logging.Logger, "handle"), (builtins, "print"))
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
    one = Warned(str(message), kind, frame.f_code.co_filename, frame.f_lineno, module, shown)
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
