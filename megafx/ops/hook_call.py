"""Hooks of modules, run by a graph at the border of the module: whole tensors in, whole tensors out.

A module with hooks stays part of the graph, captured and sharded. Around it are calls of its hooks, one node before it and one
behind it; more where hooks that are traced (capture/hooks.py) are between others. A node looks hooks up when it runs, in the
order of `nn.Module.__call__`; so one that is added to others of its kind needs no new graph. Backward hooks are torch's own
(`BackwardHook`), on the tapes of the two nodes.
"""

from __future__ import annotations

import inspect
import itertools
import types
import warnings
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from megafx.errors import CaptureError, UsageError
from megafx.meanwhile import replacing
from megafx.ops.eager_call import Constant, EagerCall, Order, ResultSize, as_node, differentiable, leaf_value, size_leaf
from megafx.ops.tapes import current

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_pairs = itertools.count()


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal for the same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def identity(hook: Any) -> Hashable:
    """Equal for hooks that trace alike, whenever they are registered."""
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, types.FunctionType) or function.__defaults__ or function.__kwdefaults__:
        return _Same(hook)
    cells = tuple(map(_Same, function.__closure__ or ()))
    return function.__code__, cells, None if hook is function else _Same(hook.__self__)


def _name(hook: Any) -> str:
    """The function of a hook, with its file and line."""
    function = inspect.unwrap(getattr(hook, "__func__", getattr(hook, "func", hook)))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _arguments(
    module: nn.Module, number: int, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) after one pre-hook."""
    if number in module._forward_pre_hooks_with_kwargs:
        changed = hook(module, args, kwargs)
        return (args, kwargs) if changed is None else changed
    if (changed := hook(module, args)) is None:
        return args, kwargs
    return changed if isinstance(changed, tuple) else (changed,), kwargs


def _output(
    module: nn.Module, number: int, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """The output after one forward hook."""
    takes = number in module._forward_hooks_with_kwargs or number in of_all._global_forward_hooks_with_kwargs
    changed = hook(module, args, kwargs, output) if takes else hook(module, args, output)
    return output if changed is None else changed


@dataclass(frozen=True)
class Side:
    """The hooks before or behind a module, in their order."""

    # identities of hooks that are traced; None is a node, which runs all others between two of them
    steps: tuple[Hashable | None, ...] = ()
    reads: bool = False  # whether it has any
    kwargs: bool = False  # whether these take keyword arguments, too

    @staticmethod
    def of(order: Sequence[Hashable | None], kwargs: bool, backward: bool, always: bool) -> Side:
        """order: None for each hook that is not traced. backward: the module has backward hooks. always: some hooks run after
        exceptions, too."""
        steps = [step for i, step in enumerate(order) if step is not None or i == 0 or order[i - 1] is not None]
        if always and (not steps or steps[0] is not None):
            steps.insert(0, None)
        if (backward or always) and steps[-1:] != [None]:
            steps.append(None)
        return Side(tuple(steps), None in order, kwargs)

    @property
    def runs(self) -> bool:
        return None in self.steps


@dataclass
class Open:
    """A module whose call has begun, and has hooks that are called after exceptions as well. called: those that were."""

    call: HookCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    called: set[int] = field(default_factory=set)

    def fail(self) -> None:
        """What `nn.Module.__call__` does where forward, or a hook, raises."""
        module = self.call.found()
        for number, hook in self.call.entries("_forward_hooks"):
            always = (
                number in module._forward_hooks_always_called or number in of_all._global_forward_hooks_always_called
            )
            if not always or number in self.called or identity(hook) in self.call.traced:
                continue
            try:
                self.output = _output(module, number, hook, self.args, self.kwargs, self.output)
            except Exception as error:
                warnings.warn(
                    "module forward hook with ``always_call=True`` raised an exception that was silenced as another error was "
                    f"raised in forward: {error}",
                    stacklevel=2,
                )


@dataclass(frozen=True)
class HookCall(EagerCall):
    """Some of the hooks around one call of one module: of (args, kwargs) before it, of (args, kwargs, output) behind it."""

    copies: ClassVar[bool] = True
    before: bool = True
    pair: int = 0  # the number of that call of the module
    traced: frozenset[Hashable] = frozenset()  # identities of hooks that are part of the graph, and are not run
    segment: int = 0  # it runs hooks that have so many traced ones before them
    last: bool = True  # it is the last of this side
    always: bool = False  # some run after exceptions

    @property
    def what(self) -> str:
        tables = ["_forward_pre_hooks"] if self.before else ["_forward_hooks"]
        tables += ["_backward_hooks", "_backward_pre_hooks"]
        names = [_name(hook) for table in tables for _, hook in self.entries(table)]
        return f"the module '{self.fqn}' has the hook{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def run(self, tensors: Sequence[Tensor], buffers: Any = None) -> Any:
        values = iter(tensors)
        leaves = [next(values) if x is None else leaf_value(x, tensors) for x in self.leaves]
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

    def entries(self, table: str) -> list[tuple[int, Any]]:
        """(number, hook) of all in one table, in the order in which they run."""
        return [*getattr(of_all, f"_global{table}").items(), *getattr(self.found(), table).items()]

    def _hooks(self, table: str) -> Iterator[tuple[int, Any]]:
        before = 0
        for number, hook in self.entries(table):
            if identity(hook) in self.traced:
                before += 1
            elif before == self.segment:
                yield number, hook

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.found()
        if self.always and self.segment == 0:
            current().open[self.pair] = Open(self, args, kwargs)
        for number, hook in self._hooks("_forward_pre_hooks"):
            args, kwargs = _arguments(module, number, hook, args, kwargs)
        tables = ("_backward_hooks", "_backward_pre_hooks")
        hooks, first = ([h for _, h in self.entries(t)] for t in tables) if self.last else ([], [])
        if hooks or first:
            backward = BackwardHook(module, hooks, first)
            args = backward.setup_input_hook(args)
            current().waiting.setdefault(self.pair, []).append(backward)
        if (opened := current().open.get(self.pair)) is not None:
            opened.args, opened.kwargs = args, kwargs
        return args, kwargs

    def _behind(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        opened = current().open.get(self.pair)
        if opened is not None:
            opened.args, opened.kwargs, opened.output = args, kwargs, output
        for number, hook in self._hooks("_forward_hooks"):
            if opened is not None:
                opened.called.add(number)
            output = _output(self.found(), number, hook, args, kwargs, output)
            if opened is not None:
                opened.output = output
        if self.last:
            current().open.pop(self.pair, None)
        waiting = current().waiting.get(self.pair) if self.last else None
        return waiting.pop(0).setup_output_hook(output) if waiting else output


class Around:
    """The hooks of one module while a model is traced: calls of them are nodes around what the module's call traces.

    before, behind: of what the sides consist. random: whether hooks draw random numbers. traced: identities of hooks that are
    traced like the module's own code. tables: (number, hook) of all pre-hooks, and of all forward hooks. always: some hooks run
    after exceptions, too.
    """

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        order: Order,
        before: Side,
        behind: Side,
        random: bool,
        traced: frozenset[Hashable],
        tables: Sequence[Sequence[tuple[int, Any]]],
        always: bool,
    ) -> None:
        self.module, self.fqn, self.order = module, fqn, order
        self.before, self.behind, self.random, self.traced = before, behind, random, traced
        self.hooks = [[(n, h) for n, h in table if identity(h) in traced] for table in tables]
        self.always = always

    @replacing
    def call_for(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What replaces the module's `_call_impl`."""
        pair, module, segment = next(_pairs), self.module, 0
        for i, step in enumerate(self.before.steps):
            if step is None:
                last = i == len(self.before.steps) - 1
                given = (args, kwargs if self.before.kwargs else {})
                args, changed = self._node(True, pair, given, segment, last)
                kwargs = changed if self.before.kwargs else kwargs
                continue
            number, hook = self.hooks[0][segment]
            segment += 1
            args, kwargs = _arguments(module, number, hook, args, kwargs)
        output, segment = original(*args, **kwargs), 0
        for i, step in enumerate(self.behind.steps):
            if step is None:
                last = i == len(self.behind.steps) - 1
                known = (args if self.behind.reads else (), kwargs if self.behind.kwargs else {}, output)
                output = self._node(False, pair, known, segment, last)
                continue
            number, hook = self.hooks[1][segment]
            segment += 1
            output = _output(module, number, hook, args, kwargs, output)
        return output

    def _node(self, before: bool, pair: int, given: tuple[Any, ...], segment: int, last: bool) -> Any:
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
            (),
            before,
            pair,
            self.traced,
            segment,
            last,
            self.always,
        )
        return as_node(call, tensors, self.order)

    def _leaf(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, torch.SymInt):
            if (found := size_leaf(value, tensors)) is not None:
                return found
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
