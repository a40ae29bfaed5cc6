"""`megafx.whole_parameters`: for a while, the parameters of a parallelized model are whole plain tensors on every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from megafx.distributed import agreement
from megafx.distributed.failures import meet, stopping_with_others
from megafx.distributed.parameters import RUNTIME, parameter_slots
from megafx.distributed.tensor import TPTensor, WholeParameter, wrap
from megafx.distributed.tensor_layout import everyone_on, shard_of, spec_of
from megafx.distributed.tensor_whole import count_write
from megafx.errors import AgreementError, UsageError

CALLER = "megafx.whole_parameters"


@dataclass
class _Swapped:
    """parameter: the user's object, whole inside. holder: an object that holds its shard meanwhile."""

    name: str
    parameter: Any
    holder: Any
    shape: torch.Size

    def swap(self) -> None:
        a, b = self.parameter, self.holder
        a.__class__, b.__class__ = b.__class__, a.__class__
        torch._C._swap_tensor_impl(a, b)


@contextlib.contextmanager
def whole_parameters(model: nn.Module, *, gradients: bool = False) -> Iterator[nn.Module]:
    """Inside, each parameter of `model` is a plain tensor with all of its values, on every rank; at the end ranks take their
    parts of them back. For merging adapters, changing weights by hand, and giving weights to another program.

    Parameters stay the same objects, so optimizers made of them stay valid. The model is its eager self inside: a call of it
    runs its own forward on this rank. gradients: make `.grad` whole too (else it is None inside, and afterwards what it was
    before, unless it was set inside). A rank holds the whole model meanwhile.

    All ranks run the same code inside. Raises AgreementError at the end if they wrote different values, and whatever the body
    raised, on every rank; then parameters are what they were before (on several ranks). If modules or shapes of parameters were
    changed inside (`merge_and_unload`, `add_adapter`), the model comes out whole and not parallelized, with a warning: call
    megafx.parallelize on what is to be trained. Collective over all ranks of the model.
    """
    found = [vars(m)[RUNTIME] for m in model.modules() if RUNTIME in vars(m)]
    runtime = found[0] if found else None
    sharded = {id(p): (name, p) for name, p in model.named_parameters() if isinstance(p, TPTensor)}
    if not sharded:
        before = _tree(model)
        with _eager(runtime):
            yield model
        if runtime is not None and _tree(model) != before:
            _release(model, runtime, [])
        return
    group = everyone_on(next(iter(sharded.values()))[1]._spec.mesh)
    meet(CALLER, group)
    with stopping_with_others(CALLER):
        swapped = [_gathered(name, p, gradients) for name, p in sharded.values()]
    before = _tree(model)
    for each in swapped:
        each.swap()
    try:
        with _eager(runtime), agreement.raising_together(group):
            yield model
        changed = _tree(model) != before or any(s.parameter.shape != s.shape for s in swapped)
        tensors = [(s.name, s.parameter.detach()) for s in swapped if not changed]
        if changed:
            tensors = [(name, p.detach()) for name, p in model.named_parameters()]
        with stopping_with_others(CALLER):
            different = agreement.differing(tensors, group)
        if different:
            raise AgreementError(
                f"ranks wrote different values into {_few(different)} inside of megafx.whole_parameters; parameters are what "
                "they were before",
                fix="run the same code on every rank, outside of `if rank == 0:`, from the same seed; or send rank 0's values "
                "to the others inside: torch.distributed.broadcast(parameter.data, 0)",
            )
        for each in swapped if not changed else ():
            whole = each.parameter.detach()
            kept = each.parameter.grad, each.parameter.requires_grad
            each.swap()
            _take(each, whole, *kept, gradients)
    except BaseException:
        for each in swapped:
            if isinstance(each.parameter, WholeParameter):
                each.swap()
        raise
    if changed:
        _release(model, runtime, swapped)
    elif runtime is not None:
        runtime.parameters_changed()


def _eager(runtime: Any) -> contextlib.AbstractContextManager[None]:
    """The model is its eager self within."""
    return contextlib.nullcontext() if runtime is None else runtime.turns.capture()


@torch.no_grad()
def _gathered(name: str, parameter: TPTensor, gradients: bool) -> _Swapped:
    if parameter.is_meta or parameter._local_tensor.is_meta:
        found = f"'{name}' is on the meta device: it has no values"
        raise UsageError(found, fix="load or initialise the model first")
    whole = parameter.full_tensor()
    holder = torch.Tensor._make_subclass(WholeParameter, whole, parameter.requires_grad)
    if gradients and parameter.grad is not None:
        if hasattr(parameter, "grad_dtype"):
            holder.grad_dtype = parameter.grad_dtype
        holder.grad = cast(TPTensor, parameter.grad).full_tensor()
    return _Swapped(name, parameter, holder, whole.shape)


@torch.no_grad()
def _take(each: _Swapped, whole: torch.Tensor, grad: torch.Tensor | None, needs: bool, gradients: bool) -> None:
    """Write this rank's parts of what was whole into the shard, which the parameter is again."""
    parameter: TPTensor = each.parameter
    if whole.dtype == parameter.dtype and whole.device == parameter._local_tensor.device:
        parameter._local_tensor.copy_(shard_of(whole, parameter._spec))
        count_write(parameter)
        torch.autograd.graph.increment_version(parameter)
    else:
        parameter.data = whole
    parameter.requires_grad_(needs)
    if grad is not None:
        parameter.grad = wrap(shard_of(grad.detach(), parameter._spec), spec_of(parameter._spec, grad.dtype))
    elif gradients:
        parameter.grad = None


def _tree(model: nn.Module) -> list[tuple[str, int]]:
    modules = [(name, id(m)) for name, m in model.named_modules(remove_duplicate=False)]
    return modules + [(name, id(slot.get())) for name, slot in parameter_slots(model)]


def _release(model: nn.Module, runtime: Any, swapped: list[_Swapped]) -> None:
    """Leave the parameters whole: there is no plan for the modules that the model has now."""
    for each in swapped:
        del each.parameter._local_tensor, each.parameter._spec
    if runtime is not None:
        runtime.release()
    warnings.warn(
        "megafx.whole_parameters: modules or shapes of parameters were changed inside, so the model is not parallelized any "
        "more: every rank holds all of it, and calls run eagerly on each rank alone. To train it on all ranks, call "
        "megafx.parallelize(model), and make the optimizer anew.",
        stacklevel=4,
    )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{n}'" for n in names[:3]) + more
