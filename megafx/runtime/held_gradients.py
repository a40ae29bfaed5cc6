"""Gradients that a rank holds back while `no_sync` is on, until a backward outside of it reduces their sums.

They are whole gradients of this rank's tensor-parallel shards. `.grad` does not show them, since it has values of all
data-parallel ranks only. Instead `.grad` holds a marker, a `HeldGradient` without values. If the marker is gone, zero_grad
was called, and what is held is dropped. Reading the marker is an error (clipping does), and an optimizer's step is refused
before it changes anything.

The marker is a tensor class because `.grad` takes nothing else, and because `zero_grad(set_to_none=False)`, clipping and
steps of any optimizer have to notice it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafx.distributed.tensor import TPTensor
from megafx.errors import UsageError

aten = torch.ops.aten
_LEAVE_ALONE = (aten.detach.default, aten.detach_.default)


class HeldGradient(TPTensor):
    """The marker in `.grad` while a gradient is held. drop: gives up what is held."""

    drop: Callable[[], None]

    @staticmethod
    def of(parameter: TPTensor, drop: Callable[[], None]) -> HeldGradient:
        local = parameter._local_tensor
        nothing = local.new_full((), torch.nan).expand(local.shape)
        mark: Any = TPTensor.__new__(HeldGradient, nothing, parameter._spec, requires_grad=False)
        mark.drop = drop
        _refuse_steps()
        return mark

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
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
    """From the first held gradient on. (AdamW decays weights before it looks at gradients.)"""

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
    """Of one model. now: whether `no_sync` is on. sums: FQN -> what is held. seen: FQN -> the `.grad` since, its version."""

    now: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def add(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        if name in self.sums:
            self.sums[name].add_(gradient)
        else:
            self.sums[name] = gradient.clone()
        if parameter.grad is None:
            assert isinstance(parameter, TPTensor)
            owner = weakref.ref(parameter)
            parameter.grad = HeldGradient.of(parameter, lambda: self.drop(name, owner()))
        assert parameter.grad is not None
        self.seen[name] = weakref.ref(parameter.grad), parameter.grad._version

    def take(self, name: str, parameter: Tensor | None) -> Tensor:
        """Give away what is held of a parameter; 0 where nothing is."""
        found = self.sums.get(name)
        self.drop(name, parameter)
        return torch.zeros(()) if found is None else found

    def drop(self, name: str, parameter: Tensor | None) -> None:
        self.sums.pop(name, None)
        self.seen.pop(name, None)
        if parameter is not None and isinstance(parameter.grad, HeldGradient):
            parameter.grad = None

    def settle(self, parameters: Mapping[str, Tensor]) -> None:
        """Drop what is held of parameters whose gradient was set to None since."""
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
    """The other backward graphs of a call. of(kind): what runs it, and the names of the gradients that it takes besides."""

    of: Callable[[Any], tuple[Any, list[str]]]

    def backward(
        self,
        held: HeldGradients,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[str | None],
        kept: Any,
        tangents: list[Any],
        retain: bool,
    ) -> list[Any] | None:
        """Gradients for `names` (of `parameters`; None: other inputs), or None where the call's own backward is to run."""
        held.settle(parameters)
        if held.now:
            run, _ = self.of("hold")
            gradients = run.backward(kept, tangents, retain)
            for name, gradient in zip(names, gradients, strict=True):
                if name is not None and gradient is not None:
                    held.add(name, parameters[name], gradient)
            return [g if name is None else None for name, g in zip(names, gradients, strict=True)]
        if not held.sums.keys() & {name for name in names if name is not None}:
            return None
        run, wanted = self.of("add")
        pending = [held.take(name, parameters[name]) for name in wanted]
        return list(run.backward(kept, tangents, retain, pending))
