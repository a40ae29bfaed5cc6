"""The contents of `metadata.json`, and whether they can be trusted.

Its digests find damage, but not a faulty or malicious writer. So everything that a load relies on is checked when the file is
read, before anything is changed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megafx.checkpoint.state import decode, tensor_names
from megafx.errors import CheckpointError, MegafxError
from megafx.weights.files import NAMES, Written, digest_of, regular_size, write_text

METADATA, FORMAT, VERSION = "metadata.json", "megafx checkpoint", 1
_FILE = re.compile(r"\w[\w.-]*")  # in the folder itself
_KINDS = {"aliases": dict, "model": dict, "optimizers": list, "rng": dict, "extra": dict}
_MOST_CUT = 8  # most sharded dims of one tensor


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
        """Raises ValueError, TypeError, KeyError or the like if `data` does not describe a whole checkpoint."""
        files = {name: Written(*about) for name, about in data["files"].items()}
        for name, file in files.items():
            _ask(_FILE.fullmatch(name) and name != METADATA, f"'{name}' is no name of a file in the folder")
            _ask(_number(file.bytes) and type(file.digest) is str, f"size and digest of {name} are {list(file)}")
        tensors = {name: _described(name, t, files) for name, t in data["tensors"].items()}
        content = Content(data["step"], tensors, files, data["objects"])
        _ask(_number(content.step), f"its step is {content.step!r}")
        _check_objects(content)
        return content


def without(content: Content, names: Collection[str]) -> Content:
    """The content without these parameters and buffers: what a stage of a pipeline loads."""
    objects, dropped = content.objects, {f"model.{name}" for name in names}
    optimizers = []
    for data in objects["optimizers"]:
        groups = [{**group, "names": [n for n in group["names"] if n not in names]} for group in data["groups"]]
        state = {n: kept for n, kept in data["state"].items() if n not in names}
        dropped |= {*tensor_names({n: kept for n, kept in data["state"].items() if n in names})}
        optimizers.append({"groups": groups, "state": state})
    aliases = {alias: n for alias, n in objects["aliases"].items() if n not in names}
    objects = {**objects, "aliases": aliases, "optimizers": optimizers}
    return content._replace(tensors={n: t for n, t in content.tensors.items() if n not in dropped}, objects=objects)


def _ask(holds: Any, wrong: str) -> None:
    if not holds:
        raise ValueError(wrong)


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _described(name: str, data: dict[str, Any], files: dict[str, Written]) -> Described:
    chunks = tuple(Chunk(tuple(o), tuple(s), file, key) for o, s, file, key in data["chunks"])
    shape = tuple(data["shape"])
    _ask(data["dtype"] in NAMES, f"'{name}' is of dtype {data['dtype']}")
    _ask(all(map(_number, shape)), f"'{name}' is of shape {shape}")
    for chunk in chunks:
        _ask(all(map(_number, (*chunk.offsets, *chunk.sizes))), f"'{name}' has a slice at {chunk.offsets}")
        _ask(chunk.file in files, f"'{name}' has a slice in {chunk.file!r}, which is none of its files")
        _ask(chunk.key == key_of(name, chunk.offsets, chunk.sizes, shape), f"'{name}' has a slice named {chunk.key!r}")
    wrong = uncovered(shape, [(c.offsets, c.sizes) for c in chunks])
    _ask(wrong is None, f"'{name}': {wrong}")
    return Described(data["dtype"], shape, chunks)


def _check_objects(content: Content) -> None:
    """Aliases, optimizers, generators and the user's data are of the form that `collect` made."""
    data = content.objects
    for part, kind in _KINDS.items():
        _ask(type(data[part]) is kind, f"'{part}' is a {type(data[part]).__name__}")
    for alias, name in data["aliases"].items():
        _ask(f"model.{name}" in content.tensors, f"'{alias}' is listed as '{name}', which is no tensor")
    decode(data, content.tensors.__getitem__)
    for optimizer in data["optimizers"]:
        names = [name for group in optimizer["groups"] for name in group["names"]]
        _ask(all(type(name) is str for name in names), "parameters of an optimizer have no names")
        _ask(all(type(kept) is dict for kept in optimizer["state"].values()), "state of an optimizer is no mapping")


def uncovered(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why boxes (offsets, sizes) do not partition the whole shape; None if they do.

    A corner of a box gets the sign (-1)**(number of its upper ends). Boxes partition the shape if and only if their signed
    corners add up to those of the shape: a sum of boxes is determined by its mixed differences.
    """
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a slice of {len(sizes)} dims is in a tensor of {len(shape)}"
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"a slice at {tuple(offsets)} of sizes {tuple(sizes)} is not within {tuple(shape)}"
    if 0 in shape:
        return None
    boxes = [box for box in boxes if 0 not in box[1]]
    cut = [d for d, n in enumerate(shape) if any(sizes[d] != n for _, sizes in boxes)]
    if len(cut) > _MOST_CUT:
        return f"{len(cut)} dims are cut"
    signs: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [(-1, ([0] * len(shape), shape)), *((1, box) for box in boxes)]:
        for far in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[d] + f * sizes[d] for d, f in zip(cut, far, strict=True))
            signs[corner] += sign * (-1) ** sum(far)
    return "its slices overlap, or leave a part out" if any(signs.values()) else None


def key_of(name: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """The name of a slice in its file: the tensor's, with the ranges unless the slice is the whole tensor."""
    ranges = (f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True))
    return name if tuple(sizes) == tuple(shape) else f"{name}[{', '.join(ranges)}]"


def write_content(folder: Path, content: Content) -> None:
    """Write `metadata.json` and flush it to the disk."""
    data = content.to_json()
    text = json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(data), "content": data}, indent=1)
    write_text(folder / METADATA, text)


def read_content(folder: Path) -> Content:
    """Read and check `metadata.json`. Raises CheckpointError that names the folder and what is wrong."""
    path = folder / METADATA
    try:
        regular_size(path)
        whole = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder} has no {METADATA}: its save was not finished") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} cannot be read ({error})") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not that of a megafx checkpoint")
    if whole.get("version") != VERSION:
        raise CheckpointError(f"{path} is of version {whole.get('version')}; this megafx reads version {VERSION}")
    try:
        if _digest(whole.get("content")) != whole.get("digest"):
            raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} is not as it was written")
        return Content.from_json(whole["content"])
    except CheckpointError:
        raise
    except (MegafxError, ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}" if type(error) is not ValueError else str(error)
        raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} does not describe it ({what})") from error


def damage(folder: Path, names: Iterable[str], content: Content) -> str | None:
    """What is wrong with these files of a checkpoint, by their sizes, digests and headers; None: nothing."""
    kept: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for tensor in content.tensors.values():
        for chunk in tensor.chunks:
            kept.setdefault(chunk.file, []).append((chunk.key, tensor.dtype, chunk.sizes))
    for name in names:
        path, wanted = folder / name, content.files[name]
        try:
            if (size := regular_size(path)) != wanted.bytes:
                return f"{name} has {size} bytes, {wanted.bytes} were written"
            if digest_of(path) != wanted.digest:
                return f"{name} does not hold what was written (its digest is another)"
            with safe_open(path, framework="pt") as file:
                for key, dtype, sizes in kept.get(name, ()):
                    part = file.get_slice(key)
                    if (part.get_dtype(), tuple(part.get_shape())) != (dtype, sizes):
                        return f"{name} has '{key}' as {part.get_shape()} {part.get_dtype()}, not {list(sizes)} {dtype}"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, SafetensorError) as error:
            return f"{name} cannot be read ({error})"
    return None


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
