"""Gradients that a rank keeps for itself while `no_sync` is on, until a backward outside of it reduces the sums.

They are whole gradients of this rank's tensor-parallel shards, in no `.grad`: that has values of all data-parallel ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class HeldGradients:
    """Of one model. now: whether `no_sync` is on; sums: FQN -> what was held so far."""

    now: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, gradient: Tensor) -> None:
        if name in self.sums:
            self.sums[name].add_(gradient)
        else:
            self.sums[name] = gradient.clone()


@dataclass
class HeldBack:
    """The other backward graphs of a call. of(kind): what runs it, and the names of the gradients that it takes besides."""

    of: Callable[[Any], tuple[Any, list[str]]]

    def backward(
        self,
        held: HeldGradients,
        names: Sequence[str | None],
        kept: Any,
        tangents: list[Any],
        retain: bool,
    ) -> list[Any] | None:
        """Gradients for `names` (parameters; None: other inputs), or None where the call's own backward is to run."""
        if held.now:
            run, _ = self.of("hold")
            gradients = run.backward(kept, tangents, retain)
            for name, gradient in zip(names, gradients, strict=True):
                if name is not None and gradient is not None:
                    held.add(name, gradient)
            return [g if name is None else None for name, g in zip(names, gradients, strict=True)]
        if not held.sums.keys() & {name for name in names if name is not None}:
            return None
        run, wanted = self.of("add")
        pending = [held.sums.pop(name, torch.zeros(())) for name in wanted]
        return list(run.backward(kept, tangents, retain, pending))
