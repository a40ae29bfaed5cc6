"""`Config`: what a user may choose, validated. No torch import.

Field names are Megatron's where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megafx.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Canonical style -> other spellings of it (PyTorch's ParallelStyle classes, Hugging Face's `tp_plan` names).
STYLES: dict[str, tuple[str, ...]] = {
    "colwise": ("ColwiseParallel", "column", "column_parallel"),
    "rowwise": ("RowwiseParallel", "row", "row_parallel"),
    "expert": ("ExpertParallel", "expert_parallel"),
    "replicate": ("ReplicateParallel", "replicated", "replicated_with_grad_allreduce"),
    "sequence": ("SequenceParallel", "sequence_parallel"),
}
# Fields that switch a family of fusions off.
FUSIONS = (
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "norm_fusion",
    "attention_fusion",
    "cross_entropy_fusion",
    "merge_linears",
)
MEASURE_NOTHING = "all"  # Config.fusion_profile: every fusion is made, whatever was measured
_STYLE_OF = {name: style for style, names in STYLES.items() for name in (style, *names)}
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Config:
    """Choices of one `megafx.parallelize` call.

    tensor_model_parallel_size  ranks of the tensor-parallel axis; None: the size of the mesh or of the world, else 1
    data_parallel_size          groups of tensor-parallel ranks that share the work of a batch; None: the 'dp' dims of the mesh,
                                else 1
    data_parallel               "ddp": every one holds all parameters; "zero1", "fsdp": a shard of them (docs/data_parallel.md)
    data_parallel_shard_size    ranks that hold one copy of sharded parameters together; None: all of data_parallel_size
    data_parallel_loss          "batch": a loss in the graph is that of the whole batch, and dropout is one mask over it;
                                "average": each rank's loss is of its own rows, and gradients are averaged
    data_parallel_bucket_mib    gradients are reduced together until they are this many MiB
    sequence_parallel           True, False, or "auto": the planner decides by cost
    micro_batch_size            workload that the planner prices; never the batch of trace inputs
    seq_length                  workload that the planner prices; None: the model's maximum, else that of the inputs
    params_dtype                the model is cast to it first ("bf16", "float32", torch.bfloat16); None: as it is
    hardware                    name of a measured profile (hardware/*.yaml), or path of one; None: by the device
    planner_policy              "megatron": policies remove strategies, each with a reason; "free": cost alone decides
    overrides                   {glob over module or parameter names: style}; styles are the keys of `STYLES`
    gather_outputs              without a loss, outputs come back whole (True) or as sharded DTensors (False)
    differentiable_outputs      large outputs beside a loss carry gradients too
    lazy_outputs                logits beside a loss that is fused with their layer are computed when they are first read
    compile                     lower the graphs through Inductor
    bias_dropout_fusion         bias + dropout + residual add become one kernel; so do these knobs switch their families off:
    bias_activation_fusion      bias + GeLU and other activations, gated linear units (SwiGLU)
    masked_softmax_fusion       scale + mask + softmax + dropout
    apply_rope_fusion           rotary embeddings
    norm_fusion                 LayerNorm and RMSNorm, and sums with the norm that follows
    attention_fusion            the attention chain
    cross_entropy_fusion        cross entropy, and linear + cross entropy
    merge_linears               linears of one value as one product: gate and up, queries, keys and values
    recompute_activation_func   outputs of fused activations are not kept: the kernel of their gradient writes them again
    fusion_profile              measurements: a fusion that was slower is not made. Name of a profile (hardware/fusions/) or a
                                path ('megafx profile-fusions' writes one); None: by the hardware; "all": all are made
    check_inputs_every          ranks compare input hashes on the first steps, then every so many steps; 0: then never
    eager_modules               globs of submodules that are not captured: their code runs as it is, on whole tensors
    check_for_nan_in_loss_and_grad  a loss or gradient that is not finite is an error on every rank, before the optimizer
                                sees it; waits for the device each step
    passes                      users' own passes: pairs ("after <pass>" or "before <pass>", function of a Program)
    """

    tensor_model_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel: Literal["ddp", "zero1", "fsdp"] = "ddp"
    data_parallel_shard_size: int | None = None
    data_parallel_loss: Literal["batch", "average"] = "batch"
    data_parallel_bucket_mib: int = 25  # that of DistributedDataParallel
    sequence_parallel: bool | Literal["auto"] = "auto"
    micro_batch_size: int = 1
    seq_length: int | None = None
    params_dtype: str | torch.dtype | None = None
    hardware: str | None = None
    planner_policy: Literal["megatron", "free"] = "megatron"
    overrides: Mapping[str, str] = field(default_factory=dict)
    gather_outputs: bool = True
    differentiable_outputs: bool = False
    lazy_outputs: bool = True
    compile: bool = False
    bias_dropout_fusion: bool = True
    bias_activation_fusion: bool = True
    masked_softmax_fusion: bool = True
    apply_rope_fusion: bool = True
    norm_fusion: bool = True
    attention_fusion: bool = True
    cross_entropy_fusion: bool = True
    merge_linears: bool = True
    recompute_activation_func: bool = True
    fusion_profile: str | None = None
    check_inputs_every: int = 100
    eager_modules: tuple[str, ...] = ()
    check_for_nan_in_loss_and_grad: bool = False
    passes: tuple[tuple[str, Callable[..., int]], ...] = ()

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  frozen: normalised once, here
        self._whole("tensor_model_parallel_size", least=1, optional=True)
        self._whole("data_parallel_size", least=1, optional=True)
        self._whole("data_parallel_shard_size", least=2, optional=True)
        self._whole("data_parallel_bucket_mib", least=1)
        self._one_of("data_parallel", ("ddp", "zero1", "fsdp"))
        self._one_of("data_parallel_loss", ("batch", "average"))
        self._data_parallel_sizes()
        self._whole("micro_batch_size", least=1)
        self._whole("seq_length", least=1, optional=True)
        self._whole("check_inputs_every", least=0)
        switches = ("gather_outputs", "differentiable_outputs", "lazy_outputs", "compile", "recompute_activation_func")
        for name in (*switches, "check_for_nan_in_loss_and_grad", *FUSIONS):
            self._one_of(name, (True, False))
        self._one_of("sequence_parallel", (True, False, "auto"))
        self._one_of("planner_policy", ("megatron", "free"))
        if self.hardware is not None and not isinstance(self.hardware, str):
            raise _error("hardware", self.hardware, "a profile name, the path of a .yaml file, or None")
        if self.fusion_profile is not None and not isinstance(self.fusion_profile, str):
            wanted = f"a profile name, the path of a .yaml file, '{MEASURE_NOTHING}', or None"
            raise _error("fusion_profile", self.fusion_profile, wanted)
        put("params_dtype", _dtype_name(self.params_dtype))
        put("overrides", _overrides(self.overrides))
        put("eager_modules", _globs(self.eager_modules))
        put("passes", _passes(self.passes))

    def _data_parallel_sizes(self) -> None:
        size, shard = self.data_parallel_size, self.data_parallel_shard_size
        if shard is not None and self.data_parallel == "ddp":
            raise _error("data_parallel_shard_size", shard, "None where data_parallel is 'ddp', which shards nothing")
        if shard is not None and size is not None and size % shard:
            raise _error("data_parallel_shard_size", shard, f"a divisor of data_parallel_size={size}")

    def _whole(self, name: str, *, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _error(name, value, f"a whole number of at least {least}" + (", or None" if optional else ""))

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if not any(value is a if isinstance(a, bool) else value == a for a in allowed):
            raise _error(name, value, " or ".join(repr(a) for a in allowed))

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, validated again."""
        return Config.from_dict({**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON and YAML can hold it); `from_dict` is the inverse. Functions become 'module:name'."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["overrides"] = dict(self.overrides)
        plain["eager_modules"] = [*self.eager_modules]
        plain["passes"] = [[where, f"{f.__module__}:{f.__qualname__}"] for where, f in self.passes]
        return plain

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Config:
        known = [f.name for f in dataclasses.fields(Config)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                fix = f"did you mean '{near[0]}'?" if near else f"known fields: {', '.join(known)}"
                raise ConfigError(f"Config has no field '{name}'", fix=fix)
        return Config(**values)

    @staticmethod
    def from_yaml(path: str | Path) -> Config:
        """A YAML mapping of field names to values."""
        import yaml

        values = yaml.safe_load(Path(path).read_text())
        if values is None:
            return Config()
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} holds {type(values).__name__}, not a mapping", fix="write one 'field: value' a line"
            )
        return Config.from_dict(values)


def _error(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"Config.{name} = {value!r} is out of range", fix=f"{name} must be {allowed}")


def _dtype_name(value: object) -> str | None:
    """None, 'bf16', 'bfloat16' or torch.bfloat16 -> 'bfloat16'."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.")
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise _error("params_dtype", value, f"one of {', '.join([*_DTYPES, *_DTYPES.values()])}, or None")
    return name


def _overrides(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _error("overrides", value, "a mapping of name patterns to styles")
    for pattern, style in value.items():
        if not isinstance(pattern, str) or style not in _STYLE_OF:
            near = difflib.get_close_matches(str(style), _STYLE_OF, n=1)
            hint = f"; did you mean '{_STYLE_OF[near[0]]}'?" if near else ""
            raise ConfigError(
                f"Config.overrides[{pattern!r}] = {style!r} is no style", fix=f"styles: {', '.join(STYLES)}{hint}"
            )
    return {pattern: _STYLE_OF[style] for pattern, style in value.items()}


def _globs(value: object) -> tuple[str, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, str) and v for v in value):
        raise _error("eager_modules", value, "a list of module names or globs of them")
    return tuple(value)


def _passes(value: object) -> tuple[tuple[str, Callable[..., int]], ...]:
    allowed = 'pairs ("after <pass>" or "before <pass>", function)'
    if not isinstance(value, (tuple, list)):
        raise _error("passes", value, allowed)
    found = []
    for item in value:
        if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], str):
            raise _error("passes", item, allowed)
        where, function = item
        words = where.split()
        if len(words) != 2 or words[0] not in ("after", "before"):
            raise _error("passes", where, allowed)
        if isinstance(function, str):
            function = _import(function)
        if not callable(function):
            raise _error("passes", item, allowed)
        found.append((" ".join(words), function))
    return tuple(found)


def _import(path: str) -> Any:
    """'package.module:function' -> the function."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Config.passes names '{path}': {error}", fix="write 'package.module:function'") from error
