"""Outputs of a graph as the user's structure: whole tensors, the loss, and lazy ones beside it.

`LazyTensor` represents a large output (logits beside a loss) that nobody may want: it knows shape and dtype, and is made at the
first use of it: put together of the ranks' shards, collectively, and computed where the graph left it out (`Output.lazy`). To
autograd it is an output of the graph like any other: gradients of what is computed with it arrive there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh

from megafx.distributed.tensor import wrap
from megafx.distributed.tensor_layout import gather_shards, make_spec, zero_pads
from megafx.ir.program import PLACEMENT, Program
from megafx.ir.sizes import Sizes
from megafx.placements.types import Layout, Placement, S

_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}
# Questions that do not make the tensor whole.
_FIELDS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu")
_QUERIES = ("size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "__len__", "get_device")
_CHECKS = ("is_floating_point", "is_complex", "is_contiguous", "is_inference")
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in (*_FIELDS, "is_meta")]
    + [getattr(torch.Tensor, name) for name in (*_QUERIES, *_CHECKS)]
)
_DATA: Any = torch.Tensor.data  # a descriptor of C
# What autograd keeps of a tensor object: of the lazy tensor itself.
_OF_AUTOGRAD = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("grad", "retains_grad", "output_nr", "_backward_hooks")]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")]
    + [torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.requires_grad_]
    + [
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    ]
)


class LazyTensor(torch.Tensor):
    """A tensor that is made whole on first use: every rank of the axis has to use it then.

    make: () -> the whole tensor, called at most once for all that derive from this one. What is computed with it is connected
    to it by `_Value`, where autograd is on.
    """

    _make: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, make: Callable[[], torch.Tensor]
    ) -> Any:
        lazy = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        lazy._make = make
        return lazy

    def __init__(self, *_: Any) -> None:
        pass

    @staticmethod
    def of(
        make: Callable[[], torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> LazyTensor:
        """make: () -> the tensor; it is called, without gradients, at most once, and dropped then."""
        found: LazyTensor = LazyTensor(shape, dtype, device, _once(make))
        return found

    def whole(self) -> torch.Tensor:
        """The tensor itself. Collective the first time."""
        return self._make()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or func in _OF_AUTOGRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in (torch.Tensor.detach, torch.detach, _DATA.__get__) and isinstance(args[0], LazyTensor):
            return LazyTensor(args[0].shape, args[0].dtype, args[0].device, args[0]._make)
        dtype = _CASTS.get(func) or _cast_of(func, args, kwargs)
        if dtype is not None:
            return _cast(args[0], dtype)
        args, kwargs = torch.utils._pytree.tree_map(_connected, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_whole, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares no name
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, made whole on first use)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.whole().clone()


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, LazyTensor) else x


def _connected(x: Any) -> Any:
    """The tensor that a lazy one is, with its gradient."""
    if not isinstance(x, LazyTensor):
        return x
    value: torch.Tensor = (
        _Value.apply(x, x.whole) if x.requires_grad and torch.is_grad_enabled() else x.whole().detach()
    )
    return value


class _Value(torch.autograd.Function):
    """What `make` gives for a lazy tensor: a tensor of its shape. Gradients go to the lazy tensor, in its dtype."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyTensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.dtype = lazy.dtype
        ctx.set_materialize_grads(False)
        return make().detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else gradient.to(ctx.dtype), None


def _cast_of(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype of `x.to(dtype)`."""
    plain = func is torch.Tensor.to and isinstance(args[0], LazyTensor) and not kwargs and len(args) == 2
    return args[1] if plain and isinstance(args[1], torch.dtype) else None


def _cast(lazy: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    if lazy.dtype == dtype:
        return lazy
    make = lazy._make
    cast = LazyTensor(lazy.shape, dtype, lazy.device, _once(lambda: make().to(dtype)))
    if not (lazy.requires_grad and torch.is_grad_enabled()):
        return cast
    connected: LazyTensor = _Value.apply(lazy, lambda: cast)
    return connected


def _once(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    made: list[torch.Tensor] = []
    todo = [make]

    def run() -> torch.Tensor:
        if todo:
            with torch.no_grad():
                made.append(todo[0]())
            todo.clear()  # and with it what the tensor was made from
        return made[0]

    return run


@dataclass(frozen=True)
class OutputShard:
    """A user output that leaves the graph sharded. layout: in structural sizes of the program."""

    placement: Placement
    sizes: Sizes

    def bind(self, sizes_of: Mapping[sympy.Symbol, int]) -> Placement:
        """The placement in the sizes of one call."""
        values = {s: sympy.Integer(n) for s, n in sizes_of.items()}
        flat = [int(self.sizes.expr(n).xreplace(values)) for n in self.placement.flat_layout]
        return S(self.placement.dim, Layout.from_flat(flat))


def output_shards(program: Program) -> list[OutputShard | None]:
    """For each output of a PLACED (or later) program that is not a gradient: how it is sharded, if it is."""
    values = program.results()
    assert isinstance(values, (tuple, list))
    shards: list[OutputShard | None] = []
    for spec, node in zip(program.outputs, values, strict=True):
        placement = node.meta.get(PLACEMENT) if spec.kind == "user" and hasattr(node, "meta") else None
        if spec.kind != "gradient":
            shards.append(OutputShard(placement, program.sizes) if placement and placement.is_shard else None)
    return shards


def bind_shape(shape: Sequence[Any], sizes: Sizes, sizes_of: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """Symbolic sizes of a program in the sizes of one call."""
    values = {s: sympy.Integer(n) for s, n in sizes_of.items()}
    return tuple(int(sizes.expr(sizes.of(n)).xreplace(values)) for n in shape)


def _logical_shape(local: torch.Tensor, placement: Placement) -> torch.Size:
    shape = list(local.shape)
    shape[placement.dim] = placement.cut.size
    return torch.Size(shape)


def make_lazy(local: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> LazyTensor:
    """This rank's shard (possibly lazy itself) -> LazyTensor of the whole."""

    def make() -> torch.Tensor:
        shard = local.whole() if isinstance(local, LazyTensor) else local.detach()
        return gather_shards(shard, ((placement, mesh.size()),), mesh.get_group())

    return LazyTensor.of(make, _logical_shape(local, placement), local.dtype, local.device)


def make_dtensor(local: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard -> DTensor (`gather_outputs=False`)."""
    spec = make_spec(mesh, ((placement, mesh.size()),), _logical_shape(local, placement), local.dtype)
    if placement.cut.padded(mesh.size()):  # in a graph padding holds anything; in a TPTensor zeros
        local = local.clone()
        zero_pads(local, spec)
    return wrap(local, spec)
