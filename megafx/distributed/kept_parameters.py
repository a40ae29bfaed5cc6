"""Parameters that users keep from before `parallelize`, in lists, optimizers, closures: the model has others in their place.

Each becomes a stand-in: reads, writes and computations on it go to the parameter in its place.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafx.distributed.tensor import WholeParameter
from megafx.ir.python_state import FIRST_ADDRESS, REPLACED_BY

_OWN = ("__dict__", "__torch_function__", REPLACED_BY)
_WITH_PARAMETER = "_post_accumulate_grad_hooks"


class Kept:
    """See the module docstring. Made by `stand_in`; hashed by its own identity."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(model_parameter, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(model_parameter(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(model_parameter(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(model_parameter(self), name)

    def __copy__(self) -> Any:
        return copy.copy(model_parameter(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return model_parameter(self).__reduce_ex__(protocol)


class _KeptParameter(Kept, nn.Parameter):
    """Of a plain parameter."""


class _KeptWhole(Kept, WholeParameter):
    """Of a parameter that `whole_parameters` has left whole."""


def model_parameter(value: Any) -> Any:
    """What the model has in the place of a kept parameter; other values as they are."""
    return vars(value)[REPLACED_BY] if issubclass(type(value), Kept) else value


def stand_in(parameter: Tensor, other: nn.Parameter) -> None:
    """Let a parameter represent the one that takes its place, and hold no memory. Hooks that get the parameter, which may look
    it up in a dict of their own, get the stand-in."""
    hooks: dict[int, Any] = getattr(parameter, _WITH_PARAMETER, None) or {}
    hooks.update({key: functools.partial(_called_with, hook, parameter) for key, hook in hooks.items()})
    parameter.grad, parameter.data = None, parameter.new_empty(0)
    vars(parameter).clear()
    vars(parameter)[REPLACED_BY] = other
    vars(other)[FIRST_ADDRESS] = id(parameter)
    parameter.__class__ = _KeptWhole if isinstance(parameter, WholeParameter) else _KeptParameter


def _called_with(hook: Any, kept: Tensor, parameter: Tensor) -> Any:
    return hook(kept)


def take_up(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of kept parameters have those of the model, with the state that it has of them."""
    for group in optimizer.param_groups:
        kept = {p: model_parameter(p) for p in group["params"] if issubclass(type(p), Kept)}
        if kept:
            group["params"][:] = [kept.get(p, p) for p in group["params"]]
            for old, new in kept.items():
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
