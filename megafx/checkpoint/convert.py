"""Convert checkpoints to safetensors files that other tools load, and back: in one process, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.storage import StorageReader

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.checkpoint import latest_checkpoint
from megafx.checkpoint.content import Chunk, Content, Described, read_content, write_content
from megafx.checkpoint.load import Shapes, misfits, refuse
from megafx.checkpoint.storage import FolderReader, read_tensors
from megafx.checkpoint.torch_format import TorchReader, names_there, tensors_there
from megafx.errors import CheckpointError, UsageError
from megafx.progress import stage
from megafx.units import bytes_of
from megafx.weights import files as safetensors_writer
from megafx.weights.files import SafetensorsFiles, dtype_name, torch_dtype
from megafx.weights.load import check_fit
from megafx.weights.names import find_savings, find_sources
from megafx.weights.save import plan_files, save_config, write_files
from megafx.weights.state import Stored, stored_tensors


@stage("convert")
def convert(source: Path, target: Path, model: nn.Module | None = None, *, max_shard_size: int | str = "5GB") -> Path:
    """Write the tensors of `source` in the other format; returns the path written.

    A checkpoint (a folder of `save_checkpoint`, the newest valid of several, or one of torch.distributed.checkpoint) becomes
    safetensors files in `target`, with config.json where `model` is of Hugging Face; optimizer state is left out. Safetensors
    files become a checkpoint of step 0 under `target`, which `load_checkpoint` loads into a model (without an optimizer).

    model: on the meta device; says the names that `from_pretrained` reads, and which tensors have to be there. Without one,
    names are kept; dtypes always are. Raises CheckpointError that lists what does not fit, and UsageError where there is no
    `source` or `target` is the same.
    """
    if source.resolve() == target.resolve():
        raise UsageError(f"'{source}' is to be converted in place", fix="give another target folder")
    if checkpoint_folder.is_checkpoint(target):
        raise UsageError(f"'{target}' is a checkpoint itself", fix="give another target folder")
    if not source.exists():
        raise UsageError(f"there is no file or folder '{source}'", fix="give a checkpoint or safetensors files")
    try:
        if source.is_dir() and (checkpoint_folder.is_checkpoint(source) or checkpoint_folder.checkpoints(source)):
            return _to_files(source, target, model, bytes_of(max_shard_size, "max_shard_size"))
        return _to_checkpoint(source, target, model)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{source}' cannot be converted to '{target}': {error}") from error


def _to_files(source: Path, target: Path, model: nn.Module | None, limit: int) -> Path:
    about, names, read = _opened(source, model)
    described = {name: about[there] for name, there in names.items()}
    if model is None:
        groups: dict[str, list[str]] = {}
        for name, there in names.items():
            groups.setdefault(there, []).append(name)
        tensors = [Stored((*group,), _meta(*about[there])) for there, group in groups.items()]
    else:
        # A meta model takes the dtypes of the source: a config may name another than was trained in.
        for t in stored_tensors(model):
            dtype = next((described[n][1] for n in t.names if n in described), t.tensor.dtype)
            if t.tensor.is_meta and dtype.is_floating_point == t.tensor.is_floating_point():
                t.tensor.data = t.tensor.data.to(dtype)
        refuse(misfits(model, described, f"'{source}'"), source)
        tensors = stored_tensors(model)
    there_of = {name: next(names[n] for n in t.names if n in names) for t in tensors for name in t.names}
    files = plan_files(find_savings(model if model is not None else nn.Module(), tensors), limit)
    write_files(target, files, lambda name, writer: read(there_of[name]), None)
    if model is not None:
        dtypes = [t.tensor.dtype for t in tensors if t.tensor.is_floating_point()]
        save_config(model, target, max(set(dtypes), key=dtypes.count) if dtypes else None)
    return target


def _opened(source: Path, model: nn.Module | None) -> tuple[Shapes, dict[str, str], Callable[[str], torch.Tensor]]:
    """(shape and dtype of each tensor there, name in the model -> name there, reader of a whole tensor)."""
    about: Shapes
    reader: Callable[[str], StorageReader]
    if (source / checkpoint_folder.TORCH_METADATA).exists():
        about = tensors_there(source)
        wanted = about if model is None else [n for t in stored_tensors(model) for n in t.names]
        names = {n: n for n in about} if model is None else names_there(about, wanted)
        reader = lambda name: TorchReader(source, {name})
    else:
        if (path := latest_checkpoint(source)) is None:
            found = f"there is no valid checkpoint in '{source}'"
            raise CheckpointError(found, fix="load_checkpoint says what is wrong")
        content = read_content(path)
        about = {n: (t.shape, torch_dtype(t.dtype)) for n, t in content.tensors.items() if n.startswith("model.")}
        names = {n.removeprefix("model."): n for n in about}
        names |= {alias: f"model.{name}" for alias, name in content.objects["aliases"].items()}
        reader = lambda name: FolderReader(path, content)

    def read(there: str) -> torch.Tensor:
        shape, dtype = about[there]
        whole = torch.empty(shape, dtype=dtype)
        read_tensors({there: whole}, reader(there), None, source)
        return whole

    return about, names, read


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _to_checkpoint(source: Path, target: Path, model: nn.Module | None) -> Path:
    files = SafetensorsFiles(source)
    if model is None:
        tensors = [Stored((n,), _meta(e.shape, torch_dtype(e.dtype))) for n, e in files.entries.items()]
    else:
        tensors = stored_tensors(model)
    sources = find_sources(model or nn.Module(), [n for t in tensors for n in t.names], files.entries)
    if lacking := check_fit(tensors, sources, files):
        raise CheckpointError(f"'{source}' has no {', '.join(sorted(lacking))}", fix="load them, and save a checkpoint")
    name_of = {alias: t.name for t in tensors for alias in t.names}
    direct: dict[str, str] = {}  # name in the checkpoint -> in the files
    for name in name_of:
        if name in sources.direct:
            direct.setdefault(name_of[name], sources.direct[name])
    shapes = {name: _meta(files.entries[f].shape, torch_dtype(files.entries[f].dtype)) for name, f in direct.items()}
    for conversion in sources.converted:
        shapes |= {name_of[name]: x for name, x in conversion.shapes(files.entries).items()}
    entries = [(f"model.{name}", x.dtype, tuple(x.shape)) for name, x in shapes.items()]

    def values() -> Iterator[torch.Tensor]:
        yield from (files.whole(name) for name in direct.values())
        for conversion in sources.converted:
            yield from conversion.make(files.whole).values()

    aliases = {alias: t.name for t in tensors for alias in t.names[1:]}
    data = {"aliases": aliases, "model": {}, "optimizers": [], "rng": {}, "extra": {}}
    file, shapes_of = "rank_00000.safetensors", {name: (dtype, shape) for name, dtype, shape in entries}
    folder = checkpoint_folder.begin(target, 0)
    try:
        written = safetensors_writer.write(folder / file, entries, values(), {"format": "pt"})
        chunks = {name: (Chunk((0,) * len(shape), shape, file, name),) for name, (_, shape) in shapes_of.items()}
        described = {n: Described(dtype_name(dtype), shape, chunks[n]) for n, (dtype, shape) in shapes_of.items()}
        write_content(folder, Content(0, described, {file: written}, data))
        return checkpoint_folder.commit(folder, 0, None)
    except BaseException:
        checkpoint_folder.abandon(folder)
        raise
