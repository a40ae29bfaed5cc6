"""Gradients that can be differentiated again (create_graph=True): a call is computed once more in eager mode.

Of parameters that ranks hold in parts each rank gathers all values, and computes all of the call; its gradients of them are cut
again. Both steps are differentiable, so that autograd goes on through them. Each parameter and input is replaced by an
alias, so that the user's hooks on them run once, in the user's own backward.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megafx.capture.libraries.caches import Updated
from megafx.capture.libraries.records import kept
from megafx.distributed.parameters import Slot
from megafx.distributed.tensor import TPTensor, wrap
from megafx.distributed.tensor_whole import Part
from megafx.errors import UsageError
from megafx.ir.call_spec import CallSpec
from megafx.ir.python_state import Place, PythonState, names
from megafx.runtime.hooks_on_outputs import Waiting
from megafx.runtime.keys import Call

WHERE = "double backward through a parallelized model"


@dataclass
class EagerCall:
    """A call of a graph, to be computed in eager mode."""

    model: nn.Module
    slots: Mapping[str, Slot]
    eager: Callable[[Call], Any]  # the user's code
    call: Call
    spec: CallSpec
    # (kind, name) of what the call has written into -> what it was: of parameters what a rank holds, of arguments with
    # its history in autograd
    before: Mapping[tuple[str, str], Tensor]
    counters: Sequence[tuple[Place, Any]]  # numbers that it has written, as they were
    # parameters (slots) and inputs (positions among the graph's inputs) of which gradients are wanted
    wrt: Sequence[Slot | int]
    inputs: Sequence[int]  # positions of the call's tensors
    where: str = WHERE  # for messages

    def gradients(
        self, outputs: Sequence[int], tangents: Sequence[Any], hooked: Sequence[Waiting] = (), of: Waiting | None = None
    ) -> list[Any]:
        """Of `wrt`, or of one output, differentiable where autograd is on. outputs: indices of the graph's outputs to which the
        tangents belong. hooked: outputs with hooks, which run on the values of this computation. Collective."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            return self._gradients(outputs, tangents, hooked, of, again)

    def _gradients(
        self,
        outputs: Sequence[int],
        tangents: Sequence[Any],
        hooked: Sequence[Waiting],
        of: Waiting | None,
        again: bool,
    ) -> list[Any]:
        state = self.spec.state
        _check(state, self.where)
        given = [*self.call.leaves, *(self.call.state or {}).values()]
        tensors = [i for i, leaf in enumerate(self.spec.leaves) if leaf.tensor]
        place = dict(zip(self.inputs, tensors, strict=True))
        names_given = [*self.call.names(), *(f"state[{name}]" for name in self.call.state or {})]
        for i, name in enumerate(names_given):
            given[i] = self.before.get(("user", name), given[i])
        inputs = {i: _alias(given[i], True) for i in (place[x] for x in self.wrt if not isinstance(x, Slot))}
        for i, name in enumerate(names_given):
            value = inputs.get(i, given[i])
            given[i] = value.clone() if ("user", name) in self.before else value
        own = len(self.call.leaves)
        args, kwargs, loss_inputs = pytree.tree_unflatten(given[:own], self.call.spec)
        call = replace(self.call, args=args, kwargs=kwargs, loss_inputs=loss_inputs, leaves=given[:own])
        with (
            self._buffers(),
            self._parameters() as aliases,
            _state(state, dict(zip(state.inputs, given[own:], strict=True)), self.counters),
        ):
            output = self.eager(call)
            written = {name: write.left(write.place.get()) for name, write in state.writes.items()}
        arguments = {name: given[names_given.index(name)] for name in self.spec.written}
        more = written or arguments
        leaves = pytree.tree_leaves(kept(Updated(output, (), written, arguments) if more else output))
        made = {leaf.index: x for leaf, x in zip(self.spec.out_leaves, leaves, strict=True)}
        pairs = [(made[i], _whole(t)) for i, t in zip(outputs, tangents, strict=True) if t is not None]
        wrt = [(x.get(), aliases[id(x.get())]) if isinstance(x, Slot) else (None, inputs[place[x]]) for x in self.wrt]
        retained = [w for w in hooked if w.retains() and of is None]  # where autograd keeps it by itself
        for each in hooked:
            for hook in each.hooks.values():
                made[each.index].register_hook(hook)
        for each in retained:
            made[each.index].retain_grad()
        if of is not None:
            wrt = [(None, made[of.index])]
        found = torch.autograd.grad(
            [x for x, _ in pairs], [x for _, x in wrt], [t for _, t in pairs], create_graph=again, allow_unused=True
        )
        of_output = dict(zip(outputs, tangents, strict=True))
        for each in retained:
            each.keep(of_output[each.index], made[each.index].grad)
        return [_cut(g, p) for g, (p, _) in zip(found, wrt, strict=True)]

    @contextlib.contextmanager
    def _parameters(self) -> Iterator[dict[int, Tensor]]:
        """Within, parameters are whole and plain: id of a parameter -> what replaces it. Collective."""
        wanted = {id(x) for x in self.wrt}
        named = [(name, slot, p) for name, slot in self.slots.items() if (p := slot.get()) is not None]
        slots = [(slot, p) for _, slot, p in named]
        wrt = {id(p) for slot, p in slots if id(slot) in wanted}
        aliases: dict[int, Tensor] = {}
        for name, _, p in named:
            if (was := self.before.get(("param", name))) is not None:
                aliases[id(p)] = _whole(wrap(was, p._spec) if isinstance(p, TPTensor) else was).clone()
        for _, p in slots:
            if id(p) not in aliases:
                aliases[id(p)] = _alias(p, id(p) in wrt)
        try:
            for slot, p in slots:
                slot.put(aliases[id(p)])
            yield aliases
        finally:
            for slot, p in slots:
                slot.put(p)

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[None]:
        """Within, the buffers that the call has changed are copies of what they were before it."""
        copies = {
            id(self.model.get_buffer(n)): was.clone() for (kind, n), was in self.before.items() if kind == "buffer"
        }
        tables = (m._buffers for m in self.model.modules()) if copies else ()
        before = [(table, key, x) for table in tables for key, x in table.items() if id(x) in copies]
        for table, key, value in before:
            table[key] = copies[id(value)]
        try:
            yield
        finally:
            for table, key, value in before:
                table[key] = value


