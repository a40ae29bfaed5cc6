"""Safetensors straight into the shards of a model: a rank reads its own slices only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from megafx.distributed import agreement
from megafx.distributed.parameters import everyone_of, runtime_of
from megafx.errors import CheckpointError
from megafx.progress import stage
from megafx.weights.files import Entry, SafetensorsFiles, listed, torch_dtype
from megafx.weights.initialize import Factory, Rest, check_planned
from megafx.weights.names import Sources, find_sources
from megafx.weights.state import Stored, give_memory, stored_tensors


@stage("load_safetensors")
def load_safetensors(
    model: nn.Module, path: str | Path, *, factory: Factory | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Load `model` (parallelized or not, on meta or not) from safetensors; returns `model`.

    path: a file, or a folder as Hugging Face models have it (an index and its files, or any .safetensors files). Each rank
    reads the slices that it holds, converts them to the model's dtypes and writes them into its shards; a model on meta gets
    memory for these, and its parameters stay the same objects. Peak memory is that of the shards and of one block of a file.
    Tensors that transformers merges or splits while it loads (experts) are made whole, one group at a time.

    Names are those of the state dict; for Hugging Face models also those that `from_pretrained` takes. A tied tensor needs
    one of its names. Meta buffers that no file has (non-persistent ones) get their values from the constructor, as in
    `megafx.initialize`; models that are not from Hugging Face need `factory` for that.

    device: where to allocate if the model has no mesh. Raises CheckpointError on every rank, before anything is changed, that
    lists all tensors that are missing, unexpected, or of another shape or kind of dtype, and truncated files; UsageError if
    the model is not planned yet. Collective over all ranks of the model. Pickles are never read.
    """
    group = everyone_of(model)
    with agreement.raising_together(group, CheckpointError):
        check_planned(model)
        files = SafetensorsFiles(path)
        tensors = stored_tensors(model)
        sources = find_sources(model, [name for t in tensors for name in t.names], files.entries)
        elsewhere = getattr(runtime_of(model), "elsewhere", None) or ()  # in other stages of a pipeline
        sources.unexpected = [name for name in sources.unexpected if name not in elsewhere]
        rest = Rest(model, factory, check_fit(tensors, sources, files))
    with agreement.raising_together(group, CheckpointError):
        given = give_memory(model, device=None if device is None else torch.device(device))
        try:
            _read(stored_tensors(model), sources, files)
        except (OSError, SafetensorError) as error:
            text = f"{type(error).__name__}: {error}"
            found = f"'{files.path}' could not be read to its end, and part of the model is filled: {text}"
            raise CheckpointError(found, fix="load again, once nothing writes there") from error
        files.close()
        rest.fill()
        if given and (runtime := runtime_of(model)) is not None:
            runtime.memory_given()
    if sources.transforms is not None:
        model._weight_conversions = sources.transforms  # type: ignore[assignment]  # what transformers reverts when it saves
    return model


def check_fit(tensors: Sequence[Stored], sources: Sources, files: SafetensorsFiles) -> set[str]:
    """Raise CheckpointError with all that does not fit; return the names of optional tensors that are missing."""
    wrong: list[str] = []
    unfilled: set[str] = set()
    made: dict[str, torch.Tensor] = {}
    for conversion in sources.converted:
        try:
            made.update(conversion.shapes(files.entries))
        except Exception as error:  # whatever transformers' operations raise on tensors that do not fit
            parts = ", ".join(name for name, _ in conversion.parts)
            wrong.append(f"{parts} cannot be converted: {error}")
    for tensor in tensors:
        present = [name for name in tensor.names if name in sources.direct]
        there = [sources.direct[name] for name in present]
        for name in there:
            wrong += _misfits(tensor, files.entries[name].shape, files.entries[name], name)
        for name in tensor.names:
            if name in made:
                wrong += _misfits(tensor, tuple(made[name].shape), None, name)
        for other in there[1:] if not wrong else ():  # tied tensors must be equal in this rank's slices
            for box in tensor.slices:
                pairs = zip(files.blocks(there[0], box.original), files.blocks(other, box.original), strict=True)
                if not wrong and not all(torch.equal(a, b) for (_, a), (_, b) in pairs):
                    wrong.append(f"tied in the model, and not equal: {there[0]}, {other}")
        if not present and not any(name in made for name in tensor.names):
            if any(sources.optional(name) for name in tensor.names):
                unfilled.add(tensor.name)
            else:
                also = f" (also named {', '.join(tensor.names[1:])})" if tensor.names[1:] else ""
                wrong.append(f"missing: {tensor.name}{also}, {tuple(tensor.tensor.shape)}")
    known = {name for t in tensors for name in t.names}
    wrong += [f"unexpected: {name}, {files.entries[name].shape}" for name in sources.unexpected]
    wrong += [f"unexpected: {name}, made of several" for name in sorted(made.keys() - known)]
    if wrong:
        fix = f"nothing was changed; names were matched by {sources.rules}"
        raise listed(f"'{files.path}' does not fit the model", wrong, fix=fix)
    return unfilled


def _misfits(tensor: Stored, shape: tuple[int, ...], entry: Entry | None, name: str) -> list[str]:
    wrong = []
    if shape != tuple(tensor.tensor.shape):
        wrong.append(f"misshapen: {name}, {shape}, is {tuple(tensor.tensor.shape)} in the model")
    if entry is not None:
        try:
            torch_dtype(entry.dtype)
        except CheckpointError as error:
            wrong.append(f"{name}: {error.found}")
        if entry.dtype.startswith(("F", "BF")) != tensor.tensor.dtype.is_floating_point:
            wrong.append(f"of another kind: {name}, {entry.dtype}, is {tensor.tensor.dtype} in the model (quantized?)")
    return wrong


@torch.no_grad()
def _read(tensors: Sequence[Stored], sources: Sources, files: SafetensorsFiles) -> None:
    """Fill memory: file by file, then the tensors that are converted."""
    by_name = {name: t for t in tensors for name in t.names}
    direct = {}
    for tensor in tensors:
        if (name := next((sources.direct[n] for n in tensor.names if n in sources.direct), None)) is not None:
            direct[name] = tensor
    for name in sorted(direct, key=lambda n: (files.entries[n].file, n)):
        local = direct[name].local
        for box in direct[name].slices:
            place = local[box.local]
            for where, values in files.blocks(name, box.original):
                place[where].copy_(values)
    for conversion in sources.converted:
        for name, whole in conversion.make(files.whole).items():
            for box in by_name[name].slices:
                by_name[name].local[box.local].copy_(whole[box.original])
