"""Operations on tensors whose physical order is not the logical one: some run on local tensors, some are DTensor's own, the
others are refused. The table is in distributed/tensor.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.distributed.tensor_layout import LayoutShard, is_permuted, make_spec, physical_spec, placement_of, zero_pads
from megafx.distributed.whole_operations import in_optimizer_step, on_whole, whole_of, written_tensors
from megafx.errors import UsageError
from megafx.placements.tensors import shard_tensor

aten = torch.ops.aten
_new = DTensor.__new__  # a third of the cost of DTensor(...), whose __init__ does nothing else


class DispatchedTensor(DTensor):
    """The part of `TPTensor` that operations go through."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.detach.default:
            return _new(type(args[0]), args[0]._local_tensor, args[0]._spec, requires_grad=False)
        adds = func is aten.add_.Tensor and not kwargs and type(args[0]) is type(args[1])
        if adds and args[0]._spec is args[1]._spec:
            args[0]._local_tensor.add_(args[1]._local_tensor)  # gradient accumulation
            _count_write(args[0])
            return args[0]
        kwargs = kwargs or {}
        if func in _TO_BOOL:  # made of operations on TPTensors, which come here too
            with contextlib.nullcontext() if SUBCLASS_DISPATCH else _Dispatching():
                return _TO_BOOL[func](*args, **kwargs)
        done, result, written = False, None, written_tensors(func, args, kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            done = True
            _unscale_gradients(func, *args, **kwargs)
        elif _order_free(func):
            done, result = _on_locals(func, args, kwargs, written)
        elif func is aten.index_put_.default:
            done, result = _write_masked(func, *args, **kwargs)
        if not done and _computes_whole(func, args, kwargs, written):
            done, result = True, on_whole(func, args, kwargs)
        if not done:
            result = _on_dtensors(func, args, kwargs)
            if (
                isinstance(result, DTensor)
                and not isinstance(result, cls)
                and result.dim() == 0
                and in_optimizer_step()
            ):
                result = whole_of(result)
        _count_write(*written)
        return result


class Unreduced(DTensor):
    """A partial result of TPTensors (a sum, a norm). Reading it as a number reduces it over the ranks first, where DTensor
    would give each rank its own part; otherwise it is an ordinary DTensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten._local_scalar_dense.default:
            whole = _new(DTensor, args[0]._local_tensor, args[0]._spec, requires_grad=False).full_tensor()
            return func(whole)
        plain = lambda x: _new(DTensor, x._local_tensor, x._spec, requires_grad=False) if isinstance(x, cls) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return torch.utils._pytree.tree_map(_marked, func(*args, **kwargs))


def _marked(x: Any) -> Any:
    if type(x) is DTensor and any(p.is_partial() for p in x._spec.placements):
        return _new(Unreduced, x._local_tensor, x._spec, requires_grad=False)
    return x


def _all(x: Any) -> bool:
    return bool((x == 0).sum().full_tensor() == 0)


def _equal(x: DTensor, y: DTensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and _all(x == y)


# Reductions to a bool by sums, to which pads add nothing; the result is the same on all ranks.
_TO_BOOL: dict[Any, Callable[..., Any]] = {
    aten.any.default: lambda x: (x != 0).sum() > 0,
    aten.all.default: lambda x: (x == 0).sum() == 0,
    aten.equal.default: _equal,
    aten.allclose.default: lambda x, y, *tolerance, **more: _all(torch.isclose(x, y, *tolerance, **more)),
}


def _count_write(*written: torch.Tensor) -> None:
    """Count a write through a DTensor as one into its local tensor: below autograd nothing else does."""
    for tensor in written:
        if isinstance(tensor, DTensor) and not tensor._local_tensor.is_inference():
            torch.autograd.graph.increment_version(tensor._local_tensor)


# -- before torch 2.13
#
# There DTensor's C++ dispatch handles its subclasses too, without calling their `__torch_dispatch__`; nor does the engine's
# accumulation of gradients. The user's operations are caught by a mode instead, and those of autograd by DTensor's table of
# handlers, which that dispatch does consult.

SUBCLASS_DISPATCH = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)


class _Dispatching(TorchDispatchMode):
    """Sends operations on TPTensors to the `__torch_dispatch__` of their class; the others run as usual."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _dispatching(types)
        return func(*args, **(kwargs or {})) if kind is None else kind.__torch_dispatch__(func, types, args, kwargs)


def _dispatching(types: Iterable[type]) -> Any:
    """The class among these whose `__torch_dispatch__` is called: the most derived, as torch 2.13 has it."""
    ours = [t for t in types if issubclass(t, (DispatchedTensor, Unreduced))]
    return max(ours, key=lambda t: len(t.__mro__), default=None)


def _through_mode(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` where there is no dispatch of subclasses."""
    with torch._C.DisableTorchFunctionSubclass(), _Dispatching():
        return func(*args, **(kwargs or {}))


def _handle(func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of one operation: DTensor's own way, but for TPTensors."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, DispatchedTensor) for x in leaves):
        return _dispatching(map(type, leaves)).__torch_dispatch__(func, (), args, kwargs)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(func)
    try:
        return func(*args, **(kwargs or {}))
    finally:
        handlers[func] = own


_PLAIN = ("detach", "alias", "clone", "view", "expand", "new_empty_strided", "zeros_like", "ones_like", "copy_", "neg")
_OF_AUTOGRAD = [
    *(getattr(aten, name).default for name in _PLAIN),
    *(getattr(aten, name).Tensor for name in ("add", "add_", "sub", "mul", "div")),
    *(aten.mul.Scalar, aten.pow.Tensor_Scalar),
]

if not SUBCLASS_DISPATCH:
    DispatchedTensor.__torch_function__ = classmethod(_through_mode)  # type: ignore[assignment]
    Unreduced.__torch_function__ = classmethod(_through_mode)  # type: ignore[assignment]
    _handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    _handlers.update(dict.fromkeys(_OF_AUTOGRAD, _handle))


# -- elementwise operations, whatever the order of elements

_COPIES = ("alias", "clone", "copy_", "zero_", "zeros_like", "_to_copy", "lerp", "lerp_")
_FUSED = tuple(f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_LOCAL_NAMES = frozenset((*_COPIES, "empty_like", "fill_", "full_like", "isclose", "ones_like", *_FUSED))
_FOREACH_REDUCES = frozenset(["_foreach_norm", "_foreach_max", "_foreach_powsum"])
# Operations that give zero where all sharded operands are zero; after the others pads are zeroed again.
_KEEPS_ZERO = frozenset(
    (*_COPIES, "sign", *(n + s for n in ("neg", "sqrt", "abs", "mul", "addcmul") for s in ("", "_")))
)
_NORMS = frozenset(["linalg_vector_norm", "norm", "_foreach_norm"])
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


def _local_of(x: Any, like: DispatchedTensor, written: Sequence[torch.Tensor] = ()) -> Any:
    """The local tensor of an operand beside `like`; raises _Mixed where it cannot be had without communication.

    written: what the operation writes. A whole tensor among these has no part that could be written in its place.
    """
    if not isinstance(x, torch.Tensor):
        return x
    spec = like._spec
    if isinstance(x, DTensor):
        if x._spec.placements == spec.placements and x.shape == like.shape:
            return x._local_tensor
        if not x._spec.placements[0].is_replicate():
            raise _Mixed
        if _is_written(x, like, written):
            raise _Mixed
        x = x._local_tensor
    if x.dim() == 0:
        return x
    if _is_written(x, like, written):
        raise _Mixed
    if x.shape == like.shape and (placement := placement_of(like)).kind != "P":
        return shard_tensor(x, placement, spec.mesh.get_local_rank(), spec.mesh.size())
    raise _Mixed


def _is_written(x: torch.Tensor, beside: DispatchedTensor, written: Sequence[torch.Tensor]) -> bool:
    """Whether whole x is written, beside a shard."""
    return any(x is w for w in written) and x.dim() > 0 and not beside._spec.placements[0].is_replicate()


def _computes_whole(func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> bool:
    """Whether an operation is done on whole values: in an optimizer's step, and where a whole tensor is written, such as an
    average of parameters that was made before they were cut."""
    tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if _order_free(func) and any(_is_written(w, x, written) for w in written for x in tensors if _is_shard(x)):
        return True
    name = _op_name(func)
    reduces = (name in _NORMS or name in ("sum", "mean", "count_nonzero")) and _is_scalar(func, args, kwargs)
    return not reduces and name not in _RANDOM and name != "_local_scalar_dense" and in_optimizer_step()


def _is_shard(x: torch.Tensor) -> bool:
    return isinstance(x, DispatchedTensor) and not x._spec.placements[0].is_replicate()


def _is_scalar(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a reduction is one of all elements, to a 0-d tensor or a list of such."""
    if _op_name(func) == "_foreach_norm":
        return True
    at = next((i for i, a in enumerate(func._schema.arguments) if a.name == "dim"), None)
    dim = None if at is None else args[at] if at < len(args) else kwargs.get("dim")
    return dim is None or (isinstance(dim, (list, tuple)) and not dim)


def _rewrap(out: Any, like: DispatchedTensor | None, name: str, sources: dict[int, Any]) -> Any:
    if not isinstance(out, torch.Tensor) or like is None:
        return out
    spec = like._spec
    if is_permuted(like) and name not in _KEEPS_ZERO:
        zero_pads(out, spec)
    if id(out) in sources:
        return sources[id(out)]
    if out.dtype != like.dtype:
        spec = make_spec(spec.mesh, placement_of(like), like.shape, out.dtype)
    return _new(type(like), out, spec, requires_grad=False)


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(e, torch.Tensor) for e in x)


def _on_locals(func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> tuple[bool, Any]:
    """(whether it could be done on local tensors, result). written: what the operation writes."""
    name = _op_name(func)
    values = [*args, *kwargs.values()]
    lists = [v for v in values if _is_list(v)]
    sources: dict[int, Any] = {}
    try:
        if lists:
            first = lambda row: next((x for x in row if isinstance(x, DispatchedTensor)), None)  # noqa: E731
            rows: list[Any] = [first(row) for row in zip(*lists, strict=True)]
            convert = lambda v: (  # noqa: E731
                [x if r is None else _local_of(x, r, written) for x, r in zip(v, rows, strict=True)]
                if _is_list(v)
                else _scalar(v)
            )
        else:
            rows = [next(v for v in values if isinstance(v, DispatchedTensor))]
            convert = lambda v: _local_of(v, rows[0], written)  # noqa: E731
        local_args, local_kwargs = [convert(a) for a in args], {k: convert(v) for k, v in kwargs.items()}
    except _Mixed:
        return False, None
    for given, local in zip(values, [*local_args, *local_kwargs.values()], strict=True):
        pairs = zip(given, local, strict=True) if _is_list(given) else [(given, local)]
        sources.update({id(b): a for a, b in pairs if isinstance(a, DispatchedTensor)})
    out = func(*local_args, **local_kwargs)
    if isinstance(out, (list, tuple)):
        return True, type(out)(_rewrap(o, r, name, sources) for o, r in zip(out, rows, strict=True))
    if lists and out is None:
        if name.removeprefix("_foreach_") not in _KEEPS_ZERO:
            for tensors in lists if name in _FUSED else lists[:1]:  # what is written
                for x, row in zip(tensors, rows, strict=True):
                    if is_permuted(x) and x.shape == row.shape:
                        zero_pads(x._local_tensor, x._spec)
        return True, None
    return True, _rewrap(out, rows[0], name, sources)


def _write_masked(func: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> tuple[bool, Any]:
    """`x[mask] = number`, as `_on_locals`: the mask is placed as x is, and false in the padding."""
    mask = indices[0]
    if not (isinstance(x, DispatchedTensor) and isinstance(mask, DispatchedTensor) and mask.dtype == torch.bool):
        return False, None
    if len(indices) > 1 or mask.shape != x.shape or mask._spec.placements != x._spec.placements or values.dim() > 0:
        return False, None
    func(x._local_tensor, [mask._local_tensor], values, accumulate)
    return True, x


def _scalar(x: Any) -> Any:
    if isinstance(x, DTensor):
        if x.dim() == 0 and x._spec.placements[0].is_replicate():
            return x._local_tensor
        raise _Mixed
    return x


def _unscale_gradients(
    func: Callable[..., None], gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply gradients by 1 / scale, in place; found_inf becomes 1 on all ranks where any rank met an infinity or NaN.

    func: `_amp_foreach_non_finite_check_and_unscale_`, which `torch.amp.GradScaler` calls for the gradients of each dtype;
    the same ones on all ranks. found_inf, inv_scale: [] or [1], plain tensors. A gradient that is no DTensor is the same on
    all ranks. DTensor's own handler of this operation (torch 2.11 to 2.13, `found_inf_reduce_handler`) looks at the first
    gradient alone: where that one is replicated (a layer norm's) the others' infinities stay with the rank that has them.
    """
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    func([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], found_inf, inv_scale)
    for mesh in dict.fromkeys(g.device_mesh for g in sharded):  # an order that all ranks have in common
        for axis in range(mesh.ndim):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))


def _on_dtensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` as DTensor's own, with permuted tensors only where the order of elements does not matter."""
    name = _op_name(func)
    tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, DispatchedTensor)]
    permuted = next((x for x in tensors if is_permuted(x)), None)
    if permuted is not None:
        if name in _SAME_SHAPE_VIEWS and tuple(args[1]) == tuple(permuted.shape):
            return _new(type(permuted), permuted._local_tensor, permuted._spec, requires_grad=False)
        if name == "mean" and len(args) == 1 and not kwargs:
            return _marked(_on_dtensors(aten.sum.default, args, {}) / args[0].numel())
        _check_order_free(func, name, args, kwargs, permuted)
    plain = {id(x): _as_dtensor(x, name in _NORMS) for x in tensors}
    back = {id(plain[id(x)]): x for x in tensors}
    args, kwargs = torch.utils._pytree.tree_map(lambda x: plain.get(id(x), x), (list(args), kwargs))
    try:
        out = func(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise UsageError(
            f"{func} met a parameter of a parallelized model and a plain tensor",
            fix="call the whole model: its submodules hold shards; full_tensor() gives a parameter's whole value",
        ) from error
    if name in _RANDOM and permuted is not None:
        if not func._schema.is_mutable:
            out = _new(type(permuted), out._local_tensor, permuted._spec, requires_grad=False)
        zero_pads(out._local_tensor, permuted._spec)
    return torch.utils._pytree.tree_map(lambda x: back.get(id(x), _marked(x)), out)


def _as_dtensor(x: DispatchedTensor, zero_for_none: bool) -> DTensor:
    """zero_for_none: where this rank holds nothing, zeros stand for it, as norms of nothing are an error for some orders."""
    spec, local = x._spec, x._local_tensor
    if zero_for_none and not local.numel() and x.numel():
        local = local.new_zeros([1, *x.shape[1:]])
    shard = spec.placements[0]
    if isinstance(shard, LayoutShard):
        assert spec.tensor_meta is not None
        spec = physical_spec(spec.mesh, shard, x.shape, spec.tensor_meta.dtype)
    return _new(DTensor, local, spec, requires_grad=False)


def _check_order_free(func: Any, name: str, args: Any, kwargs: Any, x: DispatchedTensor) -> None:
    """Raise UsageError unless DTensor's own op is right on the physical, zero-padded tensor."""
    if name in _NORMS:
        order = args[1] if len(args) > 1 and args[1] is not None else 2
        right = (len(args) < 3 or not args[2]) and not kwargs.get("dim") and order >= 0
    elif name in ("sum", "count_nonzero"):
        right = len(args) < 2 and not kwargs.get("dim")
    else:
        right = name in _RANDOM
    if not right:
        raise UsageError(
            f"{func} on a parameter stored as {x._spec.placements[0]}: its local tensor is not a slice of the logical tensor",
            fix="use full_tensor() for the logical tensor; to compute with it, call the whole model, not this submodule",
        )
