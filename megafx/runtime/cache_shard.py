"""`CacheShard`: this rank's part of a key or value cache, between two calls.

Its shape is the global one, [batch, heads, sequence, head dim]; `local` holds this rank's heads. What caches do with their
tensors between calls (reorder, repeat and select along batch, crop along the sequence, copy, join) runs on the local tensor,
without communication. `full_tensor()` gathers it, collectively; every other op raises UsageError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megafx.distributed.tensor_layout import gather_shards
from megafx.errors import UsageError
from megafx.placements.types import Placement, S

aten = torch.ops.aten


class CacheShard(torch.Tensor):
    """local: the physical shard of `placement`; padding in it is undefined."""

    local: torch.Tensor
    placement: Placement
    mesh: DeviceMesh

    @staticmethod
    def __new__(cls, local: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> Any:
        shape = list(local.shape)
        shape[placement.dim] = placement.cut.size
        shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        shard.local, shard.placement, shard.mesh = local, placement, mesh
        return shard

    def __init__(self, *_: Any) -> None:
        pass

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank. Collective."""
        with torch.no_grad():
            cuts = ((self.placement, self.mesh.size()),)
            return gather_shards(self.local.detach(), cuts, self.mesh.get_group())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares no name
        return f"CacheShard(shape={tuple(self.shape)}, local={tuple(self.local.shape)}, {self.placement}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheShard:
        if id(self) not in memo:
            memo[id(self)] = CacheShard(self.local.clone(), self.placement, self.mesh)
        copied: CacheShard = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a shard of a cache cannot be pickled", fix="use full_tensor() on every rank")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave) and isinstance(args[0], CacheShard):
            x, dim = args[0], kwargs.get("dim", args[2] if len(args) > 2 else None)
            if dim is not None and dim % x.dim() != x.placement.dim:
                return CacheShard(func(x.local, *args[1:], **kwargs), x.placement, x.mesh)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shards = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, CacheShard)]
        first = shards[0]
        allowed = _LOCAL.get(func.overloadpacket)
        alike = all(x.placement == first.placement for x in shards)
        if allowed is None or not alike or not allowed(first, args):
            raise UsageError(
                f"{func} on a cache that is sharded {first.placement} over the tensor-parallel ranks",
                fix="use its full_tensor() (collective), or generate with use_cache=False",
            )
        args, kwargs = torch.utils._pytree.tree_map(_local, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            return first
        moved = _MOVED.get(func.overloadpacket)
        placement = first.placement if moved is None else S(moved(first, args), first.placement.cut)
        return CacheShard(out, placement, first.mesh) if isinstance(out, torch.Tensor) else out


def _local(x: Any) -> Any:
    return x.local if isinstance(x, CacheShard) else x


def _other_dim(x: CacheShard, args: Any) -> bool:
    """True if the second argument names a dim other than the sharded one."""
    dim = args[1] if len(args) > 1 else 0
    return bool(dim % x.dim() != x.placement.dim)


def _indexed(x: CacheShard, args: Any) -> bool:
    """x[indices, ...] with one 1-d tensor for the first dim."""
    first, *rest = args[1]
    plain = isinstance(first, torch.Tensor) and first.dim() == 1 and all(i is None for i in rest)
    return plain and x.placement.dim != 0


def _always(x: CacheShard, args: Any) -> bool:
    return True


def _all_shards(x: CacheShard, args: Any) -> bool:
    """Joins shards and empty [0] tensors (which caches start from) along a dim that is not sharded."""
    return all(isinstance(a, CacheShard) or a.shape == (0,) for a in args[0]) and _other_dim(x, args)


def _rows(x: CacheShard, args: Any) -> bool:
    return all(isinstance(a, CacheShard) for a in args[0])


def _one_dim(x: CacheShard, args: Any) -> bool:
    return len(args) > 1 and isinstance(args[1], int) and _other_dim(x, args)


def _stacked_at(x: CacheShard, args: Any) -> int:
    dim = args[1] if len(args) > 1 else 0
    return x.placement.dim + (dim % (x.dim() + 1) <= x.placement.dim)


def _squeezed(x: CacheShard, args: Any) -> int:
    dim = args[1] % x.dim()
    return x.placement.dim - (x.shape[dim] == 1 and dim < x.placement.dim)


def _both(x: CacheShard, args: Any) -> bool:
    return all(isinstance(a, CacheShard) for a in args[:2])


# The sharded dim of the result, for ops that move it.
_MOVED: dict[Any, Callable[[CacheShard, Any], int]] = {
    aten.select: lambda x, args: x.placement.dim - (args[1] % x.dim() < x.placement.dim),
    aten.squeeze: _squeezed,
    aten.stack: _stacked_at,
    aten.unsqueeze: _stacked_at,
}
_LOCAL: dict[Any, Callable[[CacheShard, Any], bool]] = {
    aten.select: _other_dim,
    aten.unsqueeze: _always,
    aten.index_select: _other_dim,
    aten.slice: _other_dim,
    aten.index: _indexed,
    aten.cat: _all_shards,
    aten.stack: _rows,
    aten.squeeze: _one_dim,
    aten.copy_: _both,
    aten.add: _both,  # gradients of a cache that two calls read
    **dict.fromkeys((aten.clone, aten.detach, aten.alias, aten._to_copy, aten.zero_, aten.zeros_like), _always),
}
