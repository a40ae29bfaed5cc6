"""Whose turn it is: while a thread captures a model, its parameters are fakes, so no other thread may call it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from megafx.errors import UsageError
from megafx.meanwhile import meanwhile


class Turns:
    """The calls and captures of one model, by thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread = 0  # that for which the model is the user's own now

    @property
    def capturing(self) -> bool:
        """True if for this thread the model is the user's own: its forward, its hooks."""
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Within, it is."""
        with self._lock, meanwhile(self, _thread=threading.get_ident()):
            yield

    @contextlib.contextmanager
    def call(self, several_ranks: bool) -> Iterator[None]:
        """Around a call. Others wait until it ends; on several ranks, where calls have an order, they raise UsageError."""
        if not self._lock.acquire(blocking=not several_ranks):
            raise UsageError(
                "two threads call one model at the same time on several ranks, whose order is then another on each",
                fix="make the calls from one thread, or one after the other (a lock) in the same order on every rank",
            )
        try:
            yield
        finally:
            self._lock.release()
