"""The tensors that a model's state consists of, each once, with its names and with where this rank's part of it lies.

    for stored in stored_tensors(model):        # parameters, then persistent buffers; tied ones once
        for box in stored.slices:
            stored.local[box.local].copy_(original_tensor[box.original])

`local` shows the memory itself: parameters that merged linears keep side by side are views, and stay so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafx.shard_slices import ShardSlice, shard_slices
from megafx.tp_layout import placement_of


@dataclass(frozen=True)
class Stored:
    """names: all FQNs, that of the first use first. tensor: the parameter or buffer, of the logical shape."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory: the physical shard, padding included; the tensor itself where it is whole."""
        return local_of(self.tensor)

    @property
    def slices(self) -> list[ShardSlice]:
        return slices_of(self.tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter, buffer, gradient or optimizer state on this rank, without autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def slices_of(tensor: torch.Tensor) -> list[ShardSlice]:
    """Where what this rank holds of `tensor` lies in the original one; tensors that are no DTensors are whole."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return [ShardSlice((0,) * len(shape), (0,) * len(shape), shape)]
    mesh = tensor._spec.mesh
    return shard_slices(tensor.shape, placement_of(tensor), mesh.get_local_rank(), mesh.size())


def stored_tensors(model: nn.Module) -> list[Stored]:
    """Every parameter, then every persistent buffer, each once, in the order of their first uses."""
    kept = {name for name, _ in persistent_buffers(model)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [s for s in all_tensors(model) if s.name in parameters or kept.intersection(s.names)]


def all_tensors(model: nn.Module) -> list[Stored]:
    """Every parameter, then every buffer, those that state dicts leave out too."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in itertools.chain(*named):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [Stored(tuple(names), tensor) for tensor, names in found.values()]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(FQN, buffer) of those that state dicts have, aliases included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer
