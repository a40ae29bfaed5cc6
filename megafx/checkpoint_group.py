"""Which ranks save together, over which process group, and the one save that may be under way in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import nn

from megafx.lost_ranks import meet, timeout_of

_side: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # (the default group, a gloo group of the same ranks)
_threads = ThreadPoolExecutor(1, thread_name_prefix="megafx-checkpoint")
_under_way: Future[Path] | None = None


def saving_group(model: nn.Module, asynchronous: bool, what: str) -> dist.ProcessGroup | None:
    """All ranks, over gloo, once they all came to call `what`; None where the model is this process's alone.

    Replicas of a data-parallel axis take part: slices that several ranks hold are written once. What goes on in the
    background has a group of its own, so that it never meets the collectives of training.
    """
    global _side
    runtime = getattr(model, "megafx", None)
    if getattr(runtime, "mesh", None) is None:
        return None
    world = dist.group.WORLD
    assert world is not None
    meet(what, world)
    if not asynchronous and dist.get_backend(world) == "gloo":
        return world
    if _side is None or _side[0] is not world:
        _side = world, dist.new_group(backend="gloo", timeout=timeout_of(world))
    return _side[1]


def background(work: Callable[[], Path]) -> Future[Path]:
    """Run a save in the one background thread."""
    global _under_way
    _under_way = _threads.submit(work)
    return _under_way


def settle() -> None:
    """Wait for the save that is under way; raises what it raised."""
    global _under_way
    pending, _under_way = _under_way, None
    if pending is not None:
        pending.result()
