"""One load: what does not fit is listed before anything is changed, then each rank reads its slices."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megafx.checkpoint.content import Content, without
from megafx.checkpoint.state import (
    State,
    decode,
    encode,
    finish_model,
    finish_optimizer,
    generators,
    generators_of,
    on_host,
    optimizer_misfit,
    optimizer_targets,
    set_generators,
    state_misfits,
    tensor_names,
    zeros_of,
)
from megafx.checkpoint.storage import FolderReader, read_tensors
from megafx.checkpoint.torch_format import TorchReader, names_there, saved_optimizers, tensors_there
from megafx.distributed.agreement import raising_together
from megafx.distributed.parameters import device_of, runtime_of
from megafx.distributed.tensor import local_of
from megafx.errors import CheckpointError
from megafx.placements.data_axis import BATCH_AXIS
from megafx.weights.files import NAMES
from megafx.weights.initialize import Rest
from megafx.weights.state import Stored, give_memory, stored_tensors

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by name in the checkpoint


class Load:
    """A load of one checkpoint into a model and its optimizers. Made before anything is changed: raises what does not fit."""

    def __init__(
        self,
        path: Path,
        content: Content | None,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        extra: Mapping[str, Any],
    ) -> None:
        """content: of `metadata.json`; None: the checkpoint is of torch.distributed.checkpoint's own format."""
        if content is not None and (elsewhere := getattr(runtime_of(model), "elsewhere", None)):
            content = without(content, elsewhere)
        self.path, self.content, self.model, self.optimizers, self.extra = path, content, model, optimizers, extra
        self.shapes: Shapes
        if content is None:
            self.shapes = tensors_there(path)
            self.names = names_there(self.shapes, [n for stored in stored_tensors(model) for n in stored.names])
        else:
            self.shapes = {name: (t.shape, NAMES[t.dtype]) for name, t in content.tensors.items()}
            own = {name.removeprefix("model."): name for name in self.shapes if name.startswith("model.")}
            self.names = own | {alias: f"model.{name}" for alias, name in content.objects["aliases"].items()}
        wrong = misfits(model, {name: self.shapes[there] for name, there in self.names.items()}, f"checkpoint {path}")
        if content is not None:
            self.saved = content.objects["optimizers"][: len(optimizers)]
            wrong += self._more_misfits(content.objects)
        else:
            taken = self.names.values()
            self.saved = saved_optimizers(path, model, optimizers, taken) if optimizers and not wrong else []
        refuse(wrong + [w for data in self.saved for w in state_misfits(model, data, self.shapes)], path)

    def _more_misfits(self, data: Mapping[str, Any]) -> list[str]:
        """Ties, optimizers and extras that differ from what was saved."""
        wrong: list[str] = []
        used: dict[str, str] = {}
        for stored in stored_tensors(self.model):
            there = sorted({self.names[n] for n in stored.names if n in self.names})
            if len(there) > 1:
                wrong.append(f"{' and '.join(there)} are two tensors there, and one in the model")
            for name in there:
                if name in used:
                    wrong.append(f"'{stored.name}' and '{used[name]}' are one tensor there, and two in the model")
                used[name] = stored.name
        pairs = zip(self.optimizers, data["optimizers"], strict=False)
        wrong += [text for optimizer, saved in pairs if (text := optimizer_misfit(optimizer, self.model, saved))]
        if len(self.optimizers) > len(data["optimizers"]):
            wrong.append(f"it has {len(data['optimizers'])} optimizers, {len(self.optimizers)} are to be loaded")
        own = self.model.state_dict()
        wrong += [f"'{name}' is not in the model" for name in data["model"] if name not in own]
        lacking = [n for n, thing in self.extra.items() if isinstance(thing, Stateful) and n not in data["extra"]]
        return wrong + [f"it has no extra '{name}'" for name in lacking]

    def run(self, group: dist.ProcessGroup | None, rng: bool, rest: Rest) -> dict[str, Any]:
        """Fill everything; returns the user's extra. Collective. Raises CheckpointError on every rank; everything is then as it
        was (a model on meta has zeros)."""
        with raising_together(group, CheckpointError):
            give_memory(self.model)
            tensors, staged = self._targets()
            pairs = [(local_of(s.tensor), local_of(staged[there])) for there, s in self._stored()]
            state, path = tensors | staged, self.path
            reader = TorchReader(path, {*state}) if self.content is None else FolderReader(path, self.content)
        read_tensors(state, reader, group, path)
        with contextlib.ExitStack() as undo:
            with raising_together(group, CheckpointError):
                try:
                    values = self._take(tensors, pairs, rng, undo)
                    rest.fill()
                    if (runtime := runtime_of(self.model)) is not None:
                        runtime.memory_given()
                except Exception as error:
                    found = f"checkpoint {path} was read, and could not be taken: {type(error).__name__}: {error}"
                    raise CheckpointError(found, fix="nothing was changed") from error
            undo.pop_all()
        return values

    def _stored(self) -> list[tuple[str, Stored]]:
        """(name there, tensor of the model)."""
        return [(next(self.names[n] for n in s.names if n in self.names), s) for s in stored_tensors(self.model)]

    def _targets(self) -> tuple[State, State]:
        """(memory for tensors that are not the model's, host memory for the model's).

        Files are not read into the model's own memory, since they can vanish or have errors until the last one is read.
        """
        tensors: State = {}
        for saved in self.saved:
            tensors |= optimizer_targets(self.model, saved, self.shapes)
        if self.content is not None:
            tensors |= self._extra_targets(self.content.objects["extra"])
            for name in tensor_names(self.content.objects["rng"]):
                tensors[name] = zeros_of(self.shapes[name])
        return tensors, {there: on_host(stored.tensor) for there, stored in self._stored()}

    def _take(
        self, tensors: State, pairs: list[tuple[torch.Tensor, torch.Tensor]], rng: bool, undo: contextlib.ExitStack
    ) -> dict[str, Any]:
        """Put what was read in its place; `undo` reverts that. pairs: (memory of a tensor, what was read for it)."""
        data = {} if self.content is None else self.content.objects
        device, (replica, replicas) = device_of(self.model), replica_of(self.model)
        values = decode(data.get("extra", {}), tensors.__getitem__)
        saved_rng = decode(data["rng"], tensors.__getitem__) if rng and "rng" in data else {}
        states = generators_of(saved_rng, replica, replicas, device)
        objects = decode(data.get("model", {}), tensors.__getitem__)
        before = {k: v for k, v in self.model.state_dict().items() if not isinstance(v, torch.Tensor)}
        undo.callback(finish_model, self.model, before)
        undo.callback(_swap, pairs)
        _swap(pairs)
        finish_model(self.model, objects)
        for optimizer, saved in zip(self.optimizers, self.saved, strict=True):
            undo.callback(optimizer.load_state_dict, optimizer.state_dict())
            finish_optimizer(optimizer, self.model, saved, tensors)
        undo.callback(set_generators, generators(device), device)
        set_generators(states, device)
        for name, thing in self.extra.items():
            if isinstance(thing, Stateful) and name in values:
                undo.callback(_restore, thing, copy.deepcopy(thing.state_dict()))
                thing.load_state_dict(values.pop(name))
        return values

    def _extra_targets(self, data: Any) -> State:
        """Memory for the user's tensors, sharded like the DTensor given to load into if that has the same shape."""
        like: State = {}
        for name, thing in self.extra.items():
            encode(thing.state_dict() if isinstance(thing, Stateful) else thing, f"extra.{name}", like)
        like = {name: x for name, x in like.items() if isinstance(x, DTensor)}
        return {name: zeros_of(self.shapes[name], like.get(name)) for name in tensor_names(data)}


def _restore(thing: Any, state: Any) -> None:
    """Give a user's object its state back. If that fails too, the first error is the one raised."""
    with contextlib.suppress(Exception):
        thing.load_state_dict(state)


@torch.no_grad()
def _swap(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Exchange values; a second call reverts the first."""
    for a, b in pairs:
        held = a.clone()
        a.copy_(b)
        b.copy_(held)


def replica_of(model: nn.Module) -> tuple[int, int]:
    """(number of this data-parallel rank, how many there are)."""
    runtime = runtime_of(model)
    if runtime is None or runtime.meshes.data is None:
        return 0, 1
    return runtime.meshes.axes[BATCH_AXIS].rank, runtime.meshes.data.ranks


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
    """Raise CheckpointError with what does not fit, if anything."""
    if wrong:
        more = f", and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit: {'; '.join(wrong[:20])}{more}",
            fix="build the model and the optimizer as they were saved (model.to(dtype) first, where dtypes differ)",
        )
