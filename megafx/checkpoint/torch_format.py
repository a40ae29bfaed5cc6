"""Read checkpoints that torch.distributed.checkpoint's own writer made: tensors and optimizer state.

    <root>.<FQN>                           parameters and buffers; <root>: whatever key the user gave the model
    <root>.state.<FQN>.<key>               get_optimizer_state_dict(model, optimizer), of FSDP ranks or of one process
    <root>.param_groups.<i>.<option>       ... `params` are the FQNs of the group

No code from a file is run. `.metadata` is a pickle: it is read by an unpickler that makes the classes below and nothing
else. Tensors and options in the `.distcp` files are read by `torch.load(weights_only=True)`, as torch's reader does.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from megafx.checkpoint.content import uncovered
from megafx.checkpoint.folder import TORCH_METADATA
from megafx.checkpoint.state import names_of, options_of
from megafx.errors import CheckpointError
from megafx.weights.files import regular_size
from megafx.weights.state import stored_tensors

_PATHS = ("PosixPath", "WindowsPath")
_METADATA = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (*_METADATA, "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # looks a layout up by its name
    "collections": ("OrderedDict",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


_WITH_ATTRIBUTES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _Unpickler(pickle._Unpickler):
    """Makes the classes in `_ALLOWED`, and dtypes of torch. Based on pickle's Python version, to check each step: setting
    attributes of anything but instances of metadata's classes could change a class for the whole process."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch}

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise _more_than_metadata(f"asks for {module}.{name}")

    def load_build(self) -> None:
        # Below its attributes. The stubs of pickle's Unpickler in Python lack both names.
        made: Any = self.stack[-2]  # type: ignore[attr-defined]  # see above
        if type(made).__module__ not in _WITH_ATTRIBUTES or isinstance(made, Enum):
            raise _more_than_metadata(f"sets attributes of {str(made)[:80]}")
        super().load_build()  # type: ignore[misc]  # see above

    dispatch[pickle.BUILD[0]] = load_build


def _member(kind: Any, name: Any) -> Enum:
    """In place of `getattr`, by which Python 3.11.2 pickles members of an enum, and nothing else of metadata."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise _more_than_metadata(f"asks for attribute {str(name)[:80]} of {str(kind)[:80]}")


def _more_than_metadata(what: str) -> CheckpointError:
    return CheckpointError(
        f"{TORCH_METADATA} of a checkpoint {what}, which metadata has no need of: it is not read",
        fix="only load checkpoints of torch.distributed.checkpoint from where you trust",
    )


def read_metadata(folder: Path) -> Metadata:
    """Raises CheckpointError if `.metadata` is damaged, asks for anything but metadata's classes, or is inconsistent: slices
    that do not partition their tensor, or places outside of the folder's files."""
    try:
        size = regular_size(folder / TORCH_METADATA)
        return _parsed(folder, size, (folder / TORCH_METADATA).stat().st_mtime_ns)
    except CheckpointError:
        raise
    except Exception as error:
        found = f"checkpoint {folder} is damaged: {TORCH_METADATA} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointError(found) from error


@lru_cache(1)  # one load asks several times
def _parsed(folder: Path, size: int, changed: int) -> Metadata:
    found = _Unpickler(io.BytesIO((folder / TORCH_METADATA).read_bytes())).load()
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise CheckpointError(f"{folder / TORCH_METADATA} is not the metadata of a checkpoint")
    sizes: dict[str, int] = {}
    stored = {(index.fqn, tuple(index.offset or ())): info for index, info in found.storage_data.items()}
    for (name, _), info in stored.items():
        path = info.relative_path
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"checkpoint {folder} has '{name}' in {path!r}, which is not in its folder")
        if path not in sizes:
            sizes[path] = regular_size(folder / path)
        if not 0 <= info.offset <= info.offset + info.length <= sizes[path]:
            raise CheckpointError(f"checkpoint {folder} has '{name}' beyond the end of {path}")
    for name, about in found.state_dict_metadata.items():
        places: list[tuple[int, ...]] = [()]
        if isinstance(about, TensorStorageMetadata):
            boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in about.chunks]
            if (wrong := uncovered(tuple(about.size), boxes)) is not None:
                raise CheckpointError(f"checkpoint {folder} is damaged: '{name}': {wrong}")
            if not isinstance(about.properties.dtype, torch.dtype):
                raise CheckpointError(f"checkpoint {folder} is damaged: '{name}' has no dtype")
            places = [offsets for offsets, _ in boxes]
        if lacking := [place for place in places if (name, place) not in stored]:
            raise CheckpointError(f"checkpoint {folder} is damaged: it does not say where '{name}' {lacking[0]} is")
    return found


