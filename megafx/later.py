"""Lazy outputs of one call, between its forward and the first use of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megafx.errors import UsageError

if TYPE_CHECKING:
    from megafx.passes.partition import Saved


class Later:
    """Lazy outputs of one call: computed once, from values that forward left and from inputs as they were then.

    `make(i)` gives the i-th. What they need is dropped once they are made, or with this object.
    """

    def __init__(
        self, saved: Sequence[Saved], values: list[Any], run: Callable[[list[Any]], list[Any]], inputs: Sequence[int]
    ) -> None:
        """saved: what each of the values is. inputs: indices of the program's inputs among them."""
        self.saved, self.values, self.run, self.inputs = saved, values, run, inputs
        self.watched: list[tuple[str, torch.Tensor, int | None]] = []
        for what, value in zip(saved, values, strict=True):
            self.watch(what.name, value)
        self.made: list[Any] | None = None

    def watch(self, name: str, value: Any) -> None:
        """Outputs are not made once this tensor has changed in place."""
        if isinstance(value, torch.Tensor):
            self.watched.append((name, value, _version(value)))

    @property
    def device(self) -> torch.device:
        return next(v.device for v in (*(self.made or ()), *self.values) if isinstance(v, torch.Tensor))

    def make(self, index: int) -> torch.Tensor:
        if self.made is None:
            for name, value, version in self.watched:
                if _version(value) != version:
                    raise UsageError(
                        f"logits of a training call are read after '{name}' was changed in place (by an optimizer's step?): "
                        f"they are computed at the first use, from the weights of then",
                        fix="read them before the weights change, or pass Config(lazy_outputs=False)",
                    )
            self.made = self.run(self.values)
            self.values, self.watched = [], []
        found: torch.Tensor = self.made[index]
        return found


class LazyOutput(NamedTuple):
    """What forward gives in the place of a lazy output: `make()` is its local value."""

    later: Later
    place: int

    def make(self) -> torch.Tensor:
        return self.later.make(self.place)


def _version(x: Any) -> int | None:
    return x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None
