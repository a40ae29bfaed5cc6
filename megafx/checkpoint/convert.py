"""Checkpoints as safetensors files that other tools load, and such files as checkpoints: one process, one tensor at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.checkpoint import latest_checkpoint
from megafx.checkpoint.load import misfits, refuse
from megafx.checkpoint.state import Slice, Slices
from megafx.checkpoint.storage import FolderReader, FolderWriter, read_alone, write_together
from megafx.checkpoint.torch_format import StockReader, stock_names, stock_tensors
from megafx.errors import CheckpointError, UsageError
from megafx.weights.files import SafetensorsFiles, torch_dtype
from megafx.weights.load import check_fit
from megafx.weights.names import Conversion, find_savings, find_sources
from megafx.weights.save import bytes_of, plan_files, save_config, write_files
from megafx.weights.state import Stored, stored_tensors


def convert(source: Path, target: Path, model: nn.Module | None = None, *, max_shard_size: int | str = "5GB") -> Path:
    """Write what is in `source` in the other format; the path of what was written.

    A checkpoint (a folder of `save_checkpoint`, the newest valid of several, or one of torch.distributed.checkpoint) becomes
    safetensors files in `target`, with config.json where `model` is of Hugging Face; optimizer state is left out. Safetensors
    files become a checkpoint of step 0 under `target`, which `load_checkpoint` loads into a model (without an optimizer).

    model: on the meta device; says the names that `from_pretrained` reads, and what has to be there. Without one, names are
    kept; dtypes always are. Raises CheckpointError that lists what does not fit; UsageError where `target` is `source`.
    """
    if source.resolve() == target.resolve():
        raise UsageError(f"'{source}' is to be converted in place", fix="give another target folder")
    if not source.exists():
        raise CheckpointError(f"there is no file or folder '{source}'", fix="give a checkpoint or safetensors files")
    if source.is_dir() and (checkpoint_folder.is_checkpoint(source) or checkpoint_folder.checkpoints(source)):
        return _to_files(source, target, model, bytes_of(max_shard_size))
    return _to_checkpoint(source, target, model)


# -- a checkpoint -> files


def _to_files(source: Path, target: Path, model: nn.Module | None, limit: int) -> Path:
    about, names, read = _opened(source, model)
    described = {name: about[there] for name, there in names.items()}
    if model is None:
        groups: dict[str, list[str]] = {}
        for name, there in names.items():
            groups.setdefault(there, []).append(name)
        tensors = [Stored((*group,), _meta(*about[there])) for there, group in groups.items()]
    else:
        refuse([w for w in misfits(_in_dtypes(model, described), described, f"'{source}'")], source)
        tensors = [
            Stored(t.names, _meta(*described[next(n for n in t.names if n in names)])) for t in stored_tensors(model)
        ]
    there_of = {name: next(names[n] for n in t.names if n in names) for t in tensors for name in t.names}
    files = plan_files(find_savings(model if model is not None else nn.Module(), tensors), limit)
    write_files(target, files, lambda name, writer: read(there_of[name]), None)
    if model is not None:
        dtypes = [t.tensor.dtype for t in tensors if t.tensor.is_floating_point()]
        save_config(model, target, max(set(dtypes), key=dtypes.count) if dtypes else None)
    return target


About = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _opened(source: Path, model: nn.Module | None) -> tuple[About, dict[str, str], Callable[[str], torch.Tensor]]:
    """(shape and dtype of each tensor there, name in the model -> name there, reader of a whole tensor)."""
    if (source / checkpoint_folder.STOCK).exists():
        found = stock_tensors(source)
        about: About = {n: (tuple(t.size), t.properties.dtype) for n, t in found.items()}
        wanted = [*found] if model is None else [n for t in stored_tensors(model) for n in t.names]
        names = {n: n for n in found} if model is None else stock_names(found, wanted)
        return about, names, lambda there: _read(StockReader(source, {there}), there, about)
    path = latest_checkpoint(source)
    if path is None:
        raise CheckpointError(f"there is no valid checkpoint in '{source}'", fix="load_checkpoint says what is wrong")
    content = checkpoint_folder.read_content(path)
    about = {n: (t.shape, torch_dtype(t.dtype)) for n, t in content.tensors.items() if n.startswith("model.")}
    names = {n.removeprefix("model."): n for n in about}
    names |= {alias: f"model.{name}" for alias, name in content.objects["aliases"].items()}
    return about, names, lambda there: _read(FolderReader(path, content), there, about)


def _read(reader: FolderReader | StockReader, name: str, about: About) -> torch.Tensor:
    shape, dtype = about[name]
    whole = torch.empty(shape, dtype=dtype)
    read_alone({name: Slices.of(whole)}, reader)
    return whole


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _in_dtypes(model: nn.Module, described: About) -> nn.Module:
    """The model with tensors in the dtypes that are there: a config may name another than was trained in."""
    for t in stored_tensors(model):
        dtype = next((described[n][1] for n in t.names if n in described), t.tensor.dtype)
        if dtype != t.tensor.dtype and t.tensor.is_meta and dtype.is_floating_point == t.tensor.is_floating_point():
            t.tensor.data = t.tensor.data.to(dtype)
    return model


# -- files -> a checkpoint


@dataclass(frozen=True)
class _Unread(Slices):
    """A whole tensor that is read when it is written."""

    read: Callable[[], torch.Tensor]

    @staticmethod
    def make(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> _Unread:
        part = Slice((0,) * len(shape), _meta(shape, dtype))
        return _Unread(torch.Size(shape), dtype, (part,), read)

    def at(self, offsets: object) -> torch.Tensor:
        return self.read()


def _to_checkpoint(source: Path, target: Path, model: nn.Module | None) -> Path:
    files = SafetensorsFiles(source)
    if model is None:
        tensors = [Stored((n,), _meta(e.shape, torch_dtype(e.dtype))) for n, e in files.entries.items()]
    else:
        tensors = stored_tensors(model)
    sources = find_sources(model or nn.Module(), [n for t in tensors for n in t.names], files.entries)
    lacking = check_fit(tensors, sources, files)
    if lacking:
        raise CheckpointError(f"'{source}' has no {', '.join(sorted(lacking))}", fix="load them, and save a checkpoint")
    state: dict[str, Slices] = {}
    for t in tensors:
        name = next((sources.direct[n] for n in t.names if n in sources.direct), None)
        if name is not None:
            entry = files.entries[name]
            read = functools.partial(files.whole, name)
            state[f"model.{t.name}"] = _Unread.make(entry.shape, torch_dtype(entry.dtype), read)
    by_name = {n: t.name for t in tensors for n in t.names}
    for conversion in sources.converted:
        for name, x in conversion.shapes(files.entries).items():
            read = functools.partial(_converted, conversion, name, files)
            state[f"model.{by_name[name]}"] = _Unread.make(tuple(x.shape), x.dtype, read)
    aliases = {alias: t.name for t in tensors for alias in t.names[1:]}
    data = {"aliases": aliases, "model": {}, "optimizers": [], "rng": {}, "extra": {}}
    writer = FolderWriter(target, 0, data)
    write_together([state], [writer])
    files.close()
    assert writer.path is not None
    return writer.path


def _converted(conversion: Conversion, name: str, files: SafetensorsFiles) -> torch.Tensor:
    return conversion.make(files.whole)[name]
