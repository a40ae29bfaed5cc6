"""The class of a parallelized model: a subclass of the user's, made on the fly.

`isinstance`, `config`, `generate` and everything else of the class go on working; the root forward runs graphs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from megafx.capture.errors import refuse_quantised, refuse_scripted
from megafx.capture.export import refuse_lazy
from megafx.distributed import agreement
from megafx.distributed.failures import meet
from megafx.distributed.parameters import RUNTIME, replicate_parameters
from megafx.errors import UsageError
from megafx.runtime.guards import data_parallel_error, guard_forward, remove_guards
from megafx.runtime.runtime import Runtime
from megafx.weights.save import save_whole
from megafx.weights.state import full_state_dict, prepare_assignment, prepare_loading

# -- `save_pretrained` of a sharded Hugging Face model, written as `megafx.save_pretrained` writes
#
# `max_shard_size`, `variant` and `save_original_format` mean what they mean to the class's own method. `is_main_process` is
# true on some rank, or nothing is written (the Trainer gives each rank its own). A `state_dict` of whole tensors, adapters
# and quantized models are left to the method itself.

CALLER = "model.save_pretrained"
Example = tuple[tuple[Any, ...], dict[str, Any]]


def bound(
    method: Callable[..., Any], folder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The method's arguments by name, defaults included; None where the method itself has to save."""
    known = inspect.signature(method)
    options = known.bind(folder, *args, **kwargs)
    options.apply_defaults()
    model: Any = getattr(method, "__self__", None)
    special = getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None) is not None
    if special or "max_shard_size" not in known.parameters or options.arguments.get("state_dict") is not None:
        return None
    return options.arguments


def save(model: nn.Module, options: dict[str, Any], runtime: Runtime) -> None:
    """Write the files. Collective over all ranks of the model."""
    if options.get("push_to_hub"):
        raise no_upload("save_pretrained(push_to_hub=True)")
    if options.get("distributed_checkpoint"):
        raise UsageError(
            "save_pretrained(distributed_checkpoint=True) would write shards as this number of ranks lays them out",
            fix="megafx.save_checkpoint(folder, model, optimizer, step=...), which loads on any number of ranks",
        )
    if not _wanted(bool(options.get("is_main_process", True)), runtime):
        return
    folder = Path(options["save_directory"])
    save_whole(
        model,
        folder,
        options["max_shard_size"],
        CALLER,
        variant=options.get("variant") or "",
        original_format=bool(options.get("save_original_format", True)),
    )
    if runtime.is_first and getattr(model, "is_remote_code", bool)():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=model.config)


def _wanted(main: bool, runtime: Runtime) -> bool:
    """True if some rank is to write."""
    group = runtime.everyone
    if group is None:
        return main
    meet(CALLER, group)
    return agreement.first_rank(main, group) is not None


def no_upload(call: str) -> UsageError:
    return UsageError(
        f"{call} of a model whose weights are on several ranks",
        fix="model.save_pretrained(folder) on every rank, then huggingface_hub.HfApi().upload_folder(folder_path=folder, "
        "repo_id=...) on one",
    )


class Parallel:
    """Mixin of every parallelized model."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
            raise data_parallel_error("fully_shard")
        super().__init_subclass__(**kwargs)

    @property
    def megafx(self) -> Runtime:
        """The runtime: plan, graphs, `captures`, notes."""
        return cast(Runtime, vars(self)[RUNTIME])

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """True if ranks share the model: the Trainer then leaves placement and reductions to it, and saves on all ranks."""
        return self.megafx.everyone is not None

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DDP asks for this attribute before it does anything to the module.
        raise data_parallel_error("DistributedDataParallel")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        # What FullyShardedDataParallel sets on every module before it flattens parameters.
        raise data_parallel_error("FullyShardedDataParallel")

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without reducing them over data-parallel ranks: `backward` in here holds them back.

        The first backward outside adds what was held and reduces the sums. `zero_grad()`, of the model or of an optimizer,
        drops what is held.
        """
        return self.megafx.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's; gradients that `no_sync` holds are dropped too."""
        for name in [*self.megafx.state.held.sums]:
            self.megafx.state.held.drop(name, self.megafx.state.slots[name].get())
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the user's class

    def print_readable(self, fqn: str = "") -> str:
        """Print (and return) the graph that runs under module path `fqn` as Python, with shapes, placements and origins."""
        text: str = self.megafx.readable(fqn)
        print(text)
        return text

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; whole tensors are sharded. With shards, `assign` copies too, since values have to be cut. Raises
        UsageError where it would give parameters another dtype."""
        model = cast(nn.Module, self)
        if self.megafx.mesh is not None:
            if assign:
                prepare_assignment(model, state_dict)
            state_dict = prepare_loading(model, state_dict)
            assign = False
        more = {"assign": True} if assign else {}  # an override of the user's class may not know it
        result = super().load_state_dict(state_dict, strict=strict, **more)  # type: ignore[misc]  # of the user's class
        self.megafx.memory_given()
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[misc]  # of the user's class
        self.megafx.parameters_changed()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with parameters, gradients and graphs of its own making: it compiles anew with the same placements."""
        runtime = self.megafx
        new = runtime.original.__new__(runtime.original)
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name != RUNTIME:
                vars(new)[name] = copy.deepcopy(value, memo)
        remove_guards(new)
        _install(runtime.copy_for(new))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a parallelized model cannot be pickled, or copied by copy.copy: each rank holds shards and graphs",
            fix="save its state_dict() (or megafx.full_state_dict(model)), and parallelize a new model when loading; a copy "
            "with parameters of its own is copy.deepcopy(model)",
        )


