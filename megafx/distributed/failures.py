"""Ranks that end, hang or diverge: every other rank stops with a text that says so, within the process group's timeout.

A rank that ends closes its connections, which gloo reports at once; a rank that never comes is reported after the timeout of
`init_process_group(timeout=)` (with NCCL by its watchdog, which ends the process). Calls of all ranks outside of steps
(saving, gathering) meet in the store first, since a call by some ranks alone would meet other ranks' next step.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megafx.errors import LostRankError, UsageError

LONGEST_WAIT = timedelta(minutes=5)  # longest wait in `meet`, where the group's timeout is longer
SECONDS = 0.1  # slept at exit, interpreter unlocked: gloo's thread needs microseconds
_SIGNS = ("gloo", "connection closed", "connection reset", "connection was closed", "timed out", "timeout", "nccl")


@contextlib.contextmanager
def stopping_with_others(what: str) -> Iterator[None]:
    """Turn errors of torch's collectives into LostRankError."""
    try:
        yield
    except LostRankError:
        raise  # of a nested block
    except RuntimeError as error:
        text = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        late = "timed out" in text or "timeout" in text
        reason = "a rank did not come within the timeout" if late else "a rank has ended"
        raise LostRankError(
            f"rank {rank} stopped in {what}: {reason} ({str(error).strip().splitlines()[0]})",
            fix="the first error among the other ranks' output is the cause; where there is none, ranks made different calls: "
            "compare their batches and numbers of steps (Config(check_inputs_every=1)). torchrun --max-restarts N starts a "
            "job again, which goes on with megafx.load_checkpoint(..., missing_ok=True)",
        ) from error


def meet(what: str, group: dist.ProcessGroup | None) -> None:
    """Return once all ranks of the group have called `meet` with the same text.

    Raises LostRankError on the ranks that came, where some did not within the group's timeout (`LONGEST_WAIT` if that is
    longer), or came for something else. No collective: ranks that are elsewhere are not disturbed.
    """
    if group is None:
        return
    store: Any = dist.distributed_c10d._get_default_store()
    ranks, mine = dist.get_process_group_ranks(group), dist.get_rank()
    prefix = f"megafx/meet/{'-'.join(map(str, ranks))}"
    number = store.add(f"{prefix}/{mine}", 1)
    keys = {rank: f"{prefix}/{number}/{rank}" for rank in ranks}
    store.set(keys[mine], what)
    limit = min(timeout_of(group), LONGEST_WAIT)
    try:
        _wait(store, list(keys.values()), limit)
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        store.add(f"{prefix}/{mine}", -1)
        store.delete_key(keys[mine])
        raise LostRankError(
            f"{what} is a call of ranks {ranks}, but rank {', '.join(map(str, missing))} did not make it within "
            f"{limit.total_seconds():.0f} s",
            fix="call it on every rank: outside of `if rank == 0:` (files are written once all the same)",
        ) from error
    texts = {rank: store.get(key).decode() for rank, key in keys.items()}
    if number > 1:
        store.delete_key(f"{prefix}/{number - 1}/{mine}")  # all have read it: they are here
    other = next((rank for rank, text in texts.items() if text != what), None)
    if other is not None:
        found = f"rank {mine} calls {what}, rank {other} {texts[other]}"
        raise LostRankError(found, fix="make the same calls on all ranks")


def only_rank_0(what: str) -> None:
    """For a model that is each process's own. Raises UsageError on other ranks, which would write the same files."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        found = f"{what} is called on rank {dist.get_rank()} for a model that is not parallelized over ranks"
        raise UsageError(found, fix="call it on rank 0 only: `if torch.distributed.get_rank() == 0:`")


def _wait(store: Any, keys: list[str], limit: timedelta) -> Any:
    """Wait in pieces of a second: C++ would hold back Ctrl-C. Raises RuntimeError after `limit`."""
    end = time.monotonic() + limit.total_seconds()
    while (left := end - time.monotonic()) > 1:
        try:
            return store.wait(keys, timedelta(seconds=1))
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
    store.wait(keys, timedelta(seconds=max(left, 0.1)))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    found: timedelta = group._get_backend(torch.device(device)).options._timeout
    return found


@cache
def wait_at_exit() -> None:
    """Give gloo's threads a moment at the end of the process, before the interpreter is torn down. Registered once.

    A thread of gloo drops the last work's tensors a moment after the ranks have gone on. Where a mesh keeps the group alive,
    `destroy_process_group` does not wait for that thread, and a thread that wants the interpreter's lock while it is being torn
    down ends the process: "terminate called without an active exception", exit code -6, in one of five runs of a script that
    holds a DeviceMesh and whose last act is a collective (torch 2.13, CPU, 2 ranks, 2026-11-22; pytorch/pytorch#179291).
    """
    atexit.register(time.sleep, SECONDS)
