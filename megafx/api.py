"""The public calls: `parallelize`, `plan`, `explain`, `verify`. The pipeline they run is compiler/pipeline.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafx.analysis.memory import OPTIMIZERS, Memory
from megafx.capture.dims import with_sizes
from megafx.capture.libraries.huggingface import is_hf_model
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.config import Config
from megafx.distributed.mesh import make_meshes
from megafx.distributed.parameters import device_of
from megafx.equivalence import Sabotage, Verdict, config_of, sabotage_call, types_of_call, verify_call, verify_on_ranks
from megafx.errors import ConfigError, UsageError
from megafx.example_call import ExampleCall, hardware_of, inputs_of
from megafx.ir.dump import diff_folders
from megafx.placements.data_axis import DataAxis
from megafx.planner.context import CompileContext
from megafx.planner.plan import Plan
from megafx.profiling import loss_of, profile_steps
from megafx.progress import stage, uncollected
from megafx.rehearsal import Rehearsal, rehearse_compiled
from megafx.replaying import Replayed, replay_call
from megafx.report.page import side_by_side
from megafx.report.report import Report, differences, read_report
from megafx.runtime.expert_balance import expert_balance
from megafx.runtime.fp8_health import Fp8Health
from megafx.runtime.fp8_health import measure as fp8_health_of
from megafx.runtime.keys import Normalizer
from megafx.runtime.module import make_parallel
from megafx.runtime.runtime import Runtime
from megafx.units import device_memory
from megafx.what_if import SearchResult, search_call


@stage("parallelize")
@uncollected()
def parallelize(
    model: nn.Module,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """The same model object, sharded over the tensor-parallel ranks, its forward running compiled graphs.

    Collective over the ranks of `mesh` (a 1-d DeviceMesh, or one with dims named 'tp' and 'dp'; default: the world). One rank
    needs no process group. example_inputs: a training call as (args, kwargs), a tuple of args or a dict of kwargs; Hugging
    Face models need none, and any other model without one is planned at its first call. loss_fn(output, **loss_inputs): the
    loss of the user's loop, computed in the graph for calls `model(..., loss_inputs={...})`, which return (loss, output).

    Raises ConfigError, CaptureError, PlanError, AgreementError.
    """
    config = config or Config()
    if config.params_dtype is not None:
        model.to(getattr(torch, str(config.params_dtype)))
    example = inputs_of(model, example_inputs) if example_inputs is not None or is_hf_model(model) else None
    config = with_sizes(config, model, None if example_inputs is None else example)
    device = device_of(model)
    meshes = make_meshes(config, mesh, device)
    runtime = Runtime(model, config, meshes, hardware_of(config, device), loss_fn)
    return make_parallel(runtime, example, compile=example_inputs is not None)


@stage("plan")
@uncollected()
def plan(
    model: nn.Module,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Plan:
    """The plan of a training call, without ranks, a GPU or memory for weights: the model may be on the meta device.

    config.tensor_model_parallel_size is the number of ranks planned for; example_inputs and loss_fn as in `parallelize`. An
    example input has a gradient where it requires one (requires_grad=True); the others are data. The Plan can be printed,
    saved, loaded and compared; `megafx.explain(plan)` is its report. Raises CaptureError, PlanError, ConfigError.
    """
    call = ExampleCall.of(model, config, example_inputs, loss_fn, runs=False)
    data = DataAxis.of_context(call.config)
    context = CompileContext(call.config, call.t, call.hardware, data, wants_grad=call.wants_grad(), keeps_problem=True)
    made = plan_only(call.program(), context)
    made.report.model = type(model).__name__
    return made


@stage("predict_memory")
def predict_memory(
    model: nn.Module,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: str = "adamw",
) -> Memory:
    """The memory of one rank over a training step, without ranks, a GPU or memory for weights: bytes by kind, the peak of each
    part of the step, and what is alive then.

    Arguments as in `plan`; sizes are those of example_inputs, else micro_batch_size and seq_length. optimizer: a key of
    `megafx.analysis.memory.OPTIMIZERS`. Raises what `plan` raises, and PlanError for a budget that cannot be met.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"no optimizer '{optimizer}' is known", fix=f"one of {', '.join(OPTIMIZERS)}")
    return _compiled(ExampleCall.of(model, config, example_inputs, loss_fn, runs=False)).memory(optimizer)


