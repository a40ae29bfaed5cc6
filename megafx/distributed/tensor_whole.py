"""Operations on shards that need all values: they run on whole tensors, gathered for the operation, and the same on every
rank; what they write goes back to the shards. Views of shards are gathered when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from megafx.distributed.failures import stopping_with_others
from megafx.distributed.tensor_layout import everyone_on, has_replicas, new_shard, shard_of, spec_of, whole_of
from megafx.errors import UsageError

Call = Callable[[Any, list[Any], dict[str, Any]], Any]
NAME = "_megafx_name"  # attribute of a parameter: its FQN, for errors


class LazyView(torch.Tensor):
    """A view of a sharded tensor, such as `w[0]` or `w.t()`: which tensor, and the views to take of its whole value.
    Using it gives plain tensors; writing it writes the shards."""

    base: DTensor  # the sharded tensor
    # (op, its further arguments, options, index among its results)
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int | None], ...]
    form: torch.Tensor  # the view of a meta tensor

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the whole value of `base`."""
        for func, args, kwargs, index in self.steps:
            whole = func(whole, *args, **kwargs)
            whole = whole if index is None else whole[index]
        return whole


@cache
def op_name(func: Any) -> str:
    name: str = func._schema.name
    return name.split("::")[1]


@cache
def written_by(func: Any) -> tuple[int | str, ...]:
    """Arguments that the operation writes: positions, or names if keyword-only."""
    arguments = func._schema.arguments
    writes = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(arguments[i].name if arguments[i].kwarg_only else i for i in writes)


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that a call writes."""
    found = (args[i] if isinstance(i, int) and i < len(args) else kwargs.get(i) for i in written_by(func))
    return [x for x in pytree.tree_leaves([*found]) if isinstance(x, torch.Tensor)]


def count_write(x: Any) -> None:
    """Count a write through a DTensor as one into its local tensor: below autograd nothing else does."""
    for tensor in x if isinstance(x, (list, tuple)) else (x,):
        if isinstance(tensor, DTensor) and not tensor._local_tensor.is_inference():
            torch.autograd.graph.increment_version(tensor._local_tensor)


class Wholes:
    """The whole tensors that one operation uses, each gathered once."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def __call__(self, x: Any) -> Any:
        """A sharded tensor or a view of one -> plain and whole; anything else as it is."""
        if isinstance(x, LazyView):
            return x.of_whole(self(x.base))
        if not isinstance(x, DTensor):
            return x
        key = id(x._local_tensor)
        if key not in self.made:
            self.made[key] = whole_of(x) if x._spec.mesh.ndim == 1 else x.full_tensor().detach()
        return self.made[key]

    def write_back(self, x: Any) -> None:
        """The shard of what an operation has written through x."""
        base = x.base if isinstance(x, LazyView) else x
        if isinstance(base, DTensor):
            whole = self(base)
            if base._spec.placements[0].is_shard():
                base._local_tensor.copy_(shard_of(whole, base._spec))
            count_write(base)


def on_whole(func: Any, args: Any, kwargs: Any, call: Call = lambda func, args, kwargs: func(*args, **kwargs)) -> Any:
    """Run `func` on whole tensors. Collective where operands are sharded. call: runs it, given plain operands."""
    targets = written(func, args, kwargs)
    if op_name(func).startswith("new_"):  # takes dtype and device of its operand, no values
        base = args[0].base if isinstance(args[0], LazyView) else args[0]
        return func(base._local_tensor if isinstance(base, DTensor) else base, *args[1:], **kwargs)
    _check_memory(func, targets)
    wholes = Wholes()
    plain_args, plain_kwargs = pytree.tree_map(wholes, (list(args), dict(kwargs)))
    back = {id(p): x for x in targets for p in [_find(x, (args, kwargs), (plain_args, plain_kwargs))]}
    out = call(func, plain_args, plain_kwargs)
    for x in targets:
        wholes.write_back(x)
    return pytree.tree_map(lambda x: back.get(id(x), x), out)


def _find(x: Any, given: Any, plain: Any) -> Any:
    """The plain operand that replaces x."""
    pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(plain), strict=True)
    return next(p for g, p in pairs if g is x)


def _check_memory(func: Any, targets: list[Any]) -> None:
    """Raise where a shard or a view of one would get other memory or another shape."""
    moves = torch.Tag.inplace_view in func.tags or op_name(func) in ("set_", "resize_", "resize_as_")
    if moves and any(isinstance(x, (DTensor, LazyView)) for x in targets):
        raise refusal(func, targets[0], "changes the shape or the memory of")


def refusal(func: Any, x: Any, does: str) -> UsageError:
    """The error for an operation that shards cannot take."""
    base = x.base if isinstance(x, LazyView) else x
    name = getattr(base, NAME, None)
    what = f"parameter '{name}'" if name else "a tensor"
    where = base._spec.placements[0] if isinstance(base, DTensor) else "plain"
    found = f"{func} {does} {what} of shape {tuple(base.shape)}, of which each rank holds a part ({where})"
    return UsageError(
        found,
        fix="work with a whole copy (full_tensor(), on every rank); change parameters in `with "
        "megafx.whole_parameters(model):`, where they are plain and whole; or compute it inside of the model's forward",
    )


