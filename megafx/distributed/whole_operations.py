"""Operations on whole values of sharded tensors, inside of an optimizer's step.

Most optimizers compute element by element, which shards do as they are. Others have means of rows (Adafactor), products of
matrices (Muon, Shampoo) or one flat vector of all parameters (L-BFGS). Such an operation gathers its sharded operands, computes
on plain tensors, which is redundant on every rank, and cuts what it wrote again. Results are plain whole tensors; views of a
sharded tensor are `WholeView`s, which read and write that tensor. Outside of a step these operations stay errors: a gather by
accident is slow, and costs memory.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megafx.distributed.tensor_layout import gather_shards, placement_of
from megafx.placements.tensors import shard_tensor

_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__  # of the wrapper around each step


def in_optimizer_step() -> bool:
    """Whether `step` of a torch.optim.Optimizer, of whatever class, calls this, without gradients."""
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def whole_of(x: DTensor) -> Tensor:
    """The logical value on every rank, without autograd. Collective where x is sharded."""
    where = x._spec.placements[0]
    if where.is_replicate():
        return x._local_tensor
    if where.is_partial():
        return DTensor.from_local(x._local_tensor, x._spec.mesh, x._spec.placements, run_check=False).full_tensor()
    return gather_shards(x._local_tensor, placement_of(x), x._spec.mesh.get_group())


def write_whole(x: DTensor, whole: Tensor) -> None:
    """Cut a whole value into the memory of x on this rank."""
    mesh = x._spec.mesh
    local = shard_tensor(whole, placement_of(x), mesh.get_local_rank(), mesh.size())
    if local is not x._local_tensor:
        x._local_tensor.copy_(local)


@cache
def written_by(func: Any) -> tuple[int | str, ...]:
    """Arguments that the operation writes: positions, or names if keyword-only."""
    arguments = func._schema.arguments
    writes = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(arguments[i].name if arguments[i].kwarg_only else i for i in writes)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that the operation writes."""
    found: list[Tensor] = []
    for w in written_by(func):
        x = args[w] if isinstance(w, int) and w < len(args) else kwargs.get(w)
        found += x if isinstance(x, (list, tuple)) else [] if x is None else [x]
    return found


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the whole values of its DTensors. Collective where these are sharded."""
    if func._schema.name.startswith("aten::new_"):  # takes dtype and device of its operand, no values
        return func(args[0]._local_tensor, *args[1:], **kwargs)
    tensors = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)}
    whole = {key: whole_of(x) for key, x in tensors.items()}
    plain = lambda x: whole.get(id(x), x)  # noqa: E731
    if func.is_view and len(tensors) == 1:
        (base,) = tensors.values()
        if not base._spec.placements[0].is_replicate():
            return _views(Source(base, whole[id(base)]), func, *pytree.tree_map(plain, (args, kwargs)))
    out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    for x in written_tensors(func, args, kwargs):
        if id(x) in whole:
            write_whole(tensors[id(x)], whole[id(x)])
    back = {id(w): tensors[key] for key, w in whole.items()}
    return pytree.tree_map(lambda x: back.get(id(x), x), out)


class Source:
    """The whole value of a sharded tensor, which its views read and write."""

    def __init__(self, base: DTensor, whole: Tensor) -> None:
        self.base, self.whole = base, whole
        self.version = base._local_tensor._version

    def refresh(self) -> None:
        """Gather again if the shard was written since: on all ranks alike."""
        if self.base._local_tensor._version != self.version:
            self.whole.copy_(whole_of(self.base))
            self.version = self.base._local_tensor._version

    def write_back(self) -> None:
        write_whole(self.base, self.whole)
        torch.autograd.graph.increment_version(self.base._local_tensor)
        self.version = self.base._local_tensor._version


class WholeView(Tensor):
    """A view of a sharded tensor's whole value; `view` is the same view of `source.whole`."""

    source: Source
    view: Tensor

    @staticmethod
    def __new__(cls, source: Source, view: Tensor) -> WholeView:
        made = Tensor._make_wrapper_subclass(
            cls, view.shape, view.stride(), view.storage_offset(), dtype=view.dtype, device=view.device
        )
        made.source, made.view = source, view
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"WholeView({self.view})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        views = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        for x in views:
            x.source.refresh()
        plain = lambda x: x.view if isinstance(x, cls) else x  # noqa: E731
        plain_args, plain_kwargs = pytree.tree_map(plain, (args, kwargs))
        if func.is_view:
            return _views(views[0].source, func, plain_args, plain_kwargs)
        out = func(*plain_args, **plain_kwargs)
        for x in written_tensors(func, args, kwargs):
            if isinstance(x, cls):
                x.source.write_back()
        back = {id(x.view): x for x in views}
        return pytree.tree_map(lambda x: back.get(id(x), x), out)


def _views(source: Source, func: Any, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(lambda x: WholeView(source, x) if isinstance(x, Tensor) else x, func(*args, **kwargs))
