"""Hooks of modules, run by a graph at the border of the module: whole tensors in, whole tensors out.

A module with hooks stays part of the graph, captured and sharded. Around it are calls of its hooks, one node before it and one
behind it. A node looks hooks up when it runs, in the order of `nn.Module.__call__`; so one that is added to others of its kind
needs no new graph. Backward hooks are torch's own (`BackwardHook`), on the tapes of the two nodes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from megafx.errors import CaptureError, UsageError
from megafx.ops.eager_call import Constant, EagerCall, Order, ResultSize, as_node, differentiable
from megafx.ops.tapes import current

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_pairs = itertools.count()


@dataclass(frozen=True)
class Size:
    """A leaf that is a size of one of the tensors."""

    size: ResultSize


@dataclass(frozen=True)
class HookCall(EagerCall):
    """The hooks around one call of one module: of (args, kwargs) before it, of (args, kwargs, output) behind it.

    pair: the number of that call of the module. traced: hooks that are part of the graph, and are not run.
    """

    copies: ClassVar[bool] = True
    before: bool = True
    pair: int = 0
    traced: frozenset[int] = frozenset()

    def run(self, tensors: Sequence[Tensor], buffers: Any = None) -> Any:
        values = iter(tensors)
        leaves = [next(values) if x is None else _value(x, tensors) for x in self.leaves]
        given = pytree.tree_unflatten(leaves, self.spec)
        alike = self.random or current().ranks == 1
        state = None if alike else torch.get_rng_state()
        result = self._before(*given) if self.before else self._behind(*given)
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            raise UsageError(
                "a hook draws random numbers, which its code does not show: each rank would draw others",
                module=self.fqn,
                fix="draw them in the hook's own code (`torch.randn_like(output)`), or from a torch.Generator of its own that "
                "all ranks seed alike",
            )
        return result

    def refuse(self, result: str, traced: str) -> UsageError:
        return UsageError(
            f"a hook returned {result} where there was {traced}: the graph is made for what the module takes and gives",
            module=self.fqn,
            fix="return values of the same structure, shapes and dtypes; or write the change as a module of its own, and put "
            "it into the model: `model.x = nn.Sequential(model.x, Change())`",
        )

    def _hooks(self, table: str) -> Iterator[tuple[int, Any]]:
        own = getattr(self.found(), table)
        for number, hook in (*getattr(of_all, f"_global{table}").items(), *own.items()):
            if number not in self.traced:
                yield number, hook

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.found()
        for number, hook in self._hooks("_forward_pre_hooks"):
            if number in module._forward_pre_hooks_with_kwargs:
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            elif (changed := hook(module, args)) is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        hooks, first = ([h for _, h in self._hooks(t)] for t in ("_backward_hooks", "_backward_pre_hooks"))
        if hooks or first:
            backward = BackwardHook(module, hooks, first)
            args = backward.setup_input_hook(args)
            current().waiting.setdefault(self.pair, []).append(backward)
        return args, kwargs

    def _behind(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        module = self.found()
        for number, hook in self._hooks("_forward_hooks"):
            takes = number in module._forward_hooks_with_kwargs or number in of_all._global_forward_hooks_with_kwargs
            changed = hook(module, args, kwargs, output) if takes else hook(module, args, output)
            if changed is not None:
                output = changed
        waiting = current().waiting.get(self.pair)
        return waiting.pop(0).setup_output_hook(output) if waiting else output


def _value(leaf: Any, tensors: Sequence[Tensor]) -> Any:
    return leaf.size.of(tensors) if isinstance(leaf, Size) else leaf.value


class Around:
    """The hooks of one module while a model is traced: calls of them are nodes around what the module's call traces.

    before, behind: whether there are such on that side; kwargs: whether these take keyword arguments, too; random: whether they
    draw random numbers. traced: hooks that are traced like the module's own code.
    """

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        order: Order,
        *,
        before: bool,
        behind: bool,
        reads: bool,
        kwargs: tuple[bool, bool],
        random: bool,
        traced: frozenset[int],
    ) -> None:
        self.module, self.fqn, self.order = module, fqn, order
        self.before, self.behind, self.reads = before, behind, reads
        self.kwargs, self.random, self.traced = kwargs, random, traced

    def call_for(self, original: Any) -> Any:
        """What replaces the module's `_call_impl`."""

        def called(*args: Any, **kwargs: Any) -> Any:
            pair = next(_pairs)
            if self.before:
                args, changed = self._node(True, pair, (args, kwargs if self.kwargs[0] else {}))
                kwargs = changed if self.kwargs[0] else kwargs
            output = original(*args, **kwargs)
            if self.behind:
                given = (args if self.reads else (), kwargs if self.kwargs[1] else {}, output)
                output = self._node(False, pair, given)
            return output

        return called

    def _node(self, before: bool, pair: int, given: tuple[Any, ...]) -> Any:
        leaves, spec = pytree.tree_flatten(given)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not tensors:
            raise CaptureError(
                "a hook on a module whose call has no tensors: a graph has nothing to give to it",
                module=self.fqn,
                fix="put the hook on a module that gets or returns tensors",
            )
        kept = [None if isinstance(x, Tensor) else self._leaf(x, tensors) for x in leaves]
        result = given if before else given[-1]
        out, out_spec = pytree.tree_flatten(result)
        places = {id(x): i for i, x in enumerate(tensors)}
        call = HookCall(
            weakref.ref(self.module),
            self.fqn,
            spec,
            tuple(kept),
            (),
            (),
            differentiable(tensors),
            tuple(_like(x, places[id(x)]) for x in out if isinstance(x, Tensor)),
            out_spec,
            tuple(None if isinstance(x, Tensor) else Constant(x) for x in out),
            self.random,
            before,
            pair,
            self.traced,
        )
        return as_node(call, tensors, self.order)

    def _leaf(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, torch.SymInt):
            for i, tensor in enumerate(tensors):
                for d, size in enumerate(tensor.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                        return Size(ResultSize(sympy.Integer(1), ((i, d),)))
        elif isinstance(value, _PLAIN):
            return Constant(value)
        kind = type(value)
        raise CaptureError(
            f"a hook would get a {kind.__module__}.{kind.__qualname__}, which is no value of a graph",
            module=self.fqn,
            fix="put the hook on a module that gets and returns tensors and numbers alone (inside of this one, say), or let it "
            "take no keyword arguments (with_kwargs=False), if this is one of them",
        )


def _like(tensor: Tensor, index: int) -> tuple[torch.dtype, tuple[ResultSize, ...]]:
    dims = (ResultSize(sympy.Integer(1), ((index, d),)) for d in range(tensor.dim()))
    return tensor.dtype, tuple(dims)
