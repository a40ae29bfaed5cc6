"""Reductions of a sharded tensor to one value: of each rank's part, then over the ranks. Results are plain, whole and the same
on every rank. Other reductions run on the whole tensor (tensor_whole.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megafx.distributed.tensor_layout import cuts_of
from megafx.distributed.tensor_whole import op_name
from megafx.placements.slices import shard_slices

_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN


def reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a reduction to one value; NotImplemented where it is none, or is not done by parts. Collective."""
    name = op_name(func)
    if name == "_foreach_norm":
        return _foreach_norm(func, *args, **kwargs)
    x = args[0] if args else None
    if name not in _REDUCTIONS or not isinstance(x, DTensor) or not cuts_of(x) or x._local_tensor.is_meta:
        return NotImplemented
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    dim, keep = given.pop("dim", None), given.pop("keepdim", False)
    dims = [dim] if isinstance(dim, int) else dim
    if dims and {d % x.dim() for d in dims} != {*range(x.dim())}:
        return NotImplemented
    given.pop("self", None)
    if "out" in given or len(func._schema.returns) != 1:
        return NotImplemented
    value = _REDUCTIONS[name](x, **given)
    return value.reshape([1] * x.dim()) if keep and value is not NotImplemented else value


def _over_ranks(value: Tensor, x: DTensor, op: Any = _SUM) -> Tensor:
    dist.all_reduce(value, op=op, group=x._spec.mesh.get_group())
    return value


def _sum(x: DTensor, dtype: torch.dtype | None = None) -> Tensor:
    local = x._local_tensor
    exact = local.is_floating_point() or local.is_complex()
    wanted = dtype or (local.dtype if exact else torch.int64)
    wide = torch.float32 if wanted in (torch.bfloat16, torch.float16) else wanted  # as eager adds, rounded once
    return _over_ranks(local.sum(dtype=wide), x).to(wanted)


def _mean(x: DTensor, dtype: torch.dtype | None = None) -> Any:
    wanted = dtype or x.dtype
    if not (wanted.is_floating_point or wanted.is_complex) or not x.numel():
        return NotImplemented  # the error or the value of eager mode
    wide = torch.float32 if wanted in (torch.bfloat16, torch.float16) else wanted
    return (_sum(x, wide) / x.numel()).to(wanted)


def _norm(x: DTensor, ord: Any = 2, dtype: torch.dtype | None = None, p: Any = None) -> Any:
    order = float(ord if p is None else p)
    if order < 0 or math.isnan(order):
        return NotImplemented
    wanted = dtype or (x.dtype.to_real() if x.dtype.is_complex else x.dtype)
    part, op = _summand(_local_norm(x._local_tensor, order), order)
    return _from_summand(_over_ranks(part, x, op), order).to(wanted)


def _local_norm(local: Tensor, order: float) -> Tensor:
    """In fp32 at least."""
    local = local if local.numel() else local.new_zeros(1)  # norms of nothing are an error for some orders
    wide = torch.float32 if local.dtype in (torch.bfloat16, torch.float16) else None
    return torch.linalg.vector_norm(local, order, dtype=wide)


def _summand(norm: Tensor, order: float) -> tuple[Tensor, Any]:
    """What ranks add, or take the largest of; in fp64, where powers do not overflow."""
    norm = norm.double()
    if order == math.inf:
        return norm, _MAX
    return (norm if order == 0 else norm**order), _SUM


def _from_summand(total: Tensor, order: float) -> Tensor:
    return total if order in (0, math.inf) else total ** (1 / order)


def _foreach_norm(func: Any, tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """Norms of tensors, sharded ones and others: one collective for all."""
    order = float(ord)
    if order < 0 or any(x.is_meta for x in tensors):
        return NotImplemented
    locals_ = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    norms = [_local_norm(x, order) for x in locals_]
    meshes = {i: x._spec.mesh for i, x in enumerate(tensors) if isinstance(x, DTensor) and cuts_of(x)}
    for mesh in dict.fromkeys(meshes.values()):  # an order that all ranks have in common
        rows = [i for i, each in meshes.items() if each == mesh]  # meshes of two models are equal, and two objects
        parts = [_summand(norms[i], order) for i in rows]
        total = torch.stack([part for part, _ in parts])
        dist.all_reduce(total, op=parts[0][1], group=mesh.get_group())
        for i, value in zip(rows, _from_summand(total, order).unbind(), strict=True):
            norms[i] = value
    return [
        n.to(dtype or (x.dtype.to_real() if x.dtype.is_complex else x.dtype))
        for n, x in zip(norms, tensors, strict=True)
    ]


def _extreme(x: DTensor, largest: bool) -> Any:
    """Of the values, not of padding."""
    if x.dtype.is_complex or not x.numel():
        return NotImplemented
    local, mesh = x._local_tensor, x._spec.mesh
    boxes = shard_slices(x.shape, cuts_of(x), mesh.get_local_rank())
    found = [local[box.local].amax() if largest else local[box.local].amin() for box in boxes]
    bad = torch.zeros((), dtype=torch.int32, device=local.device)  # MAX of a collective may drop NaN
    if found and x.dtype.is_floating_point:
        bad = torch.stack(found).isnan().any().int()
    if x.dtype == torch.bool:
        found = [v.int() for v in found]
    kind = torch.int32 if x.dtype == torch.bool else x.dtype
    about = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    least = -math.inf if kind.is_floating_point else about.min
    most = math.inf if kind.is_floating_point else about.max
    value = torch.full((), least if largest else most, dtype=kind, device=local.device)
    if found:
        value = torch.stack(found).amax() if largest else torch.stack(found).amin()
    value = _over_ranks(
        value.nan_to_num(0.0, math.inf, -math.inf) if kind.is_floating_point else value, x, _MAX if largest else _MIN
    )
    if x.dtype.is_floating_point:
        return torch.where(_over_ranks(bad, x, _MAX) > 0, math.nan, value)
    return value.to(x.dtype)


def _count(x: DTensor) -> Tensor:
    return _over_ranks((x._local_tensor != 0).sum(), x)  # padding is zero


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "max": lambda x: _extreme(x, True),
    "min": lambda x: _extreme(x, False),
    "amax": lambda x: _extreme(x, True),
    "amin": lambda x: _extreme(x, False),
    "count_nonzero": _count,
    "any": lambda x: _count(x) > 0,
    "all": lambda x: _count(x) == x.numel(),
}
