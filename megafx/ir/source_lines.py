"""From what torch.export records about a node to the user's line and module path."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType

import torch

from megafx.errors import SourceLine

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Frames of the machinery, never of the user: torch, megafx's own wrappers, transformers' decorators round `forward`, and einops
# (it keeps what it computes of a shape in caches, unless sizes have no hash, as in a trace).
_TORCH = os.path.dirname(torch.__file__) + os.sep
_EXPORT = os.path.join(_TORCH, "export", "_trace.py")
_MEGAFX = os.path.dirname(os.path.dirname(__file__)) + os.sep
# What Python, torch and packages that write functions call their code; the user's own is "<stdin>", "<ipython-input-1-...>".
_GENERATED = (
    "<string>",
    "<frozen ",
    "<eval_with_key>",
    "<attrs ",
    "<@",
    "<__",
    "<decorator-gen",
    "<lambdify",
    "<makefun",
)
_WRAPPERS = ("torch/", _TORCH, _MEGAFX, *_GENERATED)
_WRAPPER_ENDS = (
    "transformers/utils/generic.py",
    "transformers/utils/output_capturing.py",
    "transformers/utils/deprecation.py",
    "transformers/modeling_layers.py",
    "contextlib.py",
)
_EINOPS = "-packages/einops/"


@functools.lru_cache(maxsize=4096)
def source_of_trace(stack_trace: str) -> SourceLine | None:
    """The deepest frame outside torch and the wrappers, or None where there is none."""
    for file, line, _ in reversed(_FRAME.findall(stack_trace)):
        if is_user_file(file):
            return SourceLine(file, int(line), linecache.getline(file, int(line)).strip())
    return None


def current_user_line() -> SourceLine | None:
    """The user's line that is running now."""
    return line_of(sys._getframe(1))


def frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """(frame, line) of an error's stack, the outermost first; where it has none, of what it came from."""
    seen: BaseException | None = error
    while seen is not None:
        if frames := [*traceback.walk_tb(seen.__traceback__)]:
            return frames
        seen = seen.__cause__ or seen.__context__
    return []


def line_of(frame: FrameType | None, walk: bool = True) -> SourceLine | None:
    """The line that a frame runs, where it is the user's; walk: else that of the nearest frame above that is."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return SourceLine(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        if not walk:
            return None
        frame = frame.f_back
    return None


def frame_behind(frame: FrameType | None, passed: Callable[[str], bool]) -> FrameType | None:
    """The nearest frame, from this one on, whose file is not to be passed."""
    while frame is not None and passed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def trace_of_forward(frame: FrameType | None) -> str | None:
    """The stack trace that torch.export records of a node, cut to the line that `source_of_trace` looks for in it: that of
    the user's nearest `forward`, below the call of torch.export, whose callers are not the model."""
    while frame is not None and frame.f_code.co_filename != _EXPORT:
        code = frame.f_code
        if code.co_name == "forward" and is_user_file(code.co_filename):
            return f'File "{code.co_filename}", line {frame.f_lineno}, in forward'
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """True if code in `file` is the user's (a model library's counts as such)."""
    path = file.replace(os.sep, "/")
    return not (file.startswith(_WRAPPERS) or path.endswith(_WRAPPER_ENDS) or _EINOPS in path)


def is_installed(path: str) -> bool:
    """True if a file belongs to an installed package."""
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


def compiles_for(frame: FrameType, flag: str) -> bool:
    """What a function of torch.compiler, that of this flag, answers code of a frame. Libraries have forms that can be traced,
    transformers also as a checkout; the user's own code does in a graph what it does in eager mode."""
    file = frame.f_code.co_filename
    checkout = tuple(path + os.sep for path in getattr(sys.modules.get("transformers"), "__path__", ()))
    return (is_installed(file) or file.startswith((_TORCH, *checkout))) and bool(getattr(torch.compiler, flag))


def fqn_of_stack(nn_module_stack: Mapping[str, tuple[str, object]] | None, root: str) -> str:
    """Path, relative to `root`, of the deepest module on the stack ('' is the root itself)."""
    if not nn_module_stack:
        return ""
    return strip_root(list(nn_module_stack.values())[-1][0], root)


def strip_root(path: str, root: str) -> str:
    """'model.h.0' -> 'h.0' and 'model' -> '' for root 'model'; what lies outside the root has no path in the user's model."""
    if path.startswith(root + "."):
        return path[len(root) + 1 :]
    return "" if path == root or path.startswith("_empty_nn_module_stack") else path
