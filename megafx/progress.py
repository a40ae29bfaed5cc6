"""What runs, and what has taken the time: on stderr of rank 0, of calls of megafx that take longer than two seconds.

On a terminal that is a line which changes. Elsewhere it is a line for each stage that takes long, repeated every four seconds
in the first minute of a call, and then less and less often. One line at the end says what took the time. Where logging has
handlers, lines go to them, from the logger "megafx" at level INFO; `logging.getLogger("megafx").setLevel(logging.WARNING)`
switches progress off. MEGAFX_DEBUG shows passes in its own way.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from time import (
    perf_counter,
    process_time,
)  # the very functions: while a model is traced, time.perf_counter refuses its code
from typing import Any, TypeVar

from megafx.debugging import current, is_reporting_rank

T = TypeVar("T")
SHORT = 2.0  # seconds: a call that takes no longer shows nothing
PATIENCE = 4.0  # seconds without a line; with the half of a second between two looks less than five
MINUTE = 60.0  # seconds of a call in which no two lines are further apart than that
LAUNCH = 2.5  # seconds that torchrun has taken before a process starts (its imports; torch 2.13, 2026-11-25)

logger = logging.getLogger("megafx")
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)

Progress = Callable[[str, float | None], None]  # name of a stage, and its seconds once it is over (before: None)
_progress: ContextVar[Progress | None] = ContextVar("megafx_progress", default=None)
_display = threading.Lock()  # held by the thread whose stages are shown
_silent: list[float] = []  # one entry once a display was made: nothing was shown by megafx before the first one


@contextlib.contextmanager
def progress(shown: Progress) -> Iterator[None]:
    """Call `shown` for every stage of the calls inside, in place of the display: at its start with None, at its end with its
    seconds."""
    token = _progress.set(shown)
    try:
        yield
    finally:
        _progress.reset(token)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs inside is a stage of this name; as a decorator, each call of the function. The outermost one is displayed."""
    shown, start = _progress.get(), perf_counter()
    if shown is None:
        with _displayed(name):
            yield
        return
    shown(name, None)
    try:
        yield
    finally:
        shown(name, perf_counter() - start)


def remark(text: str) -> None:
    """Show a line with the sum at the end of the call that is displayed, if it takes long: why its next start will, too."""
    shown = _progress.get()
    if text and isinstance(display := getattr(shown, "__self__", None), _Display):
        display.remarks[text] = None


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within, no cycles are collected: looking for them among objects that stay (modules, nodes and values of a graph) is a
    seventh of an import, and a tenth of a compile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def also_among_frozen(search: Callable[[], list[T]]) -> list[T]:
    """What a search by `gc.get_referrers` finds, also where the user has put objects aside (gc.freeze)."""
    found = search()
    if not found and gc.get_freeze_count():
        gc.collect()  # what is garbage now would stay for ever
        gc.unfreeze()
        try:
            found = search()
        finally:
            gc.freeze()
    return found


@contextlib.contextmanager
def _displayed(name: str) -> Iterator[None]:
    visible = logger.isEnabledFor(logging.INFO) and is_reporting_rank() and not current().level
    if not visible or not _display.acquire(blocking=False):
        yield
        return
    try:
        display = _Display(name)
        with progress(display.update):
            display.thread.start()
            try:
                yield
            finally:
                display.stop()
        display.sum_up()
    finally:
        _display.release()


class _Display:
    """The stages of one call. inside: (name, start) of those that run, one inside of the other; own: seconds of each without
    those inside of it."""

    def __init__(self, name: str) -> None:
        self.name, self.begin, self.stream = name, perf_counter(), sys.stderr
        self.waited = 0.0  # seconds of silence before: those of imports, and of a launcher
        if not _silent:
            self.waited = min(process_time() + LAUNCH * ("LOCAL_RANK" in os.environ), PATIENCE)
            _silent.append(self.waited)
        self.inside: list[tuple[str, float]] = []
        self.own: Any = Counter()  # of seconds, which its type does not know
        self.remarks: dict[str, None] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="megafx progress", daemon=True)
        self.live: Any = None
        if self.stream is not None and self.stream.isatty():
            from rich.console import Console  # here: in the thread it could meet what a trace has replaced
            from rich.live import Live
            from rich.spinner import Spinner

            spinner = Spinner("dots")

            def shown() -> Spinner:
                spinner.update(text=self._now())
                return spinner

            self.live = Live(
                get_renderable=shown, console=Console(file=self.stream, highlight=False), refresh_per_second=4,
                transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip

    def update(self, name: str, seconds: float | None) -> None:
        if seconds is None:
            self.inside.append((name, perf_counter()))
            return
        self.inside.pop()
        self.own[name] += seconds
        if self.inside:
            self.own[self.inside[-1][0]] -= seconds

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

    def sum_up(self) -> None:
        total = perf_counter() - self.begin
        if total < SHORT:
            return
        most = [f"{name} {seconds:.1f} s" for name, seconds in self.own.most_common(4) if seconds > 0.05 * total]
        self._line(f"megafx: {self.name} took {total:.1f} s" + (f" ({', '.join(most)})" if most else ""))
        for text in self.remarks:
            self._line(f"megafx: {text}")

    def _now(self) -> str:
        names = [self.name, *(name for name, _ in [*self.inside])]
        return f"megafx: {': '.join(dict.fromkeys(names))}, {perf_counter() - self.begin:.0f} s"

    def _watch(self) -> None:
        if self.live is not None:
            if not self.over.wait(SHORT):
                with self.live:
                    self.over.wait()
            return
        last, shown, wait = self.begin - self.waited, "", PATIENCE
        while not self.over.wait(0.5):
            now, text = perf_counter(), self._now().rpartition(",")[0]
            wait = wait if text == shown else PATIENCE
            if now - last >= wait:
                self._line(self._now())
                last, shown = now, text
                wait = 2 * wait if now - self.begin > MINUTE else wait

    def _line(self, text: str) -> None:
        if logger.hasHandlers():
            logger.info(text)
        elif self.stream is not None:
            print(text, file=self.stream, flush=True)
