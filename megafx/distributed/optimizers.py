"""Optimizers of sharded parameters: state follows the parameters, Muon works on whole matrices, and steps are counted.

Nothing is to be done in a training loop: `prepare`, called when a model's parameters become TPTensors, hooks into torch.optim.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafx.distributed import muon
from megafx.distributed.kept_parameters import take_up
from megafx.distributed.tensor import TPTensor, local_of, wrap
from megafx.distributed.tensor_layout import shard_of, spec_of


@cache
def prepare() -> None:
    """Once a process."""
    register_optimizer_step_pre_hook(_before_step)
    muon.prepare()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    take_up(optimizer)
    follow(optimizer)
    for group in optimizer.param_groups:
        first = next((p for p in group["params"] if p.grad is not None), None)
        if first is not None and (steps := _steps.get(id(first))) is not None:
            steps.count += 1
            steps.last = id(first)


class Steps:
    """How often optimizers have stepped a model's parameters, once for each group, so that ranks can compare it.

    last: id of the first parameter that the last one had a gradient of.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, 0
        self.ids: list[int] = []

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count steps of these from now on, and of no others."""
        for key in self.ids:
            _steps.pop(key, None)
        self.ids = [id(p) for p in parameters]
        _steps.update(dict.fromkeys(self.ids, self))


# id of a parameter -> Steps, as long as its model lives. (torch swaps no parameter that somebody refers to weakly.)
_steps: weakref.WeakValueDictionary[int, Steps] = weakref.WeakValueDictionary()


@torch.no_grad()
def follow(optimizer: torch.optim.Optimizer) -> None:
    """Cut state that was made, or loaded, for whole parameters as the parameters are cut by now.

    Such is Adagrad's, which its constructor makes, and that of a `state_dict()` of another run. What has not the parameter's
    shape is left as it is. All state of a group is alike: that of its first sharded parameter shows whether there is any.
    """
    for group in optimizer.param_groups:
        first = next((p for p in group["params"] if _is_cut(p) and p in optimizer.state), None)
        if first is not None and any(_is_whole(x, first) for x in optimizer.state[first].values()):
            for p in group["params"]:
                if _is_cut(p) and p in optimizer.state:
                    state = optimizer.state[p]
                    state.update({name: _cut(x, p) for name, x in state.items() if _is_whole(x, p)})


def _is_cut(p: Any) -> bool:
    return isinstance(p, TPTensor) and not p._spec.placements[0].is_replicate()


def _is_whole(x: Any, p: TPTensor) -> bool:
    if not isinstance(x, torch.Tensor) or x.shape != p.shape:
        return False
    return not isinstance(x, DTensor) or x._spec.placements[0].is_replicate()


def _cut(x: torch.Tensor, p: TPTensor) -> torch.Tensor:
    return wrap(shard_of(local_of(x), p._spec), spec_of(p._spec, x.dtype))
