"""Hooks on outputs that other outputs of the call depend on, and `retain_grad()` of them.

    out = model(ids, labels=ids)
    out.logits.register_hook(f)             # in eager mode f gets the gradient of the loss, too
    out.loss.backward()

To autograd all outputs of a graph are results of one function, so what reaches `logits` through `loss` is seen inside of the
backward graph alone. Hooks on such an output wait; where there are any, the gradients are those of the call computed once more
in eager mode, with the hooks on its own values (gradients_of_gradients.py).

    torch.autograd.grad(out.loss, out.logits)

is computed so, too. An output that depends on others comes of a function of them (`_Above`), so that autograd goes on to these
where their gradient is asked for; a hook puts it in the place of the zeros that arrive there.
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

from megafx.compiler.executable import freed
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


def above_others(outputs: list[Any], graph: Any, step: Any) -> None:
    """Replace outputs that depend on others, and on which none depends (autograd would not take what a hook gives of these, if
    it had to go on from them). outputs: of a call of a graph (bound_graph.py). Tensors of megafx's classes stay as they are."""
    mine = [i for i in graph.connected if i in graph.user_outputs and i not in graph.given_back]
    for index in mine:
        output = outputs[index]
        below = [outputs[i] for i, (_, users) in graph.siblings.items() if index in users and i in mine]
        if below and index not in graph.siblings and type(output) is Tensor and output.grad_fn is not None:
            outputs[index] = _Above.apply(step.arrived, index, output, *below)


class _Above(torch.autograd.Function):
    """An output, as a function of those that it depends on, whose gradients backward of the graph computes."""

    @staticmethod
    def forward(ctx: Any, arrived: Arrived, index: int, output: Tensor, *below: Tensor) -> Tensor:
        ctx.arrived, ctx.index, ctx.below = arrived, index, [weakref.ref(x) for x in below]
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        arrived: Arrived = ctx.arrived
        arrived.look()
        if gradient is None or not arrived.wanted:
            return None, None, gradient, *[None for _ in ctx.below]
        arrived.gradients[ctx.index] = gradient
        below = [None if (x := ref()) is None or not arrived.wants(x) else x for ref in ctx.below]
        zeros = (None if x is None else torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape) for x in below)
        return None, None, gradient, *zeros


def watch(outputs: Mapping[int, Tensor], watched: Mapping[int, tuple[str, frozenset[int]]], step: Any) -> list[Waiting]:
    """Let hooks on outputs wait from now on. outputs: of one call, those with gradients, as the user gets them. watched: index
    -> the name of an output that others depend on, and the indices of those; an output comes after those that depend on it, as
    autograd calls hooks in the order in which they are set. step: the call (bound_graph.py)."""
    arrived: Arrived = step.arrived
    for index, output in outputs.items():
        if index not in watched and not isinstance(output.grad_fn, _Above._backward_cls):
            output.register_hook(arrived.at(index))
    tables = []
    for index, (name, users) in watched.items():
        if (watched_one := outputs.get(index)) is not None:
            table = Waiting(index, name, watched_one)
            OrderedDict.__setitem__(table, _OURS, arrived.at(index, weakref.ref(table), users))
            watched_one._backward_hooks = table
            assert watched_one.grad_fn is not None
            watched_one.grad_fn._register_hook_dict(watched_one)
            tables.append(table)
    return tables


_OURS = -1  # no hook of a user has this key


