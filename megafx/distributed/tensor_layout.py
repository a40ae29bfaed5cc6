"""DTensor's placement of shards in the physical order of a `Layout`, the specs of such tensors, and their padding."""

from __future__ import annotations

import functools
import math
from copy import copy as copied
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megafx.errors import UsageError
from megafx.placements.slices import shard_slices
from megafx.placements.tensors import cut_tensor, put_together
from megafx.placements.types import Cuts, Layout, Owned, S, cuts_text, local_shape

new_shard: Any = DTensor.__new__  # a third of the cost of DTensor(...), whose __init__ does nothing else


class LayoutShard(Shard):
    """A shard other than torch.chunk's: cut in blocks, cut again by data-parallel ranks, or held by one rank alone."""

    cuts: Cuts  # at least one

    def __init__(self, cuts: Cuts) -> None:
        super().__init__(cuts[-1][0].dim)
        object.__setattr__(self, "cuts", cuts)  # a frozen dataclass in some versions of torch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutShard) and self.cuts == other.cuts

    def __hash__(self) -> int:
        return hash(self.cuts)

    def __repr__(self) -> str:
        return f"LayoutShard({cuts_text(self.cuts)})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return LayoutShard, (self.cuts,)

    def __copy__(self, memo: Any = None) -> LayoutShard:
        return self

    __deepcopy__ = __copy__

    def _to_replicate_tensor(self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, *_: Any) -> Tensor:
        return gather_shards(local_tensor, self.cuts, mesh.get_group(mesh_dim))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        found = f"torch asked for {self} as if its shards were torch.chunk's, which they are not"
        raise UsageError(found, fix="use full_tensor() or megafx.full_state_dict(model), which give the logical tensor")

    _split_tensor = _shard_tensor = _replicate_to_shard = _to_new_shard_dim = _reduce_shard_tensor = _refuse
    local_shard_size_and_offset = _local_shard_size_and_offset = _refuse


def gather_shards(local: Tensor, cuts: Cuts, group: dist.ProcessGroup | None) -> Tensor:
    """Physical shard -> logical tensor on every rank. Collective."""
    if not cuts:
        return local
    local, (*inner, (held, _)) = local.contiguous(), cuts
    if isinstance(held, Owned):
        shape, t = [held.cut.size, *local.shape[1:]], math.prod(size for _, size in inner)
        parts = [local.clone() if local.shape[0] else local.new_empty(shape) for _ in range(t)]
        for k, part in enumerate(parts):
            dist.broadcast(part, group_src=held.owner * t + k, group=group)
        return put_together(parts, tuple(inner))
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, local, group=group)
    return put_together(shards, cuts)


def whole_of(x: DTensor) -> Tensor:
    """The logical tensor, plain and without autograd; of a replicated one its memory itself. Collective where it is sharded."""
    if x._local_tensor.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if x._spec.placements[0].is_partial():
        whole = x._local_tensor.clone()
        dist.all_reduce(whole, group=x._spec.mesh.get_group())
        return whole
    return gather_shards(x._local_tensor.detach(), cuts_of(x), x._spec.mesh.get_group())


def shard_of(whole: Tensor, spec: DTensorSpec) -> Tensor:
    """This rank's part of a logical tensor, for a tensor of this spec: a copy, or where it is replicated the tensor itself."""
    return cut_tensor(whole, _cuts(spec), spec.mesh.get_local_rank())


_everyone: dict[DeviceMesh, dist.ProcessGroup] = {}  # mesh of parameters -> the ranks that train the same model


