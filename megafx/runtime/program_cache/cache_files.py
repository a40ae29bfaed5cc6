"""The folder of the cache on disk, and the form of its files: a checksum, JSON, and tensors as safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from megafx.debugging import current

MAGIC = b"megafx 1"
LARGEST = 2**30  # bytes of all entries together
TRIED = 8  # entries of one situation that are looked at, and kept
OFF = ("off", "0", "no", "false")  # MEGAFX_CACHE


def folder() -> Path | None:
    """Where entries are: MEGAFX_CACHE, else megafx in the user's folder of caches. None where it is off or cannot be made."""
    flags = current()
    if flags.dump or flags.check or flags.stop_after or flags.level >= 2 or (flags.cache or "").lower() in OFF:
        return None  # somebody wants to see passes
    named = flags.cache
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    place = Path(named) if named else Path(base) / "megafx"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return place


def changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def write_entry(place: Path, name: str, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=place, prefix=".", suffix=".part")  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, place / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    same = sorted(place.glob(f"{name.partition('-')[0]}-*"), key=changed_at, reverse=True)
    old = same[TRIED:]
    rest = sorted((p for p in place.glob("*-*") if p not in old), key=changed_at, reverse=True)
    total = 0
    for path in rest:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
        if total > LARGEST and path.name != name:
            old.append(path)
    for path in old:
        path.unlink(missing_ok=True)


def packed(form: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    body = zlib.compress(json.dumps(form).encode(), 1)
    rest = len(body).to_bytes(8, "little") + body + save(tensors)
    return MAGIC + hashlib.sha256(rest).digest() + rest


def unpacked(data: bytes) -> tuple[Any, dict[str, torch.Tensor]]:
    """Raises ValueError for a damaged entry."""
    head, rest = len(MAGIC) + 32, data[len(MAGIC) + 32 :]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : head] != hashlib.sha256(rest).digest():
        raise ValueError("its checksum is wrong")
    size = int.from_bytes(rest[:8], "little")
    return json.loads(zlib.decompress(rest[8 : 8 + size])), load(rest[8 + size :])
