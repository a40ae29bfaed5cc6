"""`Config`: what a user may choose, validated. No torch import.

A field's name, type, default and doc are in one place: the check of its value, `help(megafx.Config)` and the options of the
`megafx` command come from there. Names are Megatron's where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megafx.errors import ConfigError
from megafx.units import parse_bytes

# Canonical style -> other spellings of it (PyTorch's ParallelStyle classes, Hugging Face's `tp_plan` names).
STYLES: dict[str, tuple[str, ...]] = {
    "colwise": ("ColwiseParallel", "column", "column_parallel"),
    "rowwise": ("RowwiseParallel", "row", "row_parallel"),
    "expert": ("ExpertParallel", "expert_parallel"),
    "replicate": ("ReplicateParallel", "replicated", "replicated_with_grad_allreduce"),
    "sequence": ("SequenceParallel", "sequence_parallel"),
}
FIT = "fit"  # Config.activation_memory_budget: what the device has room for
MEASURE_NOTHING = "all"  # Config.fusion_profile: every fusion is made, whatever was measured
_STYLE_OF = {name: style for style, names in STYLES.items() for name in (style, *names)}
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _option(default: Any, doc: str, *, least: int = 0, fuses: bool = False, short: str = "") -> Any:
    """A field. least: the smallest whole number that it takes; fuses: it switches a family of fusions off; short: another
    name of its command-line option."""
    make = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(metadata={"doc": doc, "least": least, "fuses": fuses, "short": short}, **make)


@dataclass(frozen=True)
class Config:
    """Choices of one `megafx.parallelize` call."""

    tensor_model_parallel_size: int | None = _option(
        None,
        "ranks of the tensor-parallel axis; None: the size of the mesh or of the world, else 1",
        least=1,
        short="tp",
    )
    data_parallel_size: int | None = _option(
        None,
        "number of tensor-parallel groups, which share a batch among them; None: the size of the mesh's 'dp' dims, else 1",
        least=1,
        short="dp",
    )
    data_parallel: Literal["ddp", "zero1", "fsdp"] = _option(
        "ddp", "'ddp': every group holds all parameters; 'zero1', 'fsdp': a shard of them (docs/data_parallel.md)"
    )
    data_parallel_shard_size: int | None = _option(
        None, "number of groups that hold one copy of sharded parameters together; None: all of them", least=1
    )
    data_parallel_loss: Literal["batch", "average"] = _option(
        "batch",
        "'batch': a loss in the graph is that of the whole batch, and dropout draws one mask for all of it; "
        "'average': each rank has the loss of its own rows, and gradients are averaged",
    )
    data_parallel_bucket_mib: int = _option(  # the default is that of DistributedDataParallel
        25, "gradients are collected until they are this many MiB, and then reduced together", least=1
    )
    context_parallel_size: int = _option(
        1,
        "ranks that cut the sequence of a group's part of the batch among them (docs/context_parallel.md)",
        least=1,
        short="cp",
    )
    expert_model_parallel_size: int = _option(
        1,
        "data-parallel ranks that share out the experts of mixtures, whole ones; tokens travel to them (docs/experts.md)",
        least=1,
        short="ep",
    )
    cp_comm_type: Literal["auto", "all_gather", "a2a"] = _option(
        "auto",
        "how ranks of the context-parallel axis meet in attention: 'all_gather': keys and values are gathered; 'a2a': a rank "
        "gets some of the heads, of all tokens; 'auto': for each attention what costs less",
    )
    sequence_parallel: bool | Literal["auto"] = _option(
        "auto",
        "ranks hold slices of the sequence where no weight is cut; 'auto': the planner decides by cost",
        short="sp",
    )
    micro_batch_size: int | None = _option(
        None,
        "batch size that the planner prices; None: that of the example inputs, else 1; calls may have any",
        least=1,
        short="batch",
    )
    seq_length: int | None = _option(
        None,
        "sequence length that the planner prices; None: that of the example inputs, else the model's maximum; "
        "calls may have any",
        least=1,
        short="seq",
    )
    params_dtype: Any = _option(  # noqa: RUF009
        None, "dtype to which the model is cast first ('bf16', 'float32', torch.bfloat16); None: it stays as it is"
    )
    hardware: str | None = _option(
        None, "name of a measured profile (planner/hardware/*.yaml), or path of one; None: chosen by the device"
    )
    planner_policy: Literal["megatron", "free"] = _option(
        "megatron", "'megatron': policies remove strategies, each with a reason; 'free': cost alone decides"
    )
    overrides: Mapping[str, str] = _option(
        dict, "{glob over names of modules or parameters: style}; the styles are the keys of `STYLES`"
    )
    gather_outputs: bool = _option(
        True, "without a loss in the graph, outputs come back whole; False: as sharded DTensors"
    )
    differentiable_outputs: bool = _option(
        False,
        "outputs beside a loss keep what their gradients need from the first call on, not from the first such backward on",
    )
    lazy_outputs: bool = _option(
        True, "logits beside a loss that is fused with their layer are computed when they are first read"
    )
    tp_comm_overlap: bool | Literal["auto"] = _option(
        "auto",
        "gathers and scatters of sequence parallelism run in pieces beside their products, through memory that the ranks "
        "share; 'auto': on GPUs that reach each other's memory (docs/overlap.md)",
    )
    cuda_graphs: bool | Literal["auto"] = _option(
        False,
        "forward and backward are recorded as CUDA graphs and replayed (docs/cuda_graphs.md); 'auto': where launching the "
        "kernels takes the host about as long as running them takes the GPU",
    )
    compile: bool | Literal["auto"] = _option(
        False,
        "Inductor compiles the ops that megafx has no kernels for, chain by chain; 'auto': where that is modelled to pay "
        "(docs/fusion.md)",
    )
    bias_dropout_fusion: bool = _option(True, "fuse bias + dropout + residual sum", fuses=True)
    bias_activation_fusion: bool = _option(
        True, "fuse bias + GeLU or another activation, and gated linear units (SwiGLU)", fuses=True
    )
    masked_softmax_fusion: bool = _option(True, "fuse scale + mask + softmax + dropout", fuses=True)
    apply_rope_fusion: bool = _option(True, "fuse rotary embeddings", fuses=True)
    norm_fusion: bool = _option(True, "fuse LayerNorm and RMSNorm, also with the sum before them", fuses=True)
    attention_fusion: bool = _option(True, "fuse the chain of attention", fuses=True)
    cross_entropy_fusion: bool = _option(True, "fuse cross entropy, and linear + cross entropy", fuses=True)
    merge_linears: bool = _option(
        True, "compute linears that read one value as one product: gate and up; queries, keys and values", fuses=True
    )
    moe_grouped_gemm: bool | Literal["auto"] = _option(
        "auto",
        "compute experts that are called one by one, each on its own tokens, as grouped products; 'auto': where that is "
        "modelled to be faster",
        fuses=True,
    )
    recompute_activation_func: bool = _option(
        True, "outputs of fused activations are not kept for backward: the kernel of their gradient computes them again"
    )
    activation_func_fp8_input_store: bool = _option(
        False,
        "inputs of fused activations are kept for backward in e4m3, with one scale; their gradients, and outputs that "
        "recompute_activation_func recomputes, are of these (docs/fp8.md)",
    )
    activation_memory_budget: float | int | str | None = _option(
        None,
        "what a rank may keep for backward: '24GiB', or a fraction (0.0 to 1.0) of what it keeps without a budget; 'fit': what "
        "the device has room for. Backward recomputes values that do not fit, the cheapest first (docs/memory.md)",
    )
    recompute_granularity: Literal["selective", "full"] | None = _option(
        None, "'full': layers are computed again from their inputs; 'selective': the parts that recompute_modules names"
    )
    recompute_method: Literal["uniform", "block"] | None = _option(
        None,
        "for 'full': 'uniform' (the default) keeps the input of every recompute_num_layers layers; 'block' computes the first "
        "recompute_num_layers layers again, one by one",
    )
    recompute_num_layers: int | None = _option(None, "number of layers for recompute_method; None: 1", least=1)
    recompute_modules: tuple[str, ...] = _option(
        tuple,
        "for 'selective': core_attn (the default), norm, act, mlp, moe, shared_experts, mla_up_proj, or globs of module names",
    )
    distribute_saved_activations: bool = _option(
        False, "for 'full': the inputs of layers that are kept lie spread over the tensor-parallel ranks"
    )
    cpu_offloading: bool = _option(
        False,
        "kept values wait for backward in pinned memory of the host: with a budget, those that fit behind the compute and as "
        "many as it asks for; without one, those of the layers that cpu_offloading_num_layers says (docs/memory.md)",
    )
    cpu_offloading_num_layers: int | None = _option(
        None, "number of layers, the first ones, whose kept values are offloaded; None: all but the last", least=1
    )
    gradient_accumulation_fusion: bool = _option(
        False,
        "gradients of bf16 and fp16 parameters are fp32, and products that make them write fp32: of the first micro-batch into "
        "`.grad`, of later ones on top of it; `param.main_grad` is the same tensor (docs/memory.md)",
    )
    accumulate_allreduce_grads_in_fp32: bool = _option(
        False,
        "gradients of bf16 and fp16 parameters are cast to fp32 where they are made: they are reduced over ranks, accumulated, "
        "and given to `.grad` and `main_grad` as such",
    )
    fp8: Literal["e4m3", "hybrid"] | None = _option(
        None,
        "products of layers with their weights, and the gradients of these, read FP8: 'e4m3' throughout; 'hybrid': "
        "gradients as e5m2 (docs/fp8.md)",
    )
    fp8_recipe: Literal["tensorwise", "rowwise"] = _option(
        "tensorwise",
        "scales of FP8, from the values themselves: one for a matrix, or one for each of its rows along the summed dim",
    )
    fp8_wgrad: bool = _option(True, "gradients of weights are products of FP8 too; False: they are not")
    fp8_head: bool = _option(
        False, "with fp8, products of the head too: of the linear behind the last layer, and of its fused loss"
    )
    first_last_layers_bf16: bool = _option(
        True,
        "fp8 leaves the first num_layers_at_start_in_bf16 and the last num_layers_at_end_in_bf16 layers as they are",
    )
    num_layers_at_start_in_bf16: int = _option(1, "number of layers for first_last_layers_bf16")
    num_layers_at_end_in_bf16: int = _option(1, "number of layers for first_last_layers_bf16")
    fusion_profile: str | None = _option(
        None,
        "measurements, by which a fusion that was slower is left out: name of a profile (planner/hardware/fusions/*.yaml), or "
        "path of one that benchmarks/profile_fusions.py wrote; None: chosen by the hardware; 'all': every fusion is made",
    )
    check_inputs_every: int = _option(
        100,
        "ranks compare hashes of their inputs on the first calls, then at every so many calls; 0: on the first alone",
    )
    eager_modules: tuple[str, ...] = _option(
        tuple, "globs of submodules that are not captured: their code runs as it is, on whole tensors"
    )
    uncaptured: Literal["eager", "error"] = _option(
        "eager",
        "a submodule whose code cannot be captured: 'eager' leaves it out of the graph, as eager_modules does, with a note; "
        "'error' raises a CaptureError",
    )
    cache: bool = _option(
        True, "plans and programs of calls are kept on disk, and read at the next start (docs/cache.md)"
    )
    profiler_ranges: bool = _option(
        False, "a torch.profiler trace shows what runs under the path of its module (NVTX ranges under emit_nvtx)"
    )
    check_for_nan_in_loss_and_grad: bool = _option(
        False,
        "a loss or gradient that is not finite is an error on every rank, before the optimizer sees it; "
        "each step then waits for the device",
    )
    passes: tuple[tuple[str, Callable[..., int]], ...] = _option(
        tuple, "your own passes: pairs of 'after <pass>' or 'before <pass>' and a function (program, context) -> int"
    )

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # frozen: normalised once, here
        if self.fp8_recipe == "delayed":
            found = "fp8_recipe='delayed' takes scales from earlier steps, and saturates where values grow"
            raise ConfigError(found, fix="use 'tensorwise': its scales are those of the values themselves, as fast")
        for name, choices, text, least, optional in _checked_fields():
            value = getattr(self, name)
            if choices and not any(value is c if isinstance(c, bool) else value == c for c in choices):
                allowed = " or ".join(repr(c) for c in choices if c is not None)
                raise _error(name, value, allowed + (", or None" if None in choices else ""))
            if text and not (value is None or isinstance(value, str)):
                raise _error(name, value, "a profile name, the path of a .yaml file, or None")
            if least is None or (value is None and optional):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                allowed = f"a whole number of at least {least}" + (", or None" if optional else "")
                raise _error(name, value, allowed)
        size, shard = self.data_parallel_size, self.data_parallel_shard_size
        if shard is not None and self.data_parallel == "ddp":
            raise _error("data_parallel_shard_size", shard, "None where data_parallel is 'ddp', which shards nothing")
        if shard == 1 and self.context_parallel_size == 1:
            raise _error(
                "data_parallel_shard_size", shard, "at least 2 without context-parallel ranks that hold a copy"
            )
        if shard is not None and size is not None and size % shard:
            raise _error("data_parallel_shard_size", shard, f"a divisor of data_parallel_size={size}")
        experts = self.expert_model_parallel_size
        for name, of in (("data_parallel_size", size), ("data_parallel_shard_size", shard)):
            if of is not None and of % experts:
                raise _error("expert_model_parallel_size", experts, f"a divisor of {name}={of}")
        put("params_dtype", _dtype_name(self.params_dtype))
        put("activation_memory_budget", _budget(self.activation_memory_budget))
        self._check_recompute()
        put("overrides", _overrides(self.overrides))
        globs = self.eager_modules
        if not isinstance(globs, (tuple, list)) or not all(isinstance(g, str) and g for g in globs):
            raise _error("eager_modules", globs, "a list of module names or globs of them")
        put("eager_modules", tuple(globs))
        put("passes", _passes(self.passes))

    def _check_recompute(self) -> None:
        names = self.recompute_modules
        if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) and n for n in names):
            raise _error("recompute_modules", names, "a list of names, or of globs of module names")
        object.__setattr__(self, "recompute_modules", tuple(names))
        if self.distribute_saved_activations:
            if self.recompute_granularity != "full":
                raise _error("distribute_saved_activations", True, "False where recompute_granularity is not 'full'")
            if self.sequence_parallel is True:
                raise _error(
                    "distribute_saved_activations", True, "False where sequence_parallel=True keeps slices anyway"
                )
        if self.cpu_offloading_num_layers is not None and not self.cpu_offloading:
            raise _error(
                "cpu_offloading_num_layers", self.cpu_offloading_num_layers, "unset where cpu_offloading is off"
            )
        if self.cpu_offloading and self.cuda_graphs is True:
            raise _error("cpu_offloading", True, "False where cuda_graphs=True: its copies are on streams of their own")
        needs = {"recompute_method": "full", "recompute_num_layers": "full", "recompute_modules": "selective"}
        for name, granularity in needs.items():
            value = getattr(self, name)
            if value and self.recompute_granularity != granularity:
                wanted = f"unset, as recompute_granularity is {self.recompute_granularity!r} and not {granularity!r}"
                raise _error(name, value, wanted)

    @property
    def rounds(self) -> bool:
        """True if values are rounded to FP8, which eager mode does nowhere."""
        return self.fp8 is not None or self.activation_func_fp8_input_store

    @property
    def gradients_in_fp32(self) -> bool:
        """True if gradients of bf16 and fp16 parameters are fp32."""
        return self.gradient_accumulation_fusion or self.accumulate_allreduce_grads_in_fp32

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, validated again."""
        return Config.from_dict({**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes})

    def of_one_rank(self, **changes: Any) -> Config:
        """The same for a process that runs the model by itself."""
        sizes = (
            "tensor_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "data_parallel_size",
        )
        return self.replace(**dict.fromkeys(sizes, 1), data_parallel_shard_size=None, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON and YAML can hold it); `from_dict` is the inverse. Functions become 'module:name'."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["recompute_modules"] = [*self.recompute_modules]
        passes = [[where, f"{f.__module__}:{getattr(f, '__qualname__', type(f))}"] for where, f in self.passes]
        return plain | {"overrides": dict(self.overrides), "eager_modules": [*self.eager_modules], "passes": passes}

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
        """A YAML mapping of field names to values. Functions that `passes` names are imported and called: read your own."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise ConfigError(
                f"'{path}' cannot be read as YAML: {why}", fix="write one 'field: value' a line"
            ) from error
        if values is None:
            return Config()
        if not isinstance(values, dict):
            found = f"{path} holds {type(values).__name__}, not a mapping"
            raise ConfigError(found, fix="write one 'field: value' a line")
        return Config.from_dict(values)


_TYPES = get_type_hints(Config)
FUSIONS = tuple(f.name for f in dataclasses.fields(Config) if f.metadata["fuses"])


@functools.cache
def choices_of(name: str) -> tuple[Any, ...]:
    """The values that a field takes, where its type lists them: of bool, None, Literal, and unions of these."""
    kind, found = _TYPES[name], list[Any]()
    for part in (kind,) if kind is bool or get_origin(kind) is Literal else get_args(kind):
        if part is bool:
            found += [True, False]
        elif part is NoneType:
            found.append(None)
        elif get_origin(part) is Literal:
            found += get_args(part)
        else:
            return ()
    return tuple(found)


@functools.cache
def is_whole(name: str) -> bool:
    """True if a field takes whole numbers, or those and None."""
    return _TYPES[name] is int or set(get_args(_TYPES[name])) == {int, NoneType}


@functools.cache
def _checked_fields() -> list[tuple[str, tuple[Any, ...], bool, int | None, bool]]:
    """Of each field that has them: its choices; whether it takes text; the least whole number; whether it may be None."""
    found = []
    for f in dataclasses.fields(Config):
        kind, choices = _TYPES[f.name], choices_of(f.name)
        least = f.metadata["least"] if is_whole(f.name) else None
        if choices or kind == str | None or least is not None:
            found.append((f.name, choices, kind == str | None, least, kind is not int))
    return found


GROUPS = {  # title -> the first of its fields
    "ranks and their shares": "tensor_model_parallel_size",
    "what is planned for": "micro_batch_size",
    "outputs": "gather_outputs",
    "overlap and launches": "tp_comm_overlap",
    "fusions": "bias_dropout_fusion",
    "memory": "recompute_activation_func",
    "gradients in fp32": "gradient_accumulation_fusion",
    "fp8": "fp8",
    "checks, tools, and what is left out": "fusion_profile",
}


def grouped_fields() -> dict[str, list[dataclasses.Field[Any]]]:
    """Title -> fields of Config, in their order."""
    found: dict[str, list[dataclasses.Field[Any]]] = {}
    titles, title = {name: title for title, name in GROUPS.items()}, ""
    for f in dataclasses.fields(Config):
        title = titles.get(f.name, title)
        found.setdefault(title, []).append(f)
    return found


def _listing() -> str:
    """The fields with their docs and defaults, for `help(Config)`."""
    lines: list[str] = []
    for title, f in [(title, f) for title, fields in grouped_fields().items() for f in fields]:
        if f.name == GROUPS[title]:
            lines += [*([""] if lines else []), f"-- {title}"]
        default = "" if f.default is dataclasses.MISSING else f" (default: {f.default!r})"
        doc = f.metadata["doc"] + default
        lines += textwrap.wrap(doc, 120, initial_indent=f"{f.name}: ", subsequent_indent=" " * 4)
    return textwrap.indent("\n".join(lines), " " * 4)


Config.__doc__ = f"{Config.__doc__}\n\n{_listing()}"


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


def _budget(value: object) -> float | int | str | None:
    """None; 'fit'; a float from 0 to 1: a fraction; an int: bytes, which '24GiB' becomes."""
    allowed = "a size such as '24GiB', a fraction from 0.0 to 1.0, 'fit', or None"
    if value is None or value == FIT:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value <= 1:
            return float(value)
        if isinstance(value, int) and value > 1:
            return value
    if isinstance(value, str) and re.fullmatch(r"\s*(\d+(\.\d*)?|\.\d+)\s*", value):
        return _budget(float(value))
    if (size := parse_bytes(value) if isinstance(value, str) else None) is None:
        raise _error("activation_memory_budget", value, allowed)
    return size


def _overrides(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _error("overrides", value, "a mapping of name patterns to styles")
    for pattern, style in value.items():
        if not isinstance(pattern, str) or style not in _STYLE_OF:
            near = difflib.get_close_matches(str(style), _STYLE_OF, n=1)
            hint = f"; did you mean '{_STYLE_OF[near[0]]}'?" if near else ""
            found = f"Config.overrides[{pattern!r}] = {style!r} is no style"
            raise ConfigError(found, fix=f"styles: {', '.join(STYLES)}{hint}")
    return {pattern: _STYLE_OF[style] for pattern, style in value.items()}


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
        if isinstance(function, str):  # 'package.module:function'
            module, _, name = function.partition(":")
            try:
                function = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError, ValueError) as error:
                fix = "write 'package.module:function'"
                raise ConfigError(f"Config.passes names '{item[1]}': {error}", fix=fix) from error
        if not callable(function):
            raise _error("passes", item, allowed)
        found.append((" ".join(words), function))
    return tuple(found)
