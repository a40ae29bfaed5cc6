"""What a parallelized module tree refuses, because a flat graph has no submodule calls: direct calls of submodules that hold
shards, new hooks on submodules, and wrapping in DDP or `fully_shard`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from megafx.errors import UsageError

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DATA_PARALLEL = (
    "a parallelized model runs one flat graph, which has no submodule calls to hook: do not wrap it; data parallelism is "
    "Config(data_parallel_size=...) with data_parallel='ddp', 'zero1' or 'fsdp' (docs/data_parallel.md)"
)


def data_parallel_error(wrapper: str) -> UsageError:
    return UsageError(f"{wrapper} around a model that megafx has parallelized", fix=DATA_PARALLEL)


class HookTable(OrderedDict[int, Any]):
    """The hooks of one submodule: those that were there when it was parallelized, and no new ones (except during capture)."""

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

    def __copy__(self) -> OrderedDict[int, Any]:  # type: ignore[override]
        return OrderedDict(self.items())


class RootHooks(HookTable):
    """The hooks of the root: all but those of `fully_shard`."""

    def __setitem__(self, key: int, hook: Any) -> None:
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
            raise data_parallel_error("fully_shard")
        OrderedDict.__setitem__(self, key, hook)


class DirectCallGuard:
    """A forward pre-hook that refuses a call of a submodule that holds shards."""

    def __init__(self, fqn: str, open_now: Callable[[], bool]) -> None:
        self.fqn, self.open_now = fqn, open_now

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.open_now():
            raise UsageError(
                f"a direct call of '{self.fqn}' ({type(module).__name__}), a submodule of a parallelized model: "
                f"its parameters are shards",
                module=self.fqn,
                fix="call the whole model, or keep an eager copy of the submodule made before megafx.parallelize",
            )


def guard_modules(
    model: nn.Module, open_now: Callable[[], bool], sharded: bool, eager: Collection[str] = ()
) -> list[str]:
    """Install the guards; returns FQNs of submodules that had hooks already (they run at capture only).

    open_now: whether capture is going on. sharded: whether submodules hold shards (t > 1). eager: FQNs of submodules whose
    code runs as it is: their hooks do too, and nothing is refused.
    """
    hooked = []
    for fqn, module in model.named_modules():
        if any(f"{fqn}.".startswith(f"{name}.") for name in eager):
            continue
        if any(vars(module).get(table) for table in _HOOK_TABLES) and fqn:
            hooked.append(fqn)
        kind = HookTable if fqn else RootHooks
        for table in _HOOK_TABLES:
            setattr(module, table, kind(fqn, open_now, vars(module).get(table, {})))
        if fqn and sharded and any(True for _ in module.parameters()):
            guard = DirectCallGuard(fqn, open_now)
            OrderedDict.__setitem__(module._forward_pre_hooks, -1, guard)
            OrderedDict.move_to_end(module._forward_pre_hooks, -1, last=False)
    return hooked


def remove_guards(model: nn.Module) -> None:
    """Plain hook tables again, without our own hooks (for copies of the model)."""
    for module in model.modules():
        for table in _HOOK_TABLES:
            hooks = {k: h for k, h in vars(module).get(table, {}).items() if not isinstance(h, DirectCallGuard)}
            setattr(module, table, OrderedDict(hooks))
