"""Submodules of a parallelized model, whose flat graph has no submodule calls.

A direct call of a submodule that holds shards runs a graph of its own. New hooks on submodules are refused, and so is
wrapping the model in DDP or `fully_shard`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from megafx.capture.prepare import HOOK_TABLES
from megafx.errors import UsageError

DATA_PARALLEL = (
    "a parallelized model runs one flat graph, which has no submodule calls to hook: do not wrap it; data parallelism is "
    "Config(data_parallel_size=...) with data_parallel='ddp', 'zero1' or 'fsdp' (docs/data_parallel.md)"
)


def data_parallel_error(wrapper: str) -> UsageError:
    return UsageError(f"{wrapper} around a model that megafx has parallelized", fix=DATA_PARALLEL)


class HookTable(OrderedDict[int, Any]):
    """The hooks of one submodule. New ones are refused, except during capture."""

    def __init__(self, fqn: str, open_now: Callable[[], bool], hooks: Any = ()) -> None:
        super().__init__()
        self.fqn, self.open_now = fqn, open_now
        for key, hook in dict(hooks).items():
            super().__setitem__(key, hook)

    def __setitem__(self, key: int, hook: Any) -> None:
        if not self.open_now():
            if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed"):
                raise data_parallel_error("fully_shard")
            raise UsageError(
                "a hook on a submodule of a parallelized model would never run: the whole model is one graph",
                module=self.fqn,
                fix="register it on the root model, or on parameters (register_hook, register_post_accumulate_grad_hook)",
            )
        super().__setitem__(key, hook)

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)

    def __deepcopy__(self, memo: Any) -> OrderedDict[int, Any]:
        return OrderedDict(self.items())

    def __copy__(self) -> OrderedDict[int, Any]:
        return OrderedDict(self.items())


class RootHooks(HookTable):
    """The hooks of the root: all but those of `fully_shard`."""

    def __setitem__(self, key: int, hook: Any) -> None:
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
            raise data_parallel_error("fully_shard")
        OrderedDict.__setitem__(self, key, hook)


class DirectCall:
    """The forward of a submodule that holds shards: the module's own during capture, a graph otherwise.

    run(fqn, args, kwargs): calls that graph. replaced: the forward that the user had put on this instance, if any.
    """

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        open_now: Callable[[], bool],
        run: Callable[[str, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        functools.update_wrapper(self, module.forward)  # its signature is asked for (generate does)
        self.fqn, self.open_now, self.run = fqn, open_now, run
        self.own, self.replaced = module.forward, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs) if self.open_now() else self.run(self.fqn, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedApart:
        return CopiedApart(self.fqn, self.replaced)


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


def guard_modules(
    model: nn.Module,
    open_now: Callable[[], bool],
    run: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None,
    eager: Collection[str] = (),
) -> list[str]:
    """Install the guards; returns FQNs of submodules that had hooks already (they run at capture only).

    open_now: whether capture is going on. run(fqn, args, kwargs): what a direct call of a submodule does where submodules hold
    shards; None where they hold none. eager: FQNs of submodules whose code runs as it is: their hooks do too, and nothing is
    refused.
    """
    hooked = []
    for fqn, module in model.named_modules():
        if any(f"{fqn}.".startswith(f"{name}.") for name in eager):
            continue
        if any(vars(module).get(table) for table in HOOK_TABLES) and fqn:
            hooked.append(fqn)
        kind = HookTable if fqn else RootHooks
        for table in HOOK_TABLES:
            setattr(module, table, kind(fqn, open_now, vars(module).get(table, {})))
        if fqn and run is not None and _is_callable(module) and any(True for _ in module.parameters()):
            vars(module)["forward"] = DirectCall(fqn, module, open_now, run)
    return hooked


def _is_callable(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules have none."""
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


def remove_guards(model: nn.Module) -> None:
    """Plain hook tables and forwards again (for copies of the model)."""
    for module in model.modules():
        for table in HOOK_TABLES:
            setattr(module, table, OrderedDict(vars(module).get(table, {})))
        forward = vars(module).get("forward")
        if isinstance(forward, (DirectCall, CopiedApart)):
            del vars(module)["forward"]
            if forward.replaced is not None:
                vars(module)["forward"] = forward.replaced
