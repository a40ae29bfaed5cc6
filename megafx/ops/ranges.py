"""Named ranges around what a graph runs, for profilers: `torch.profiler.record_function`, which is NVTX under `emit_nvtx`."""

from __future__ import annotations

from torch.autograd.profiler import record_function

PREFIX = "megafx "  # of the names, which distinguishes them from other ranges


def enter_range(name: str) -> record_function:
    """Begin a range of this name."""
    begun = record_function(name)
    begun.__enter__()
    return begun


def leave_range(begun: record_function) -> None:
    """End it."""
    begun.__exit__(None, None, None)
