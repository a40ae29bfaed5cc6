"""What graphs make of weights and keep until one of these changes: casts to FP8, and parameters gathered from other ranks.

Micro-batches of one step share casts. Parameters whose optimizer state is cut (ZeRO-1) are gathered once for each change.

A weight has changed if its version counter or its shard's has, if another tensor or other memory took its place, or if a torch
optimizer steps it. The parameter's counter sees writes to its views, the shard's those through `.data` and its views
(tensor_dispatch.py). Casts are given up too if backward ran and the weight's gradient is gone: a step has come between, whose
kernels may count no versions. What writes into memory that no counter sees (`weight.untyped_storage()`, an array of NumPy) is
not noticed; it can say so by `torch.autograd.graph.increment_version(weight)`.

Before a weight is stepped, what was made of it is dropped: the step can use the memory. CUDA graphs read casts where they were
when recorded, so that they stay there, and are written again.

All ranks run the same code, so they find the same weights changed, and cast and gather again together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafx.distributed.parameters import replaced_memory
from megafx.ir.program import compiled_graph


class _Seen(NamedTuple):
    """A weight at the last look. local: the shard, where it has one; state: numbers that differ once it has changed."""

    local: weakref.ref[Tensor] | None
    state: tuple[int, ...]
    backwards: int


@dataclass
class _Kept:
    names: frozenset[str]
    values: list[Tensor]
    stays: bool
    stale: bool = False


class KeptValues:
    """Of the weights of one model. made: how often some were made, for tests. backwards: backward graphs run so far.

    whole: of weights that are gathered, no two values are kept of one, and gradients say nothing.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self.made = self.backwards = 0
        self.kept: dict[Any, _Kept] = {}
        self._seen: dict[str, _Seen] = {}
        self._stepped = _Stepped(self)

    def look(self, weights: Mapping[str, Tensor]) -> bool:
        """True if each has been seen, and none has changed since. What was made of those that have is given up."""
        changed = set()
        for name, weight in weights.items():
            last, now = self._seen.get(name), self._state(weight)
            if (
                last is None
                or last.state != now.state
                or not _same_shard(last, weight)
                or self._is_new_step(last, weight)
            ):
                changed.add(name)
            self._seen[name] = now
        self._give_up(changed)
        return not changed

    def values(
        self, key: Any, names: frozenset[str], make: Callable[[], Sequence[Tensor]], stays: bool
    ) -> list[Tensor]:
        """What `make` gives, or gave for this key while none of these weights changed. stays: in the same memory for always."""
        found = self.kept.get(key)
        if found is not None and not found.stale:
            return found.values
        if self.whole:  # of a graph that gathers others together
            self._give_up(names)
        with torch.inference_mode(False):
            new = [*make()]
        self.made += 1
        if found is None:
            found = self.kept[key] = _Kept(names, new, stays)
            self._stepped.watch()
        else:
            for value, by in zip(found.values, new, strict=True):
                value.copy_(by)
            found.stale = False
        return found.values

    def before_step(self, parameters: set[int]) -> None:
        """parameters: ids of those that an optimizer steps now."""
        self._give_up({name for name, seen in self._seen.items() if seen.state[0] in parameters})

    def _give_up(self, changed: Set[str]) -> None:
        for key, kept in [*self.kept.items()] if changed else ():
            if kept.names & changed and kept.stays:
                kept.stale = True
            elif kept.names & changed:
                del self.kept[key]

    def gather(self, shards: Sequence[Tensor], ranks: int, axis: str) -> Tensor:
        """Start one all-gather of the shards; the result has to be waited for."""
        flat: Tensor = torch.ops.megafx.gather_region([*shards], ranks, axis)
        return flat

    def _state(self, weight: Tensor) -> _Seen:
        if isinstance(weight, DTensor):
            local = weight._local_tensor
            return _Seen(weakref.ref(local), (id(weight), weight._version, local._version), self.backwards)
        return _Seen(None, (id(weight), weight._version, replaced_memory(weight), weight.data_ptr()), self.backwards)

    def _is_new_step(self, last: _Seen, weight: Tensor) -> bool:
        return not self.whole and weight.requires_grad and last.backwards < self.backwards and weight.grad is None


def _same_shard(last: _Seen, weight: Tensor) -> bool:
    return last.local is None or (isinstance(weight, DTensor) and last.local() is weight._local_tensor)


class _Stepped:
    """Says before a torch optimizer steps, until the values are gone."""

    def __init__(self, kept: KeptValues) -> None:
        self.kept = weakref.ref(kept)
        self.hook: Any = None

    def watch(self) -> None:
        if self.hook is None and (kept := self.kept()) is not None:
            mine: Any = self.kept
            self.hook = hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(mine(), optimizer))
            weakref.finalize(kept, hook.remove)


def _before_step(kept: KeptValues | None, optimizer: torch.optim.Optimizer) -> None:
    if kept is not None:
        kept.before_step({id(p) for group in optimizer.param_groups for p in group["params"]})


class CastWeights:
    """Returns, at each call, the casts that forward takes after its other inputs."""

    def __init__(self, graph: fx.GraphModule, names: frozenset[str], kept: KeptValues) -> None:
        self.run, self.names, self.kept = compiled_graph(graph), names, kept
        self.key = graph.code, tuple(sorted(names))
        self.stays = False

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor]:
        return self.kept.values(self.key, self.names, lambda: self.run(*inputs), self.stays)


class Gathered:
    """Returns, at each call, some of a graph's inputs gathered; the gather may still be under way. names: of these inputs."""

    def __init__(
        self, indices: tuple[int, ...], names: tuple[str, ...], ranks: int, axis: str, kept: KeptValues
    ) -> None:
        self.indices, self.names, self.ranks, self.axis, self.kept = indices, names, ranks, axis, kept

    def __call__(self, inputs: Sequence[Any]) -> Tensor:
        shards = [inputs[i] for i in self.indices]
        make = lambda: [self.kept.gather(shards, self.ranks, self.axis)]
        return self.kept.values((self.names, self.axis), frozenset(self.names), make, stays=False)[0]
