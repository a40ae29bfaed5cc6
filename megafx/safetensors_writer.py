"""One safetensors file, written as a stream: header, then tensor after tensor, hashed on the way, flushed to the disk.

(`safetensors.torch.save_file` holds all bytes of a file in memory a second time.) Format: 8 bytes little-endian length of the
header, the header as JSON padded with spaces to a multiple of 8, the data:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from megafx.errors import CheckpointError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}
_BLOCK = 1 << 24  # bytes hashed and read at a time


@dataclass(frozen=True)
class Written:
    """Size of a file in bytes and the digest of its contents."""

    bytes: int
    digest: str


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        raise CheckpointError(f"safetensors has no {dtype}", fix="convert the tensor before saving it")
    return DTYPES[dtype]


def write(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    values: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors under the names of `entries` (name, dtype, shape) and flush them to the disk; `values` in the same order.

    A value is asked for when it is written, so that one at a time has to be on the host.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in entries:
        size = dtype.itemsize * _numel(shape)
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.blake2b(digest_size=16)
    total = 0
    with open(path, "wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            total += _put(file, digest, block)
        waiting = iter(values)
        for entry in entries:  # no name here (nor in a zip) holds a value while the next one is made
            total += _put_value(file, digest, entry, next(waiting, None))
        if next(waiting, None) is not None:
            raise ValueError("there are more values than entries")
        file.flush()
        os.fsync(file.fileno())
    return Written(total, digest.hexdigest())


def _put_value(
    file: BinaryIO, digest: hashlib.blake2b, entry: tuple[str, torch.dtype, Sequence[int]], value: torch.Tensor | None
) -> int:
    name, dtype, shape = entry
    if value is None:
        raise ValueError(f"there is no value for '{name}'")
    if value.dtype != dtype or tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"'{name}' is {tuple(value.shape)} {value.dtype}, not {tuple(shape)} {dtype}")
    if not value.numel():
        return 0
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _put(file, digest, raw.numpy().data)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _put(file: BinaryIO, digest: hashlib.blake2b, block: bytes | memoryview) -> int:
    digest.update(block)
    file.write(block)
    return len(block)


def digest_of(path: Path) -> str:
    """What `Written.digest` is of the file as it is now."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
