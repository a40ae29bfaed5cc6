"""Every debug flag, in one table. Environment variables set them; `with megafx.debug(level=2):` overrides them.

MEGAFX_DEBUG=1       one line a pass: index, name, changes, nodes +/-, ms
            =2       also a diff of the graph after each pass that changed it, and match counts of patterns
            =3       also near misses of patterns, and the planner's alternatives with their costs
            =4       also the whole graph after each pass
MEGAFX_DUMP=dir      rank 0 writes 00_capture.txt, 01_<pass>.txt, ...; further graphs go to dir/graph1, dir/graph2, ...
MEGAFX_CHECK=1       check the graph after each pass against the contract of its phase
            =2       also run the graph before and after each pass, and name the first pass that changed numbers
MEGAFX_SKIP=a,b      leave out passes by name; leaving out one that a later pass needs is an error
MEGAFX_CACHE=dir     where plans and programs of calls are kept; off: nowhere (docs/cache.md)
MEGAFX_STOP_AFTER=a  raise `PipelineStopped`, which holds the program, after the named pass
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from megafx.errors import ConfigError


@dataclass(frozen=True)
class Debug:
    """The settings in force. level 0-4, dump and cache: folders or None, check 0-2, skip and stop_after: pass names."""

    level: int = 0
    dump: str | None = None
    check: int = 0
    skip: tuple[str, ...] = ()
    stop_after: str | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("level", 4), ("check", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ConfigError(f"debug {name} = {value!r} is out of range", fix=f"{name} must be 0 to {most}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# environment variable -> the field of `Debug` that it sets, how its text is read, what it takes
FLAGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "MEGAFX_DEBUG": ("level", int, "0 to 4"),
    "MEGAFX_DUMP": ("dump", str, "a folder"),
    "MEGAFX_CHECK": ("check", int, "0 to 2"),
    "MEGAFX_SKIP": ("skip", _names, "pass names, separated by commas"),
    "MEGAFX_STOP_AFTER": ("stop_after", str, "a pass name"),
    "MEGAFX_CACHE": ("cache", str, "a folder, or off"),
}
_override: ContextVar[dict[str, Any] | None] = ContextVar("megafx_debug", default=None)


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The fields that the environment sets. An unknown MEGAFX_ variable is an error: it may be a typo."""
    fields: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith("MEGAFX_") or not text:
            continue
        if name not in FLAGS:
            raise ConfigError(f"environment variable {name} is no megafx flag", fix=f"flags: {', '.join(FLAGS)}")
        field, read, values = FLAGS[name]
        try:
            fields[field] = read(text)
            Debug(**fields)
        except (ValueError, ConfigError):
            raise ConfigError(f"{name}={text} is out of range", fix=f"{name} takes {values}") from None
    return fields


def current() -> Debug:
    """The environment's settings, overridden by the innermost `debug(...)`."""
    return Debug(**{**from_environment(), **(_override.get() or {})})


@contextlib.contextmanager
def debug(
    level: int | None = None,
    *,
    dump: str | os.PathLike[str] | None = None,
    check: int | None = None,
    skip: Iterable[str] | None = None,
    stop_after: str | None = None,
) -> Iterator[Debug]:
    """Settings for the calls inside: `with megafx.debug(level=2, dump="graphs"):`. None leaves a setting as it is."""
    folder, names = None if dump is None else os.fspath(dump), None if skip is None else tuple(skip)
    given = {"level": level, "dump": folder, "check": check, "skip": names, "stop_after": stop_after}
    fields = {**(_override.get() or {}), **{k: v for k, v in given.items() if v is not None}}
    settings = dataclasses.replace(Debug(), **{**from_environment(), **fields})
    token = _override.set(fields)
    try:
        yield settings
    finally:
        _override.reset(token)


def is_reporting_rank() -> bool:
    """True if this process logs and dumps: rank 0 of the job, or the only process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"  # torchrun's variable, before the process group exists


def say(text: str) -> None:
    """Print to stderr on the reporting rank."""
    if is_reporting_rank():
        print(text, file=sys.stderr, flush=True)
