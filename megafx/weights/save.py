"""The weights of a parallelized model as files that other tools load; no rank ever holds the whole model."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafx.distributed import agreement
from megafx.distributed.failures import meet
from megafx.errors import CheckpointError, MegafxError, UsageError
from megafx.placements.slices import ShardSlice
from megafx.weights import files as safetensors_writer
from megafx.weights.files import INDEX, SINGLE
from megafx.weights.names import Saving, find_savings
from megafx.weights.state import Stored, stored_tensors

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
Fetch = Callable[[str, int], torch.Tensor | None]  # (name in the model, writing rank) -> the whole tensor on that rank


def save_pretrained(model: nn.Module, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write safetensors files (with an index where there are several) and config.json, as `from_pretrained` loads them.

    Names, shapes and dtypes are those of the model's state dict, in the original layout; tied tensors are written once. For
    Hugging Face models, tensors that transformers renamed or merged on loading get the names and shapes of their files back,
    and config.json and generation_config.json are written; of any other model the files hold the state dict, which
    `megafx.load_safetensors` reads. max_shard_size: bytes of a file, as a number or like "5GB"; a tensor is never split.

    Files are shared out to the ranks, which write them one after the other; a rank holds one whole tensor (or one group that
    is split into files' tensors) at a time. The folder is one file system for all ranks. New files get their names when all of
    them are complete, then files of an earlier save that are not replaced are removed.

    Collective over all ranks of the model. Raises CheckpointError on every rank, where a file cannot be written.
    """
    save_whole(model, Path(folder), max_shard_size, "megafx.save_pretrained")


def save_whole(
    model: nn.Module,
    folder: Path,
    max_shard_size: int | str,
    caller: str,
    *,
    variant: str = "",
    original_format: bool = True,
) -> None:
    """`save_pretrained`, for the call that users made. variant: part of the files' names, as transformers has it.

    original_format: give tensors that transformers renamed or merged on loading their names and shapes back.
    """
    runtime = getattr(model, "megafx", None)
    group = None if runtime is None else runtime.everyone
    meet(caller, group)
    error: MegafxError | None = None
    try:
        limit = bytes_of(max_shard_size)
        tensors = stored_tensors(model)
        bare = [t.name for t in tensors if t.tensor.is_meta]
        if bare:
            raise UsageError(f"{', '.join(bare)} have no values", fix="load or initialise the model first")
        files = plan_files(find_savings(model, tensors, original_format), limit, variant)
    except MegafxError as found:
        error = found
    agreement.raise_together(error, group)
    if group is not None:
        agreement.check_same(f"the folder of {caller}", str(folder), group)
    gather = _Gather({t.name: t for t in tensors}, group)
    write_files(folder, files, gather.fetch, group, variant)
    if _rank(group) == 0:
        save_config(model, folder, next((p.dtype for p in model.parameters()), None))
    agreement.raise_together(None, group)


@dataclass
class PlannedFile:
    """A file and what goes into it."""

    name: str
    savings: list[Saving]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.savings)


def plan_files(savings: Sequence[Saving], limit: int, variant: str = "") -> list[PlannedFile]:
    """In order, each file filled up to `limit` bytes."""
    parts: list[list[Saving]] = [[]]
    size = 0
    for saving in savings:
        if parts[-1] and size + saving.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(saving)
        size += saving.nbytes
    stem = _stem(variant)
    if len(parts) == 1:
        return [PlannedFile(f"{stem}.safetensors", parts[0])]
    return [PlannedFile(f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors", p) for i, p in enumerate(parts)]


def _stem(variant: str) -> str:
    stem = SINGLE.removesuffix(".safetensors")
    return f"{stem}.{variant}" if variant else stem


def write_files(
    folder: Path, files: Sequence[PlannedFile], fetch: Fetch, group: dist.ProcessGroup | None, variant: str = ""
) -> None:
    """Write the files and the index; `fetch` is called on all ranks, for every tensor in order. Collective."""
    rank, ranks = _rank(group), 1 if group is None else dist.get_world_size(group)
    error: MegafxError | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as found:
        error = CheckpointError(f"'{folder}' cannot be made: {found}")
    agreement.raise_together(error, group)
    for number, file in enumerate(files):
        writer = number % ranks
        values = _values(file, fetch, writer, rank)
        if writer != rank:
            for _ in values:
                pass
            agreement.raise_together(None, group)
            continue
        try:
            entries = [entry for saving in _ordered(file) for entry in saving.entries]
            safetensors_writer.write(_partial(folder, file.name), entries, values, {"format": "pt"})
        except (OSError, MegafxError) as found:
            error = CheckpointError(f"'{folder / file.name}' cannot be written: {found}", fix="nothing was replaced")
            for _ in values:  # the other ranks are sending
                pass
        agreement.raise_together(error, group)
    try:
        if rank == 0:
            _finish(folder, files, variant)
    except OSError as found:
        error = CheckpointError(f"files of '{folder}' cannot be replaced: {found}")
    agreement.raise_together(error, group)


def _ordered(file: PlannedFile) -> list[Saving]:
    """Wide dtypes first, so that every tensor is aligned (what the safetensors library does too)."""
    return sorted(file.savings, key=lambda s: -min(dtype.itemsize for _, dtype, _ in s.entries))


def _values(file: PlannedFile, fetch: Fetch, writer: int, rank: int) -> Iterator[torch.Tensor]:
    for saving in _ordered(file):
        whole = [fetch(name, writer) for name in saving.names]
        if writer == rank:
            made = iter(saving.make([x for x in whole if x is not None]))
            del whole  # what is written is not held while the next tensor comes
            yield from made


def _partial(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"


def _finish(folder: Path, files: Sequence[PlannedFile], variant: str) -> None:
    """Give the complete files their names, write the index, and remove what an earlier save left."""
    ours = re.compile(rf"{re.escape(_stem(variant))}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    old = [f for f in folder.iterdir() if ours.fullmatch(f.name)]
    listing = INDEX.replace(".json", f".{variant}.json") if variant else INDEX
    (folder / listing).unlink(missing_ok=True)
    for file in files:
        os.replace(_partial(folder, file.name), folder / file.name)
    for path in old:
        if path.name not in {file.name for file in files}:
            path.unlink()
    if len(files) > 1:
        places = {name: file.name for file in files for saving in file.savings for name, _, _ in saving.entries}
        index = {"metadata": {"total_size": sum(f.nbytes for f in files)}, "weight_map": places}
        _partial(folder, listing).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(_partial(folder, listing), folder / listing)


class _Gather:
    """Whole tensors, each on the rank that writes it: every box from one rank that holds it."""

    def __init__(self, tensors: dict[str, Stored], group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.tensors = {name: t for t in tensors.values() for name in t.names}
        self.boxes: list[dict[str, list[ShardSlice]]] = [{name: t.slices for name, t in tensors.items()}]
        if group is not None:
            mine = self.boxes[0]
            self.boxes = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(self.boxes, mine, group=group)

    @torch.no_grad()
    def fetch(self, name: str, writer: int) -> torch.Tensor | None:
        """The whole tensor on `writer`, on its device; None on other ranks."""
        stored, rank = self.tensors[name], _rank(self.group)
        local = stored.local
        order = [writer, *(r for r in range(len(self.boxes)) if r != writer)]
        holders: dict[tuple[Any, Any], tuple[int, ShardSlice]] = {}
        for r in order:
            for box in self.boxes[r][stored.name]:
                holders.setdefault((box.offsets, box.sizes), (r, box))
        whole = local.new_empty(stored.tensor.shape) if rank == writer else None
        for holder, box in holders.values():
            if holder == rank == writer:
                assert whole is not None
                whole[box.original] = local[box.local]
            elif holder == rank:
                dist.send(local[box.local].contiguous(), group=self.group, group_dst=writer)
            elif rank == writer:
                assert whole is not None
                part = local.new_empty(box.sizes)
                dist.recv(part, group=self.group, group_src=holder)
                whole[box.original] = part
        return whole


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def bytes_of(size: int | str) -> int:
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"max_shard_size={size!r} is no size", fix="write 5GB, 200MiB or a number of bytes")
    return int(match[1]) * _UNITS[match[2].upper()]


def save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """config.json and generation_config.json of a Hugging Face model; dtype: of its weights."""
    if not (hasattr(model, "config") and hasattr(model.config, "save_pretrained")):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    if getattr(config, "distributed_config", None) is not None:
        config.distributed_config = None  # what `parallelize` told Trainer of the ranks
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
