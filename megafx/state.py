"""Whole tensors of a parallelized model: state dicts and gradients in the original layout, under the original names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megafx.params import as_parameter, parameter_slots
from megafx.tp_tensor import TPTensor, wrap


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The logical tensor of a parameter, gradient or optimizer state; plain tensors as they are. Collective."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """`state_dict()` with whole tensors in the original layout, on every rank. Collective.

    Tied parameters are gathered once and stay one tensor; tensors that are whole already are not copied.
    """
    done: dict[int, torch.Tensor] = {}

    def full(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = id(value._local_tensor) if isinstance(value, TPTensor) else id(value)
        if key not in done:
            done[key] = full_tensor(value).detach()
        return done[key]

    return {name: full(value) for name, value in model.state_dict().items()}


@torch.no_grad()
def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """FQN -> whole gradient in the original layout, on every rank, of each parameter that has one. Collective."""
    return {n: full_tensor(p.grad).detach() for n, p in model.named_parameters() if p.grad is not None}


def prepare_loading(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Make a model with sharded parameters ready for `nn.Module.load_state_dict(state)`, whose copies then shard whole tensors.

    Meta parameters and buffers that `state` has values for get memory; parameters keep their identity.
    """
    for fqn, slot in parameter_slots(model):
        param = slot.get()
        if isinstance(param, TPTensor) and param._local_tensor.is_meta and _has_value(state, fqn):
            local = torch.zeros_like(param._local_tensor, device=_device_of(param))
            torch.utils.swap_tensors(param, as_parameter(wrap(local, param._spec), like=param))
    device = next((_device_of(p) for p in model.parameters() if isinstance(p, TPTensor)), torch.device("cpu"))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and _has_value(state, f"{prefix}.{name}" if prefix else name):
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _has_value(state: Mapping[str, Any], fqn: str) -> bool:
    value = state.get(fqn)
    return isinstance(value, torch.Tensor) and not value.is_meta


def _device_of(param: TPTensor) -> torch.device:
    kind = param._spec.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
