"""Processes that used gloo end with the exit code of their script.

A thread of gloo drops the last work's tensors a moment after the ranks have gone on. Where a mesh keeps the group alive,
`destroy_process_group` does not wait for that thread, and a thread that wants the interpreter's lock while it is being torn
down ends the process: "terminate called without an active exception", exit code -6, in one of five runs of a script that
holds a DeviceMesh and whose last act is a collective (torch 2.13, CPU, 2 ranks, 2026-11-22; pytorch/pytorch#179291).
"""

from __future__ import annotations

import atexit
import time
from functools import cache

SECONDS = 0.1  # without the lock held: the thread needs microseconds of them


@cache
def wait_at_exit() -> None:
    """Give gloo's threads a moment at the end of the process, before the interpreter is torn down. Asked for once."""
    atexit.register(time.sleep, SECONDS)
