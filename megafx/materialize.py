"""Memory for parameters and buffers of a model on the meta device: this rank's shards only. Values come later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from megafx.params import as_parameter, parameter_slots
from megafx.tp_tensor import TPTensor, wrap


def give_memory(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True, device: torch.device | None = None
) -> list[str]:
    """Zeros for each meta parameter and buffer that has a wanted name (any alias of it); returns the names that got them.

    Parameters stay the same objects, so that optimizers made of them stay valid (but for those to which something has weak
    references: recurrent layers' weights). device: of the new memory; default: the
    mesh's, else that of the model's other parameters, else the CPU.
    """
    slots = [(name, slot, p) for name, slot in parameter_slots(model) if (p := slot.get()) is not None]
    device = device or _device_of([p for _, _, p in slots])
    given: list[str] = []
    done: dict[int, torch.Tensor] = {}
    for name, slot, parameter in slots:
        if id(parameter) not in done and parameter.is_meta and wanted(name):
            done[id(parameter)] = _with_memory(parameter, device)
        if id(parameter) in done:
            given.append(name)
            if done[id(parameter)] is not parameter:
                setattr(slot.module, slot.key, done[id(parameter)])
    for name, module, key, buffer in _buffers(model):
        if buffer.is_meta and (wanted(name) or id(buffer) in done):
            module._buffers[key] = done.setdefault(id(buffer), torch.zeros_like(buffer, device=device))
            given.append(name)
    return given


@torch.no_grad()
def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A meta parameter, plain or sharded, with zeros in it: the same object where torch can swap its contents."""
    made: torch.Tensor
    if isinstance(parameter, TPTensor):
        device = _mesh_device(parameter)
        made = wrap(torch.zeros_like(parameter._local_tensor, device=device), parameter._spec)
    else:
        made = torch.zeros_like(parameter, device=device)
    new = as_parameter(made, like=parameter)
    if weakref.getweakrefs(parameter):  # as recurrent layers have of their weights; then it cannot be swapped
        return new
    torch.utils.swap_tensors(parameter, new)
    return parameter


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key, buffer


def _device_of(parameters: list[nn.Parameter]) -> torch.device:
    sharded = next((p for p in parameters if isinstance(p, TPTensor)), None)
    if sharded is not None:
        return _mesh_device(sharded)
    return next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))


def _mesh_device(param: TPTensor) -> torch.device:
    kind = param._spec.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
