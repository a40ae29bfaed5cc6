"""The weights of a parallelized model as files that other tools load; no rank ever holds the whole model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafx.distributed import agreement
from megafx.distributed.failures import meet, only_rank_0
from megafx.distributed.parameters import everyone_of
from megafx.distributed.tensor import slices_by_rank
from megafx.errors import CheckpointError, MegafxError, UsageError
from megafx.placements.slices import ShardSlice
from megafx.progress import stage
from megafx.units import bytes_of
from megafx.weights import files as safetensors_writer
from megafx.weights.files import INDEX, SINGLE, flush_folder, write_text
from megafx.weights.names import Saving, find_savings, own_config
from megafx.weights.state import Stored, stored_tensors

Fetch = Callable[[str, int], torch.Tensor | None]  # (name in the model, writing rank) -> the whole tensor there


@stage("save_pretrained")
def save_pretrained(model: nn.Module, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write safetensors files (with an index where there are several) and config.json, as `from_pretrained` loads them.

    Names, shapes and dtypes are those of the model's state dict, in the original layout; tied tensors are written once. For
    Hugging Face models, tensors that transformers renamed or merged on loading get the names and shapes of their files back,
    and config.json and generation_config.json are written; of any other model the files hold the state dict, which
    `megafx.load_safetensors` reads. max_shard_size: most bytes of a file, as a number or like "5GB"; a tensor is never split.

    Ranks take turns to write files; a rank holds one whole tensor (or one group that is converted together) at a time. All
    ranks must share the folder's file system. A killed save leaves the earlier model in place: new files are complete and
    flushed before one rename makes them the model, and the earlier ones are removed after it. Where the usual names of several
    files are taken, the new files get other names, which the index lists.

    Collective over all ranks of the model. Raises CheckpointError on every rank if a file cannot be written.
    """
    save_whole(model, Path(folder), max_shard_size, "megafx.save_pretrained")


def save_whole(
    model: nn.Module,
    folder: Path,
    max_shard_size: int | str,
    caller: str,
    variant: str = "",
    original_format: bool = True,
) -> None:
    """`save_pretrained` on behalf of `caller`, which errors name. variant: part of the file names, as in transformers.

    original_format: give tensors that transformers renamed or merged on loading their names and shapes back.
    """
    group = everyone_of(model)
    if group is None:
        only_rank_0(caller)
    meet(caller, group)
    with agreement.raising_together(group, CheckpointError):
        limit = bytes_of(max_shard_size, "max_shard_size")
        tensors = stored_tensors(model)
        if bare := [t.name for t in tensors if t.tensor.is_meta]:
            raise UsageError(f"{', '.join(bare)} have no values", fix="load or initialise the model first")
        files = plan_files(find_savings(model, tensors, original_format), limit, variant)
    if group is not None:
        agreement.check_same(f"the folder of {caller}", str(folder), group)
    write_files(folder, files, _gatherer(tensors, group), group, variant)
    with agreement.raising_together(group, CheckpointError):
        if group is None or dist.get_rank(group) == 0:
            save_config(model, folder, next((p.dtype for p in model.parameters()), None))


Files = dict[str, list[Saving]]  # name of a file -> what goes into it


def plan_files(savings: Sequence[Saving], limit: int, variant: str = "") -> Files:
    """Fill files in order, up to `limit` bytes each; a larger saving gets a file of its own."""
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
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors": p for i, p in enumerate(parts)}


def _stem(variant: str) -> str:
    stem = SINGLE.removesuffix(".safetensors")
    return f"{stem}.{variant}" if variant else stem


