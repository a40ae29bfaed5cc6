"""Hooks on outputs that other outputs of the call depend on, and `retain_grad()` of them.

    out = model(ids, labels=ids)
    out.logits.register_hook(f)             # in eager mode f gets the gradient of the loss, too
    out.loss.backward()

To autograd all outputs of a graph are results of one function, so what comes to `logits` by way of `loss` is seen inside of the
backward graph alone. Hooks on such an output wait; where there are any, the gradients are those of the call computed once more
in eager mode, with the hooks on its own values (gradients_of_gradients.py).
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
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
        for key in [*self.hooks]:
            del self[key]

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


def watch(outputs: Mapping[int, Tensor], watched: Mapping[int, tuple[str, frozenset[int]]]) -> list[Waiting]:
    """Let hooks on outputs wait from now on. outputs: of one call, those with gradients. watched: index -> the name of an
    output that others depend on, and the indices of those; an output comes after those that depend on it, as autograd calls
    hooks in the order in which they are set."""
    arrived = Arrived()
    for index, output in outputs.items():
        if index not in watched:
            output.register_hook(arrived.at(index))
    tables = []
    for index, (name, users) in watched.items():
        if (watched_one := outputs.get(index)) is not None:
            table = Waiting(index, name, watched_one)
            OrderedDict.__setitem__(table, _OURS, arrived.at(index, name, users, table.output))
            watched_one._backward_hooks = table
            assert watched_one.grad_fn is not None
            watched_one.grad_fn._register_hook_dict(watched_one)
            tables.append(table)
    return tables


_OURS = -1  # no hook of a user has this key


class Arrived:
    """The outputs of a call that a run of autograd gave gradients. A run that differentiates with respect to an output would
    leave out what other outputs add to its gradient: autograd need not call the function that all are results of."""

    def __init__(self) -> None:
        self.run, self.at_outputs = -1, set[int]()

    def at(
        self,
        index: int,
        name: str = "",
        users: frozenset[int] = frozenset(),
        watched: weakref.ref[Tensor] | None = None,
    ) -> Callable[[Tensor | None], None]:
        """The hook of one output, which autograd calls without a gradient where another output has one. users: of a watched
        output, those that depend on it."""

        def hook(gradient: Tensor | None) -> None:
            if self.run != (run := torch._C._current_graph_task_id()):
                self.run = run
                self.at_outputs.clear()
            if gradient is not None:
                self.at_outputs.add(index)
            output = None if watched is None or self.at_outputs.isdisjoint(users) else watched()
            if output is not None and _is_differentiated_by(output):
                raise UsageError(
                    f"torch.autograd.grad or backward(inputs=...) with respect to the output '{name}', of what depends on it "
                    "by way of other outputs of the same call: that part of the gradient would be left out",
                    fix=f"call {name}.retain_grad(), then backward() without `inputs`, and read {name}.grad",
                )

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn of it
        return hook


_DIFFERENTIATE = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)


def _is_differentiated_by(output: Tensor) -> bool:
    """Whether a torch.autograd.grad, or a backward, that runs has this tensor among its inputs. (On a GPU hooks run in
    autograd's threads.)"""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code in _DIFFERENTIATE:
                given = at.f_locals.get("inputs")
                if given is not None and any(x is output for x in ([given] if isinstance(given, Tensor) else [*given])):
                    return True
            at = at.f_back
    return False


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
