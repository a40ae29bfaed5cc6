"""Submodules of a parallelized model, whose flat graph has no submodule calls.

A direct call of a submodule that holds shards runs a graph of its own. Hooks on submodules are watched: another set of them
needs another graph (capture/hooks.py). So are buffers whose numbers a graph has in it (`TableGuard`). Wrapping the model in DDP
or `fully_shard` is refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, cast

from torch import nn
from torch.nn.modules import module as of_all

from megafx.analysis.tables import Table, read_table
from megafx.capture.hook_stores import line_of_hook, names_of_hook
from megafx.capture.hooks import HOOK_TABLES, hooked_modules, names_in, refuse_dispatch
from megafx.capture.like_layers import AroundForward
from megafx.errors import UsageError
from megafx.ir.python_state import Place

DATA_PARALLEL = (
    "a parallelized model runs one flat graph, which has no submodule calls to hook: do not wrap it; data parallelism is "
    "Config(data_parallel_size=...) with data_parallel='ddp', 'zero1' or 'fsdp' (docs/data_parallel.md)"
)


def data_parallel_error(wrapper: str) -> UsageError:
    return UsageError(f"{wrapper} around a model that megafx has parallelized", fix=DATA_PARALLEL)


class HookTable(OrderedDict[int, Any]):
    """The hooks of one kind on one module. A change of it makes a call look again (`Hooked`). Equal to itself alone: code that
    takes hooks off puts another table in its place."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self.changed = changed

    def __setitem__(self, key: int, hook: Any) -> None:
        owner = type(getattr(hook, "__self__", None))
        if owner.__module__.startswith("torch.distributed") or owner.__name__ == "FSDPState":
            raise data_parallel_error("fully_shard")
        super().__setitem__(key, hook)
        self.changed()

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self.changed()

    def clear(self) -> None:
        super().clear()
        self.changed()

    def pop(self, *key: Any) -> Any:
        self.changed()
        return super().pop(*key)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__  # type: ignore[assignment]  # an OrderedDict has none

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)

    def __deepcopy__(self, memo: Any) -> OrderedDict[int, Any]:
        return OrderedDict(self.items())

    def __copy__(self) -> OrderedDict[int, Any]:
        return OrderedDict(self.items())


