"""Storage of `checkpoint/folder.py`'s format for torch.distributed.checkpoint, and its save and load with it.

Plans, slices that several ranks hold, and reads of slices that were cut otherwise are torch's. Nothing is pickled into a
file: data are safetensors, metadata JSON.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.folder import Chunk, Content, Described
from megafx.checkpoint.state import State
from megafx.distributed.failures import stopping_with_others
from megafx.errors import CheckpointError
from megafx.weights import files as safetensors_writer
from megafx.weights.files import Written

FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}  # planners' options: a state is a flat dict


def write_checkpoint(state: State, writer: FolderWriter, group: dist.ProcessGroup | None) -> None:
    """Write this rank's slices. Collective over the group; None: of this process alone."""
    planner = DefaultSavePlanner(**FLAT)
    if group is not None:
        with _errors_of_ranks("saving", "saved"):
            save(state, storage_writer=writer, planner=planner, process_group=group)
        return
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def read_tensors(state: State, reader: StorageReader, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's slices of the tensors. Collective over the group; None: of this process alone."""
    planner = DefaultLoadPlanner(**FLAT)
    if group is not None:
        with _errors_of_ranks("loading", "loaded"):
            load(state, storage_reader=reader, planner=planner, process_group=group)
        return
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()


@contextlib.contextmanager
def _errors_of_ranks(doing: str, done: str) -> Iterator[None]:
    """What torch raises for several ranks, as an error that names them."""
    try:
        with stopping_with_others(f"{doing} a checkpoint"):
            yield
    except CheckpointException as error:
        texts = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())]
        raise CheckpointError(f"the checkpoint could not be {done}: " + "; ".join(texts)) from error


class _Storage:
    """What torch asks of a storage and this one has no use for."""

    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass

    set_up_storage_reader = set_up_storage_writer = reset

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    prepare_global_plan = prepare_local_plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # torch.distributed.checkpoint never picks it by itself


class FolderWriter(_Storage, StorageWriter):
    """Writes one checkpoint under `root`; `path` is where it lies once `finish` has run (on the coordinator)."""

    def __init__(self, root: Path, step: int, objects: dict[str, Any], keep: int | None = None) -> None:
        self.root, self.step, self.objects, self.keep = root, step, objects, keep
        self.path: Path | None = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before anyone writes: makes the folder, and names each rank's file."""
        checkpoint_folder.begin(self.root, self.step)
        return [SavePlan(p.items, f"rank_{rank:05d}.safetensors", p.planner_data) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            file: str = plan.storage_data
            about: list[Any] = [item.tensor_data for item in plan.items]  # all items are tensors
            keys = [_key(item.index.fqn, a) for item, a in zip(plan.items, about, strict=True)]
            entries = [(key, a.properties.dtype, a.chunk.sizes) for key, a in zip(keys, about, strict=True)]
            path = checkpoint_folder.partial(self.root, self.step) / file
            values = (planner.resolve_data(item) for item in plan.items)
            written = safetensors_writer.write(path, entries, values, {"format": "pt"})  # type: ignore[arg-type]  # no BytesIO
            for item, key, a in zip(plan.items, keys, about, strict=True):
                chunk = Chunk(tuple(item.index.offset or ()), tuple(a.chunk.sizes), file, key)
                results.append(WriteResult(item.index, 0, (chunk, written)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks wrote: `metadata.json`, and the rename that makes it a checkpoint."""
        files: dict[str, Written] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in itertools.chain(*results):
            chunk, files[result.storage_data[0].file] = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
        folder = checkpoint_folder.partial(self.root, self.step)
        for name, file in files.items():
            if not (folder / name).exists() or (folder / name).stat().st_size != file.bytes:
                found = f"{folder / name}, which another rank wrote, is not to be seen by rank 0"
                raise CheckpointError(found, fix="save to a file system that all ranks share")
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            dtype = safetensors_writer.dtype_name(about.properties.dtype)
            tensors[name] = Described(dtype, tuple(about.size), tuple(sorted(chunks[name], key=lambda c: c.offsets)))
        checkpoint_folder.write_content(folder, Content(self.step, tensors, files, self.objects))
        self.path = checkpoint_folder.commit(self.root, self.step, self.keep)


def _key(name: str, about: TensorWriteData) -> str:
    """The name of a slice in its file: the tensor's, with ranges unless it is all of it."""
    ranges = (f"{o}:{o + s}" for o, s in zip(about.chunk.offsets, about.chunk.sizes, strict=True))
    return name if about.chunk.sizes == about.size else f"{name}[{', '.join(ranges)}]"


class FolderReader(_Storage, StorageReader):
    """Reads slices of a checked checkpoint."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder, self.content = folder, content

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {}
        for name, t in self.content.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in t.chunks]
            properties = TensorProperties(dtype=safetensors_writer.NAMES[t.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(t.shape), chunks)
        return Metadata(described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            assert item.storage_index.index is not None
            chunk = self.content.tensors[item.storage_index.fqn].chunks[item.storage_index.index]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, reads in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for chunk, item in reads:
                    if tuple(item.lengths) == chunk.sizes:
                        value = file.get_tensor(chunk.key)
                    else:
                        ranges = zip(item.storage_offsets, item.lengths, strict=True)
                        value = file.get_slice(chunk.key)[tuple(slice(o, o + n) for o, n in ranges)]
                    planner.resolve_tensor(item).detach().copy_(value)
        done: Future[None] = Future()
        done.set_result(None)
        return done
