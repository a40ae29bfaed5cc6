"""Reading what torch.distributed.checkpoint's own writer made, without running anything that a file says.

Its `.metadata` is a pickle. It is read by an unpickler that makes the classes below and nothing else; the tensors in the
`.distcp` files are read by `torch.load(weights_only=True)`, as torch's reader does.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megafx.checkpoint_folder import STOCK
from megafx.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a layout up by its name
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    """Makes what `_ALLOWED` names, and dtypes of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{STOCK} of a checkpoint asks for {module}.{name}, which metadata has no need of: it is not read",
            fix="only load checkpoints of torch.distributed.checkpoint from where you trust",
        )


def read_stock_metadata(folder: Path) -> Metadata:
    """Raises CheckpointError where `.metadata` is damaged, is no metadata, or asks for anything but metadata's classes."""
    try:
        found = _Unpickler(io.BytesIO((folder / STOCK).read_bytes())).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {STOCK} cannot be read ({error})") from error
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise CheckpointError(f"{folder / STOCK} is not the metadata of a checkpoint")
    return found


class StockReader(FileSystemReader):
    """torch's reader of the tensors of these names."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        super().__init__(folder)
        whole = read_stock_metadata(folder)
        about = {name: whole.state_dict_metadata[name] for name in names}
        stored = {index: info for index, info in whole.storage_data.items() if index.fqn in names}
        self.described = Metadata(about, storage_data=stored)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.described


def stock_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> what is said of each tensor."""
    about = read_stock_metadata(folder).state_dict_metadata
    return {name: t for name, t in about.items() if isinstance(t, TensorStorageMetadata)}


def stock_names(about: Mapping[str, Any], names: list[str]) -> dict[str, str]:
    """Name of ours -> name in the checkpoint, where all of ours have one prefix there ('', 'model.', ...)."""
    known, counts = {*names}, Counter[str]()
    for there in about:
        parts = there.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in known:
                counts["".join(f"{part}." for part in parts[:i])] += 1
    prefix = min(counts, key=lambda p: (-counts[p], len(p), p), default="")
    return {name: prefix + name for name in names if prefix + name in about}
