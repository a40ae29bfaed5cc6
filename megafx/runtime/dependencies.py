"""Files and variables that an entry of the cache on disk depends on: code of the model, installed packages, the environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafx.capture.reads import LIBRARIES
from megafx.ir.program import Program
from megafx.ir.stored import Unstorable
from megafx.runtime.fingerprint import Fingerprint, is_installed
from megafx.runtime.stored_state import lines

TORCH = str(Path(torch.__file__).parent) + os.sep


def _started() -> float:
    """When this process started, in seconds since the epoch; a little later at most where that is not to be had."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age - 0.1
    except (OSError, ValueError, AttributeError):
        return time.time() - time.process_time()


STARTED = _started()
STDLIB = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})


@cache
def own_roots() -> tuple[str, ...]:
    names = ("megafx", "megafx.passes", "megafx.patterns")
    return tuple(str(Path(next(iter(sys.modules[n].__path__))).resolve()) + os.sep for n in names if n in sys.modules)


def _is_users(path: str) -> bool:
    """True for code that is neither Python's, nor an installed package's, nor megafx's."""
    return (
        not is_installed(path)
        and not path.startswith((*STDLIB, TORCH))
        and not str(Path(path).resolve()).startswith(own_roots())
    )


def code_files(own: Fingerprint, model: nn.Module, state: Any, program: Program) -> list[tuple[str, str]]:
    """(file, digest) of all code that the graph may come from: the model's, and what the process has loaded of the user's."""
    found = {*own.files, *lines(state)}
    for module in {c.__module__ for m in model.modules() for c in type(m).__mro__} | own.modules:
        if module.partition(".")[0] not in LIBRARIES:
            file = getattr(sys.modules.get(module), "__file__", None)
            if file is None:
                raise Unstorable(f"code of the module '{module}', which is in no file")
            found.add(file)
    for node in program.graph.nodes:
        if (source := node.meta.get("source")) is not None:
            found.add(source.file)
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        users = name != "__main__" and name.partition(".")[0] not in LIBRARIES
        if users and isinstance(file, str) and file.endswith(".py") and _is_users(file):
            found.add(file)
    rows = []
    for path in sorted(found):
        python = path.startswith(STDLIB) and not is_installed(path)
        if python or path.startswith(("<", TORCH)) or str(Path(path).resolve()).startswith(own_roots()):
            continue
        text = file_digest(path)
        if not text:
            raise Unstorable(f"code in '{path}', which is no file, or has changed since this process started")
        rows.append((path, text))
    return rows


def file_digest(path: str) -> str:
    """'' where the file is not there, or may be another than the one that was imported."""
    try:
        if Path(path).stat().st_mtime >= STARTED:
            return ""
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def packages() -> list[Any]:
    """(file, time, size) of the first file of each installed package that is loaded: another version has another."""
    rows = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and isinstance(file, str) and is_installed(file):
            rows.append([file, *stat_of(file)])
    return rows


def stat_of(path: str) -> list[int]:
    try:
        found = Path(path).stat()
    except OSError:
        return []
    return [found.st_mtime_ns, found.st_size]


def hidden(value: str | None) -> str:
    """A variable of the environment may be a secret."""
    return "" if value is None else hashlib.sha256(value.encode()).hexdigest()


def asked_by_megafx() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", *STDLIB)):
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return frame is not None and str(frame.f_code.co_filename).startswith(own_roots())


_watching: list[dict[str, str]] = []  # of the threads that compile now
_lock = threading.Lock()


@contextlib.contextmanager
def watching(read: dict[str, str] | None) -> Iterator[None]:
    """Within, variables of the environment that code reads, megafx's own aside, are noted in `read`, with digests of what they
    hold."""
    if read is None:
        yield
        return
    with _lock:
        _watching.append(read)
        _Environment.__getitem__ = _watched_item
    try:
        yield
    finally:
        with _lock:
            _watching[:] = [other for other in _watching if other is not read]
            if not _watching:
                _Environment.__getitem__ = _plain_item


_Environment: Any = type(os.environ)
_plain_item = _Environment.__getitem__


def _watched_item(environment: Any, name: Any) -> Any:
    value = None
    try:
        value = _plain_item(environment, name)
        return value
    finally:
        if environment is os.environ and isinstance(name, str) and not asked_by_megafx():
            for read in _watching:
                read[name] = hidden(value)
