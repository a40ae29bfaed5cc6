"""What a checkpoint holds of a training run: names for every tensor of model, optimizer and random generators, and back.

    model.<FQN>                          parameters and persistent buffers; tied ones once, under the name of their first use
    optimizer.state.<FQN>.<key>          what the optimizer keeps of a parameter (or optimizer.<i>.state... of several)
    optimizer.groups.<i>.<option>        options that are tensors (a capturable learning rate)
    rng.cpu, rng.cuda                    torch's default generators, from which megafx's seeds are drawn too
    extra.<path>                         the user's

Everything that is no tensor is plain data in `metadata.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megafx.checkpoint.folder import decode, encode, tensor_names
from megafx.errors import CheckpointError, UsageError
from megafx.weights.state import local_of, slices_of, stored_tensors

# -- checkpoint slices
#
# What this rank holds of a logical tensor, in original coordinates, as torch.distributed.checkpoint plans reads and writes.


class Slice(NamedTuple):
    """`local` are the elements at [offsets, offsets + local.shape) of the logical tensor: a view of this rank's memory."""

    offsets: tuple[int, ...]
    local: torch.Tensor


@dataclass(frozen=True)
class Slices:
    """This rank's part of a logical tensor of `shape` and `dtype`; no parts where it holds padding only."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[Slice, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Slices:
        """Of a plain tensor the whole; of a DTensor the boxes that its shard consists of."""
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            raise CheckpointError("a tensor whose ranks hold summands is to be saved", fix="redistribute it first")
        local = local_of(tensor)
        parts = tuple(Slice(box.offsets, local[box.local]) for box in slices_of(tensor))
        return Slices(tensor.shape, tensor.dtype, parts)

    def copied(self) -> Slices:
        """The same values in CPU memory of their own."""
        parts = tuple(Slice(s.offsets, s.local.to("cpu", copy=True)) for s in self.parts)
        return Slices(self.shape, self.dtype, parts)

    def at(self, offsets: Sequence[int] | None) -> torch.Tensor:
        """The slice that begins there."""
        wanted = tuple(offsets if offsets is not None else (0,) * len(self.shape))
        for part in self.parts:
            if part.offsets == wanted:
                return part.local
        raise CheckpointError(f"this rank holds no slice at {wanted} of a tensor of {tuple(self.shape)}")

    # -- torch.distributed.checkpoint's protocol

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(s.offsets), s.local.shape) for s in self.parts]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def collect(
    model: nn.Module, optimizers: Optimizers, extra: Mapping[str, Any], device: torch.device, rank: int = 0
) -> tuple[dict[str, Slices], dict[str, Any]]:
    """(this rank's slices by name, plain data) of all there is to save. No communication, no copies.

    Of generators and the user's plain tensors, which may differ between ranks, rank 0's are saved, as plain data are.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for stored in stored_tensors(model):
        if stored.tensor.is_meta:
            raise UsageError(
                f"'{stored.name}' is on the meta device: it has no values to save", fix="load or initialise it"
            )
        tensors[f"model.{stored.name}"] = stored.tensor
        aliases |= dict.fromkeys(stored.names[1:], stored.name)
    objects = {k: v for k, v in model.state_dict().items() if not isinstance(v, torch.Tensor)}
    held = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in extra.items()}
    data = {
        "aliases": aliases,
        "model": encode(objects, "model", tensors),
        "optimizers": [encode(of_optimizer(o, model), at, tensors) for o, at in _numbered(optimizers)],
        "rng": encode(_generators(device), "rng", tensors),
        "extra": encode(held, "extra", tensors),
    }
    mine = {
        name: tensor
        for name, tensor in tensors.items()
        if rank == 0 or isinstance(tensor, DTensor) or not name.startswith(("rng.", "extra."))
    }
    return {name: Slices.of(tensor) for name, tensor in mine.items()}, data


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


# -- the model


def model_targets(model: nn.Module, saved: Mapping[str, str]) -> dict[str, Slices]:
    """Name in the checkpoint -> slices to fill, for a model that `misfits` found to fit. saved: FQN -> name there."""
    targets: dict[str, Slices] = {}
    for stored in stored_tensors(model):
        targets[next(saved[name] for name in stored.names if name in saved)] = Slices.of(stored.tensor)
    return targets


def finish_model(model: nn.Module, objects: dict[str, Any]) -> None:
    """After the slices are filled: `set_extra_state` of modules, and saved-tensor checks see that values changed."""
    if objects:
        nn.Module.load_state_dict(model, objects, strict=False)
    for stored in stored_tensors(model):
        torch.autograd.graph.increment_version(stored.tensor)


