"""Safetensors: read boxes of tensors from a folder of files; write one file as a stream.

Reading: the safetensors library maps files into memory. Mapped pages count as memory of the process for as long as the map
lives, so files are mapped anew after every `MAPPED` bytes: little more is held than what was asked for.

Writing: header, then tensor after tensor, hashed on the way and flushed to the disk (`safetensors.torch.save_file` holds all
bytes of a file in memory a second time). Format: 8 bytes little-endian length of the header, the header as JSON padded with
spaces to a multiple of 8, the data: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megafx.errors import CheckpointError, MegafxError

NAMES: dict[str, torch.dtype] = {  # safetensors' name -> dtype
    **{f"F{n}": getattr(torch, f"float{n}") for n in (64, 32, 16)},
    **{f"I{n}": getattr(torch, f"int{n}") for n in (64, 32, 16, 8)},
    **{f"U{n}": getattr(torch, f"uint{n}") for n in (64, 32, 16, 8)},
    **{
        "BF16": torch.bfloat16,
        "BOOL": torch.bool,
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    },
}
DTYPES = {dtype: name for name, dtype in NAMES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAPPED = 1 << 25  # bytes; benchmarks/load_memory.py measures what is held
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NUMBERED = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")  # one of several files, listed in an index


def dtype_name(dtype: torch.dtype) -> str:
    """torch's dtype -> safetensors' name of it."""
    if dtype not in DTYPES:
        raise CheckpointError(f"safetensors has no {dtype}", fix="convert the tensor before saving it")
    return DTYPES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """safetensors' name of a dtype -> torch's."""
    if name not in NAMES:
        raise CheckpointError(f"tensors of dtype {name} are not read", fix="convert them to a dtype of torch")
    return NAMES[name]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: dtype as safetensors names it (F32, BF16, I64, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class SafetensorsFiles:
    """entries: name -> Entry, of all files. Opening checks each file's header against its length."""

    def __init__(self, path: str | Path) -> None:
        """path: a .safetensors file, or a folder with model.safetensors.index.json, model.safetensors or any such files.

        Raises CheckpointError, which lists every file that is missing, truncated or not safetensors.
        """
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        self._open: tuple[Path, Any] | None = None
        self._used = 0
        wrong: list[str] = []
        for file, names in _files_of(self.path).items():
            try:
                regular_size(file)
                with safe_open(file, framework="pt") as opened:
                    present = list(opened.keys())
                    for name in present:
                        if name in self.entries:
                            wrong.append(f"{file.name}: '{name}' is in {self.entries[name].file.name} too")
                        part = opened.get_slice(name)
                        self.entries[name] = Entry(file, tuple(part.get_shape()), part.get_dtype())
            except (OSError, SafetensorError) as error:
                wrong.append(f"{file.name}: {getattr(error, 'strerror', None) or error}")
                continue
            if names is not None:
                more, less = sorted({*present} - {*names}), sorted({*names} - {*present})
                wrong += [f"{file.name}: '{n}' is in the file, and not in {INDEX}" for n in more]
                wrong += [f"{file.name}: '{n}' is not in the file, and {INDEX} says so" for n in less]
        if wrong:
            raise listed(f"'{self.path}' cannot be read", wrong, fix="copy the files again")

    def blocks(self, name: str, box: Sequence[slice]) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """The values in a box of a tensor, piece by piece: (where in the box, values in the file's dtype).

        A piece is at most `MAPPED` bytes of whole rows (or one row of dim 0) and valid until the next one.
        """
        entry = self.entries[name]
        sizes = [s.stop - s.start for s in box]
        if not box:
            yield (), self._slice(entry, name, 0)[...]
            return
        if 0 in sizes:
            return
        row = torch_dtype(entry.dtype).itemsize * math.prod(entry.shape[1:])  # pages of whole rows get mapped
        step = max(1, MAPPED // max(row, 1))
        for at in range(0, sizes[0], step):
            length = min(step, sizes[0] - at)
            part = self._slice(entry, name, length * row)
            start = box[0].start + at
            yield (slice(at, at + length), *(slice(0, n) for n in sizes[1:])), part[start : start + length, *box[1:]]
            del part

    def _slice(self, entry: Entry, name: str, size: int) -> Any:
        """safetensors' own slice object, after counting `size` bytes as mapped."""
        if self._open is None or self._open[0] != entry.file or self._used + size > MAPPED:
            self._open = None
            self._open = (entry.file, safe_open(entry.file, framework="pt").__enter__())
            self._used = 0
        self._used += size
        return self._open[1].get_slice(name)

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        entry = self.entries[name]
        made = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        for where, values in self.blocks(name, [slice(0, n) for n in entry.shape]):
            made[where] = values
        return made

    def close(self) -> None:
        self._open = None


def _files_of(path: Path) -> Mapping[Path, list[str] | None]:
    """File -> the names that an index says it has (None without an index)."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return {path: None}
        if path.name.endswith(".index.json"):
            return _indexed(path)
        raise CheckpointError(f"'{path}' is no safetensors file", fix=_PICKLE_FIX)
    if not path.is_dir():
        raise CheckpointError(f"there is no file or folder '{path}'", fix="give a folder of safetensors files")
    if (path / SINGLE).exists():  # goes before an index, as in transformers: one rename makes it the model
        return {path / SINGLE: None}
    if (path / INDEX).exists():
        return _indexed(path / INDEX)
    found = sorted(path.glob("*.safetensors"))
    if numbered := [f.name for f in found if NUMBERED.fullmatch(f.name)]:
        problem = f"'{path}' has {len(numbered)} of several files ({', '.join(numbered[:3])}) and no {INDEX}"
        raise CheckpointError(f"{problem}: a save that was not finished", fix="save again, or copy the index too")
    if found:
        return dict.fromkeys(found)
    pickles = sorted(f.name for pattern in PICKLES for f in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"'{path}' has weights as pickles only ({', '.join(pickles[:3])}), which can run code when they are read",
            fix=_PICKLE_FIX,
        )
    raise CheckpointError(f"'{path}' has no safetensors files", fix="give a folder of safetensors files")


_PICKLE_FIX = (
    "convert it once, on a machine where you trust the file: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors'), "
    "or AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of transformers"
)


def _indexed(index: Path) -> dict[Path, list[str]]:
    fix = "copy the files again"
    try:
        regular_size(index)
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        outside = [file for file in places.values() if Path(file).is_absolute() or ".." in Path(file).parts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"'{index}' is no index of safetensors files: {type(error).__name__}: {error}"
        raise CheckpointError(problem, fix=fix) from error
    if outside:
        raise CheckpointError(f"'{index}' names files outside of its folder: {', '.join(outside[:3])}", fix=fix)
    found: dict[Path, list[str]] = {}
    for name, file in places.items():
        found.setdefault(index.parent / file, []).append(name)
    return found


def regular_size(path: Path) -> int:
    """Size of a file in bytes. Raises OSError if it is unreadable, or a device or pipe, on which a reader could block."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"'{path}' is no regular file")
    with open(path, "rb"):  # safetensors would report an unreadable file as missing
        return found.st_size


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """fsync a folder, so that new names in it are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def listed(found: str, lines: Sequence[str], fix: str = "", kind: type[MegafxError] = CheckpointError) -> MegafxError:
    """An error with one line for each thing found."""
    return kind("\n  ".join([f"{found}:", *lines]), fix=fix)


class Written(NamedTuple):
    """Size of a file in bytes and the digest of its contents."""

    bytes: int
    digest: str


def write(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    values: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors under the names of `entries` (name, dtype, shape) and flush them to the disk; `values` in the same order.

    Each value is taken when it is written, so only one at a time has to be on the host.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in entries:
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "wb") as file:
        total = _put(file, digest, len(text).to_bytes(8, "little") + text)
        waiting = iter(values)
        for entry in entries:  # no variable (nor a zip) holds a value while the next one is made
            total += _put(file, digest, _bytes_of(entry, next(waiting, None)))
        if next(waiting, None) is not None:
            raise ValueError("there are more values than entries")
        file.flush()
        os.fsync(file.fileno())
    return Written(total, digest.hexdigest())


def _bytes_of(entry: tuple[str, torch.dtype, Sequence[int]], value: torch.Tensor | None) -> memoryview:
    name, dtype, shape = entry
    if value is None:
        raise ValueError(f"there is no value for '{name}'")
    if value.dtype != dtype or tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"'{name}' is {tuple(value.shape)} {value.dtype}, not {tuple(shape)} {dtype}")
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _put(file: BinaryIO, digest: hashlib.blake2b, block: bytes | memoryview) -> int:
    digest.update(block)
    file.write(block)
    return len(block)


def digest_of(path: Path) -> str:
    """The digest of a file's present contents, as in `Written`."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
