"""Save a training run and resume it later, on any number of tensor-parallel ranks.

    path = megafx.save_checkpoint("runs/gpt", model, optimizer, step=100, extra={"scheduler": scheduler})
    loaded = megafx.load_checkpoint("runs/gpt", model, optimizer, extra={"scheduler": scheduler})   # the newest valid one

checkpoint/folder.py describes the files, checkpoint/state.py their content; docs/checkpoints.md is the user's guide.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.content import Content, damage, read_content
from megafx.checkpoint.load import Load, replica_of
from megafx.checkpoint.state import Optimizers, State, collect, copied, generators, merged, several_of
from megafx.checkpoint.storage import FolderWriter, write_checkpoint
from megafx.distributed.agreement import broadcast_object, check_same, first_rank, gather_on_first, raising_together
from megafx.distributed.failures import meet, only_rank_0, timeout_of
from megafx.distributed.parameters import device_of, runtime_of
from megafx.errors import CheckpointError, MegafxError, UsageError
from megafx.progress import stage
from megafx.weights.initialize import Factory, Rest, check_planned

TRIES = 10  # attempts to read the newest, which a trainer may remove meanwhile
LARGEST_STEP = 10**15


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` found. path: of the checkpoint. extra: what was saved as `extra`, without the objects that were
    given to load into. skipped: newer checkpoints that are damaged, each with the reason."""

    path: Path
    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    skipped: dict[Path, str] = field(default_factory=dict)


@overload
def save_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: Optimizers = None, *, step: int, asynchronous: Literal[False] = False,
    extra: Mapping[str, Any] | None = None, keep: int | None = None,
) -> Path: ...  # fmt: skip


@overload
def save_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: Optimizers = None, *, step: int, asynchronous: Literal[True],
    extra: Mapping[str, Any] | None = None, keep: int | None = None,
) -> Future[Path]: ...  # fmt: skip


@stage("save_checkpoint")
def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Path | Future[Path]:
    """Write parameters, buffers, optimizer state and torch's generators to `folder/step_<step>`; returns that path.

    Collective over all ranks, which share the file system. Every tensor is written in original coordinates, by the ranks that
    hold it. extra: numbers, strings, None, tensors, lists, tuples and dicts of these, and objects with `state_dict()` and
    `load_state_dict()` (schedulers, a GradScaler); rank 0's are saved. optimizer: one, or a list. keep: how many checkpoints
    to keep; older ones are removed once this one is complete.

    asynchronous: values are copied to host memory, and a thread does the rest; returns a Future of the path. The next save or
    load waits for it first and raises its error. Call `.result()` before the process group is destroyed.

    A save that is killed leaves a folder whose name begins with '.', which the next save removes, and older checkpoints as
    they were. Raises CheckpointError on every rank; UsageError where ranks are called with different arguments.
    """
    unseen = _settle()
    with contextlib.suppress(TypeError):  # numbers of NumPy are ints here; what is none is refused below
        step = step if isinstance(step, bool) else operator.index(step)
    folder = Path(folder).absolute()  # where it is now, whatever directory the process is in when a thread writes
    group = _saving_group(model, asynchronous, f"megafx.save_checkpoint(asynchronous={asynchronous})")
    replicas = _generators_of_replicas(model, group)
    with raising_together(group, CheckpointError):
        if unseen is not None:
            raise unseen
        if group is None:
            only_rank_0("megafx.save_checkpoint")
        step_fits = type(step) is int and 0 <= step < LARGEST_STEP
        if not step_fits or not (keep is None or (type(keep) is int and keep >= 1)):
            found = f"save_checkpoint(step={step!r}, keep={keep!r})"[:200]
            raise UsageError(found, fix=f"step is an int of 0 to {LARGEST_STEP - 1}, keep an int of at least 1 or None")
        if checkpoint_folder.is_checkpoint(folder):
            raise UsageError(f"'{folder}' is a checkpoint itself", fix="give the folder that it lies in, or a new one")
        rank = dist.get_rank(group) if group is not None else 0
        state, data = collect(model, optimizer, extra or {}, rank, replicas)
        if asynchronous:
            state = copied(state)
    shapes = [f"{n} {tuple(x.shape)} {x.dtype}" for n, x in state.items() if not n.startswith(("rng.", "extra."))]
    groups = [each for optimizer in data["optimizers"] for each in optimizer["groups"]]
    if getattr(runtime_of(model), "elsewhere", None) is not None:  # stages have tensors of their own
        shapes, groups = [], [{**each, "names": []} for each in groups]
        data = _of_all_stages(data, model, group)
    options = [str(each) for each in groups]  # learning rates
    text = "\n".join([str(folder), f"step={step}", f"keep={keep}", *options, *shapes])
    check_same("what is to be saved", text, group)
    writer = FolderWriter(folder, step, data, keep)
    if not asynchronous:
        return _write(state, writer, group)
    global _under_way
    _under_way = _Saving(step)
    _threads.submit(_under_way.run, state, writer, group)
    return _under_way


