"""Checkpoints on disk: folders, `metadata.json`, validity; a checkpoint appears whole, in one rename, or not at all.

    runs/gpt/                          the root that users name
        step_00000010/                 a finished checkpoint
            metadata.json              every tensor with its slices and their files; digest of every file; plain data
            rank_00000.safetensors     slices of tensors in original coordinates, as rank 0 wrote them
        step_00000020-1/               step 20 saved once more (after a resume): takes the place of step_00000020
        .step_00000030.partial/        a save that is under way, or that was killed

A save writes and flushes everything below `.partial`, `metadata.json` last, and renames the folder: a folder without that
prefix is complete. Later damage is found by sizes and digests (blake2b). Nothing here communicates.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megafx.errors import CheckpointError
from megafx.weights.files import Written, digest_of

METADATA, FORMAT, VERSION = "metadata.json", "megafx checkpoint", 1
TORCH_METADATA = ".metadata"  # what torch.distributed.checkpoint's own writer makes
_NAME = re.compile(r"step_(\d{8,})(?:-(\d+))?")


class Chunk(NamedTuple):
    """One slice of a tensor: where it is in the tensor, and where in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


class Described(NamedTuple):
    """One tensor. dtype: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Content(NamedTuple):
    """What `metadata.json` says. objects: plain data (`encode` of checkpoint/state.py)."""

    step: int
    tensors: dict[str, Described]
    files: dict[str, Written]
    objects: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"tensors": {name: t._asdict() for name, t in self.tensors.items()}}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Content:
        tensors = {}
        for name, t in data["tensors"].items():
            chunks = tuple(Chunk(tuple(o), tuple(s), file, key) for o, s, file, key in t["chunks"])
            tensors[name] = Described(t["dtype"], tuple(t["shape"]), chunks)
        files = {name: Written(*about) for name, about in data["files"].items()}
        return Content(data["step"], tensors, files, data["objects"])


def write_content(folder: Path, content: Content) -> None:
    """Write `metadata.json` and flush it to the disk."""
    data = content.to_json()
    text = json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(data), "content": data}, indent=1)
    with open(folder / METADATA, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_content(folder: Path) -> Content:
    """Raises CheckpointError that names the folder and what is wrong with its `metadata.json`."""
    path = folder / METADATA
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder} has no {METADATA}: its save was not finished") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} cannot be read ({error})") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not that of a megafx checkpoint")
    if whole.get("version") != VERSION:
        raise CheckpointError(f"{path} is of version {whole.get('version')}; this megafx reads version {VERSION}")
    if _digest(whole.get("content")) != whole.get("digest"):
        raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} is not as it was written")
    return Content.from_json(whole["content"])


def damage(folder: Path, names: Iterable[str], content: Content) -> str | None:
    """What is wrong with these files of a checkpoint, by their sizes and digests; None: nothing."""
    for name in names:
        path, wanted = folder / name, content.files[name]
        try:
            size = path.stat().st_size
            if size != wanted.bytes:
                return f"{name} has {size} bytes, {wanted.bytes} were written"
            if digest_of(path) != wanted.digest:
                return f"{name} does not hold what was written (its digest is another)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is one checkpoint rather than a root of several."""
    return any((folder / name).exists() for name in (METADATA, TORCH_METADATA)) or bool(_NAME.fullmatch(folder.name))


def checkpoints(root: Path) -> list[Path]:
    """The finished checkpoints of a root, newest first: by step, then by how often that step was saved."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found, reverse=True)]


def partial(root: Path, step: int) -> Path:
    """Where a save of this step writes."""
    return root / f".step_{step:08d}.partial"


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; what saves that were killed left behind is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)
    folder = partial(root, step)
    folder.mkdir()
    return folder


def commit(root: Path, step: int, keep: int | None) -> Path:
    """Make the written folder a checkpoint, in one rename; then remove those that it replaces and all but `keep` newest."""
    folder, base = partial(root, step), f"step_{step:08d}"
    flush_folder(folder)
    same = [path for path in checkpoints(root) if path.name.split("-")[0] == base]
    again = f"-{int(same[0].name.partition('-')[2] or 0) + 1}" if same else ""  # -1, -2, ...: the step was saved before
    final = root / (base + again)
    os.rename(folder, final)
    flush_folder(root)
    later = checkpoints(root)
    for path in {*same, *(later[keep:] if keep is not None else ())} - {final}:
        gone = path.with_name(f".{path.name}.deleted")
        os.rename(path, gone)  # in one step: a folder that is being removed is no checkpoint
        shutil.rmtree(gone, ignore_errors=True)
    return final


def flush_folder(folder: Path) -> None:
    """Names in a folder are on the disk only after this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
