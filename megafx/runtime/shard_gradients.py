"""Gradients where a graph meets autograd: inside they are this rank's part, outside they are of the kind of their tensor.

Parameters and outputs may be DTensors (`TPTensor`); caches hold `CacheShard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from megafx.distributed.parameters import shard_like
from megafx.distributed.tensor import TPTensor, wrap
from megafx.distributed.tensor_layout import spec_of
from megafx.runtime.cache_shard import CacheShard
from megafx.runtime.outputs import make_dtensor


def layouts_of(tensors: Sequence[Any]) -> list[Any]:
    """Of tensors whose gradients are wanted: what `as_shard` needs; None for whole ones."""
    return [
        x._spec if isinstance(x, TPTensor) else (x.placement, x.mesh) if isinstance(x, CacheShard) else None
        for x in tensors
    ]


def as_shard(gradient: Any, layout: Any) -> Any:
    """This rank's part of a gradient, as autograd wants that of a tensor of this layout."""
    if gradient is None:
        return gradient
    if isinstance(layout, tuple):
        made: Any = make_dtensor(gradient, *layout)  # its padding is zeros
        return CacheShard(made._local_tensor, *layout)
    return wrap(gradient, spec_of(layout, gradient.dtype))


def local_part(gradient: Any, output: TPTensor | None) -> Any:
    """The gradient of an output as the graph wants it: this rank's part where the output was a shard."""
    if isinstance(gradient, CacheShard):
        return gradient.local
    if output is None or gradient is None:
        return gradient
    if isinstance(gradient, DTensor) and gradient._spec.placements == output._spec.placements:
        return gradient._local_tensor
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return shard_like(whole, output)._local_tensor
