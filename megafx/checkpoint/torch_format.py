"""The optimizer's state in a checkpoint that torch.distributed.checkpoint itself wrote, as `checkpoint_state` has it.

    <root>.state.<FQN>.<key>               get_optimizer_state_dict(model, optimizer), FSDP or one process; <root>: the user's
    <root>.param_groups.<i>.<option>       .. `params` are the FQNs of the group
    <root>.param_groups.<FQN>.<option>     .. with flatten_optimizer_state_dict=True
    <root>.state.<n>.<key>                 optimizer.state_dict(): parameters by number, in the order of its groups

Options are small pickles: they are read by torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from megafx.checkpoint.folder import STOCK
from megafx.checkpoint.state import names_of
from megafx.errors import CheckpointError
from megafx.weights.state import stored_tensors

# -- checkpoint stock
#
# Reading what torch.distributed.checkpoint's own writer made, without running anything that a file says.
#
# Its `.metadata` is a pickle. It is read by an unpickler that makes the classes below and nothing else; the tensors in the
# `.distcp` files are read by `torch.load(weights_only=True)`, as torch's reader does.

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


_ENTRY = re.compile(r"(?:(.+?)\.)?(state|param_groups)\.(.+)\.([^.]+)")


@dataclass
class _Found:
    """state, groups: (FQN, or number of the parameter or group) -> {key: encoded value}."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)


def stock_optimizers(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], taken: Iterable[str]
) -> list[dict[str, Any]]:
    """Data as `of_optimizer` gives them, encoded, of each optimizer. taken: names in the checkpoint that are the model's.

    Raises CheckpointError where there is no optimizer, or it has other parameters or groups.
    """
    found = _entries(folder, set(taken))
    mine = [names_of(optimizer, model) for optimizer in optimizers]
    wanted = [names for groups in mine for names in groups]
    known = {alias: stored.name for stored in stored_tensors(model) for alias in stored.names}
    listed = [str(name) for group in found.groups.values() for name in group.get("params", ())]
    flat = [name for name, group in found.groups.items() if "params" not in group]
    there = stock_names(dict.fromkeys([*found.state, *listed, *flat]), [*known])
    named = {saved: known[name] for name, saved in there.items()}
    if {*found.state} - {*named} and all(name.isdigit() for name in found.state):
        named = _by_number(found, wanted, folder)
    unknown = sorted({*found.state} - {*named})
    if unknown:
        raise _misfit(folder, f"it keeps {unknown[:3]}, which are no parameters of the model")
    state = {named[name]: kept for name, kept in found.state.items()}
    groups = _groups(found, named, wanted, folder)
    data = []
    for own in mine:
        kept = {name for names in own for name in names}
        data.append(
            {
                "groups": [groups[frozenset(names)] for names in own],
                "state": {name: value for name, value in state.items() if name in kept},
            }
        )
    return data


def _entries(folder: Path, taken: set[str]) -> _Found:
    """Everything of an optimizer that the checkpoint has: tensors by name, the rest by value."""
    about = read_stock_metadata(folder).state_dict_metadata
    matched = {name: m for name in about if name not in taken and (m := _ENTRY.fullmatch(name)) is not None}
    roots = sorted({m[1] or "" for m in matched.values()})
    if not any(m[2] == "param_groups" for m in matched.values()):
        raise CheckpointError(
            f"checkpoint {folder} holds no optimizer",
            fix="load the model alone; or save what torch's get_optimizer_state_dict(model, optimizer) gives with it",
        )
    if len(roots) > 1:
        raise CheckpointError(
            f"checkpoint {folder} holds several optimizers ({', '.join(roots)})",
            fix="save get_optimizer_state_dict(model, [all optimizers]), which is one",
        )
    plain = _read_objects(folder, {name for name in matched if not isinstance(about[name], TensorStorageMetadata)})
    found = _Found()
    for name, match in matched.items():
        into = found.state if match[2] == "state" else found.groups
        value = plain.get(name, {"$tensor": name})
        into.setdefault(match[3], {})[match[4]] = value
    return found


class _Objects(DefaultLoadPlanner):
    """Takes what is no tensor, as plain data."""

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
    reader, planner, nowhere = StockReader(folder, names), _Objects(), torch.Size((0,))
    reader.set_up_storage_reader(reader.read_metadata(), True)
    items = [
        ReadItem(LoadItemType.BYTE_IO, MetadataIndex(n), nowhere, MetadataIndex(n), nowhere, nowhere)
        for n in sorted(names)
    ]
    try:
        reader.read_data(LoadPlan(items), planner).wait()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    return planner.values


def _groups(
    found: _Found, named: Mapping[str, str], wanted: list[list[str]], folder: Path
) -> dict[frozenset[str], dict[str, Any]]:
    """Names of a group -> its options, for the groups of these optimizers."""
    groups: dict[frozenset[str], dict[str, Any]] = {}
    if all("params" in options for options in found.groups.values()):
        for options in found.groups.values():
            params = [named.get(str(name), str(name)) for name in options["params"]]
            groups[frozenset(params)] = _options(params, options)
    else:  # by parameter, where those of one group have the same
        for names in wanted:
            each = [found.groups[saved] for saved, name in named.items() if name in names and saved in found.groups]
            if len(each) == len(names) and all(_equal(each[0], other) for other in each[1:]):
                groups[frozenset(names)] = _options(names, each[0])
    wrong = [names for names in wanted if frozenset(names) not in groups]
    if wrong:
        raise _misfit(
            folder, f"it has no group of the {len(wrong[0])} parameters {wrong[0][:3]}, as this optimizer has"
        )
    return groups


def _options(names: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {"names": names, **{k: v for k, v in options.items() if k not in ("params", "param_names")}}


def _equal(a: Any, b: Any) -> bool:
    """Options that are tensors have other names for each parameter, and are the same tensor."""
    return {k: v for k, v in a.items() if not isinstance(v, dict)} == {
        k: v for k, v in b.items() if not isinstance(v, dict)
    }


def _by_number(found: _Found, wanted: list[list[str]], folder: Path) -> dict[str, str]:
    """Number -> FQN, by the places in the groups: what `optimizer.load_state_dict` does."""
    groups = [found.groups[i]["params"] for i in sorted(found.groups, key=int)]
    if [*map(len, groups)] != [*map(len, wanted)]:
        raise _misfit(
            folder, f"its groups have {[*map(len, groups)]} parameters, those of this optimizer {[*map(len, wanted)]}"
        )
    pairs = zip(groups, wanted, strict=True)
    return {str(i): name for numbers, names in pairs for i, name in zip(numbers, names, strict=True)}


def _misfit(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer of checkpoint {folder} does not fit: {what}",
        fix="make the optimizer with the groups that were saved, of the model that was saved",
    )
