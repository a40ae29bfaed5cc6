"""torch.distributed.checkpoint's planners and storage for `checkpoint_folder`'s format.

The planners are torch's, over flat dicts of `Slices`. Nothing is pickled into a file: data are safetensors, metadata JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.folder import Chunk, Content, Described
from megafx.checkpoint.state import Slices
from megafx.distributed.failures import stopping_with_others
from megafx.errors import CheckpointError
from megafx.weights import files as safetensors_writer
from megafx.weights.files import Written

State = dict[str, Slices]


class SavePlans(DefaultSavePlanner):
    """Plans the write of this rank's slices; a slice that several ranks hold is written by the one with the least to do."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        held: Slices = self.state_dict[index.fqn]
        return held.at(index.offset)


class LoadPlans(DefaultLoadPlanner):
    """Plans the reads that fill this rank's slices, from whatever slices were written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        held: Slices = self.state_dict[index.fqn]
        return held.at(index.offset)


class FolderWriter(StorageWriter):
    """Writes one checkpoint under `root`; `path` is where it is once `finish` ran (on the coordinator)."""

    def __init__(self, root: Path, step: int, objects: dict[str, Any], keep: int | None = None) -> None:
        self.root, self.step, self.objects, self.keep = root, step, objects, keep
        self.path: Path | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before anyone writes: makes the folder, and names each rank's file."""
        checkpoint_folder.begin(self.root, self.step)
        return [SavePlan(p.items, f"rank_{rank:05d}.safetensors", p.planner_data) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file: str = plan.storage_data
        about: list[Any] = [item.tensor_data for item in plan.items]  # all items are tensors
        entries = [(_key(item), a.properties.dtype, a.chunk.sizes) for item, a in zip(plan.items, about, strict=True)]
        path = checkpoint_folder.partial(self.root, self.step) / file
        values = (planner.resolve_data(item) for item in plan.items)
        written = safetensors_writer.write(path, entries, values, {"format": "pt"})  # type: ignore[arg-type]  # no BytesIO
        return [
            WriteResult(item.index, 0, (Chunk(tuple(item.index.offset or ()), tuple(sizes), file, key), written))
            for item, (key, _, sizes) in zip(plan.items, entries, strict=True)
        ]

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
                raise CheckpointError(
                    f"{folder / name}, which another rank wrote, is not to be seen by rank 0",
                    fix="save to a file system that all ranks share",
                )
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            dtype = safetensors_writer.dtype_name(about.properties.dtype)
            tensors[name] = Described(dtype, tuple(about.size), tuple(sorted(chunks[name], key=lambda c: c.offsets)))
        checkpoint_folder.write_content(folder, Content(self.step, tensors, files, self.objects))
        self.path = checkpoint_folder.commit(self.root, self.step, self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # torch.distributed.checkpoint never picks it by itself


def _key(item: WriteItem) -> str:
    """The name of a slice in its file: the tensor's, with ranges unless it is all of it."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{ranges}]"


class FolderReader(StorageReader):
    """Reads slices of a checked checkpoint."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder, self.content = folder, content

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {}
        for name, t in self.content.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in t.chunks]
            properties = TensorProperties(dtype=safetensors_writer.NAMES[t.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(t.shape), chunks)
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            assert item.storage_index.index is not None
            chunk = self.content.tensors[item.storage_index.fqn].chunks[item.storage_index.index]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, reads in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for chunk, item in reads:
                    target = planner.resolve_tensor(item)
                    if tuple(item.lengths) == chunk.sizes:
                        value = file.get_tensor(chunk.key)
                    else:
                        ranges = zip(item.storage_offsets, item.lengths, strict=True)
                        value = file.get_slice(chunk.key)[tuple(slice(o, o + n) for o, n in ranges)]
                    target.copy_(value)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


# -- running them


def write_checkpoint(state: State, writer: FolderWriter, group: dist.ProcessGroup | None) -> None:
    """Write this rank's slices. Collective over the group; None: of this process alone."""
    if group is None:
        write_together([state], [writer])
        return
    try:
        with stopping_with_others("saving a checkpoint"):
            save(state, storage_writer=writer, planner=SavePlans(), process_group=group)
    except CheckpointException as error:
        raise _plain(error, "saved") from error


def read_slices(state: State, reader: StorageReader, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's slices. Collective over the group."""
    if group is None:
        read_alone(state, reader)
        return
    try:
        with stopping_with_others("loading a checkpoint"):
            load(state, storage_reader=reader, planner=LoadPlans(), process_group=group)
    except CheckpointException as error:
        raise _plain(error, "loaded") from error


def write_together(states: Sequence[State], writers: Sequence[FolderWriter]) -> None:
    """What `torch.distributed.checkpoint.save` does on all ranks, in one process: states and writers of rank 0, 1, ..."""
    planners = [SavePlans() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for plan, writer, planner in zip(plans, writers, planners, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)


def read_alone(state: State, reader: StorageReader) -> None:
    """What `torch.distributed.checkpoint.load` does on a rank: reading needs no other."""
    planner, metadata = LoadPlans(), reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _plain(error: CheckpointException, what: str) -> CheckpointError:
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    texts = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items()]
    return CheckpointError(f"the checkpoint could not be {what}: " + "; ".join(texts))
