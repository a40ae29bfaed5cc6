"""Save a training run and go on with it later, on any number of tensor-parallel ranks.

    path = megafx.save_checkpoint("runs/gpt", model, optimizer, step=100, extra={"scheduler": scheduler})
    loaded = megafx.load_checkpoint("runs/gpt", model, optimizer, extra={"scheduler": scheduler})   # the newest valid one

The format is `checkpoint_folder`'s, what is in it `checkpoint_state`'s; docs/checkpoints.md is the user's guide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import nn

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.folder import Content, read_content
from megafx.checkpoint.load import Load, load_stock
from megafx.checkpoint.state import Optimizers, Slices, collect, device_of, several_of
from megafx.checkpoint.storage import FolderWriter, write_checkpoint
from megafx.distributed.agreement import broadcast_object, check_same, raise_together
from megafx.distributed.failures import meet, timeout_of
from megafx.errors import CheckpointError, MegafxError, UsageError
from megafx.weights.initialize import Factory, Rest, check_planned
from megafx.weights.state import give_memory

# -- checkpoint group
#
# Which ranks save together, over which process group, and the one save that may be under way in the background.

_side: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # (the default group, a gloo group of the same ranks)
_threads = ThreadPoolExecutor(1, thread_name_prefix="megafx-checkpoint")
_under_way: Future[Path] | None = None


def saving_group(model: nn.Module, asynchronous: bool, what: str) -> dist.ProcessGroup | None:
    """All ranks, over gloo, once they all came to call `what`; None where the model is this process's alone.

    Replicas of a data-parallel axis take part: slices that several ranks hold are written once. What goes on in the
    background has a group of its own, so that it never meets the collectives of training.
    """
    global _side
    runtime = getattr(model, "megafx", None)
    if getattr(runtime, "mesh", None) is None:
        return None
    world = dist.group.WORLD
    assert world is not None
    meet(what, world)
    if not asynchronous and dist.get_backend(world) == "gloo":
        return world
    if _side is None or _side[0] is not world:
        _side = world, dist.new_group(backend="gloo", timeout=timeout_of(world))
    return _side[1]


def background(work: Callable[[], Path]) -> Future[Path]:
    """Run a save in the one background thread."""
    global _under_way
    _under_way = _threads.submit(work)
    return _under_way


def settle() -> None:
    """Wait for the save that is under way; raises what it raised."""
    global _under_way
    pending, _under_way = _under_way, None
    if pending is not None:
        pending.result()


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` found. path: of the checkpoint. extra: what was saved as such and is no object that was given to
    load into. skipped: newer checkpoints that are damaged, each with what is wrong."""

    path: Path
    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    skipped: dict[Path, str] = field(default_factory=dict)


@overload
def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: Literal[False] = False,
) -> Path: ...


@overload
def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: Literal[True],
) -> Future[Path]: ...


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
    """Write parameters, buffers, optimizer state and torch's generators to `folder/step_<step>`; the path of it.

    Collective over all ranks, which share the file system. Every tensor is written in original coordinates, by the ranks that
    hold it. extra: numbers, strings, None, tensors, lists, tuples and dicts of these, and objects with `state_dict()` and
    `load_state_dict()` (schedulers, a GradScaler); rank 0's. optimizer: one, or a list. keep: older checkpoints beyond so
    many are removed, after this one is complete.

    asynchronous: values are copied to host memory, the rest is done by a thread; a Future of the path. The next save, or load,
    waits for it first and raises what it raised. Needs no care of the user's, except `.result()` before the process group is
    destroyed.

    A save that is killed leaves a folder whose name begins with '.', which the next save removes, and older checkpoints as
    they were. Raises CheckpointError on every rank; UsageError where ranks are called with different arguments.
    """
    settle()
    if not isinstance(step, int) or step < 0 or (keep is not None and keep < 1):
        raise UsageError(
            f"save_checkpoint(step={step!r}, keep={keep!r})", fix="step is at least 0, keep at least 1 or None"
        )
    group = saving_group(model, asynchronous, "megafx.save_checkpoint")
    rank = dist.get_rank(group) if group is not None else 0
    state, data = collect(model, optimizer, extra or {}, device_of(model), rank)
    if group is not None:
        shapes = [f"{n} {tuple(s.shape)} {s.dtype}" for n, s in state.items() if not n.startswith(("rng.", "extra."))]
        check_same("what is to be saved", "\n".join([str(folder), str(step), *shapes]), group)
    writer = FolderWriter(Path(folder), step, data, keep)
    if not asynchronous:
        return _write(state, writer, group)
    staged = {name: slices.copied() for name, slices in state.items()}
    return background(lambda: _write(staged, writer, group))