def _compiled(call: ExampleCall) -> Compiled:
    """The graph of a training call for the ranks that its config says, none of which are there."""
    context = CompileContext(
        call.config, call.t, call.hardware, DataAxis.of(call.config),
        wants_grad=lambda spec: spec.kind == "param" and spec.name in call.trained,
        at_call=call.given, device_bytes=call.hardware.memory_bytes,
    )  # fmt: skip
    return compile_program(call.program(), context)


@stage("rehearse")
def rehearse(
    model: nn.Module,
    config: Config | None = None,
    world: int | None = None,
    *,
    stages: int | Sequence[str] | None = None,
    microbatches: int | None = None,
    schedule: str = "1F1B",
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Rehearsal:
    """Prove a run of `world` ranks before it is paid for, in one process, without a GPU or memory for weights.

    Ranks fall into classes with equal graphs. Proven for all ranks of every group: they start the same collectives (op, shape,
    dtype, reduction) in the same order, forward and backward, and none wait for one another in a circle. The result is true
    where each class fits into the memory of config.hardware; str() is a table with the modelled step, .to_dict() its data.
    world: default, the product of the config's sizes; without config.data_parallel_size, data-parallel ranks are those that
    are left. stages, microbatches, schedule: of a pipeline, as `megafx.pipeline` takes them. Of it is proven that both ends of
    each message between stages agree in order, value, shape and dtype, and memory is that of the micro-batches that the
    schedule keeps. Other arguments as in `plan`. Raises what `predict_memory` raises, ConfigError, and PlacementError, which
    names two ranks that differ, the position, the module and its line.
    """
    config = config or Config()
    if stages is not None:
        from megafx.rehearsal_of_stages import proposed, rehearse_stages  # not on top: torch.distributed.pipelining

        config, asked, ranks = proposed(config, world, stages, microbatches, schedule)
        return rehearse_stages(ExampleCall.of(model, config, example_inputs, loss_fn, runs=False), asked, ranks)
    inner = (config.tensor_model_parallel_size or 1) * config.context_parallel_size
    if world is None:
        world = inner * (config.data_parallel_size or 1)
    if world < 1 or world % inner:
        found = f"{world} ranks are no multiple of the {inner} that tensor_model_parallel_size and context_parallel_size make"
        raise ConfigError(found, fix="give a multiple, or other sizes")
    if config.data_parallel_size is None and world > inner:
        config = config.replace(data_parallel_size=world // inner)
    return rehearse_compiled(_compiled(ExampleCall.of(model, config, example_inputs, loss_fn, runs=False)), world)


@stage("search")
@uncollected()
def search(
    model: nn.Module,
    gpus: int,
    memory: int | str,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    batches: Sequence[int] = (1, 2, 4, 8),
    global_batch: int | None = None,
    shown: int = 10,
) -> SearchResult:
    """The fastest configurations of a model on so many GPUs that fit into `memory` bytes each ('80GiB'), best first.

    Tried are tensor-, context- and data-parallel sizes, forms of the latter, sequence parallelism, micro-batch sizes
    (`batches`), for mixtures whose rows are sorted by expert numbers of ranks that share out the experts, and budgets for what
    is kept for backward; other fields are those of `config`, and so are a context_parallel_size or an
    expert_model_parallel_size of more than 1, and an activation_memory_budget. Beyond one host pipelines of `megafx.pipeline`
    are tried too. global_batch: rows of a step, in as many micro-batches as ranks need (gradients add up); without it, one a
    step, and of a pipeline four for each of its ranks. str() of the result is a table with step time, MFU, memory, bytes and
    why each loses to the best; `.config` is that of the best; `.best` has up to `shown` of them, and .to_json() is all of it as
    data. Configurations that differ in the form of data parallelism alone, and by at most 2% in time, are one of these: the
    others are its `.twins`. Needs no ranks, GPU or weights. Raises CaptureError, UsageError.
    """
    limit = device_memory(memory)
    if gpus < 1 or not batches or min(batches) < 1 or (global_batch is not None and global_batch < 1):
        found = f"gpus={gpus}, batches={tuple(batches)}, global_batch={global_batch} leave nothing to search"
        raise UsageError(found, fix="give at least one GPU, and micro-batch sizes and a global batch of at least 1")
    call = ExampleCall.of(model, config, example_inputs, loss_fn, runs=False)
    wants_grad = call.wants_grad()
    return search_call(
        call.program(), call.config, call.hardware, gpus, limit, batches, shown, wants_grad, global_batch
    )


def explain(subject: nn.Module | Plan) -> Report:
    """What was done and why: of a parallelized model, or of a plan. str(), .table(), .html(path), .trace(path), .to_json()."""
    if isinstance(subject, Plan):
        if subject.report is None:
            raise UsageError("this plan was loaded, so it has no graph to explain", fix="print(plan), or plan again")
        return subject.report
    runtime = getattr(subject, "megafx", None)
    if not isinstance(runtime, Runtime):
        raise UsageError(
            f"{type(subject).__name__} is not parallelized", fix="call megafx.parallelize(model, ...) or megafx.plan"
        )
    report = runtime.report()
    report.model = type(subject).__name__
    return report


@stage("profile")
def profile(model: nn.Module, batch: Any, *, steps: int = 3) -> Report:
    """Run some training steps of a parallelized model, and put measured times beside those of the cost model in its report.

    Collective over its ranks. batch: a call, in the forms of example_inputs; each step runs it forward and backward, without
    an optimizer, and gradients are None afterwards. Times are of this rank: on a GPU those of kernels, else of the host. Then
    the call runs once op by op, to count the rows of experts that grouped products compute (`report.experts`). The model needs
    Config(profiler_ranges=True). Raises UsageError without.
    """
    report = explain(model)
    args, kwargs = inputs_of(model, batch)

    def step() -> None:
        loss_of(model(*args, **kwargs)).backward()
        for parameter in model.parameters():
            parameter.grad = None

    profile_steps(step, steps, report)
    runtime: Any = model.megafx
    with torch.enable_grad():
        report.experts = expert_balance(runtime, runtime._call_of(args, kwargs))
    return report


@stage("fp8_health")
def fp8_health(model: nn.Module, batch: Any) -> Fp8Health:
    """How the values of one call fit into FP8: of each cast the largest magnitude, the share that becomes 0, and the share at
    the largest number of the format, over all ranks. str() is a table, `.casts` its rows.

    Collective over the ranks of a parallelized model. batch: a call, in the forms of example_inputs. It runs forward and
    backward op by op, and leaves parameters, gradients, buffers and generators as they were. Raises UsageError for a model that
    is not parallelized.
    """
    explain(model)
    args, kwargs = inputs_of(model, batch)
    runtime: Any = model.megafx
    with torch.enable_grad():
        return fp8_health_of(runtime, runtime._call_of(args, kwargs))


@stage("verify")
def verify(
    model: nn.Module,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    tolerance: float | None = None,
    types: bool = False,
    on_ranks: bool = False,
    mesh: Mapping[str, int] | None = None,
) -> Verdict:
    """Run one call on all ranks, simulated in this process, and compare output, loss and every gradient with eager.

    The model keeps its weights and mode; it must not be parallelized yet. Inputs are drawn for Hugging Face models that are
    given none. With dropout on, or with fp8, the reference is megafx on one rank: eager draws other masks, and rounds nothing
    to FP8. A copy on one rank is then called several times (not with fp8), each time against eager: with other parameters,
    one row more, other numbers and tensors that forward reads from attributes and globals, and in the other mode; outputs
    beside a loss, and what forward leaves behind, are compared too. The verdict is true where
    all is equal within `tolerance` (relative; default by dtype), and otherwise names the node at which the runs first differ.
    types: check only the types of the graph's values, axis by axis; nothing is computed: the model may be on the meta device.
    on_ranks: run it on the ranks of the job, and compare each with eager on its own device. Collective over the world, whose
    ranks are all tensor-parallel; weights and inputs are those of rank 0. Raises UsageError without a process group.
    mesh: sizes of the axes of simulated ranks, {"dp": 2, "cp": 2, "tp": 2}, in place of the config's: data-parallel ranks have
    parts of the batch, and hold parameters as config.data_parallel says; context-parallel ranks cut the sequence. Without it,
    ranks are tensor-parallel, and context-parallel where the config says so. With fp8 all ranks must be tensor-parallel.
    """
    if mesh is not None:
        config = config_of(mesh, config)
    data = None if config is None else DataAxis.of_context(config) if mesh is None else DataAxis.of(config)
    if mesh is not None and on_ranks:
        raise UsageError("mesh is of simulated ranks", fix="leave out mesh, or on_ranks=True")
    if data is not None and config is not None and config.rounds and not types:
        raise UsageError(
            "with fp8, data- and context-parallel ranks scale by the rows that they have, and round otherwise than one rank",
            fix="verify tensor-parallel ranks with fp8 (mesh={'tp': 2}), and this mesh with Config(fp8=None)",
        )
    if types:
        return types_of_call(ExampleCall.of(model, config, example_inputs, loss_fn, runs=True), data)
    call = ExampleCall.of(model, config, example_inputs, loss_fn, runs=True, draw=True)
    return verify_on_ranks(call, tolerance) if on_ranks else verify_call(call, tolerance, data)


@stage("sabotage")
def sabotage(
    model: nn.Module,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Sabotage:
    """Whether `verify` would notice: each collective of the call is left out, and then replaced by another, one at a time.

    The result is true where every such graph is found wrong. Arguments as of `verify`.
    """
    return sabotage_call(ExampleCall.of(model, config, example_inputs, loss_fn, runs=True, draw=True))


def diff(before: Plan | str | Path, after: Plan | str | Path, *, html: str | Path | None = None) -> str:
    """What differs between two plans (or files of saved ones), between two reports (pages or JSON files), or graph by graph
    between two folders that MEGAFX_DUMP wrote.

    Empty where nothing does. html: where to write a page with two reports side by side; of plans too, where they have one.
    Raises UsageError or PlanError where there is no such plan, report or folder.
    """
    sides = [one if isinstance(one, Plan) else Path(one) for one in (before, after)]
    if any(isinstance(one, Path) and one.is_dir() for one in sides):
        return diff_folders(*(str(one) for one in sides))
    old, new = (one.report and one.report.page_data() if isinstance(one, Plan) else read_report(one) for one in sides)
    if old and new and not (html is None and all(isinstance(one, Plan) for one in sides)):
        found = differences(old, new)
        if html is not None:
            Path(html).write_text(side_by_side(old, new, found))
        return found
    if html is not None:
        raise UsageError("a saved plan has no report to draw", fix="compare pages that `megafx explain --html` wrote")
    plans = [one if isinstance(one, Plan) else Plan.load(one) for one in sides]
    return plans[0].diff(plans[1])


@stage("replay")
def replay(folder: str | Path, model: nn.Module, *, example_inputs: Any = None) -> Replayed:
    """Compile the model as a dump folder of MEGAFX_DUMP says, without ranks, and compare with its graphs.

    The result is true where all are the same, and names the first pass that left another graph otherwise. The model may be on
    the meta device; example_inputs as in `parallelize`. Raises UsageError where the folder cannot be replayed.
    """
    args, kwargs = inputs_of(model, example_inputs)
    return replay_call(model, args, kwargs, Normalizer(model.forward)(args, kwargs), folder)