class TorchReader(FileSystemReader):
    """torch's reader, limited to these names."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        super().__init__(folder)
        whole = read_metadata(folder)
        about = {name: whole.state_dict_metadata[name] for name in names}
        stored = {index: info for index, info in whole.storage_data.items() if index.fqn in names}
        self.described = Metadata(about, storage_data=stored)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.described


def tensors_there(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of each tensor in the checkpoint."""
    about = read_metadata(folder).state_dict_metadata
    return {n: (tuple(t.size), t.properties.dtype) for n, t in about.items() if isinstance(t, TensorStorageMetadata)}


def names_there(there: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Name -> name in the checkpoint, which has one prefix for all ('', 'model.', ...); absent names are left out."""
    present, known, counts = {*there}, {*names}, Counter[str]()
    for name in present:
        parts = name.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in known:
                counts["".join(f"{part}." for part in parts[:i])] += 1
    prefix = min(counts, key=lambda p: (-counts[p], len(p), p), default="")
    return {name: prefix + name for name in names if prefix + name in present}


_ENTRY = re.compile(r"(?:(.+?)\.)?(state|param_groups)\.(.+)\.([^.]+)")
_FIX = "save what get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict gives"
Entries = dict[str, dict[str, Any]]  # FQN of a parameter, or number of a group -> {key: encoded value}


def saved_optimizers(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], taken: Iterable[str]
) -> list[dict[str, Any]]:
    """The saved state of each optimizer, encoded as in `checkpoint/state.py`. taken: saved names of the model's tensors.

    Raises CheckpointError where there is no optimizer, it is kept in another form, or has other parameters or groups.
    """
    state, groups = _entries(folder, {*taken})
    if any("params" not in group for group in groups.values()):
        raise _refused(folder, "is flattened (flatten_optimizer_state_dict=True), which megafx does not read", _FIX)
    listed = [name for group in groups.values() for name in group["params"]]
    if not all(isinstance(name, str) for name in listed):
        raise _refused(folder, "keeps parameters by number (optimizer.state_dict()), which megafx does not read", _FIX)
    known = {alias: stored.name for stored in stored_tensors(model) for alias in stored.names}
    named = {there: known[name] for name, there in names_there([*state, *listed], known).items()}
    fix = "make the optimizer with the groups that were saved, of the model that was saved"
    if unknown := sorted({*state} - {*named}):
        raise _refused(folder, f"does not fit: it keeps {unknown[:3]}, which are no parameters of the model", fix)
    saved = {}
    for group in groups.values():
        names = [named.get(name, name) for name in group["params"]]
        saved[frozenset(names)] = {"names": names, **options_of(group)}
    data = []
    for optimizer in optimizers:
        mine = names_of(optimizer, model)
        for names in mine:
            if frozenset(names) not in saved:
                found = f"it has no group of the {len(names)} parameters {names[:3]}, as this optimizer has"
                raise _refused(folder, f"does not fit: {found}", fix)
        kept = {name for names in mine for name in names}
        of_it = {named[there]: values for there, values in state.items() if named[there] in kept}
        data.append({"groups": [saved[frozenset(names)] for names in mine], "state": of_it})
    return data


def _refused(folder: Path, what: str, fix: str) -> CheckpointError:
    return CheckpointError(f"the optimizer of checkpoint {folder} {what}", fix=fix)


def _entries(folder: Path, taken: set[str]) -> tuple[Entries, Entries]:
    """(state, groups): everything of an optimizer that the checkpoint has, tensors by name, the rest by value."""
    about = read_metadata(folder).state_dict_metadata
    matched = {name: m for name in about if name not in taken and (m := _ENTRY.fullmatch(name)) is not None}
    roots = sorted({m[1] or "" for m in matched.values()})
    if not any(m[2] == "param_groups" for m in matched.values()):
        raise CheckpointError(f"checkpoint {folder} holds no optimizer", fix=f"load the model alone; or {_FIX} with it")
    if len(roots) > 1:
        found = f"checkpoint {folder} holds several optimizers ({', '.join(roots)})"
        raise CheckpointError(found, fix="save get_optimizer_state_dict(model, [all optimizers]), which is one")
    plain = _read_objects(folder, {name for name in matched if not isinstance(about[name], TensorStorageMetadata)})
    state, groups = Entries(), Entries()
    for name, match in matched.items():
        into = state if match[2] == "state" else groups
        into.setdefault(match[3], {})[match[4]] = plain.get(name, {"$tensor": name})
    return state, groups


class _Objects(DefaultLoadPlanner):
    """Collects non-tensor values, as plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.storage_index.fqn
        try:
            self.values[name] = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"'{name}' of a checkpoint is no plain data: {error}") from error


def _read_objects(folder: Path, names: set[str]) -> dict[str, Any]:
    """Name -> value."""
    reader, planner, nowhere = TorchReader(folder, names), _Objects(), torch.Size((0,))
    reader.set_up_storage_reader(reader.read_metadata(), True)
    indices = [MetadataIndex(name) for name in sorted(names)]
    items = [ReadItem(LoadItemType.BYTE_IO, at, nowhere, at, nowhere, nowhere) for at in indices]
    try:
        reader.read_data(LoadPlan(items), planner).wait()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    return planner.values