class Hooked:
    """Which modules of a model have hooks, of which kinds: part of what a graph is made for.

    Tables that are empty when the model is parallelized are replaced by `HookTable`s, which say when they change. Others stay:
    handles refer to them, with which hooks are removed; they are looked at in each call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.changed = model, True
        self.watched: list[tuple[dict[str, Any], str, Any]] = []
        self.owners: list[dict[str, Any]] = []
        self.tables: list[tuple[Any, ...]] = []
        self.found: Hashable = ()
        self.seen: Hashable = None
        weak = weakref.ref(self)

        def change() -> None:
            if (mine := weak()) is not None:
                mine.changed = True

        self.change = change

    def watch(self) -> None:
        """Take the tables of all modules into care."""
        self.watched = []
        self.owners = [vars(module) for module in self.model.modules()]
        for module in self.model.modules():
            for name in HOOK_TABLES:
                table = vars(module).get(name)
                if isinstance(table, HookTable):
                    continue
                if table:
                    self.watched.append((vars(module), name, table))
                else:
                    vars(module)[name] = HookTable(self.change)
        self.tables = list(map(_TABLES_OF, self.owners))
        self.changed = False

    def state(self, eager: Collection[str]) -> Hashable:
        """Equal for two calls that one graph can serve. CaptureError where hooks are of a kind that none can. eager: FQNs of
        modules that are left eager, hooks and all."""
        refuse_dispatch(self.model, "")
        seen = (
            [(owner.get(name) is table, *table) for owner, name, table in self.watched],
            [tuple(table) for table in _OF_ALL],
        )
        if self.changed or seen != self.seen or list(map(_TABLES_OF, self.owners)) != self.tables:
            self.watch()
            outside = {self.model}
            for name in eager:
                outside |= set(self.model.get_submodule(name).modules())
            found = hooked_modules(self.model, outside, read=names_in(self.model))
            self.found = tuple(found.items())
            self.seen = ([(True, *table) for _, _, table in self.watched], [tuple(table) for table in _OF_ALL])
        return self.found


def changed_by_a_hook(model: nn.Module, place: Place) -> UsageError:
    """The error for a hook that changed, while a graph ran, what forward reads after it."""
    key = str(place.outermost.key)
    hooks = [(fqn, h) for fqn, m in model.named_modules() for t in HOOK_TABLES for h in vars(m).get(t, {}).values()]
    named = [(fqn, h) for fqn, h in hooks if key in names_of_hook(h)] or hooks
    fqn, hook = named[0] if named else ("", None)
    return UsageError(
        f"a hook changed '{place.name}', and forward reads that later in the same call: the graph had the value of before",
        module=fqn,
        source=line_of_hook(hook),
        fix="let the hook's own code assign it by name (`self.stored = output`, `stores['skip'] = output`), so that the hook "
        "is a part of the graph; or let a module do so: `model.x = nn.Sequential(model.x, Store())`",
    )


_TABLES_OF = operator.itemgetter(*HOOK_TABLES)
_OF_ALL = [getattr(of_all, f"_global{name}") for name in HOOK_TABLES]


Run = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]


class DirectCall(AroundForward):
    """The forward of a submodule that holds shards (or of the model, where the user has put one on it): the module's own during
    capture, a graph otherwise.

    run(fqn, module, args, kwargs): calls that graph. replaced: the forward that the user had put on this instance, if any.
    """

    def __init__(self, fqn: str, module: nn.Module, open_now: Callable[[], bool], run: Run) -> None:
        functools.update_wrapper(self, module.forward)  # its signature is asked for (generate does)
        self.fqn, self.open_now, self.run, self.module = fqn, open_now, run, weakref.ref(module)
        self.replaced = vars(module).get("forward")

    @property
    def own(self) -> Callable[..., Any]:
        """The module's own forward, as it is now: of its class, where the user has put none on the instance."""
        if self.replaced is not None:
            return cast(Callable[..., Any], self.replaced)
        module = self.module()
        return cast(Callable[..., Any], inspect.getattr_static(type(module), "forward").__get__(module, type(module)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs) if self.open_now() else self.run(self.fqn, self.module(), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedApart:
        return CopiedApart(self.fqn, copy.deepcopy(self.replaced, memo))


class CopiedApart:
    """The forward of a submodule that was copied without its model: its parameters are shards, so it refuses."""

    def __init__(self, fqn: str, replaced: Any) -> None:
        self.fqn, self.replaced = fqn, replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"a call of a copy of '{self.fqn}', a submodule of a parallelized model: its parameters are shards",
            module=self.fqn,
            fix="copy the whole model, or call the submodule of the model itself",
        )


def guard_modules(model: nn.Module, open_now: Callable[[], bool], run: Run, eager: Collection[str] = ()) -> None:
    """Replace the forwards of submodules that hold shards, where they are not yet.

    open_now: whether capture is going on. run(fqn, module, args, kwargs): what a direct call of a submodule does. eager: FQNs
    of submodules whose code runs as it is: nothing is changed in them.
    """
    for fqn, module in model.named_modules():
        inside = any(f"{fqn}.".startswith(f"{name}.") for name in eager)
        now = vars(module).get("forward")
        if isinstance(now, DirectCall):
            now.fqn = fqn
            continue
        if isinstance(now, CopiedApart):  # the copy became a part of the model
            _forward_of_the_users(module, now)
        if fqn and not inside and _is_callable(module) and any(True for _ in module.parameters()):
            vars(module)["forward"] = DirectCall(fqn, module, open_now, run)


def guard_forward(model: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Where the user has put a forward on the model itself, which its class's would not replace: `call` takes its place."""
    if "forward" in vars(model):
        vars(model)["forward"] = DirectCall(
            "", model, lambda: False, lambda fqn, module, args, kwargs: call(args, kwargs)
        )


def root_forward(model: nn.Module, kind: type) -> Any:
    """What a call of a model of this class runs now: the forward that the user has put on it, else that of the class."""
    if isinstance(now := vars(model).get("forward"), DirectCall):
        return now.replaced
    return next(vars(c)["forward"] for c in kind.__mro__ if "forward" in vars(c))


def root_call(model: nn.Module, kind: type[nn.Module]) -> Callable[..., Any]:
    """The same as a function whose first argument is the model."""
    own = root_forward(model, kind) if isinstance(vars(model).get("forward"), DirectCall) else None
    return kind.forward if own is None else lambda _, *args, **kwargs: own(*args, **kwargs)


def name_now(model: nn.Module, module: nn.Module, before: str) -> str:
    """The FQN of a submodule that was `before` at the last look. UsageError where it is no submodule any more."""
    found = model
    for name in before.split("."):
        found = found._modules.get(name) or nn.Module()
    if found is module:
        return before
    now = next((fqn for fqn, m in model.named_modules() if m is module), "")
    if not now:
        raise UsageError(
            f"a direct call of a {type(module).__name__} that was '{before}' of a parallelized model, and is none of its "
            "submodules any more: its parameters are shards",
            fix="call it before it is taken out, or put it back",
        )
    return now


def _is_callable(module: nn.Module) -> bool:
    """True if a module has a forward: lists and dicts of modules have none."""
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


def remove_guards(model: nn.Module) -> None:
    """Plain hook tables and forwards again (for copies of the model)."""
    for module in model.modules():
        for table in HOOK_TABLES:
            if isinstance(vars(module).get(table), HookTable):
                setattr(module, table, OrderedDict(vars(module)[table]))
        forward = vars(module).get("forward")
        if isinstance(forward, (DirectCall, CopiedApart)):
            _forward_of_the_users(module, forward)


def _forward_of_the_users(module: nn.Module, now: DirectCall | CopiedApart) -> None:
    del vars(module)["forward"]
    if now.replaced is not None:
        vars(module)["forward"] = now.replaced


class TableGuard:
    """Whether buffers of a model hold what was read from them."""

    def __init__(self, model: nn.Module, tables: Mapping[str, Table]) -> None:
        self.model, self.tables = model, dict(tables)
        self.seen = {name: self._mark(name) for name in tables}

    def _mark(self, name: str) -> tuple[int, int, int]:
        buffer = self.model.get_buffer(name)
        return id(buffer), -1 if buffer.is_inference() else buffer._version, buffer.data_ptr()

    def holds(self) -> bool:
        """Looks at the numbers only where a buffer was written or replaced since."""
        for name, table in self.tables.items():
            mark = self._mark(name)
            if mark == self.seen[name]:
                continue
            if read_table(self.model.get_buffer(name)) != table:
                return False
            self.seen[name] = mark
        return True
