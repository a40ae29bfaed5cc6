"""Parameters that graphs read as one tensor: their rows, one below the other.

They are views of one memory where they lie side by side in it; else they are copied together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def side_by_side(parameters: Sequence[Tensor]) -> Tensor | None:
    """One view of parameters that follow each other in one memory; None where they do not."""
    first = parameters[0]
    memory, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for p in parameters:
        if p.data_ptr() != at or p.dtype != first.dtype or not p.is_contiguous():
            return None
        if p.untyped_storage().data_ptr() != memory:
            return None
        at += p.numel() * p.element_size()
    rows = sum(p.shape[0] for p in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


class Joined:
    """Gives the join of some of a graph's inputs at each call: the view of last time while they lie where they lay."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        self.where: tuple[int, ...] = ()
        self.view: Tensor | None = None

    def __call__(self, inputs: Sequence[Any]) -> Tensor:
        parameters = [inputs[i] for i in self.indices]
        where = tuple(p.data_ptr() for p in parameters)
        if self.view is None or where != self.where:
            self.view, self.where = side_by_side(parameters), where
        return torch.cat(parameters) if self.view is None else self.view
