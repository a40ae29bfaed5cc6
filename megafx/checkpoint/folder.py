"""Checkpoints on disk: their names, order and owner; a checkpoint appears whole, in one rename, or not at all.

    runs/gpt/                          the root that users name
        step_00000010/                 a finished checkpoint
            metadata.json              every tensor with its slices and their files; digest of every file; plain data
            rank_00000.safetensors     slices of tensors in original coordinates, as rank 0 wrote them
        step_00000030/
        step_00000015-1/               after the run went back from 30 to 10: newer than all without -1; next time -2
        .owner.json                    the process that saves here
        .step_00000018.6b0f2a.partial/ a save that is under way, or that was killed

A save writes and flushes everything below `.partial`, `metadata.json` last, and renames the folder: a folder without that
prefix is complete. Later damage is found by content.py. Nothing here communicates.

Only the latest job may save in a root. Its first save, also after a load from there, writes `.owner.json`. An older job that
is still alive finds another's id in it before it writes or removes anything, and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import socket
from functools import cache
from pathlib import Path

from megafx.checkpoint.content import METADATA, read_content
from megafx.errors import CheckpointError
from megafx.weights.files import flush_folder, regular_size

TORCH_METADATA = ".metadata"  # what torch.distributed.checkpoint's own writer makes
OWNER = ".owner.json"
_NAME = re.compile(r"step_(\d{8,})(?:-(\d+))?")
_claimed: dict[str, str] = {}  # root -> the id under which this process, or the one it was forked from, saves there
_under_way: set[Path] = set()
_numbers = itertools.count()


def is_checkpoint(folder: Path) -> bool:
    """True if the folder is one checkpoint rather than a root of several."""
    named = _NAME.fullmatch(folder.absolute().name)
    return any((folder / name).exists() for name in (METADATA, TORCH_METADATA)) or bool(named)


def checkpoints(root: Path) -> list[Path]:
    """The finished checkpoints of a root, newest first: by how often the run went back, then by step."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append((*_order(path), path))
    return [path for *_, path in sorted(found, reverse=True)]


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2] or 0), int(match[1])


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into. Removes what killed saves left behind."""
    root.mkdir(parents=True, exist_ok=True)
    left = [path for path in root.glob(".step_*") if path not in _under_way]
    _claim(root)  # in this order: nothing in `left` is a later owner's
    for path in left:
        _delete(path)
    folder = root / f".step_{step:08d}.{_me(os.getpid())['id']}-{next(_numbers)}.partial"
    folder.mkdir()
    _under_way.add(folder)
    return folder


def commit(folder: Path, step: int, keep: int | None) -> Path:
    """Make the written folder a checkpoint, in one rename; then remove those that it replaces and all but `keep` newest."""
    root = folder.parent
    flush_folder(folder)
    _claim(root)
    while True:
        final = root / _name(step, checkpoints(root))
        try:
            os.rename(folder, final)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    _under_way.discard(folder)
    flush_folder(root)
    same = [path for path in checkpoints(root) if _order(path)[1] == step and path != final]
    rest = [path for path in checkpoints(root) if path not in (final, *same)]
    goes = {*same, *(rest[keep - 1 :] if keep is not None else ())}
    if goes and sizes_hold(final) and taken_over(root) is None:  # in this order: nothing in `goes` is a later owner's
        for path in goes:
            gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.deleted")
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, gone)  # in one step: a folder that is being removed is no checkpoint
            _delete(gone)
    return final


def abandon(folder: Path) -> None:
    """Remove what a save that failed has written."""
    _under_way.discard(folder)
    _delete(folder)


def _name(step: int, present: list[Path]) -> str:
    """Name of a new checkpoint. If its step is not above the newest, the run went back: the suffix is one more."""
    times, newest = _order(present[0]) if present else (0, -1)
    times += step <= newest
    return f"step_{step:08d}" + (f"-{times}" if times else "")


def sizes_hold(path: Path) -> bool:
    """True if the metadata is valid and every file has its size; tensors are not read."""
    try:
        return all((path / name).stat().st_size == file.bytes for name, file in read_content(path).files.items())
    except (OSError, CheckpointError):
        return False


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


# -- the owner of a root


@cache
def _me(process: int) -> dict[str, str | int]:
    return {"host": socket.gethostname(), "process": process, "id": secrets.token_hex(8)}


def _owner(root: Path) -> dict[str, str | int]:
    try:
        regular_size(root / OWNER)
        found = json.loads((root / OWNER).read_text())
        return {name: found[name] for name in ("host", "process", "id")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def check_owner(root: Path) -> None:
    """Raises CheckpointError if another process has begun to save in the root since this one did."""
    if (taken := taken_over(root)) is not None:
        fix = (
            "end one of the two jobs, or give each a folder of its own; a job that loads from the folder takes it over"
        )
        raise CheckpointError(taken, fix=fix)


def _claim(root: Path) -> None:
    """Make this process the owner of the root. Raises CheckpointError if another has taken it over."""
    check_owner(root)
    mine = _me(os.getpid())
    if _owner(root) != mine:
        draft = root / f".owner.{mine['id']}"
        draft.write_text(json.dumps(mine))
        os.replace(draft, root / OWNER)
    _claimed[os.path.realpath(root)] = str(mine["id"])


def taken_over(root: Path) -> str | None:
    """Who has begun to save in the root since this process did; None: nobody."""
    known, owner = _claimed.get(os.path.realpath(root)), _owner(root)
    if known is None or not owner or owner["id"] == known:
        return None
    return f"'{root}' has been taken over: process {owner['process']} on {owner['host']} saves there now"


def go_on_from(path: Path) -> None:
    """A run resumes from this checkpoint: its next save takes the root over."""
    for root in (path, path.parent):
        _claimed.pop(os.path.realpath(root), None)