def write_files(folder: Path, files: Files, fetch: Fetch, group: dist.ProcessGroup | None, variant: str = "") -> None:
    """Write the files and the index; `fetch` is called on all ranks, for every tensor in order. Collective."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    with _writing(f"'{folder}' cannot be made", group):
        folder.mkdir(parents=True, exist_ok=True)
    token = agreement.broadcast_object(secrets.token_hex(4), group)
    partial = {name: folder / f".{name}.{token}.partial" for name in files}
    try:
        for number, (name, savings) in enumerate(files.items()):
            # Wide dtypes first, so that every tensor is aligned (what the safetensors library does too).
            ordered = sorted(savings, key=lambda s: -min(dtype.itemsize for _, dtype, _ in s.entries))
            values = _values(ordered, fetch, number % ranks, rank)
            with _writing(f"'{folder / name}' cannot be written", group, fix="nothing was replaced"):
                try:
                    if number % ranks == rank:
                        entries = [entry for saving in ordered for entry in saving.entries]
                        safetensors_writer.write(partial[name], entries, values, {"format": "pt"})
                except Exception:
                    deque(values, 0)  # receives what the other ranks are sending
                    raise
                deque(values, 0)  # sends what another rank writes
        with _writing(f"files of '{folder}' cannot be replaced", group):
            if rank == 0:
                _finish(folder, files, partial, token, variant)
    except BaseException:
        for path in partial.values():  # they may have filled the disk
            path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _writing(what: str, group: dist.ProcessGroup | None, fix: str = "") -> Iterator[None]:
    """Raise write errors as CheckpointError on every rank. Collective."""
    with agreement.raising_together(group, CheckpointError):
        try:
            yield
        except (OSError, MegafxError) as found:
            raise CheckpointError(f"{what}: {found}", fix=fix) from found


def _values(savings: Sequence[Saving], fetch: Fetch, writer: int, rank: int) -> Iterator[torch.Tensor]:
    """A file's tensors in the order of writing; nothing on ranks that only send."""
    for saving in savings:
        whole = [fetch(name, writer) for name in saving.names]
        if writer == rank:
            made = iter(saving.make([x for x in whole if x is not None]))
            del whole  # so that it is not held while the next tensor comes
            yield from made


def _finish(folder: Path, files: Files, partial: dict[str, Path], token: str, variant: str) -> None:
    """Make the complete files the model, in one rename, and remove what earlier saves left.

    A reader takes `model.safetensors`, else the files that the index names. So the last step is the rename of that file or,
    with several files, the rename of the index and the removal of that file.
    """
    stem, listing = _stem(variant), INDEX.replace(".json", f".{variant}.json") if variant else INDEX
    ours = re.compile(rf"{re.escape(stem)}(-[0-9a-f]{{8}})?(-\d{{5}}-of-\d{{5}})?\.safetensors")
    left = re.compile(rf"\.{re.escape(stem)}.*\.[0-9a-f]{{8}}\.partial")
    present = [f for f in folder.iterdir() if ours.fullmatch(f.name) or left.fullmatch(f.name)]
    single = folder / f"{stem}.safetensors"
    taken = len(files) > 1 and any((folder / name).exists() for name in files)
    final = {name: name.replace(stem, f"{stem}-{token}", 1) if taken else name for name in files}
    for name, path in partial.items():
        if len(files) > 1:
            os.replace(path, folder / final[name])
    flush_folder(folder)
    if len(files) > 1:
        places = {name: final[file] for file, savings in files.items() for s in savings for name, _, _ in s.entries}
        total = sum(s.nbytes for savings in files.values() for s in savings)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        draft = folder / f".{listing}.{token}.partial"
        write_text(draft, json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(draft, folder / listing)
        flush_folder(folder)
        single.unlink(missing_ok=True)
    else:
        os.replace(partial[single.name], single)
        flush_folder(folder)
        (folder / listing).unlink(missing_ok=True)
    flush_folder(folder)
    for path in present:
        if path.name not in final.values():
            path.unlink(missing_ok=True)


def _gatherer(tensors: Sequence[Stored], group: dist.ProcessGroup | None) -> Fetch:
    """Gathers each tensor on the rank that writes it, from the ranks that share it with that one; others send nothing."""
    by_name = {name: t for t in tensors for name in t.names}
    rank = 0 if group is None else dist.get_rank(group)

    @torch.no_grad()
    def fetch(name: str, writer: int) -> torch.Tensor | None:
        stored = by_name[name]
        of_ranks, local = slices_by_rank(stored.tensor, group), stored.local
        if not of_ranks:
            return local.clone() if rank == writer else None
        if writer not in of_ranks:
            return None
        holders: dict[tuple[Any, Any], tuple[int, ShardSlice]] = {}
        for r in (writer, *of_ranks):
            for box in of_ranks[r]:
                holders.setdefault((box.offsets, box.sizes), (r, box))
        whole = local.new_empty(stored.tensor.shape if rank == writer else ())
        for holder, box in holders.values():
            if holder == rank == writer:
                whole[box.original] = local[box.local]
            elif holder == rank:
                dist.send(local[box.local].contiguous(), group=group, group_dst=writer)
            elif rank == writer:
                part = local.new_empty(box.sizes)
                dist.recv(part, group=group, group_src=holder)
                whole[box.original] = part
        return whole if rank == writer else None

    return fetch


def save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """config.json and generation_config.json of a Hugging Face model; dtype: of its weights."""
    if not (hasattr(model, "config") and hasattr(model.config, "save_pretrained")):
        return
    config = own_config(model)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
