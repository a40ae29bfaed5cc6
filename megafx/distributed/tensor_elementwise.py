"""Elementwise operations on shards: on local tensors, as the order of elements does not matter. Operands of other placements,
plain tensors and those that broadcast are cut as the shards are. Padding stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafx.distributed.tensor_layout import is_permuted, new_shard, shard_of, spec_of, zero_pads
from megafx.distributed.tensor_whole import LazyView, Wholes, op_name, written

_COPIES = ("alias", "clone", "copy_", "zero_", "zeros_like", "_to_copy", "lerp", "lerp_")
FUSED = tuple(f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_LOCAL_NAMES = frozenset(
    (*_COPIES, "empty_like", "fill_", "full_like", "isclose", "masked_fill_", "new_empty_strided", "ones_like", *FUSED)
)
_FOREACH_REDUCES = frozenset(["_foreach_norm", "_foreach_max", "_foreach_powsum"])
# Operations that give zero where all sharded operands are zero; after the others pads are zeroed again.
_KEEPS_ZERO = frozenset(
    (*_COPIES, "sign", *(n + s for n in ("neg", "sqrt", "abs", "mul", "addcmul") for s in ("", "_")))
)


@cache
def is_elementwise(func: Any) -> bool:
    name = op_name(func)
    if name.startswith("_foreach_"):
        return name not in _FOREACH_REDUCES
    if not any(isinstance(r.type, torch.TensorType) for r in func._schema.returns) and name not in FUSED:
        return False  # `equal` has the tag too
    return torch.Tag.pointwise in func.tags or name in _LOCAL_NAMES


class _NotLocal(Exception):
    """The operation is not one on local tensors of these operands."""


def on_locals(func: Any, args: Any, kwargs: Any) -> Any:
    """The result on local tensors; NotImplemented where what is written, or the result, is not a shard of some operand's kind.

    Collective where operands are sharded in other ways.
    """
    name = op_name(func)
    values = [*args, *kwargs.values()]
    lists = [v for v in values if _is_list(v)]
    targets = {id(x) for x in written(func, args, kwargs)}
    rows = [*zip(*lists, strict=True)] if lists else [[v for v in values if isinstance(v, torch.Tensor)]]
    wholes, sources = Wholes(), {}
    try:
        if name == "new_empty_strided" and (tuple(args[1]), tuple(args[2])) != (args[0].shape, args[0].stride()):
            return NotImplemented
        likes = [_like(row, targets) for row in rows]
        several = [x for x in values if isinstance(x, torch.Tensor)] if lists else []
        if any(x.dim() and x.numel() > 1 for x in several):
            return NotImplemented

        def local(v: Any) -> Any:
            if _is_list(v):
                return [_operand(x, like, wholes) for x, like in zip(v, likes, strict=True)]
            return _operand(v, None if lists else likes[0], wholes)

        local_args, local_kwargs = [local(a) for a in args], {k: local(v) for k, v in kwargs.items()}
    except _NotLocal:
        return NotImplemented
    if name == "new_empty_strided":
        local_args[1:3] = local_args[0].shape, local_args[0].stride()
    for given, made in zip(values, [*local_args, *local_kwargs.values()], strict=True):
        pairs = zip(given, made, strict=True) if _is_list(given) else [(given, made)]
        sources.update({id(b): a for a, b in pairs if isinstance(a, torch.Tensor) and id(a) in targets})
    out = func(*local_args, **local_kwargs)
    if isinstance(out, (list, tuple)):
        forms = likes if lists else likes * len(out)
        return type(out)(_rewrap(o, like, name, sources) for o, like in zip(out, forms, strict=True))
    if lists and out is None:
        if name.removeprefix("_foreach_") not in _KEEPS_ZERO:
            for x in written(func, args, kwargs):
                if is_permuted(x):
                    zero_pads(x._local_tensor, x._spec)
        return None
    return _rewrap(out, likes[0], name, sources)


def write_masked(func: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """`x[mask] = number` on local tensors; NotImplemented for other indices. The mask is false in the padding."""
    mask = indices[0]
    alike = isinstance(x, DTensor) and isinstance(mask, DTensor) and mask._spec.placements == x._spec.placements
    if not alike or len(indices) > 1 or mask.dtype != torch.bool or mask.shape != x.shape or values.dim() > 0:
        return NotImplemented
    func(x._local_tensor, [mask._local_tensor], values, accumulate)
    return x


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(e, torch.Tensor) for e in x)


def _like(row: Sequence[Any], targets: set[int]) -> Any:
    """The operand whose form the result has; None where all of them are plain, or the result is to be plain."""
    tensors = [x for x in row if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, DTensor)]
    if not ours and not any(isinstance(x, LazyView) for x in tensors):
        return None
    shapes = {x.shape for x in tensors if x.dim()} or {torch.Size()}
    try:
        shape = torch.broadcast_shapes(*shapes) if len(shapes) > 1 else shapes.pop()
    except RuntimeError:
        raise _NotLocal from None
    wanted = [x for x in tensors if id(x) in targets] or [x for x in ours if x.shape == shape]
    kinds = {x._spec.placements if isinstance(x, DTensor) else None for x in wanted if x.dim()}
    if not wanted or not all(isinstance(x, DTensor) for x in wanted if x.dim()):
        raise _NotLocal
    found = [x for x in wanted if isinstance(x, DTensor)]
    if not found or found[0].shape != shape or (id(found[0]) in targets and len(kinds) > 1):
        raise _NotLocal
    if not shape and len(ours) < len(tensors) and id(found[0]) not in targets:
        raise _NotLocal  # a plain scalar (a loss) and a scalar parameter: a plain scalar
    return next((x for x in found if x._spec.placements[0].is_shard()), found[0])


def _operand(x: Any, like: Any, wholes: Wholes) -> Any:
    """What replaces an operand where the result has the form of `like`."""
    if not isinstance(x, torch.Tensor):
        return x
    if like is None:
        return wholes(x)
    if isinstance(x, DTensor) and x._spec.placements == like._spec.placements and x.shape == like.shape:
        return x._local_tensor
    x = wholes(x)
    if x.dim() == 0 or not like._spec.placements[0].is_shard():
        return x
    return shard_of(x.expand(like.shape), like._spec)


def _rewrap(out: Any, like: Any, name: str, sources: dict[int, Any]) -> Any:
    if not isinstance(out, torch.Tensor) or like is None:
        return out
    if is_permuted(like) and name not in _KEEPS_ZERO:
        zero_pads(out, like._spec)
    if id(out) in sources:
        return sources[id(out)]
    return new_shard(type(like), out, spec_of(like._spec, out.dtype), requires_grad=False)