def set_everyone(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Note that parameters on `mesh` belong to a model of all ranks of `group`: other data-parallel ranks hold them too."""
    _everyone[mesh] = group


def everyone_on(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks that hold the parameters of this mesh, or shards or copies of them."""
    return _everyone.get(mesh) or mesh.get_group()


def has_replicas(mesh: DeviceMesh) -> bool:
    """True if data-parallel ranks train the model of the parameters on this mesh."""
    return mesh in _everyone


def spec_of(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same spec for another dtype: gradients of bf16 parameters may be fp32."""
    meta = spec.tensor_meta
    return spec if meta is None or meta.dtype == dtype else _on(spec.mesh, _spec_of(spec, dtype))


@functools.lru_cache(1024)
def _spec_of(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    found = copied(spec)
    assert spec.tensor_meta is not None
    found.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    return found


def make_spec(mesh: DeviceMesh, cuts: Cuts, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a parameter of logical `shape`; `Shard` where the shards are torch.chunk's, else `LayoutShard`."""
    return _on(mesh, _make_spec(mesh, cuts, shape, dtype))


def _on(mesh: DeviceMesh, spec: DTensorSpec) -> DTensorSpec:
    """A spec that was kept, on this very mesh: one that is equal may be of groups that were destroyed since."""
    if spec.mesh is mesh:
        return spec
    found = copied(spec)
    found.mesh = mesh
    return found


@cache
def _make_spec(mesh: DeviceMesh, cuts: Cuts, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    where = Shard(cuts[-1][0].dim) if cuts else Replicate()
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, (where,), tensor_meta=TensorMeta(shape, stride, dtype))
    owned = any(isinstance(cut, Owned) for cut, _ in cuts) and mesh.size() > 1
    if owned or len(cuts) > 1 or not all(cut.cut.contiguous_shards(size) for cut, size in cuts):
        spec.placements = (LayoutShard(cuts),)  # set last: DTensorSpec() takes torch's kinds only
    return spec


def zero_pads(local: Tensor, spec: DTensorSpec) -> None:
    """Zero, in place, the padding of a permuted shard."""
    shard = cast(LayoutShard, spec.placements[0])
    if len(shard.cuts) > 1:
        mask = _padding(spec.mesh, shard.cuts, spec.shape, local.device)
        if mask is not None:
            local.masked_fill_(mask, 0)
        return
    for start, length in pads(spec.mesh, shard):
        local.narrow(shard.dim, start, length).zero_()


@cache
def pads(mesh: DeviceMesh, shard: LayoutShard) -> tuple[tuple[int, int], ...]:
    """(start, length) of the padding in this rank's shard."""
    ((placement, ranks),) = shard.cuts
    if isinstance(placement, Owned):
        return ()
    ranges, position, layout = [], 0, placement.cut
    for piece in layout.pieces(mesh.get_local_rank(), ranks):
        ranges.append((position, piece.local_start - position))
        position = piece.local_start + piece.length
    ranges.append((position, layout.local_size(ranks) - position))
    return tuple((start, length) for start, length in ranges if length > 0)


@cache
def _padding(mesh: DeviceMesh, cuts: Cuts, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Bool mask of the padding in this rank's part of a parameter of logical `shape`; None where there is none."""
    mask = torch.ones(local_shape(shape, cuts, mesh.get_local_rank()), dtype=torch.bool)
    for box in shard_slices(shape, cuts, mesh.get_local_rank()):
        mask[box.local] = False
    return mask.to(device) if bool(mask.any()) else None


def cuts_of(tensor: DTensor) -> Cuts:
    """How the ranks of its 1-d mesh cut a DTensor; () where all hold it whole, or summands of it."""
    return _cuts(tensor._spec)


def _cuts(spec: DTensorSpec) -> Cuts:
    (where,) = spec.placements
    if isinstance(where, LayoutShard):
        return where.cuts
    if isinstance(where, Shard):
        return ((S(where.dim, Layout.contiguous(spec.shape[where.dim], spec.mesh.size())), spec.mesh.size()),)
    return ()


def is_permuted(x: Any) -> bool:
    """True if x is a DTensor whose shards are not torch.chunk's."""
    return isinstance(x, DTensor) and isinstance(x._spec.placements[0], LayoutShard)
