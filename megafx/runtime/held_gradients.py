"""Backward graphs that add to gradients of earlier calls: to those that `no_sync` holds back, and to those in `.grad`.

A rank holds gradients back while `no_sync` is on, until a backward outside of it reduces their sums.

Held gradients are those of this rank's whole tensor-parallel shards. They are not in `.grad`, which only has values that are
reduced over data-parallel ranks. Instead `.grad` holds a marker, a `HeldGradient` without values. If the marker is gone,
zero_grad was called, and what is held is dropped. Reading the marker (as clipping does) is an error, and an optimizer's step is
refused before it changes anything.

The marker is a tensor class because `.grad` takes nothing else, and because `zero_grad(set_to_none=False)`, clipping and
steps of any optimizer have to notice it.

With `gradient_accumulation_fusion` on one data-parallel rank, products add to `.grad` itself, if autograd would add to it in
place and no hook watches the parameter. Autograd then gets no gradient to add.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafx.compiler.compiled import Pending
from megafx.distributed.tensor import TPTensor, local_of
from megafx.distributed.tensor_layout import spec_of
from megafx.errors import UsageError
from megafx.meanwhile import meanwhile

aten = torch.ops.aten
_LEAVE_ALONE = (aten.detach.default, aten.detach_.default)


class HeldGradient(TPTensor):
    """The marker in `.grad` while a gradient is held. drop: gives up what is held."""

    drop: Callable[[], None]

    @staticmethod
    def of(parameter: TPTensor, dtype: torch.dtype, drop: Callable[[], None]) -> HeldGradient:
        local = parameter._local_tensor
        nothing = local.new_full((), torch.nan, dtype=dtype).expand(local.shape)
        mark: Any = TPTensor.__new__(HeldGradient, nothing, spec_of(parameter._spec, dtype), requires_grad=False)
        mark.drop = drop
        _refuse_steps()
        return mark

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten._foreach_zero_.default:
            others = [x for x in args[0] if not _dropped(x)]
            if others:
                func(others)
            return None
        if func is aten.zero_.default and _dropped(args[0]):
            return args[0]
        if func in _LEAVE_ALONE:
            return args[0]
        raise _unreduced(str(func))

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        raise _unreduced("full_tensor")

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        raise _unreduced("to_local")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """What is held stays with the original."""
        return None


@functools.cache
def _refuse_steps() -> None:
    """Refuse optimizer steps while gradients are held. (AdamW decays weights before it reads gradients.)"""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(isinstance(p.grad, HeldGradient) for group in optimizer.param_groups for p in group["params"]):
            raise _unreduced(f"{type(optimizer).__name__}.step()")

    register_optimizer_step_pre_hook(check)


def _dropped(x: Tensor) -> bool:
    if isinstance(x, HeldGradient):
        x.drop()
    return isinstance(x, HeldGradient)


def _unreduced(what: str) -> UsageError:
    return UsageError(
        f"{what} reads a gradient that `no_sync` holds: it is not summed over data-parallel ranks yet",
        fix="run the last backward of an accumulation outside of no_sync, or drop what is held with zero_grad()",
    )


@dataclass
class HeldGradients:
    """Of one model. now: whether `no_sync` is on. sums: FQN -> held sum. seen: FQN -> (`.grad` at the last add, version)."""

    now: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def holding(self) -> contextlib.AbstractContextManager[None]:
        """Gradients are held within."""
        return meanwhile(self, now=True)

    def add(self, name: str, parameter: nn.Parameter, gradient: Tensor, summed: bool) -> None:
        """summed: `gradient` includes what was held, and need not be copied."""
        if summed:
            self.sums[name] = gradient
        elif name in self.sums:
            self.sums[name].add_(gradient)
        else:
            self.sums[name] = gradient.clone()
        if parameter.grad is None:
            assert isinstance(parameter, TPTensor)
            owner = weakref.ref(parameter)
            parameter.grad = HeldGradient.of(parameter, gradient.dtype, lambda: self.drop(name, owner()))
        assert parameter.grad is not None
        self.seen[name] = weakref.ref(parameter.grad), parameter.grad._version

    def take(self, wanted: Pending, parameter: Tensor) -> Tensor:
        """Remove and return what is held of a parameter; zeros if nothing is."""
        found = self.sums.get(wanted.name)
        self.drop(wanted.name, parameter)
        return _zeros(wanted, parameter) if found is None else found

    def drop(self, name: str, parameter: Tensor | None) -> None:
        self.sums.pop(name, None)
        self.seen.pop(name, None)
        if parameter is not None and isinstance(parameter.grad, HeldGradient):
            parameter.grad = None

    def settle(self, parameters: Mapping[str, Tensor]) -> None:
        """Drop what is held of parameters whose `.grad` was set to None since. Raises UsageError if it was changed in place."""
        for name in [*self.sums]:
            now, (ref, version) = parameters[name].grad, self.seen[name]
            was = ref()
            if now is None or (was is None and not isinstance(now, HeldGradient)):
                self.drop(name, parameters[name])
            elif now is was and now._version != version:
                raise UsageError(
                    f"the gradient of '{name}' was changed in place while no_sync holds what is to be added to it",
                    fix="set gradients to None (optimizer.zero_grad(set_to_none=True), the default), or change them after "
                    "a backward outside of no_sync",
                )


@dataclass
class HeldBack:
    """The accumulating backward graphs of a call. of(kind): (what runs it, the earlier gradients that it takes as inputs).

    fused: products add to these (`gradient_accumulation_fusion`).
    """

    of: Callable[[Any], tuple[Any, list[Pending]]]
    fused: bool = False

    def backward(
        self,
        held: HeldGradients,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[str | None],
        kept: Any,
        tangents: list[Any],
        retain: bool,
        there: Callable[[int], bool],
    ) -> list[Any] | None:
        """Gradients for `names` (of `parameters`; None: other inputs), or None where the call's own backward is to run.

        there: whether the i-th is a gradient, once backward has run, or zeros in place of none."""
        held.settle(parameters)
        own = {name for name in names if name is not None}
        if held.now:
            summed = self.fused and bool(held.sums.keys() & own)
            run, wanted = self.of("accumulate" if summed else "hold")
            pending = [held.sums[w.name] if w.name in held.sums else _zeros(w, parameters[w.name]) for w in wanted]
            gradients = run.backward(kept, tangents, retain, pending)
            for i, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
                if name is not None and gradient is not None and (name in held.sums or there(i)):
                    held.add(name, parameters[name], gradient, summed)
            return [g if name is None else None for name, g in zip(names, gradients, strict=True)]
        if not held.sums.keys() & own:
            return None
        run, wanted = self.of("add")
        pending = [held.take(w, parameters[w.name]) for w in wanted]
        return list(run.backward(kept, tangents, retain, pending))

    def accumulate(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[str | None],
        edges: Sequence[Any],
        kept: Any,
        tangents: list[Any],
        retain: bool,
        check: Callable[[list[Any]], None],
    ) -> list[Any] | None:
        """As `backward`, on one data-parallel rank: adds to `.grad` where `adds_in_place`. edges: where autograd sends each
        gradient; check: called with all gradients. None for a parameter: its gradient is in `.grad` already."""
        ready = {
            n for n, edge in zip(names, edges, strict=True) if n is not None and adds_in_place(parameters[n], edge)
        }
        if not ready:
            return None
        run, wanted = self.of("accumulate")
        there = {w.name: local_of(_grad(parameters[w.name])) for w in wanted if w.name in ready}
        pending = [there[w.name] if w.name in there else _zeros(w, parameters[w.name]) for w in wanted]
        gradients = list(run.backward(kept, tangents, retain, pending))
        check(gradients)
        for i, name in enumerate(names):
            if name in there:
                if gradients[i].data_ptr() != there[name].data_ptr():  # a graph that may run again
                    there[name].copy_(gradients[i])
                gradients[i] = None
        return gradients


def adds_in_place(parameter: Any, edge: Any) -> bool:
    """True if autograd would add this parameter's gradient to its `.grad`, and no hook sees what is added.

    edge: the autograd node that receives it.
    """
    grad, dtype = parameter.grad, parameter.grad_dtype or parameter.dtype
    if grad is None or edge is None or grad.requires_grad or grad.dtype != dtype or isinstance(grad, HeldGradient):
        return False
    if type(grad) not in (Tensor, TPTensor) or not local_of(grad).is_contiguous():
        return False
    if isinstance(grad, TPTensor) and grad._spec.placements != parameter._spec.placements:
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(edge))
    except RuntimeError:  # torch.autograd.grad takes the gradient away
        return False


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _zeros(wanted: Pending, parameter: Tensor) -> Tensor:
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device=parameter.device)