# -- views


@cache
def is_view(func: Any) -> bool:
    """True if the results of the operation are views of its first operand."""
    if op_name(func).startswith("unsafe_") and not func._schema.is_mutable:  # split, chunk: schemas do not say so
        return True
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and not first.is_write and all(r.alias_info is not None for r in func._schema.returns)


_SAME_ORDER = frozenset(["alias", "expand", "lift_fresh", "slice", "squeeze", "view", "_unsafe_view"])


def view(kind: type[LazyView], func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a sharded tensor, or of a view of one: a `kind`, a list of them, or where it changes nothing the same shard."""
    x = args[0]
    base, steps = (x.base, x.steps) if isinstance(x, LazyView) else (x, ())
    form = x.form if isinstance(x, LazyView) else torch.empty(x.shape, dtype=x.dtype, device="meta")
    out = func(form, *args[1:], **kwargs)
    if base is x and isinstance(out, torch.Tensor) and op_name(func) in _SAME_ORDER and out.shape == x.shape:
        return new_shard(type(x), x._local_tensor, x._spec, requires_grad=False)

    def make(form: torch.Tensor, index: int | None) -> LazyView:
        made = torch.Tensor._make_wrapper_subclass(
            kind,
            form.shape,
            strides=form.stride(),
            storage_offset=form.storage_offset(),
            dtype=form.dtype,
            device=base.device,
        )
        made.base, made.form, made.steps = base, form, (*steps, (func, tuple(args[1:]), dict(kwargs), index))
        return made

    if isinstance(out, torch.Tensor):
        return make(out, None)
    return type(out)(make(each, i) for i, each in enumerate(out))


# -- autograd: gradients of sharded tensors are sharded, those of plain tensors plain
#
# What data-parallel ranks compute of a parameter outside of the model is of their own rows, and their losses are averaged. So
# are its gradients, which come plain: before ranks take their shards of it. A gradient that is None stays so: optimizers leave
# such a parameter as it is.


class Averaged(torch.autograd.Function):
    """The mean over all ranks that train a model, of which tensor-parallel ones have equal values. Collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        group = everyone_on(spec.mesh)
        repeated = x.dim() > 0 and x.numel() > 0 and not any(x.stride())  # of a sum or a mean: one number
        mean = (x.reshape(-1)[:1] if repeated else x).detach().clone(memory_format=torch.contiguous_format)
        with stopping_with_others("backward of a parameter that is used outside of the model"):
            dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        return mean.expand(x.shape) if repeated else mean

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None if grad is None else averaged(grad, ctx.spec), None


def averaged(x: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A plain gradient of a tensor of this spec, over data-parallel ranks, if there are any. Collective; differentiable."""
    if not has_replicas(spec.mesh) or x.is_meta:
        return x
    made: torch.Tensor = Averaged.apply(x, spec)
    return made


def in_backward() -> bool:
    """True if autograd runs a backward now."""
    return torch._C._current_graph_task_id() != -1


class Part(torch.autograd.Function):
    """Whole tensor -> this rank's part, as a tensor of `kind`; differentiable."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, spec: DTensorSpec, kind: type[DTensor]) -> DTensor:
        ctx.set_materialize_grads(False)
        return new_shard(kind, shard_of(whole.detach(), spec), spec_of(spec, whole.dtype), requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return Whole.apply(grad) if isinstance(grad, DTensor) else grad, None, None


class Whole(torch.autograd.Function):
    """Sharded tensor, or a view of one -> whole and plain; differentiable. Collective."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        ctx.form = x._spec if isinstance(x, DTensor) else None, type(x)
        ctx.set_materialize_grads(False)
        whole: torch.Tensor = Wholes()(x)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        spec, kind = ctx.form
        if grad is None or spec is None or isinstance(grad, DTensor):
            return grad
        made: torch.Tensor = Part.apply(averaged(grad, spec), spec, kind)
        return made


class GradientForm:
    """Hook on a tensor: its gradient gets the tensor's form. spec: None of a plain tensor."""

    def __init__(self, spec: DTensorSpec | None, kind: type[DTensor]) -> None:
        self.spec, self.kind = spec, kind

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # of a parameter that this call does not use
            return None
        if isinstance(grad, DTensor) and self.spec is not None and grad._spec.placements == self.spec.placements:
            return grad
        if isinstance(grad, (DTensor, LazyView)):
            grad = Whole.apply(grad)
        return grad if self.spec is None else Part.apply(averaged(grad, self.spec), self.spec, self.kind)


def keep_form(x: Any, kind: type[DTensor]) -> None:
    """Let the gradient of x, which enters an operation whose result has another form, have the form of x."""
    spec = x._spec if isinstance(x, DTensor) else None
    for hook in (x._backward_hooks or {}).values():
        if isinstance(hook, GradientForm):
            hook.spec = spec
            x._backward_hooks = x._backward_hooks  # anew: a swap of tensors (Module.to) leaves hooks behind
            return
    x.register_hook(GradientForm(spec, kind))
