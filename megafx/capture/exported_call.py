"""The module that torch.export gets: one call of the user's model, and what of it leaves the graph beside its output."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafx.capture.eager_parts import CallValues
from megafx.capture.followed import Trace
from megafx.capture.hooks import without_hooks
from megafx.capture.host_numbers import HostNumber
from megafx.capture.libraries.caches import Ordered, Revived
from megafx.capture.libraries.expert_loops import ExpertLoops
from megafx.capture.libraries.records import Given, kept
from megafx.capture.program import Returned
from megafx.ir.call_spec import ambient_autocast, in_autocast, register_dataclasses
from megafx.ir.data_sizes import DataShapeEnv
from megafx.ops.eager_call import Order


def _ignored(leaves: Sequence[Returned]) -> None:
    """Nothing is done with them."""


class ExportedCall(nn.Module):
    """The exported module: the user's call plus loss_fn, under the caller's autocast state."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, forward: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.training = model, loss_fn, model.training
        self.call = forward if forward is not None else type(model).__call__
        self.calls_forward = forward is not None  # and not the hooks around it
        self.autocast = ambient_autocast()
        self.note: Callable[[str], None] = lambda text: None
        self.returned: Callable[[Sequence[Returned]], None] = _ignored  # called with the leaves of the result
        self.trace: Trace | None = None
        self.order = Order()
        self.values: CallValues | None = None
        self.names: list[str] = []  # of the leaves of a call
        self.same: dict[int, int] = {}  # `same_tensors` of them
        self.constants: dict[int, Any] = {}  # place of a leaf -> what it is, where torch.export would not take it
        self.under_no_grad = self.reads_sizes = False
        self.numbers: frozenset[str] = frozenset()  # of those that are numbers

    def release(self) -> None:
        """Let go of the call's tensors: guards on what was read hold this module."""
        self.values, self.trace, self.returned = None, None, _ignored

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: dict[str, Any], state: dict[str, Any]
    ) -> Any:
        with in_autocast(self.autocast), ExpertLoops(self.note) as loops:
            buffers = [(m, n, b) for m in self.model.modules() for n, b in m._buffers.items() if b is not None]
            caches, self.order.last, self.order.count = Revived(), None, 0
            entering, spec = pytree.tree_flatten((args, kwargs, loss_inputs, state))
            if self.same or self.constants:
                entering = [entering[self.same.get(i, i)] for i in range(len(entering))]
                entering = [copy.copy(self.constants[i]) if i in self.constants else x for i, x in enumerate(entering)]
                args, kwargs, loss_inputs, state = pytree.tree_unflatten(entering, spec)
            tensors = {n: x for n, x in zip(self.names, entering, strict=True) if isinstance(x, torch.Tensor)}
            versions = {name: x._version for name, x in tensors.items()}
            args, kwargs, loss_inputs = caches.revive((args, kwargs, loss_inputs))
            given = Given((args, kwargs))
            assert self.trace is not None
            self.trace.reads.asked.begin(tensors)
            self.trace.memos.given = {id(x): name in self.numbers for name, x in tensors.items()}
            if self.values is not None:
                self.values.begin([*tensors.values()])
            off = torch.no_grad() if self.under_no_grad else contextlib.nullcontext()
            with DataShapeEnv.recording(self.reads_sizes), self.trace.running(state), off:
                output = self.call(self.model, *args, **kwargs)
                for module, name, old in buffers:
                    new = module._buffers.get(name)
                    if new is None or new is old or (new.shape, new.dtype) != (old.shape, old.dtype):
                        continue
                    with torch.no_grad():  # `self.mean = ...` is written in place, as graphs record it
                        old.copy_(new)
                    module._buffers[name] = old
            while register_dataclasses(pytree.tree_leaves(output)):  # so that export can flatten it
                pass
            result = output if self.loss_fn is None else (self.loss_fn(output, **loss_inputs), output)
            loops.check(result)
            given.refuse_changes()
            written = {name: x for name, x in tensors.items() if x._version != versions[name]}
            result = kept(caches.result(result, self.trace.tensors, written))
            if self.order.last is not None:
                result = Ordered(result, self.order.last)
            leaves, spec = pytree.tree_flatten(result)
            self.returned([Returned.of(x) for x in leaves])
            return pytree.tree_unflatten([None if isinstance(x, HostNumber) else x for x in leaves], spec)


def part_forward(module: nn.Module) -> Callable[..., Any]:
    """forward(model, ...) that calls this submodule of it."""

    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with without_hooks(module):
            return module(*args, **kwargs)

    return forward