# -- optimizers


def _numbered(optimizers: Optimizers) -> list[tuple[torch.optim.Optimizer, str]]:
    several = several_of(optimizers)
    return [(o, "optimizer" if len(several) == 1 else f"optimizer.{i}") for i, o in enumerate(several)]


def several_of(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """None, one or several -> a list."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """FQNs of each group's parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise UsageError(
                f"the optimizer holds {len(unknown)} parameters that the model does not have (the first of shape {unknown[0]})",
                fix="give the model that the optimizer was made of",
            )
        found.append([names[id(p)] for p in group["params"]])
    return found


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Its state dict by FQN: {"groups": [{"names": FQNs, option: value}], "state": {FQN: {key: value}}}."""
    names, state = names_of(optimizer, model), optimizer.state_dict()
    packed = {
        index: name
        for group, known in zip(state["param_groups"], names, strict=True)
        for index, name in zip(group["params"], known, strict=True)
    }
    groups = [
        {"names": known, **{k: v for k, v in group.items() if k not in ("params", "param_names")}}
        for group, known in zip(state["param_groups"], names, strict=True)
    ]
    return {"groups": groups, "state": {packed[index]: value for index, value in state["state"].items()}}


def optimizer_misfit(optimizer: torch.optim.Optimizer, model: nn.Module, data: Any) -> str | None:
    """How the parameter groups of a saved optimizer are not those of this one; None: they are."""
    mine, theirs = names_of(optimizer, model), [group["names"] for group in data["groups"]]
    if sorted(map(sorted, mine)) == sorted(map(sorted, theirs)):
        return None
    a, b = {n for names in theirs for n in names}, {n for names in mine for n in names}
    if a != b:
        return f"its optimizer has parameters {sorted(a - b)[:3]} that this one has not, and lacks {sorted(b - a)[:3]}"
    return f"its optimizer has {len(theirs)} groups of parameters, this one {len(mine)}, or they are otherwise grouped"


def state_misfits(model: nn.Module, data: Any, shapes: Mapping[str, Any]) -> list[str]:
    """Tensors of a saved optimizer that cannot be kept of the parameter they are said to be of (sizes of 1 are sums)."""
    parameters, wrong = dict(model.named_parameters()), []
    for fqn, kept in data["state"].items():
        mine = tuple(parameters[fqn].shape)
        for name in tensor_names(kept):
            shape = tuple(shapes[name][0])
            if len(shape) == len(mine) and any(n not in (1, m) for n, m in zip(shape, mine, strict=True)):
                wrong.append(f"'{name}' is {shape} there, '{fqn}' is {mine} in the model")
    return wrong


def optimizer_targets(model: nn.Module, data: Any, shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Memory for the tensors of one saved optimizer: name -> tensor, laid out as the parameter where it has its shape.

    shapes: name in the checkpoint -> (shape, dtype).
    """
    parameters = dict(model.named_parameters())
    made: dict[str, torch.Tensor] = {}
    for fqn, kept in data["state"].items():
        parameter = parameters[fqn]
        for name in tensor_names(kept):
            shape, dtype = shapes[name]
            if shape == tuple(parameter.shape) and len(shape):
                made[name] = torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)
            else:
                made[name] = torch.zeros(shape, dtype=dtype)
    for name in tensor_names(data["groups"]):
        shape, dtype = shapes[name]
        made[name] = torch.zeros(shape, dtype=dtype)
    return made


def finish_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, data: Any, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give the optimizer its saved state, through its own `load_state_dict`."""
    whole = decode(data, tensors.__getitem__)
    names = names_of(optimizer, model)
    saved = {frozenset(group["names"]): group for group in whole["groups"]}
    now = optimizer.state_dict()
    groups, state = [], {}
    for group, known in zip(now["param_groups"], names, strict=True):
        found = saved[frozenset(known)]
        kept = {k: v for k, v in group.items() if k in ("params", "param_names")}
        groups.append({**{k: v for k, v in found.items() if k != "names"}, **kept})
        for index, name in zip(group["params"], known, strict=True):
            if name in whole["state"]:
                state[index] = whole["state"][name]
    optimizer.load_state_dict({**now, "state": state, "param_groups": groups})


# -- generators


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def finish_generators(data: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Torch's default generators as they were on rank 0."""
    states = decode(data, tensors.__getitem__)
    if "cpu" in states:  # not in a checkpoint that was made of weights alone (`megafx convert`)
        torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
