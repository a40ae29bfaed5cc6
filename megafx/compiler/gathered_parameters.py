"""Parameters that were gathered from data-parallel ranks and are kept until one of their shards changes (ZeRO-1).

A shard has changed if its version counter or its parameter's has, or if another tensor took its place: load_state_dict, a
copy into it, an optimizer's step. The parameter's counter sees writes to its views, the shard's those through `.data` and its
views (tensor_dispatch.py). The step of a torch optimizer first drops what was gathered of its parameters: it would be out of
date, and the step can use its memory.

All ranks run the same code, so they find the same shards changed, and gather again together.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def gather(shards: Sequence[Tensor], ranks: int, axis: str) -> Tensor:
    """Start one all-gather of the shards; the result has to be waited for."""
    flat: Tensor = torch.ops.megafx.gather_region([*shards], ranks, axis)
    return flat


class _Kept:
    """What was gathered, with the shards and their versions at that time."""

    def __init__(self, shards: Sequence[Tensor], flat: Tensor) -> None:
        self.shards = [weakref.ref(s) for s in shards]
        self.versions = [s._version for s in shards]
        self.flat = flat

    def holds(self, shards: Sequence[Tensor]) -> bool:
        return all(ref() is s for ref, s in zip(self.shards, shards, strict=True)) and self.versions == [
            s._version for s in shards
        ]


class GatheredParameters:
    """The gathered parameters of one model. gathers: number of gathers, for tests."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], _Kept] = {}
        self.gathers = 0
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._hook: Any = None

    def __call__(self, shards: Sequence[Tensor], ranks: int, axis: str) -> Tensor:
        """`gather_region` of the shards, which may still be under way."""
        key = tuple(id(s) for s in shards)
        if key in self.kept and self.kept[key].holds(shards):
            return self.kept[key].flat
        self._forget({*key})  # old, or of a graph with other regions
        if self._hook is None:
            mine = weakref.ref(self)
            self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(mine(), optimizer))
            weakref.finalize(self, self._hook.remove)
        with torch.inference_mode(False):
            flat = gather(shards, ranks, axis)
        self.kept[key] = _Kept(shards, flat)
        self.gathers += 1
        return flat

    def see(self, parameter: DTensor) -> None:
        """Drop what was gathered of a parameter if it has changed since the last call."""
        local, version = parameter._local_tensor, parameter._version
        ref, last = self._seen.get(id(local), (None, -1))
        if last != version or ref is None or ref() is not local:
            self._forget({id(local)})
            self._seen[id(local)] = weakref.ref(local), version

    def _forget(self, members: set[int]) -> None:
        for key in [k for k in self.kept if members & {*k}]:
            del self.kept[key]


def _before_step(gathered: GatheredParameters | None, optimizer: torch.optim.Optimizer) -> None:
    if gathered is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gathered._forget({id(p._local_tensor) for p in parameters if isinstance(p, DTensor)})


class Gathered:
    """Returns, at each call, some of a graph's inputs gathered."""

    def __init__(self, indices: tuple[int, ...], ranks: int, axis: str, kept: GatheredParameters) -> None:
        self.indices, self.ranks, self.axis, self.kept = indices, ranks, axis, kept

    def __call__(self, inputs: Sequence[Any]) -> Tensor:
        return self.kept([inputs[i] for i in self.indices], self.ranks, self.axis)
