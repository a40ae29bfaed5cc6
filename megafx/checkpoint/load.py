"""One load: what does not fit is listed before anything is changed, then each rank reads its slices of what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megafx.checkpoint.folder import Content, decode, encode, tensor_names
from megafx.checkpoint.state import (
    Slices,
    device_of,
    finish_generators,
    finish_model,
    finish_optimizer,
    model_targets,
    optimizer_misfit,
    optimizer_targets,
    state_misfits,
)
from megafx.checkpoint.storage import FolderReader, read_slices
from megafx.checkpoint.torch_format import StockReader, stock_names, stock_optimizers, stock_tensors
from megafx.errors import CheckpointError
from megafx.weights.files import NAMES
from megafx.weights.state import give_memory, stored_tensors


class Load:
    """One load: what is read into what."""

    def __init__(
        self,
        path: Path,
        content: Content,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        extra: Mapping[str, Any],
    ) -> None:
        self.path, self.content, self.model, self.optimizers, self.given = path, content, model, optimizers, extra
        self.shapes = {name: (t.shape, NAMES[t.dtype]) for name, t in content.tensors.items()}
        self.data = content.objects

    def run(self, group: dist.ProcessGroup | None, rng: bool) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
        """(extra that is returned, [(object, state for its `load_state_dict`)])."""
        self._check()
        _give_memory(self.model)
        tensors: dict[str, torch.Tensor] = {}
        saved = self.data["optimizers"][: len(self.optimizers)]
        for data in saved:
            tensors |= optimizer_targets(self.model, data, self.shapes)
        tensors |= self._extra_targets()
        for name in tensor_names(self.data["rng"]):
            tensors[name] = torch.zeros(self.shapes[name][0], dtype=self.shapes[name][1])
        state = {name: Slices.of(tensor) for name, tensor in tensors.items()}
        state |= model_targets(self.model, self._names())
        read_slices(state, FolderReader(self.path, self.content), group)
        finish_model(self.model, decode(self.data["model"], tensors.__getitem__))
        for optimizer, data in zip(self.optimizers, saved, strict=True):
            finish_optimizer(optimizer, self.model, data, tensors)
        if rng:
            finish_generators(self.data["rng"], tensors, device_of(self.model))
        values = decode(self.data["extra"], tensors.__getitem__)
        into = [(thing, values[name]) for name, thing in self.given.items() if isinstance(thing, Stateful)]
        return {k: v for k, v in values.items() if not isinstance(self.given.get(k), Stateful)}, into

    def _names(self) -> dict[str, str]:
        """FQN -> name in the checkpoint, tied names included."""
        own = {name.removeprefix("model."): name for name in self.content.tensors if name.startswith("model.")}
        return own | {alias: f"model.{name}" for alias, name in self.data["aliases"].items()}

    def _check(self) -> None:
        """Raise a list of everything that does not fit."""
        names = self._names()
        described = {name: self.shapes[saved] for name, saved in names.items()}
        wrong = misfits(self.model, described, f"checkpoint {self.path}")
        used: dict[str, str] = {}
        for stored in stored_tensors(self.model):
            there = sorted({names[n] for n in stored.names if n in names})
            if len(there) > 1:
                wrong.append(f"{' and '.join(there)} are two tensors there, and one in the model")
            wrong += [
                f"'{stored.name}' and '{used[n]}' are one tensor there, and two in the model"
                for n in there
                if n in used
            ]
            used |= dict.fromkeys(there, stored.name)
        pairs = zip(self.optimizers, self.data["optimizers"], strict=False)
        wrong += [text for optimizer, data in pairs if (text := optimizer_misfit(optimizer, self.model, data))]
        if len(self.optimizers) > len(self.data["optimizers"]):
            wrong.append(f"it has {len(self.data['optimizers'])} optimizers, {len(self.optimizers)} are to be loaded")
        lacking = [n for n, thing in self.given.items() if isinstance(thing, Stateful) and n not in self.data["extra"]]
        wrong += [f"it has no extra '{name}'" for name in lacking]
        refuse(wrong, self.path)

    def _extra_targets(self) -> dict[str, torch.Tensor]:
        """Memory for the user's tensors: sharded where what is given to load into is a DTensor of that shape."""
        like: dict[str, torch.Tensor] = {}
        for name, thing in self.given.items():
            encode(thing.state_dict() if isinstance(thing, Stateful) else thing, f"extra.{name}", like)
        made = {}
        for name in tensor_names(self.data["extra"]):
            (shape, dtype), known = self.shapes[name], like.get(name)
            if isinstance(known, DTensor) and tuple(known.shape) == shape:
                made[name] = torch.zeros_like(known.detach(), dtype=dtype)
            else:
                made[name] = torch.zeros(shape, dtype=dtype)
        return made


def misfits(model: nn.Module, there: Mapping[str, tuple[Any, torch.dtype]], source: str) -> list[str]:
    """Every tensor of the model that is missing, unexpected, or of another shape or dtype. there: FQN -> (shape, dtype)."""
    wrong, known = [], set()
    for stored in stored_tensors(model):
        known |= {*stored.names}
        name = next((n for n in stored.names if n in there), None)
        if name is None:
            wrong.append(f"'{stored.name}' is not in {source}")
        elif there[name] != (mine := (tuple(stored.tensor.shape), stored.tensor.dtype)):
            (shape, dtype), (own_shape, own_dtype) = there[name], mine
            wrong.append(f"'{name}' is {shape} {dtype} there, {own_shape} {own_dtype} in the model")
    return wrong + [f"'{name}' is not in the model" for name in there if name not in known]


def refuse(wrong: list[str], path: Path) -> None:
    """Raise what does not fit, if anything."""
    if wrong:
        more = f", and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit: {'; '.join(wrong[:20])}{more}",
            fix="build the model and the optimizer as they were saved (model.to(dtype) first, where dtypes differ)",
        )


def load_stock(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], group: dist.ProcessGroup | None
) -> None:
    """Fill model and optimizers from a checkpoint of torch.distributed.checkpoint's own format. Collective over the group."""
    about = stock_tensors(path)
    names = stock_names(about, [n for stored in stored_tensors(model) for n in stored.names])
    there = {name: (tuple(about[t].size), about[t].properties.dtype) for name, t in names.items()}
    wrong = misfits(model, there, f"checkpoint {path}")
    saved = stock_optimizers(path, model, optimizers, names.values()) if optimizers and not wrong else []
    shapes = {name: (tuple(t.size), t.properties.dtype) for name, t in about.items()}
    wrong += [text for data in saved for text in state_misfits(model, data, shapes)]
    refuse(wrong, path)
    _give_memory(model)
    tensors: dict[str, torch.Tensor] = {}
    for data in saved:
        tensors |= optimizer_targets(model, data, shapes)
    targets = {name: Slices.of(tensor) for name, tensor in tensors.items()} | model_targets(model, names)
    read_slices(targets, StockReader(path, {*targets}), group)
    finish_model(model, {})
    for optimizer, data in zip(optimizers, saved, strict=True):
        finish_optimizer(optimizer, model, data, tensors)


def _give_memory(model: nn.Module) -> None:
    """To parameters and persistent buffers on the meta device."""
    names = {name for stored in stored_tensors(model) for name in stored.names}
    runtime = getattr(model, "megafx", None)
    if give_memory(model, names.__contains__) and runtime is not None:
        runtime.memory_given()