class Arrived:
    """The outputs of a call that a run of autograd gave gradients. A run that differentiates with respect to an output would
    leave out what other outputs add to its gradient: there the hook gives all of it.

    wanted: outputs with respect to which the run differentiates. accumulates: by backward(inputs=...). gradients: of outputs,
    where there are such, as they came. given: the last run in which a hook gave all of an output's gradient, and its name.
    """

    def __init__(self, step: Any) -> None:
        self.step: weakref.ref[Any] = weakref.ref(step)
        self.run = -1
        self.wanted: list[Tensor] = []
        self.accumulates = False
        self.gradients: dict[int, Tensor] = {}
        self.given = -1, ""

    def look(self) -> None:
        """To be called first, in every run."""
        if self.run != (run := torch._C._current_graph_task_id()):
            self.run = run
            watched = [] if (step := self.step()) is None else step.watched
            outputs = [x for w in watched if (x := w.output()) is not None]
            self.wanted, self.accumulates = _differentiated_by(outputs)
            self.gradients.clear()

    def wants(self, output: Tensor) -> bool:
        return any(x is output for x in self.wanted)

    def at(
        self, index: int, of: weakref.ref[Waiting] | None = None, users: frozenset[int] = frozenset()
    ) -> Callable[[Tensor | None], Tensor | None]:
        """The hook of one output, which autograd calls without a gradient where another output has one. of, users: of a
        watched output, its table, which holds the hook, and those that depend on it."""

        def hook(gradient: Tensor | None) -> Tensor | None:
            table = None if of is None else of()
            self.look()
            if gradient is not None and self.wanted:
                self.gradients[index] = gradient
            output = None if table is None or self.gradients.keys().isdisjoint(users) else table.output()
            if table is None or output is None or not self.wants(output):
                return None
            if gradient is None:  # and autograd lets no hook make one
                name = table.name
                fix = f"add it, times zero, to what is differentiated: torch.autograd.grad(... + 0 * {name}.sum(), {name})"
                if self.accumulates:
                    fix = f"call {name}.retain_grad(), then backward() without `inputs`, and read {name}.grad"
                raise UsageError(
                    f"a gradient with respect to the output '{name}', of what depends on it by way of other outputs "
                    "of the same call alone, on which a third one depends",
                    fix=fix,
                )
            return gradient_of(self.step(), table, self.gradients)

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn of it
        return hook

    def tangents(self, connected: Sequence[int], tangents: Sequence[Any], edges: Sequence[Any]) -> Sequence[Any]:
        """The gradients of outputs (of `connected`) as they came, where hooks of this run of autograd have put others in their
        place; none where it wants nothing else. edges: where autograd sends gradients of inputs."""
        run, name = self.given
        if run != torch._C._current_graph_task_id():
            return tangents
        if self.accumulates and not any(torch._C._will_engine_execute_node(edge) for edge in edges if edge is not None):
            return [None for _ in tangents]
        step = self.step()
        wanted = {w.index: w for w in step.watched if (x := w.output()) is not None and self.wants(x)} if step else {}
        if not self.accumulates or any(w.hooks for w in wanted.values()):
            raise UsageError(  # autograd has taken what was there before the hook
                f"one torch.autograd.grad with respect to the output '{name}', which other outputs depend on, and to "
                "parameters or inputs",
                fix="ask for the gradients of outputs by themselves first: torch.autograd.grad(..., retain_graph=True)",
            )
        return [self.gradients.get(i) if i in wanted else x for i, x in zip(connected, tangents, strict=True)]


def gradient_of(step: Any, output: Waiting, gradients: Mapping[int, Tensor]) -> Tensor | None:
    """All of the gradient of an output of a call (bound_graph.py). gradients: of outputs, as they came."""
    graph, (number, shared), again, call = step.graph, step.numbers, step.again, step.call
    if call is None or again is None:
        raise freed()
    if (boards := graph.state.boards) is not None:
        about = f"a gradient with respect to the output '{output.name}'\n{graph.about}"
        boards.backward(graph, number, shared, graph.state.held.now, about)
    hooked = [output, *(w for w in step.watched if w.hooks and w is not output)]
    step.arrived.given = torch._C._current_graph_task_id(), output.name
    tangents = [gradients.get(i) for i in graph.connected]
    found: list[Tensor | None] = graph.gradients_with_hooks(step.kept, call, again, tangents, hooked, output)
    return found[0]


_DIFFERENTIATE = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)


def _differentiated_by(outputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Those of these tensors that a torch.autograd.grad, or a backward, that runs has among its inputs, and whether it is a
    backward. (On a GPU hooks run in autograd's threads.)"""
    found, accumulates = list[Tensor](), False
    frames: list[FrameType | None] = [*sys._current_frames().values()]
    while frames:
        if (at := frames.pop()) is None:
            continue
        if at.f_code in _DIFFERENTIATE and (given := at.f_locals.get("inputs")) is not None:
            inputs = [given] if isinstance(given, Tensor) else [*given]
            new = [x for x in outputs if any(x is each for each in inputs)]
            found, accumulates = found + new, accumulates or (bool(new) and at.f_code is _DIFFERENTIATE[1])
        frames.append(at.f_back)
    del at  # this function's own frame would keep all that its callers have, until garbage is collected
    return found, accumulates


def called_for(watched: Sequence[Waiting], tangents: dict[int, Any], arrived: Arrived) -> list[Waiting]:
    """Those outputs that have hooks, or whose gradient is retained and may come from other outputs, and is not there yet."""
    given = arrived.given[0] == torch._C._current_graph_task_id()
    there = lambda w: given and (x := w.output()) is not None and arrived.wants(x)
    return [w for w in watched if w.hooks or (w.retains() and any(i != w.index for i in tangents) and not there(w))]


def refused(waiting: Sequence[Waiting], why: str) -> UsageError:
    """why: the call cannot be computed once more."""
    names = ", ".join(f"'{w.name}'" for w in waiting)
    return UsageError(
        f"a hook on the output {names}, retain_grad() of it, or a gradient with respect to it, where other outputs depend on "
        f"it: the call would be computed once more in eager mode, but {why}",
        fix="set a hook inside of forward, where it becomes a part of the graph: `logits.register_hook(f)`",
    )


def _nothing(gradient: Tensor) -> None:
    return None


def _version(output: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return output._version
