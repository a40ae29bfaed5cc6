"""The gather of a region's parameters as one op, and as one collective on real ranks.

    megafx::gather_region   shards of several tensors -> the tensors, one after the other in one buffer

Each tensor has its rows of all ranks one below the other, as all_gather_into_tensor has, so that it is a view of the buffer:
nothing is copied on either side of the collective. (Shards packed into one would come out rank by rank, each tensor in as many
pieces as there are ranks.) The buffer is there once wait_tensor was called on it. Tensors begin at multiples of ALIGNED
elements, since kernels read memory that is aligned, as an allocator's is, faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megafx.ops.axes import axis_context

ALIGNED = 128


def starts(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Where in the buffer each tensor begins, and where the last one ends. shapes: of the shards."""
    sizes = [math.ceil(math.prod(shape) * ranks / ALIGNED) * ALIGNED for shape in shapes]
    return [0, *itertools.accumulate(sizes)]


def whole_views(flat: Tensor, shapes: Sequence[Sequence[int]], ranks: int) -> list[Tensor]:
    """The tensors in the buffer, padding of their last shards included."""
    at = starts(shapes, ranks)
    pairs = zip(at, shapes, strict=False)
    return [flat[i : i + math.prod(s) * ranks].view(s[0] * ranks, *s[1:]) for i, s in pairs]


def _buffer(shards: Sequence[Tensor], ranks: int) -> Tensor:
    return shards[0].new_empty(starts([s.shape for s in shards], ranks)[-1])


@torch.library.custom_op("megafx::gather_region", mutates_args=())
def gather_region(shards: Sequence[Tensor], ranks: int, axis: str) -> Tensor:
    """shards: of one dtype, each with as many rows on every rank."""
    name: Any = axis_context(axis).group_name
    group: Any = _resolve_process_group(name)
    flat = _buffer(shards, ranks)
    outputs = whole_views(flat, [s.shape for s in shards], ranks)
    work = group.allgather_into_tensor_coalesced(outputs, [s.contiguous() for s in shards])
    torch._C._distributed_c10d._register_work(flat, work)  # what wait_tensor waits for
    return flat


@gather_region.register_fake
def _(shards: Sequence[Tensor], ranks: int, axis: str) -> Tensor:
    return _buffer(shards, ranks)
