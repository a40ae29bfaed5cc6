"""The caller's autocast: part of what a call means to capture and to graph keys, and off wherever graphs are made or run.

Graphs hold autocast's casts as nodes; an op that ran under it once more would compute another dtype than the graph says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_DEVICE_TYPES = ("cpu", "cuda")


def ambient_autocast() -> list[dict[str, Any]]:
    """The autocast contexts that the caller is in, as arguments of torch.autocast."""
    return [
        {
            "device_type": device_type,
            "dtype": torch.get_autocast_dtype(device_type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    ]


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Autocast off, whatever the caller is in."""
    with contextlib.ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