class _Pretrained:
    """For Hugging Face models: `save_pretrained` writes original tensors; ranks that generate text draw the same tokens."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the class's own. Tokens are drawn on every rank: from rank 0's generator state, so that they are the same."""
        cast(Parallel, self).megafx.same_generators()
        return super().generate(*args, **kwargs)  # type: ignore[misc]  # of the user's class

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As the class's own, on every rank: files are written by all of them, and none holds the whole model."""
        runtime = cast(Parallel, self).megafx
        original = super().save_pretrained  # type: ignore[misc]  # of the user's class
        if runtime.mesh is None:
            return original(save_directory, *args, **kwargs)
        options = bound(original, save_directory, args, kwargs)
        if options is not None:
            return save(cast(nn.Module, self), options, runtime)
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = full_state_dict(cast(nn.Module, self))
        kwargs["is_main_process"] = kwargs.get("is_main_process", True) and runtime.is_first
        tp_size, self._tp_size = vars(self).get("_tp_size"), None
        try:
            return original(save_directory, *args, **kwargs)
        finally:
            self._tp_size = tp_size

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        if cast(Parallel, self).megafx.mesh is None:
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]  # of the user's class
        raise no_upload("push_to_hub")


def make_parallel(runtime: Runtime, example: Example | None = None, *, compile: bool = False) -> nn.Module:
    """The runtime's model, now an instance of its parallel subclass, with DTensors for parameters on several ranks.

    Collective over all ranks of the runtime's meshes. example: a training call to plan by, ahead of the first one; compile:
    make its graph too.
    """
    model = runtime.model
    if RUNTIME in vars(model):
        raise UsageError("the model is parallelized already", fix="call megafx.parallelize once a model")
    if (inner := next((n for n, m in model.named_modules() if RUNTIME in vars(m)), None)) is not None:
        fix = "parallelize the whole model alone, before its parts, or leave the outer module as it is"
        raise UsageError(f"the model's submodule '{inner}' is parallelized already", fix=fix)
    refuse_scripted(model)
    refuse_quantised(model, runtime.t)
    refuse_lazy(model)
    if runtime.mesh is not None:
        replicate_parameters(model, runtime.mesh)
        for name in agreement.agree_on_weights(model, runtime.everyone):
            runtime.note("agreement", f"'{name}' differed between ranks: rank 0's value is used")
    _install(runtime)
    if example is not None:
        try:
            runtime.start(*example, compile=compile)
        except BaseException:
            if runtime.mesh is None:  # so that it can be parallelized once more, as the error advises
                remove_guards(model)
                model.__class__ = runtime.original
                del vars(model)[RUNTIME]
            raise
    return model


def _install(runtime: Runtime) -> None:
    model, data = runtime.model, runtime.meshes.data
    runtime.guard()
    vars(model)[RUNTIME] = runtime
    guard_forward(model, runtime.call)
    model.__class__ = parallel_class(runtime.original)
    alike, replicas = (1, 1) if data is None else (data.cp, data.ranks)
    announce(model, runtime.t * alike, replicas)
    runtime.parameters_changed()


def announce(model: Any, t: int, replicas: int) -> None:
    """Tell Trainer and accelerate of the ranks, so that they neither wrap the model nor split a group's batches.

    t: the ranks that are given the same batches, which is what they know tensor-parallel ranks for.

    They read attributes of any model, not of transformers' own alone: `tp_size`, `_tp_size`, that the model owns its placement
    (`Parallel.is_distributed_loading_by_transformers`), and the other sizes in `config.distributed_config`.
    """
    for name in ("tp_size", "_tp_size"):
        if not isinstance(getattr(type(model), name, None), property):
            setattr(model, name, t)
    if t * replicas == 1:
        return
    if getattr(model, "config", None) is None:
        model.config = RanksConfig()
    with contextlib.suppress(AttributeError, TypeError):  # a dict, a frozen dataclass: the Trainer refuses them itself
        model.config.distributed_config = _sizes(t, replicas)


@dataclass
class RankSizes:
    """The sizes that Trainer and accelerate read from transformers' DistributedConfig, where transformers is not imported."""

    tp_size: int
    fsdp_size: int
    dp_replicate_size: int = 1
    pp_size: int = 1
    ep_size: int = 1

    @property
    def dp_size(self) -> int:
        return self.dp_replicate_size * self.fsdp_size


class RanksConfig:
    """The `config` of a parallelized model that has none of its own: the Trainer looks for the ranks there."""

    def to_dict(self) -> dict[str, Any]:
        return {n: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for n, v in vars(self).items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict())


def _sizes(t: int, replicas: int) -> Any:
    module = sys.modules.get("transformers.distributed.configuration_utils")
    known = getattr(module, "DistributedConfig", None)
    if known is None or "fsdp_size" not in inspect.signature(known).parameters:
        return RankSizes(t, replicas)
    return known(tp_size=t, tp_plan={}, fsdp_size=replicas)


def parallel_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `original` whose forward runs graphs."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.megafx.call(args, kwargs)

    # torch.compile round the user's loop takes the call as it is: it runs a graph already.
    reason = "a model that megafx has parallelized runs a graph of its own"
    eager: Any = torch.compiler.disable(forward, reason=reason)
    eager.__signature__ = inspect.signature(original.forward)
    bases = (Parallel, _Pretrained, original) if hasattr(original, "save_pretrained") else (Parallel, original)
    namespace = {"forward": eager, "__module__": original.__module__, "__qualname__": original.__qualname__}

    class OfUsersClass(type(original)):  # type: ignore[misc]  # a metaclass that is computed
        """`type(model).calls += 1` is of the user's class, as its methods mean it."""

        def __setattr__(cls, name: str, value: Any) -> None:
            setattr(original, name, value)

        def __delattr__(cls, name: str) -> None:
            delattr(original, name)

    return OfUsersClass(original.__name__, bases, namespace)
