"""Where operations on sharded tensors go: the first that takes one of

    random numbers          those of one process (tensor_random.py)
    elementwise             on local tensors (tensor_elementwise.py); the result is sharded
    reductions to a value   by parts and over the ranks (tensor_reductions.py); the result is plain
    views                   a view that is gathered when it is used (tensor_whole.py)
    everything else         on whole tensors, the same on every rank (tensor_whole.py); the result is plain

Gradients of sharded tensors are sharded as they are, and those of plain tensors plain, whatever they were combined with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.distributed.failures import stopping_with_others
from megafx.distributed.tensor_elementwise import is_elementwise, on_locals, write_masked
from megafx.distributed.tensor_layout import has_replicas, new_shard
from megafx.distributed.tensor_random import draw, is_random
from megafx.distributed.tensor_reductions import reduced
from megafx.distributed.tensor_whole import (
    LazyView,
    Whole,
    averaged,
    count_write,
    in_backward,
    is_view,
    keep_form,
    on_whole,
    view,
    written,
    written_by,
)

aten = torch.ops.aten


class Values:
    """What sharded tensors and views of them have in common: Python values of the whole. Collective."""

    def tolist(self) -> Any:
        return Whole.apply(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return Whole.apply(self).numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return Whole.apply(self).__array__(*args, **kwargs)


class DispatchedTensor(Values, DTensor):
    """The part of `TPTensor` that operations go through."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.detach.default:
            return new_shard(type(args[0]), args[0]._local_tensor, args[0]._spec, requires_grad=False)
        adds = func is aten.add_.Tensor and not kwargs and type(args[0]) is type(args[1])
        if adds and args[0]._spec is args[1]._spec:
            args[0]._local_tensor.add_(args[1]._local_tensor)  # gradient accumulation
            count_write(args[0])
            return args[0]
        return _dispatch(func, args, kwargs or {})


