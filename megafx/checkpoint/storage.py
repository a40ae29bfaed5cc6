"""Write and read `checkpoint/folder.py`'s format through torch.distributed.checkpoint.

torch makes the plans: it writes slices that several ranks hold once, and reads slices that were cut otherwise. Nothing is
pickled into a file: data are safetensors, metadata is JSON.
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.content import Chunk, Content, Described, key_of, write_content
from megafx.checkpoint.state import State
from megafx.distributed.failures import stopping_with_others
from megafx.errors import CheckpointError, MegafxError
from megafx.weights import files as safetensors_writer
from megafx.weights.files import Written

FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}  # planners' options: a state is a flat dict


def write_checkpoint(state: State, writer: FolderWriter, group: dist.ProcessGroup | None) -> None:
    """Write this rank's slices. Collective over `group` (None: this process alone). Raises CheckpointError; nothing is then
    left on disk."""
    planner = DefaultSavePlanner(**FLAT)
    try:
        with _errors_of_ranks("saving", f"the checkpoint of step {writer.step} could not be saved in '{writer.root}'"):
            if group is not None:
                save(state, storage_writer=writer, planner=planner, process_group=group)
                return
            planner.set_up_planner(state, is_coordinator=True)
            plans, metadata = planner.create_global_plan([planner.create_local_plan()])
            (plan,) = writer.prepare_global_plan(plans)
            writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
    except BaseException:
        if writer.partial is not None:
            checkpoint_folder.abandon(writer.partial)
        raise


def read_tensors(state: State, reader: StorageReader, group: dist.ProcessGroup | None, source: Path) -> None:
    """Fill this rank's slices of the tensors. Collective over `group` (None: this process alone). Raises CheckpointError,
    which names `source`; some may be filled then."""
    planner = DefaultLoadPlanner(**FLAT)
    with _errors_of_ranks("loading", f"checkpoint {source} could not be loaded"):
        if group is not None:
            load(state, storage_reader=reader, planner=planner, process_group=group)
            return
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        reader.read_data(planner.finish_plan(plan), planner).wait()


@contextlib.contextmanager
def _errors_of_ranks(doing: str, failed: str) -> Iterator[None]:
    """Raise errors of torch and of files, on one rank or several, as one CheckpointError."""
    try:
        with stopping_with_others(f"{doing} a checkpoint"):
            yield
    except MegafxError:
        raise
    except CheckpointException as error:
        found = {rank: e for rank, (e, _) in sorted(error.failures.items())}
        texts = [f"rank {rank}: {_text(e)}" for rank, e in found.items()]
        fix = next((e.fix for e in found.values() if isinstance(e, MegafxError)), "")
        raise CheckpointError(f"{failed}: {'; '.join(texts)}", fix=fix) from error
    except Exception as error:
        raise CheckpointError(f"{failed}: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return error.found if isinstance(error, MegafxError) else f"{type(error).__name__}: {error}"


class _Storage:
    """Parts of torch's storage interface that are not needed here."""

    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass

    set_up_storage_reader = set_up_storage_writer = reset

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    prepare_global_plan = prepare_local_plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # so that torch.distributed.checkpoint never picks it by itself


class FolderWriter(_Storage, StorageWriter):
    """Writes one checkpoint under `root`; `path` is where it lies once `finish` has run (on the coordinator)."""

    def __init__(self, root: Path, step: int, objects: dict[str, Any], keep: int | None = None) -> None:
        self.root, self.step, self.objects, self.keep = root, step, objects, keep
        self.path: Path | None = None
        self.partial: Path | None = None  # on the coordinator

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before anyone writes: makes the folder, and names each rank's file."""
        self.partial = checkpoint_folder.begin(self.root, self.step)
        paths = [self.partial / f"rank_{rank:05d}.safetensors" for rank in range(len(plans))]
        return [SavePlan(p.items, path, p.planner_data) for p, path in zip(plans, paths, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            path: Path = plan.storage_data
            about: list[Any] = [item.tensor_data for item in plan.items]  # all items are tensors
            keys = [
                key_of(item.index.fqn, a.chunk.offsets, a.chunk.sizes, a.size)
                for item, a in zip(plan.items, about, strict=True)
            ]
            entries = [(key, a.properties.dtype, a.chunk.sizes) for key, a in zip(keys, about, strict=True)]
            values = (planner.resolve_data(item) for item in plan.items)
            with _there(path.parent):
                written = safetensors_writer.write(path, entries, values, {"format": "pt"})  # type: ignore[arg-type]  # no BytesIO
            for item, key, a in zip(plan.items, keys, about, strict=True):
                chunk = Chunk(tuple(item.index.offset or ()), tuple(a.chunk.sizes), path.name, key)
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
        folder = self.partial
        assert folder is not None
        for name, file in files.items():
            if not (folder / name).exists() or (folder / name).stat().st_size != file.bytes:
                checkpoint_folder.check_owner(self.root)
                found = f"{folder / name}, which another rank wrote, is not visible to rank 0"
                raise CheckpointError(found, fix="save to a file system that all ranks share")
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            dtype = safetensors_writer.dtype_name(about.properties.dtype)
            tensors[name] = Described(dtype, tuple(about.size), tuple(sorted(chunks[name], key=lambda c: c.offsets)))
        with _there(folder):
            write_content(folder, Content(self.step, tensors, files, self.objects))
            self.path = checkpoint_folder.commit(folder, self.step, self.keep)


@contextlib.contextmanager
def _there(folder: Path) -> Iterator[None]:
    """Says why the folder that is written into is gone."""
    try:
        yield
    except FileNotFoundError as error:
        found = f"'{folder}' was removed while it was written: another job saves in '{folder.parent}'"
        raise CheckpointError(found, fix="end one of the two jobs, or give each a folder of its own") from error


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
