"""Outputs of one call whose backward has nothing in common, differentiated one after another.

    actor, critic = model(observation)
    actor.backward()
    critic.backward()

Autograd frees what a backward has walked, and the second one walks other nodes. To it all outputs of a graph are results of one
function: what that keeps stays until each output has been differentiated that shares nothing with those before, or until the
user has given up what depends on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megafx.compiler.executable import freed


def sharing_of(names: Mapping[int, str], sharing: Mapping[str, Iterable[str]]) -> dict[int, frozenset[int]]:
    """As `SeparateOutputs` has it; nothing where no backward leaves another one all that it needs. names: of the outputs;
    sharing: as `Reached.sharing`."""
    found = {i: frozenset(k for k, other in names.items() if other in sharing.get(n, ())) for i, n in names.items()}
    return found if sharing and any(len(others) < len(names) for others in found.values()) else {}


class SeparateOutputs:
    """Of one call. sharing: index of an output -> those whose backward frees what its own needs. ended: those differentiated
    so far, without retain_graph. waiting: others, while something depends on them."""

    def __init__(self, sharing: Mapping[int, frozenset[int]]) -> None:
        self.sharing, self.ended = sharing, set[int]()
        self.waiting: dict[int, weakref.ref[Any]] = {}

    def watch(self, outputs: list[Any], below: Container[int]) -> None:
        """Notice when outputs are given up. outputs: of a call of a graph (bound_graph.py). below: on which others depend; they
        stay results of one function (hooks_on_outputs.py), and are taken to be given up with their tensor."""
        for i in self.sharing:
            if type(output := outputs[i]) is Tensor and output.grad_fn is not None:
                in_use = output if i in below else _InUse()
                self.waiting[i] = weakref.ref(in_use)
                if i not in below:
                    outputs[i] = _Watched.apply(in_use, output)

    def begins(self, given: Iterable[int], retain: bool) -> bool:
        """A backward with gradients of these outputs: whether another may follow. UsageError where it needs what is freed."""
        given = {*given} & self.sharing.keys()
        if any(not self.sharing[i].isdisjoint(self.ended) for i in given):
            raise freed()
        if retain:
            return True
        self.ended |= given
        return any(
            in_use() is not None and i not in self.ended and self.sharing[i].isdisjoint(self.ended)
            for i, in_use in self.waiting.items()
        )


class _InUse:
    """Lives as long as something depends on an output."""


class _Watched(torch.autograd.Function):
    """An output."""

    @staticmethod
    def forward(ctx: Any, in_use: _InUse, output: Tensor) -> Tensor:
        ctx.in_use = in_use
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