def _write(state: dict[str, Slices], writer: FolderWriter, group: dist.ProcessGroup | None) -> Path:
    write_checkpoint(state, writer, group)
    path = broadcast_object(str(writer.path), group) if group is not None else str(writer.path)
    return Path(path)


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
    which they were saved; what else was saved is in the result. missing_ok: None where there is no checkpoint yet.

    A model on meta gets memory for what this rank holds; buffers that are not persistent get the constructor's values, as
    in `megafx.initialize` (factory: needed for them where the model is not of Hugging Face).

    Raises CheckpointError, before anything is changed, where no checkpoint is valid, or names, shapes, dtypes or parameter
    groups are not those that were saved.
    """
    settle()
    group = saving_group(model, False, "megafx.load_checkpoint")
    root = Path(folder)
    stock = root / checkpoint_folder.STOCK
    if _same(stock.exists(), group):
        rest = _rest(model, factory, group)
        load_stock(root, model, several_of(optimizer), group)
        _fill(model, rest)
        return LoadedCheckpoint(root, 0)
    found = _newest_valid(root, group)
    if found is None:
        if missing_ok:
            return None
        raise CheckpointError(f"there is no checkpoint in {root}", fix="name the folder that save_checkpoint was given")
    path, content, skipped = found
    rest = _rest(model, factory, group)
    loaded, into = Load(path, content, model, several_of(optimizer), extra or {}).run(group, rng)
    _fill(model, rest)
    for thing, state in into:
        thing.load_state_dict(state)
    return LoadedCheckpoint(path, content.step, loaded, skipped)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest valid checkpoint under a root folder, its files compared with their digests; None: there is none."""
    found = _newest_valid(Path(folder), None, raises=False)
    return None if found is None else found[0]


# -- a model on meta


def _rest(model: nn.Module, factory: Factory | None, group: dist.ProcessGroup | None) -> Rest | None:
    """What no checkpoint has. Raises on every rank."""
    error: MegafxError | None = None
    rest = None
    try:
        check_planned(model)
        rest = Rest(model, factory)
    except MegafxError as found:
        error = found
    raise_together(error, group)
    return rest


def _fill(model: nn.Module, rest: Rest | None) -> None:
    runtime = getattr(model, "megafx", None)
    give_memory(model)
    if rest is not None:
        rest.fill()
    if runtime is not None:
        runtime.memory_given()


# -- which checkpoint


def _newest_valid(
    root: Path, group: dist.ProcessGroup | None, raises: bool = True
) -> tuple[Path, Content, dict[Path, str]] | None:
    """(path, content, damaged newer ones). None: there are no checkpoints. Raises where all of them are damaged."""
    names = (
        [str(root)] if checkpoint_folder.is_checkpoint(root) else [str(p) for p in checkpoint_folder.checkpoints(root)]
    )
    skipped: dict[Path, str] = {}
    for path in map(Path, _same(names, group)):
        content, problem = _checked(path, group)
        if problem is None:
            assert content is not None
            if skipped and (group is None or dist.get_rank(group) == 0):
                warnings.warn(f"{'; '.join(skipped.values())}; loading {path}", stacklevel=3)
            return path, content, skipped
        skipped[path] = problem
    if skipped and raises:
        raise CheckpointError(f"no valid checkpoint in {root}: {'; '.join(skipped.values())}")
    return None


def _checked(path: Path, group: dist.ProcessGroup | None) -> tuple[Content | None, str | None]:
    """(content, what is wrong). Ranks share the files among them, and come to the same result."""
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    content, problem = None, None
    try:
        content = read_content(path)
        wrong = checkpoint_folder.damage(path, sorted(content.files)[rank::ranks], content)
        problem = f"checkpoint {path} is damaged: {wrong}" if wrong else None
    except MegafxError as error:
        problem = error.found
    problems = [problem]
    if group is not None:
        problems = [None] * ranks
        dist.all_gather_object(problems, problem, group=group)
    return content, next((p for p in problems if p), None)


def _same(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's: folders may change while ranks look."""
    return value if group is None else broadcast_object(value, group)