def _generators_of_replicas(model: nn.Module, group: dist.ProcessGroup | None) -> list[dict[str, torch.Tensor]]:
    """Of each data-parallel rank, the generators of its first tensor-parallel rank, on rank 0; else nothing."""
    runtime = runtime_of(model)
    if group is None or runtime is None or runtime.meshes.data is None:
        return []
    own = (replica_of(model)[0], generators(device_of(model))) if runtime.rank == 0 else None
    of_replica = dict(filter(None, gather_on_first(own, group)))
    return [of_replica[replica] for replica in sorted(of_replica)]


def _of_all_stages(data: dict[str, Any], model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The plain data of all stages of a pipeline, on rank 0, which writes them; on other ranks their own."""
    if group is None:
        return data
    first_of_stage = runtime_of(model).rank == 0 and replica_of(model)[0] == 0
    parts = gather_on_first(data if first_of_stage else None, group)
    with raising_together(group):
        return merged([*filter(None, parts)]) if parts else data


def _write(state: State, writer: FolderWriter, group: dist.ProcessGroup | None) -> Path:
    write_checkpoint(state, writer, group)
    return Path(broadcast_object(str(writer.path), group))


_side: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # (the default group, a gloo group of the same ranks)
_threads = ThreadPoolExecutor(1, thread_name_prefix="megafx-checkpoint")


class _Saving(Future[Path]):
    """A save in the background. asked: whether anybody has seen how it ended."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.asked = step, False

    def run(self, *arguments: Any) -> None:
        try:
            self.set_result(_write(*arguments))
        except BaseException as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Path:
        try:
            return super().result(timeout)
        finally:
            self.asked |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.asked = True
        return found


_under_way: _Saving | None = None


@atexit.register
def _tell() -> None:
    """At exit, after all threads: print a failed save that nobody asked about, and make the exit code 1."""
    saving = _under_way
    if saving is None or saving.asked or (error := saving.exception(0)) is None:
        return
    text = "".join(traceback.format_exception(error))
    print(f"{text}megafx: the checkpoint of step {saving.step} was not saved (see above)", file=sys.stderr)
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        flush()
    os._exit(1)  # an exception here would leave the exit code 0


def _saving_group(model: nn.Module, asynchronous: bool, what: str) -> dist.ProcessGroup | None:
    """A gloo group of all ranks, replicas included, once all of them have called `what`; None where the model has no mesh.
    A background save has a group of its own, apart from the collectives of training."""
    global _side
    runtime = runtime_of(model)
    if runtime is None or (runtime.mesh is None and runtime.elsewhere is None):
        return None
    world = dist.group.WORLD
    assert world is not None
    meet(what, world)
    if not asynchronous and dist.get_backend(world) == "gloo":
        return world
    if _side is None or _side[0] is not world:
        _side = world, dist.new_group(backend="gloo", timeout=timeout_of(world))
    return _side[1]


def _settle() -> BaseException | None:
    """Wait for the save that is under way; the error with which it ended, unless somebody has seen that."""
    global _under_way
    pending, _under_way = _under_way, None
    if pending is None or pending.asked:
        return None
    return pending.exception()


@stage("load_checkpoint")
def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    rng: bool = True,
    missing_ok: bool = False,
    factory: Factory | None = None,
) -> LoadedCheckpoint | None:
    """Fill model, optimizer and generators from a checkpoint that was saved on any number of ranks.

    Collective over all ranks. folder: of one checkpoint, or a root of several, of which the newest valid one is taken (files
    are compared with their digests; damaged ones are named in a warning); or one of torch.distributed.checkpoint's own format,
    with model and optimizer. Each rank reads its own slices. extra: objects with `load_state_dict()`, by the names under
    which they were saved; everything else saved is in the result. missing_ok: return None if there is no checkpoint yet.

    A model on meta gets memory for what this rank holds; non-persistent buffers get the constructor's values, as in
    `megafx.initialize` (models that are not from Hugging Face need `factory` for that).

    Raises CheckpointError, before anything is changed, if no checkpoint is valid, or if names, shapes, dtypes or parameter
    groups differ from those that were saved.
    """
    unseen = _settle()
    root = Path(folder)
    group = _saving_group(model, False, "megafx.load_checkpoint")
    with raising_together(group, CheckpointError):
        if unseen is not None:
            raise unseen
        if root.is_file():
            raise CheckpointError(f"'{root}' is a file", fix="name the folder that save_checkpoint was given")
        of_torch = (root / checkpoint_folder.TORCH_METADATA).exists()
    of_torch = broadcast_object(of_torch, group)
    for left in reversed(range(TRIES)):
        path, content, skipped = root, None, dict[Path, str]()
        if not of_torch:
            if (found := _newest_valid(root, group)) is None:
                if missing_ok:
                    return None
                problem = f"there is no checkpoint in {root}"
                raise CheckpointError(problem, fix="name the folder that save_checkpoint was given")
            path, content, skipped = found
        try:
            with raising_together(group, CheckpointError):
                check_planned(model)
                rest = Rest(model, factory)
                load = Load(path, content, model, several_of(optimizer), extra or {})
            loaded = load.run(group, rng, rest)
            break
        except CheckpointError:  # on every rank
            if not left or path == root or first_rank(not path.exists(), group) is None:
                raise  # else: it was removed, since a newer one was complete
    checkpoint_folder.go_on_from(path)
    return LoadedCheckpoint(path, 0 if content is None else content.step, loaded, skipped)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest valid checkpoint under a root folder, its files compared with their digests; None if there is none."""
    found = _newest_valid(Path(folder), None, raises=False)
    return None if found is None else found[0]


def _newest_valid(
    root: Path, group: dist.ProcessGroup | None, raises: bool = True
) -> tuple[Path, Content, dict[Path, str]] | None:
    """(path, content, damaged newer ones). None: there are no checkpoints. Raises where all of them are damaged."""
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    for left in reversed(range(TRIES)):
        skipped: dict[Path, str] = {}
        with raising_together(group, CheckpointError):
            names = [root] if checkpoint_folder.is_checkpoint(root) else checkpoint_folder.checkpoints(root)
        for path in map(Path, broadcast_object([*map(str, names)], group)):  # rank 0's: folders may change meanwhile
            content, problem, removed = None, None, False
            try:
                content = read_content(path)
                wrong = damage(path, sorted(content.files)[rank::ranks], content)  # this rank's share
                problem = f"checkpoint {path} is damaged: {wrong}" if wrong else None
                removed = not path.exists()
            except Exception as error:  # of any class: the other ranks wait for what is found here
                problem = (
                    error.found if isinstance(error, MegafxError) else f"checkpoint {path} cannot be read: {error!r}"
                )
                removed = not os.path.lexists(path)
            first, any_removed = first_rank(problem is not None, group), first_rank(removed, group) is not None
            problem = None if first is None else broadcast_object(problem, group, first)
            if problem is None:
                assert content is not None
                if skipped and rank == 0:
                    warnings.warn(f"{'; '.join(skipped.values())}; loading {path}", stacklevel=3)
                return path, content, skipped
            skipped[path] = problem
            if left and any_removed:
                break  # a newer one was complete: look again
        else:
            break
    if skipped and raises:
        raise CheckpointError(f"no valid checkpoint in {root}: {'; '.join(skipped.values())}")
    return None