def _check(state: PythonState, where: str) -> None:
    """Raise where eager mode would not compute what the call has."""
    if changed := state.changed():
        raise UsageError(
            f"{where}: forward reads {names(changed)}, which changed between forward and backward",
            fix="take these gradients before the change",
        )


@contextlib.contextmanager
def _state(state: PythonState, inputs: Mapping[str, Any], counters: Sequence[tuple[Place, Any]]) -> Iterator[None]:
    """Within, the Python state that is an input is as given, and so are numbers; what is written goes again."""
    places = [p for p in state.inputs.values() if isinstance(p, Place)]
    before = [
        (place, place.get()) for place in (*places, *state.counters, *(write.place for write in state.writes.values()))
    ]
    lists = [(held, [*held]) for w in state.writes.values() if isinstance(held := w.place.get(), (list, deque))]
    try:
        for place in places:
            place.set(inputs[place.name])
        for place, value in counters:
            place.set(value)
        yield
    finally:
        for held, items in lists:
            held.clear()
            held.extend(items)
        for place, value in reversed(before):
            place.set(value)


def _alias(x: Tensor, wanted: bool) -> Tensor:
    """The same values, whole. wanted: a gradient of the alias is, also where x needs none any more."""
    alias = x.full_tensor() if isinstance(x, DTensor) else x.view_as(x)
    return alias.detach().requires_grad_() if wanted and not alias.requires_grad else alias


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _cut(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """The gradient of a parameter as the parameter is held."""
    if gradient is None or not isinstance(parameter, DTensor):
        return gradient
    cut: Tensor = Part.apply(gradient, parameter._spec, type(parameter))
    return cut
