"""The DTensor placement of a shard whose physical order is `placements.Layout`'s, and the specs of tensors so placed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megafx.errors import UsageError
from megafx.placements.slices import shard_slices
from megafx.placements.tensors import unshard_tensors
from megafx.placements.types import Layout, Nested, Owned, Placement, S


class LayoutShard(Shard):
    """Shard of a dim whose physical order is not torch.chunk's; torch code that assumes it is gets an error."""

    layout: Layout

    def __init__(self, dim: int, layout: Layout) -> None:
        super().__init__(dim)
        object.__setattr__(self, "layout", layout)  # a frozen dataclass in some versions of torch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutShard) and (self.dim, self.layout) == (other.dim, other.layout)

    def __hash__(self) -> int:
        return hash((self.dim, self.layout))

    def __repr__(self) -> str:
        return f"LayoutShard({self.dim}, {self.layout})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return LayoutShard, (self.dim, self.layout)

    def __copy__(self) -> LayoutShard:
        return self

    def __deepcopy__(self, memo: Any) -> LayoutShard:
        return self

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, *_: Any
    ) -> torch.Tensor:
        return gather_shards(local_tensor, S(self.dim, self.layout), mesh.get_group(mesh_dim))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            f"torch asked for {self} as if its shards were torch.chunk's, which they are not",
            fix="use full_tensor() or megafx.full_state_dict(model), which give the logical tensor",
        )

    _split_tensor = _shard_tensor = _replicate_to_shard = _to_new_shard_dim = _reduce_shard_tensor = _refuse
    local_shard_size_and_offset = _local_shard_size_and_offset = _refuse


class NestedShard(LayoutShard):
    """A shard that data-parallel ranks cut again (placements/types.py), on the mesh of all the ranks that do."""

    def __init__(self, placement: Nested) -> None:
        super().__init__(0, placement.cut)
        object.__setattr__(self, "placement", placement)

    placement: Nested

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NestedShard) and self.placement == other.placement

    def __hash__(self) -> int:
        return hash(self.placement)

    def __repr__(self) -> str:
        return f"NestedShard({self.placement})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return NestedShard, (self.placement,)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, *_: Any
    ) -> torch.Tensor:
        return gather_shards(local_tensor, self.placement, mesh.get_group(mesh_dim))


class OwnedShard(LayoutShard):
    """One rank holds all, the others no rows (placements/types.py)."""

    def __init__(self, placement: Owned) -> None:
        super().__init__(0, placement.cut)
        object.__setattr__(self, "placement", placement)

    placement: Owned

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnedShard) and self.placement == other.placement

    def __hash__(self) -> int:
        return hash(self.placement)

    def __repr__(self) -> str:
        return f"OwnedShard({self.placement})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnedShard, (self.placement,)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, *_: Any
    ) -> torch.Tensor:
        return gather_shards(local_tensor, self.placement, mesh.get_group(mesh_dim))


def gather_shards(local: torch.Tensor, placement: Placement, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Physical shard -> logical tensor on every rank. Collective."""
    if not placement.is_shard:
        return local
    local = local.contiguous()
    if isinstance(placement, Owned):
        whole = local.clone() if local.shape[0] else local.new_empty([placement.cut.size, *local.shape[1:]])
        dist.broadcast(whole, group_src=placement.owner, group=group)
        return whole
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, local, group=group)
    return unshard_tensors(shards, placement, len(shards))


@cache
def make_spec(mesh: DeviceMesh, placement: Placement, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a parameter of logical `shape`; `Shard` where the shards are torch.chunk's, else `LayoutShard`."""
    where = Shard(placement.dim) if placement.is_shard else Replicate()
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, (where,), tensor_meta=TensorMeta(shape, stride, dtype))
    if isinstance(placement, Nested):
        spec.placements = (NestedShard(placement),)
    elif isinstance(placement, Owned) and mesh.size() > 1:
        spec.placements = (OwnedShard(placement),)
    elif placement.is_shard and not placement.cut.contiguous_shards(mesh.size()):
        spec.placements = (
            LayoutShard(placement.dim, placement.cut),
        )  # afterwards: DTensorSpec knows torch's kinds only
    return spec


@cache
def physical_spec(mesh: DeviceMesh, shard: LayoutShard, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """What DTensor may think that a LayoutShard tensor is, for operations to which order is nothing."""
    if isinstance(shard, NestedShard):
        physical = shard.placement.local_shape(shape)
        physical[0] *= mesh.size()
    elif isinstance(shard, OwnedShard):
        physical = list(shape)
    else:
        physical = list(shape)
        physical[shard.dim] = shard.layout.local_size(mesh.size()) * mesh.size()
    stride = torch.empty(physical, device="meta").stride()
    return DTensorSpec(mesh, (Shard(shard.dim),), tensor_meta=TensorMeta(torch.Size(physical), stride, dtype))


@cache
def pads(mesh: DeviceMesh, shard: LayoutShard) -> tuple[tuple[int, int], ...]:
    """(start, length) of the padding in this rank's shard."""
    if isinstance(shard, OwnedShard):
        return ()
    ranges, position = [], 0
    for piece in shard.layout.pieces(mesh.get_local_rank(), mesh.size()):
        if piece.local_start > position:
            ranges.append((position, piece.local_start - position))
        position = piece.local_start + piece.length
    end = shard.layout.local_size(mesh.size())
    return (*ranges, (position, end - position)) if end > position else tuple(ranges)


@cache
def nested_padding(
    mesh: DeviceMesh, shard: NestedShard, shape: torch.Size, device: torch.device
) -> torch.Tensor | None:
    """Bool mask of the padding in this rank's part of a parameter of logical `shape`; None where there is none."""
    mask = torch.ones(shard.placement.local_shape(shape), dtype=torch.bool)
    for box in shard_slices(shape, shard.placement, mesh.get_local_rank(), mesh.size()):
        mask[box.local] = False
    return mask.to(device) if bool(mask.any()) else None


def placement_of(tensor: DTensor) -> Placement:
    """The megafx placement of a DTensor on a 1-d mesh."""
    (where,) = tensor._spec.placements
    if isinstance(where, (NestedShard, OwnedShard)):
        return where.placement
    if isinstance(where, LayoutShard):
        return S(where.dim, where.layout)
    if isinstance(where, Shard):
        return S(where.dim, Layout.contiguous(tensor.shape[where.dim], tensor._spec.mesh.size()))
    return Placement("P" if where.is_partial() else "I")


def is_permuted(x: Any) -> bool:
    """Whether x is a DTensor whose shards are not torch.chunk's."""
    return isinstance(x, DTensor) and isinstance(x._spec.placements[0], LayoutShard)
