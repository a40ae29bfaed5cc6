"""Functions that give something else at each call, or set what draws do: random numbers, iterators, the clock, a seed.

A graph would have what they gave at capture. While a model is traced they are an error that names the line, but where code that
is left eager calls them; variables of the environment are guarded (reads.py).
"""

from __future__ import annotations

import builtins
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from megafx.capture.reads import Reads, is_looked_at, names_layerdrop, not_repeatable
from megafx.errors import CaptureError, or_leave_eager
from megafx.ir.source_lines import line_of
from megafx.ops.eager_call import in_eager_code

_CLOCK = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_SEEDS = ("manual_seed", "seed", "set_rng_state")
_SEEDS_OF_CUDA = ("manual_seed", "manual_seed_all", "set_rng_state")


def unrepeatable(reads: Reads) -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """(owner, name, its replacement in a trace, why) of functions that give something else at each call."""
    table: list[tuple[Any, str, Callable[[Any], Any], str]] = [
        (type(os.environ), "__getitem__", reads.environment, "a graph is for what variables of the environment hold")
    ]
    why = "a graph would have the same number at every call"
    for module, shown in ((random, "Python's `random`"), (np.random, "numpy")):
        for name in dir(module):
            function = vars(module).get(name)
            if isinstance(getattr(function, "__self__", None), (random.Random, np.random.RandomState)) and not any(
                word in name for word in ("state", "seed")
            ):
                table.append((module, name, _refusing(reads, f"a random number of {shown}"), why))
    why = "a graph draws from the seed of its step"
    for owner, names in ((torch, _SEEDS), (torch.random, _SEEDS), (torch.cuda, _SEEDS_OF_CUDA)):
        table += [(owner, name, _refusing_seeds(reads, name), why) for name in names]
    table += [(time, name, _refusing(reads, "the clock"), why) for name in _CLOCK]
    table.append((builtins, "next", _noting(reads), "an iterator that is kept goes on at each call"))
    table.append((builtins, "open", _refusing(reads, "a file"), "a graph would have what the file held at capture"))
    return table


def _noting(reads: Reads) -> Callable[[Any], Any]:
    """Of `next`: which iterators go on."""

    def of(old: Any) -> Any:
        def noting(*args: Any) -> Any:
            if reads.on and args:
                reads.advanced.add(id(args[0]))
            return old(*args)

        return noting

    return of


def _refusing_seeds(reads: Reads, name: str) -> Callable[[Any], Any]:
    def of(old: Any) -> Any:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(2)  # past what makes it this thread's (prepare.py)
            line = line_of(frame, walk=False)
            if not reads.on or in_eager_code() or line is None or not is_looked_at(line.file):
                return old(*args, **kwargs)
            module = reads.names.get(id(frame.f_locals.get("self")))
            fix = "draw the numbers before the call, and give them to forward or keep them in a buffer"
            raise CaptureError(
                f"forward sets the state of torch's generator ({name}): a graph draws from the seed of its step, and would "
                "have other numbers at each call",
                module=module,
                source=line,
                fix=or_leave_eager(fix, module),
            )

        return refusing

    return of


def _refusing(reads: Reads, what: str) -> Callable[[Any], Any]:
    def of(old: Any) -> Any:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(2)  # past what makes it this thread's (prepare.py)
            line = line_of(frame, walk=False)
            owner = frame.f_locals.get("self")
            drops = isinstance(owner, nn.Module) and names_layerdrop(owner)
            if not reads.on or line is None or not is_looked_at(line.file) or drops:
                return old(*args, **kwargs)
            raise not_repeatable(what, line)

        return refusing

    return of
