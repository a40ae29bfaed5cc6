"""Whole tensors of a parallelized model: state dicts and gradients in the original layout, under the original names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megafx.lost_ranks import meet
from megafx.materialize import give_memory
from megafx.tp_tensor import TPTensor


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The logical tensor of a parameter, gradient or optimizer state; plain tensors as they are. Collective."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """`state_dict()` with whole tensors in the original layout, on every rank. Collective.

    Tied parameters are gathered once and stay one tensor; tensors that are whole already are not copied.
    """
    _meet("megafx.full_state_dict", model)
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
    _meet("megafx.full_gradients", model)
    return {n: full_tensor(p.grad).detach() for n, p in model.named_parameters() if p.grad is not None}


def _meet(what: str, model: nn.Module) -> None:
    """Ranks that gather alone would wait for others forever: they raise LostRankError."""
    runtime = getattr(model, "megafx", None)
    meet(what, getattr(runtime, "group", None))


def prepare_loading(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Make a model with sharded parameters ready for `nn.Module.load_state_dict(state)`, whose copies then shard whole tensors.

    Meta parameters and buffers that `state` has values for get memory; parameters keep their identity.
    """
    give_memory(model, lambda name: isinstance(value := state.get(name), torch.Tensor) and not value.is_meta)
