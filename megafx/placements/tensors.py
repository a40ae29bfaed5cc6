"""Cut a logical tensor into the ranks' local tensors and put it together again: pure tensors, no process group.

    shard_tensor(full: [.., n, ..], S(d, layout)) -> [.., layout.local_size(t), ..]   zeros in the padding
    unshard_tensors(locals at any placement)      -> full

Pieces come from `placements.Layout.pieces`, independently of the ops that move values at run time (placements/moves.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafx.errors import PlacementError
from megafx.placements.types import Cuts, Owned, Placement, on_axes


def shard_tensor(full: Tensor, placement: Placement, rank: int, t: int) -> Tensor:
    """The local tensor of `rank`: a slice for S, the value itself for I, R, M and its owner, the value on rank 0 for P."""
    if placement.kind in ("I", "R", "M") or t == 1:
        return full
    if placement.kind == "P":
        return full if rank == 0 else torch.zeros_like(full)
    dim, layout = placement.dim, placement.cut
    if full.shape[dim] != layout.size:
        raise PlacementError(f"dim {dim} of {tuple(full.shape)} cannot be cut as {placement}: it must be {layout.size}")
    if isinstance(placement, Owned):
        return full if rank == placement.owner else full.new_zeros((0, *full.shape[1:]))
    local_shape = [*full.shape]
    local_shape[dim] = layout.local_size(t)
    local = full.new_zeros(local_shape)
    for start, at, length in layout.pieces(rank, t):
        local.narrow(dim, at, length).copy_(full.narrow(dim, start, length))
    return local


def unshard_tensors(locals_: Sequence[Tensor], placement: Placement, t: int) -> Tensor:
    """The logical tensor that `t` ranks hold together: padding dropped, partials summed, the largest of maxima taken; rank 0's
    where all hold it."""
    if len(locals_) != t:
        raise PlacementError(f"{len(locals_)} local tensors for {t} ranks")
    if placement.kind in ("I", "R") or t == 1:
        return locals_[0]
    if placement.kind == "P":
        return torch.stack([*locals_]).sum(0)
    if placement.kind == "M":
        return torch.stack([*locals_]).amax(0)
    if isinstance(placement, Owned):
        return locals_[placement.owner]
    dim, layout = placement.dim, placement.cut
    shape = [*locals_[0].shape]
    if shape[dim] != layout.local_size(t):
        raise PlacementError(
            f"dim {dim} of a local {tuple(shape)} is no shard of {placement} on {t} ranks: it must be {layout.local_size(t)}"
        )
    shape[dim] = layout.size
    full = locals_[0].new_empty(shape)
    for rank, local in enumerate(locals_):
        for start, at, length in layout.pieces(rank, t):
            full.narrow(dim, start, length).copy_(local.narrow(dim, at, length))
    return full


def cut_tensor(full: Tensor, cuts: Cuts, rank: int) -> Tensor:
    """What `rank` holds of a parameter."""
    for cut in on_axes(cuts, rank):
        full = shard_tensor(full, *cut)
    return full


def put_together(locals_: Sequence[Tensor], cuts: Cuts) -> Tensor:
    """The logical tensor that all ranks hold together: of each group of neighbours first what they have of one shard."""
    for cut, size in reversed(cuts):
        inner = len(locals_) // size
        locals_ = [unshard_tensors(locals_[k::inner], cut, size) for k in range(inner)]
    return locals_[0]
