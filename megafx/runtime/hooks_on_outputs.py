"""Hooks on outputs that other outputs of the call depend on, and `retain_grad()` of them.

    out = model(ids, labels=ids)
    out.logits.register_hook(f)             # in eager mode f gets the gradient of the loss, too
    out.loss.backward()

To autograd all outputs of a graph are results of one function, so what comes to `logits` by way of `loss` is seen inside of the
backward graph alone. Hooks on such an output wait; where there are any, the gradients are those of the call computed once more
in eager mode, with the hooks on its own values (gradients_of_gradients.py).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.errors import UsageError


class Waiting(OrderedDict[int, Any]):
    """`_backward_hooks` of an output. hooks: those of the user; autograd finds functions that do nothing."""

    def __init__(self, index: int, name: str, output: Tensor) -> None:
        super().__init__()
        self.index, self.name, self.hooks = index, name, dict[int, Any]()
        self.output, self.version = weakref.ref(output), _version(output)

    def __setitem__(self, key: int, hook: Any) -> None:
        self.hooks[key] = hook
        super().__setitem__(key, _nothing)

    def __delitem__(self, key: int) -> None:
        del self.hooks[key]
        super().__delitem__(key)

    def clear(self) -> None:
        self.hooks.clear()
        super().clear()

    def retains(self) -> bool:
        output = self.output()  # one that was changed in place is another value
        return output is not None and output.retains_grad and _version(output) == self.version

    def keep(self, tangent: Tensor | None, gradient: Tensor | None) -> None:
        """Put the gradient where autograd has put the tangent alone, beside that of earlier backwards."""
        output = self.output()
        if output is None or gradient is None:
            return
        with torch.no_grad():
            before = output.grad
            if before is not None and tangent is not None:
                before = None if torch.equal(before, tangent) else before - tangent
            output.grad = gradient.detach() if before is None else before + gradient

    def __reduce__(self) -> Any:
        return OrderedDict, ()

    def __deepcopy__(self, memo: Any) -> OrderedDict[int, Any]:
        return OrderedDict()


def watch(index: int, name: str, output: Tensor) -> Waiting:
    """Let hooks on an output wait from now on."""
    table = Waiting(index, name, output)
    output._backward_hooks = table
    return table


def called_for(watched: Sequence[Waiting], tangents: dict[int, Any]) -> list[Waiting]:
    """Those outputs that have hooks, or whose gradient is retained and may come from other outputs."""
    return [w for w in watched if w.hooks or (w.retains() and any(i != w.index for i in tangents))]


def refused(waiting: Sequence[Waiting], why: str) -> UsageError:
    """why: the call cannot be computed once more."""
    names = ", ".join(f"'{w.name}'" for w in waiting)
    return UsageError(
        f"a hook on the output {names}, or retain_grad() of it, where other outputs depend on it: the call would be computed "
        f"once more in eager mode, but {why}",
        fix="set the hook inside of forward, where it becomes a part of the graph: `logits.register_hook(f)`",
    )


def _nothing(gradient: Tensor) -> None:
    return None


def _version(output: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return output._version