class ShardView(Values, LazyView):
    """A view of a sharded tensor."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def full_tensor(self) -> torch.Tensor:
        """The view of the whole tensor, plain, on every rank. Collective; differentiable."""
        made: torch.Tensor = Whole.apply(self)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares no name
        return repr(self.full_tensor())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return cast(torch.Tensor, memo.setdefault(id(self), Whole.apply(self.detach()).clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Whole.apply(self.detach()).clone().__reduce_ex__(protocol)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale_gradients(func, *args, **kwargs)
    with stopping_with_others(f"{func} on a parameter"):
        result = NotImplemented
        ours = _with_replicas(args)
        if ours is not None and func in _LINEAR and in_backward():
            args = _averaged_operands(args, ours)
        if is_random(func):
            result = draw(func, args, kwargs)
        elif ours is not None and _meets_rows(func, args, kwargs):
            result = on_whole(func, args, kwargs)
        elif is_elementwise(func):
            result = on_locals(func, args, kwargs)
        elif func is aten.index_put_.default:
            result = write_masked(func, *args, **kwargs)
        elif is_view(func) and isinstance(args[0], (DTensor, LazyView)):
            result = view(ShardView, func, args, kwargs)
        if result is NotImplemented:
            result = reduced(func, args, kwargs)
        if result is NotImplemented:
            result = on_whole(func, args, kwargs)
        elif written_by(func):
            count_write(written(func, args, kwargs))
    if torch.is_grad_enabled():
        _connect(args, kwargs, result)
    return result


# -- with data parallelism
#
# Plain tensors may be of a rank's own rows. What is computed of them and of parameters, for a loss, is whole on each rank; its
# gradient is averaged when it gets the form of the parameter (tensor_whole.py). In backward that is where autograd adds it to
# one that has the form already, or multiplies by the gradient of a number (of a norm).

_LINEAR = frozenset([aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor])


def _with_replicas(args: Any) -> DTensor | None:
    """The first operand that data-parallel ranks have too."""
    found = (x.base if isinstance(x, ShardView) else x for x in args if isinstance(x, (DispatchedTensor, ShardView)))
    first = next(found, None)
    return first if first is not None and has_replicas(first._spec.mesh) else None


def _meets_rows(func: Any, args: Any, kwargs: Any) -> bool:
    """True if an elementwise operation, for a loss, has a plain operand."""
    if not torch.is_grad_enabled() or in_backward() or not is_elementwise(func) or written_by(func):
        return False
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return any(x.requires_grad for x in tensors) and any(not isinstance(x, (DTensor, LazyView)) for x in tensors)


def _averaged_operands(args: Any, ours: DTensor) -> Any:
    """Plain ones of the same shape, and numbers."""
    plain = lambda x: isinstance(x, torch.Tensor) and not isinstance(x, (DTensor, LazyView))
    return tuple(averaged(x, ours._spec) if plain(x) and x.shape in ((), ours.shape) else x for x in args)


def _connect(args: Any, kwargs: Any, result: Any) -> None:
    """Let gradients have the form of their tensors, where those of the result may have another."""
    results = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    kind = next(type(x) for x in _ours(args, kwargs))
    kind = kind if issubclass(kind, DispatchedTensor) else DispatchedTensor
    for x in pytree.tree_leaves((args, kwargs)):
        if not isinstance(x, torch.Tensor) or not x.requires_grad or isinstance(x, ShardView):
            continue
        if isinstance(x, DTensor):
            same = all(
                isinstance(r, DTensor) and (r._spec.placements, r.shape) == (x._spec.placements, x.shape)
                for r in results
            )
        else:
            same = not any(isinstance(r, DTensor) for r in results)
        if not same:
            keep_form(x, type(x) if isinstance(x, DTensor) else kind)


def _ours(args: Any, kwargs: Any) -> list[Any]:
    found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (DispatchedTensor, ShardView))]
    return [x.base if isinstance(x, ShardView) else x for x in found]


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
    count_write(sharded)
    for mesh in dict.fromkeys(g.device_mesh for g in sharded):  # an order that all ranks have in common
        for axis in range(mesh.ndim):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))


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
    ours = [t for t in types if issubclass(t, (DispatchedTensor, ShardView))]
    return max(ours, key=lambda t: len(t.__mro__), default=None)


# What an optimizer asks each parameter at each step, without an operation that could be dispatched: a mode for each of these
# questions took a sixth of a step of 32 ms.
_READ = (
    "grad",
    "grad_fn",
    "requires_grad",
    "is_leaf",
    "_version",
    "dtype",
    "device",
    "layout",
    "shape",
    "ndim",
    "is_cuda",
)
_PROPERTIES: Any = [getattr(torch.Tensor, name) for name in (*_READ, "is_sparse", "is_meta", "is_cpu", "is_nested")]
_ASKED = frozenset(
    [prop.__get__ for prop in _PROPERTIES]
    + [_PROPERTIES[0].__set__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel]
    + [torch.is_complex, torch.Tensor.is_complex, torch.is_floating_point, torch.Tensor.is_floating_point]
)


def _through_mode(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` where there is no dispatch of subclasses."""
    if func in _ASKED:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    with torch._C.DisableTorchFunctionSubclass(), _Dispatching():
        return func(*args, **(kwargs or {}))


def _handle(func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of one operation: DTensor's own way, but for TPTensors."""
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, DispatchedTensor) for x in leaves):
        return _dispatching(map(type, leaves)).__torch_dispatch__(func, (), args, kwargs)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(func)
    try:
        return func(*args, **(kwargs or {}))
    finally:
        handlers[func] = own


def _aten_ops() -> Iterator[Any]:
    """Those that the dispatcher knows."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, full = name.partition("::")
        packet, _, overload = full.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None) if namespace == "aten" else None
        if op is not None:
            yield op


if not SUBCLASS_DISPATCH:
    classes: Any = (DispatchedTensor, ShardView)
    for one in classes:
        one.__torch_function__ = classmethod(_through_mode)
    _handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    _handlers.update({op: _handle for op in _aten_ops() if op not in _handlers})
