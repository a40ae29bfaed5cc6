"""`TPTensor`: the DTensor that parameters, their gradients and optimizer state are at t > 1.

Its shape is the logical one; its local tensor is the physical shard of `placements.Layout`: block-permuted, and zero padded
where units do not divide. Which operations see what:

    elementwise, foreach and fused optimizer ops     run on local tensors as they are (order does not matter; pads stay zero)
    norms and sums                                   DTensor's own, over the physical tensor (pads are zero and add nothing)
    full_tensor, redistribute to Replicate, copy_,
    torch.distributed.checkpoint                     speak the logical layout
    everything else                                  DTensor's own where the physical order is the logical one, else UsageError
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megafx.errors import UsageError
from megafx.placements import Layout, Placement, S
from megafx.sharding import shard_tensor, unshard_tensors

aten = torch.ops.aten
_new = DTensor.__new__  # a third of the cost of DTensor(...), whose __init__ does nothing else


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


def gather_shards(local: torch.Tensor, placement: Placement, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Physical shard -> logical tensor on every rank. Collective."""
    if not placement.is_shard:
        return local
    local = local.contiguous()
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, local, group=group)
    return unshard_tensors(shards, placement, len(shards))


@cache
def make_spec(mesh: DeviceMesh, placement: Placement, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a parameter of logical `shape`; `Shard` where the shards are torch.chunk's, else `LayoutShard`."""
    where = Shard(placement.dim) if placement.is_shard else Replicate()
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, (where,), tensor_meta=TensorMeta(shape, stride, dtype))
    if placement.is_shard and not placement.cut.contiguous_shards(mesh.size()):
        spec.placements = (
            LayoutShard(placement.dim, placement.cut),
        )  # afterwards: DTensorSpec knows torch's kinds only
    return spec


