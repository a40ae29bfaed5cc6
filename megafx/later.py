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

    def __init__(self, saved: Sequence[Saved], values: list[Any], run: Callable[[list[Any]], list[Any]]) -> None:
        """saved: what each of the values is."""
        self.saved, self.values, self.run = saved, values, run
        self.versions = [_version(v) for v in values]
        self.made: list[Any] | None = None

    @property
    def device(self) -> torch.device:
        return next(v.device for v in (*(self.made or ()), *self.values) if isinstance(v, torch.Tensor))

    def make(self, index: int) -> torch.Tensor:
        if self.made is None:
            for saved, value, version in zip(self.saved, self.values, self.versions, strict=True):
                if _version(value) != version:
                    raise UsageError(
                        f"logits of a training call are read after '{saved.name}' was changed in place (by an optimizer's "
                        f"step?): they are computed at the first use, from the weights of then",
                        module=saved.fqn or None,
                        source=saved.source,
                        fix="read them before the weights change, or pass Config(lazy_outputs=False)",
                    )
            self.made = self.run(self.values)
            self.values = []
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
