"""Hooks on parameters and inputs of which a backward has no gradient run only where there is one.

A graph is one node of autograd, which has edges to all its inputs. Where a loss does not depend on a parameter, eager mode's
backward does not arrive at it. Here it arrives at every input: autograd calls the hooks of one without a gradient with None
(`p.register_hook(lambda g: g * mask)` fails), and those of `register_post_accumulate_grad_hook` as if there were one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megafx.distributed.tensor_whole import GradientForm
from megafx.runtime.hooks_on_outputs import Waiting


@dataclass(eq=False)
class _IfGiven:
    """A hook on a gradient."""

    hook: Callable[[torch.Tensor], Any]

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class _Arrival:
    """A hook that notes whether there is a gradient."""

    arrived = False

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self.arrived = gradient is not None


@dataclass(eq=False)
class _IfArrived:
    """A hook that runs once a gradient has been accumulated."""

    hook: Callable[[torch.Tensor], Any]
    arrival: _Arrival

    def __call__(self, parameter: torch.Tensor) -> Any:
        return self.hook(parameter) if self.arrival.arrived else None


def only_with_gradients(tensor: torch.Tensor) -> None:
    """Let the hooks on a tensor run only in a backward that has a gradient of it."""
    hooks: Any = tensor._backward_hooks or {}
    if isinstance(hooks, Waiting):  # megafx calls these itself, with gradients
        return
    for key, hook in hooks.items():
        if not isinstance(hook, (GradientForm, _IfGiven, _Arrival)):
            hooks[key] = _IfGiven(hook)
    later: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    new = [key for key, hook in later.items() if not isinstance(hook, _IfArrived)]
    if new:
        arrival = next((hook for hook in hooks.values() if isinstance(hook, _Arrival)), None)
        if arrival is None:
            tensor.register_hook(arrival := _Arrival())
        for key in new:
            later[key] = _IfArrived(later[key], arrival)


def before_autograd_comes(edges: Iterable[Any]) -> None:
    """edges: where a node of autograd sends the gradients that it does not have."""
    for edge in edges:
        leaf = getattr(edge, "variable", None)
        if leaf is not None:
            only_with_gradients(leaf)