@cache
def _physical_spec(mesh: DeviceMesh, shard: LayoutShard, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """What DTensor may think that a LayoutShard tensor is, for operations to which order is nothing."""
    physical = list(shape)
    physical[shard.dim] = shard.layout.local_size(mesh.size()) * mesh.size()
    stride = torch.empty(physical, device="meta").stride()
    return DTensorSpec(mesh, (Shard(shard.dim),), tensor_meta=TensorMeta(torch.Size(physical), stride, dtype))


@cache
def _pads(mesh: DeviceMesh, shard: LayoutShard) -> tuple[tuple[int, int], ...]:
    """(start, length) of the padding in this rank's shard."""
    ranges, position = [], 0
    for piece in shard.layout.pieces(mesh.get_local_rank(), mesh.size()):
        if piece.local_start > position:
            ranges.append((position, piece.local_start - position))
        position = piece.local_start + piece.length
    end = shard.layout.local_size(mesh.size())
    return (*ranges, (position, end - position)) if end > position else tuple(ranges)


def wrap(local: torch.Tensor, spec: DTensorSpec) -> TPTensor:
    """Local tensor -> TPTensor without gradient; `spec` from `make_spec`, for the same dtype."""
    return _new(TPTensor, local, spec, requires_grad=False)  # type: ignore[return-value]


def placement_of(tensor: DTensor) -> Placement:
    """The megafx placement of a DTensor on a 1-d mesh."""
    (where,) = tensor._spec.placements
    if isinstance(where, LayoutShard):
        return S(where.dim, where.layout)
    if isinstance(where, Shard):
        return S(where.dim, Layout.contiguous(tensor.shape[where.dim], tensor._spec.mesh.size()))
    return Placement("P" if where.is_partial() else "I")


class TPTensor(DTensor):
    """See the module docstring. Made by `wrap`, or from a parameter by `params.replicate_parameters`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.detach.default:
            return _new(TPTensor, args[0]._local_tensor, args[0]._spec, requires_grad=False)
        if func is aten.add_.Tensor and not kwargs and _same_spec(*args):  # gradient accumulation
            args[0]._local_tensor.add_(args[1]._local_tensor)
            return args[0]
        kwargs = kwargs or {}
        if _order_free(func):
            done, result = _on_locals(func, args, kwargs)
            if done:
                return result
        return _on_dtensors(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> TPTensor:
        if id(self) not in memo:
            copy = wrap(self._local_tensor.clone(), self._spec).requires_grad_(self.requires_grad)
            vars(copy).update(vars(self))
            memo[id(self)] = copy
            if self.is_leaf and self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)
        return cast(TPTensor, memo[id(self)])

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The logical tensor on every rank. Collective; differentiable."""
        if not _permuted(self):
            return super().full_tensor(grad_placements=grad_placements)
        return cast(torch.Tensor, _Full.apply(self))

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's physical shard."""
        if not _permuted(self) or not torch.is_grad_enabled():
            return super().to_local(grad_placements=grad_placements)
        return cast(torch.Tensor, _Local.apply(self))

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        if not _permuted(self) or placements is None:
            return super().redistribute(device_mesh, placements, **options)
        if tuple(placements) == self._spec.placements:
            return self
        if all(p.is_replicate() for p in placements):
            return DTensor.from_local(self.full_tensor(), self._spec.mesh, list(placements), run_check=False)
        raise UsageError(
            f"{self._spec.placements[0]} cannot be redistributed to {tuple(placements)}",
            fix="use full_tensor(), then torch.distributed.tensor.distribute_tensor",
        )

    # -- torch.distributed.checkpoint: chunks in logical coordinates

    def _chunks(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
        """(logical offsets, sizes, start in the shard, dim) of each piece of this rank."""
        placement = placement_of(self)
        chunks = []
        for piece in placement.cut.pieces(self._spec.mesh.get_local_rank(), self._spec.mesh.size()):
            offsets, sizes = [0] * self.ndim, list(self.shape)
            offsets[placement.dim], sizes[placement.dim] = piece.global_start, piece.length
            chunks.append((tuple(offsets), tuple(sizes), piece.local_start, placement.dim))
        return chunks

    def __create_chunk_list__(self) -> list[Any]:
        if not _permuted(self):
            return super().__create_chunk_list__()
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s, _, _ in self._chunks()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        if not _permuted(self):
            return super().__create_write_items__(fqn, object)
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if not _permuted(self):
            return super().__get_tensor_shard__(index)
        for offsets, sizes, start, dim in self._chunks():
            if index.offset is not None and tuple(index.offset) == offsets:
                return self._local_tensor.narrow(dim, start, sizes[dim])
        raise UsageError(f"this rank holds no chunk of '{index.fqn}' at {index.offset}")


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: TPTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.spec, ctx.placement = x._spec, placement_of(x)
        return gather_shards(x._local_tensor, ctx.placement, x._spec.mesh.get_group())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> TPTensor:  # type: ignore[override]
        mesh = ctx.spec.mesh
        return wrap(shard_tensor(grad, ctx.placement, mesh.get_local_rank(), mesh.size()), ctx.spec)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: TPTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> TPTensor:  # type: ignore[override]
        return wrap(grad, ctx.spec)


def _same_spec(a: Any, b: Any) -> bool:
    return type(a) is TPTensor and type(b) is TPTensor and a._spec is b._spec


def _permuted(x: Any) -> bool:
    return isinstance(x, DTensor) and isinstance(x._spec.placements[0], LayoutShard)


# -- operations to which the order of elements is nothing

_LOCAL_NAMES = frozenset(
    [
        "alias",
        "clone",
        "copy_",
        "empty_like",
        "fill_",
        "full_like",
        "ones_like",
        "zero_",
        "zeros_like",
        "_to_copy",
        "lerp",
        "lerp_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
    ]
)
_FOREACH_REDUCES = frozenset(["_foreach_norm", "_foreach_max", "_foreach_powsum"])
# Operations that give zero where all sharded operands are zero; after the others pads are zeroed again.
_KEEPS_ZERO = frozenset(
    [
        "alias",
        "clone",
        "copy_",
        "zero_",
        "zeros_like",
        "_to_copy",
        "lerp",
        "lerp_",
        "neg",
        "neg_",
        "sqrt",
        "sqrt_",
        "abs",
        "abs_",
        "mul",
        "mul_",
        "addcmul",
        "addcmul_",
        "sign",
    ]
)
# DTensor's own reductions over the physical tensor: zero pads add nothing.
_REDUCES = frozenset(
    [
        "linalg_vector_norm",
        "norm",
        "sum",
        "_foreach_norm",
        "any",
        "count_nonzero",
        "_amp_foreach_non_finite_check_and_unscale_",
    ]
)
_RANDOM = frozenset(["normal_", "uniform_", "bernoulli_", "exponential_", "rand_like", "randn_like", "random_"])
_SAME_SHAPE_VIEWS = frozenset(["view", "_unsafe_view", "reshape", "expand"])


@cache
def _op_name(func: Any) -> str:
    return func._schema.name.split("::")[1]


@cache
def _order_free(func: Any) -> bool:
    name = _op_name(func)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name.startswith("_foreach_"):
        return name not in _FOREACH_REDUCES
    return torch.Tag.pointwise in func.tags or name in _LOCAL_NAMES


class _Mixed(Exception):
    """Operands at different placements."""


def _local_of(x: Any, like: TPTensor) -> Any:
    """The local tensor of an operand beside `like`; raises _Mixed where it cannot be had without communication."""
    if not isinstance(x, torch.Tensor):
        return x
    spec = like._spec
    if isinstance(x, DTensor):
        if x._spec.placements == spec.placements and x.shape == like.shape:
            return x._local_tensor
        if not x._spec.placements[0].is_replicate():
            raise _Mixed
        x = x._local_tensor
    if x.dim() == 0:
        return x
    if x.shape == like.shape and (placement := placement_of(like)).kind != "P":
        return shard_tensor(x, placement, spec.mesh.get_local_rank(), spec.mesh.size())
    raise _Mixed


def _rewrap(out: Any, like: TPTensor, name: str, sources: dict[int, Any]) -> Any:
    if not isinstance(out, torch.Tensor):
        return out
    spec = like._spec
    if _permuted(like) and name not in _KEEPS_ZERO:
        _zero_pads(out, spec)
    if id(out) in sources:
        return sources[id(out)]
    if out.dtype != like.dtype:
        spec = make_spec(spec.mesh, placement_of(like), like.shape, out.dtype)
    return wrap(out, spec)


def _zero_pads(local: torch.Tensor, spec: DTensorSpec) -> None:
    shard = cast(LayoutShard, spec.placements[0])
    for start, length in _pads(spec.mesh, shard):
        local.narrow(shard.dim, start, length).zero_()


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(e, torch.Tensor) for e in x)


def _on_locals(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """(whether it could be done on local tensors, result)."""
    name = _op_name(func)
    values = [*args, *kwargs.values()]
    lists = [v for v in values if _is_list(v)]
    sources: dict[int, Any] = {}
    try:
        if lists:
            rows: list[Any] = [
                next((x for x in row if isinstance(x, TPTensor)), None) for row in zip(*lists, strict=True)
            ]
            if None in rows:
                return False, None
            convert = lambda v: [_local_of(x, r) for x, r in zip(v, rows, strict=True)] if _is_list(v) else _scalar(v)  # noqa: E731
        else:
            rows = [next(v for v in values if isinstance(v, TPTensor))]
            convert = lambda v: _local_of(v, rows[0])  # noqa: E731
        local_args, local_kwargs = [convert(a) for a in args], {k: convert(v) for k, v in kwargs.items()}
    except _Mixed:
        return False, None
    for given, local in zip(values, [*local_args, *local_kwargs.values()], strict=True):
        pairs = zip(given, local, strict=True) if _is_list(given) else [(given, local)]
        sources.update({id(b): a for a, b in pairs if isinstance(a, TPTensor)})
    out = func(*local_args, **local_kwargs)
    if isinstance(out, (list, tuple)):
        return True, type(out)(_rewrap(o, r, name, sources) for o, r in zip(out, rows, strict=True))
    if lists and out is None:
        _zero_after_in_place(func, lists, rows, name)
        return True, None
    return True, _rewrap(out, rows[0], name, sources)


def _zero_after_in_place(func: Any, lists: Sequence[Any], rows: Sequence[TPTensor], name: str) -> None:
    if name.removeprefix("_foreach_") in _KEEPS_ZERO:
        return
    mutated = lists if name.startswith("_fused_") else lists[:1]
    for tensors in mutated:
        for x, row in zip(tensors, rows, strict=True):
            if _permuted(x) and x.shape == row.shape:
                _zero_pads(x._local_tensor, x._spec)


def _scalar(x: Any) -> Any:
    if isinstance(x, DTensor):
        if x.dim() == 0 and x._spec.placements[0].is_replicate():
            return x._local_tensor
        raise _Mixed
    return x


# -- everything else


def _on_dtensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` as DTensor's own, with permuted tensors only where their order is nothing."""
    name = _op_name(func)
    tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, TPTensor)]
    permuted = next((x for x in tensors if _permuted(x)), None)
    if permuted is not None:
        if name in _SAME_SHAPE_VIEWS and tuple(args[1]) == tuple(permuted.shape):
            return wrap(permuted._local_tensor, permuted._spec)
        if name == "mean" and len(args) == 1 and not kwargs:
            return args[0].sum() / args[0].numel()
        _check_order_free(func, name, args, kwargs, permuted)
    plain = {id(x): _as_dtensor(x) for x in tensors}
    back = {id(d): x for x, d in ((x, plain[id(x)]) for x in tensors)}
    swap = lambda x: plain.get(id(x), x)  # noqa: E731
    args, kwargs = torch.utils._pytree.tree_map(swap, (list(args), kwargs))
    try:
        out = func(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise _direct_use(func) from error
    if name in _RANDOM and permuted is not None:
        assert permuted is not None
        if not func._schema.is_mutable:
            out = wrap(out._local_tensor, permuted._spec)
        _zero_pads(out._local_tensor, permuted._spec)
    return torch.utils._pytree.tree_map(lambda x: back.get(id(x), x), out)


def _as_dtensor(x: TPTensor) -> DTensor:
    spec = x._spec
    shard = spec.placements[0]
    if isinstance(shard, LayoutShard):
        assert spec.tensor_meta is not None
        spec = _physical_spec(spec.mesh, shard, x.shape, spec.tensor_meta.dtype)
    return _new(DTensor, x._local_tensor, spec, requires_grad=False)


def _check_order_free(func: Any, name: str, args: Any, kwargs: Any, x: TPTensor) -> None:
    whole = len(args) < 3 or not args[2]  # no `dim` argument: a reduction of the whole tensor
    if name in ("linalg_vector_norm", "norm", "_foreach_norm"):
        order = args[1] if len(args) > 1 and args[1] is not None else 2
        if whole and not kwargs.get("dim") and order >= 0:
            return
    elif name in ("sum", "any", "count_nonzero"):
        if len(args) < 2 and not kwargs.get("dim"):
            return
    elif name in _REDUCES or name in _RANDOM:
        return
    raise UsageError(
        f"{func} on a parameter stored as {x._spec.placements[0]}: its local tensor is not a slice of the logical tensor",
        fix="use full_tensor() for the logical tensor; to compute with it, call the whole model, not this submodule",
    )


def _direct_use(func: Any) -> UsageError:
    return UsageError(
        f"{func} met a parameter of a parallelized model and a plain tensor",
        fix="call the whole model: its submodules hold shards; full_tensor() gives a parameter's whole value",
    )
