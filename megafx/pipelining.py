"""`megafx.pipeline`: a training step over stages of the model, each on ranks of its own.

The call is captured whole and cut into stages (compiler/cut_stages.py). Each stage's graph is compiled as that of any model:
for tensor-parallel ranks inside of the stage, with context- and data-parallel ones beside it. Schedules and messages are those
of torch.distributed.pipelining. A rank holds the parameters of its stages, under the names that the whole model has for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megafx.capture.dims import with_sizes
from megafx.capture.libraries.records import taken_apart
from megafx.compiler.captured import Uncaptured
from megafx.compiler.cut_stages import (
    FORM,
    RECEIVED,
    Cut,
    StageGraph,
    Whole,
    bound_shape,
    cut_program,
    share_out,
    total_of,
)
from megafx.config import Config
from megafx.distributed import agreement
from megafx.distributed.failures import stopping_with_others, wait_at_exit
from megafx.distributed.mesh import DATA_DIMS, Meshes, dims_of, join_the_job, make_meshes, world_mesh
from megafx.distributed.parameters import device_of, parameter_slots
from megafx.distributed.tensor import local_of
from megafx.errors import AgreementError, MegafxError, UsageError
from megafx.example_call import hardware_of, inputs_of
from megafx.ir.call_spec import ambient_autocast, call_tree, leaf_name
from megafx.ir.program import VAL, Program
from megafx.meanwhile import in_modes, meanwhile
from megafx.ops.axes import microbatch
from megafx.placements.data_axis import PIPELINE_AXIS, TENSOR_AXIS, DataAxis
from megafx.planner.context import CompileContext, in_training
from megafx.planner.plan import Plan
from megafx.progress import stage
from megafx.report.stages import Stage
from megafx.runtime.keys import Normalizer
from megafx.runtime.module import make_parallel
from megafx.runtime.runtime import Runtime
from megafx.staging import divide, made_schedule, schedule_of, with_stages

KEPT_SCHEDULES = 8  # sizes of calls whose buffers for messages are kept


@stage("pipeline")
def pipeline(
    model: nn.Module,
    config: Config | None = None,
    *,
    stages: int | Sequence[str],
    microbatches: int,
    schedule: str = "1F1B",
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    mesh: DeviceMesh | None = None,
) -> Pipeline:
    """This rank's stages of the model. `step` of what is returned trains on a batch; its parameters go to an optimizer.

    Collective over the ranks of `mesh`, whose dims are named 'pp', then 'dp', 'ep', 'cp' and 'tp' where there are such;
    default: the world, pipeline ranks outermost. stages: how many, cut so that the slowest is as fast as it can be; or the
    paths of the modules with which stages begin, but for the first. There is one a rank of 'pp', or several with schedule
    "Interleaved1F1B"; the others are "GPipe" and "1F1B". microbatches: into how many parts of equal rows `step` cuts a rank's
    batch.
    example_inputs, loss_fn: as in `parallelize`; a model that is not Hugging Face's needs an example. The model's parameters
    move to the stages: it is left on the meta device.

    Raises ConfigError, CaptureError, PlanError, AgreementError, UsageError.
    """
    kind, config = schedule_of(schedule), with_stages(config or Config(), microbatches)
    if config.params_dtype is not None:
        model.to(getattr(torch, str(config.params_dtype)))
    args, kwargs = inputs_of(model, example_inputs)
    mesh, config = _mesh(mesh, config, device_of(model))
    sized = with_sizes(config, model, None if example_inputs is None else (args, kwargs))
    if config.micro_batch_size is None and sized.micro_batch_size is not None:
        sized = sized.replace(micro_batch_size=max(1, sized.micro_batch_size // microbatches))
    return _Maker(model, sized, mesh, microbatches, kind, loss_fn).made(args, kwargs, stages)


def _mesh(mesh: DeviceMesh | None, config: Config, device: torch.device) -> tuple[DeviceMesh, Config]:
    """The ranks by dims pp, then those of `dims_of`, and the config with the sizes of dp and tp."""
    wait_at_exit()
    if mesh is None:
        join_the_job(None, config.data_parallel_size or 1, device)
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        t, c, d = config.tensor_model_parallel_size or 1, config.context_parallel_size, config.data_parallel_size or 1
        if world % (t * c * d) or world == t * c * d:
            raise AgreementError(
                f"a pipeline of tensor_model_parallel_size={t}, context_parallel_size={c} and data_parallel_size={d} "
                f"on {world} ranks",
                fix="start torch.distributed (torchrun, dist.init_process_group) with stages x data_parallel_size x "
                "context_parallel_size x tensor_model_parallel_size ranks",
            )
        mesh = world_mesh(device, {PIPELINE_AXIS: world // (t * c * d)} | dims_of(config, t))
    names = mesh.mesh_dim_names or ()
    if PIPELINE_AXIS not in names or mesh[PIPELINE_AXIS].size() < 2:
        what = f"mesh {mesh} has no dim '{PIPELINE_AXIS}' of at least two ranks"
        raise AgreementError(what, fix=f"name its first dim '{PIPELINE_AXIS}', and the others 'dp' and '{TENSOR_AXIS}'")
    data_size = math.prod(mesh[name].size() for name in DATA_DIMS if name in names)
    tensor = mesh[TENSOR_AXIS].size() if TENSOR_AXIS in names else 1
    for option, size in (("tensor_model_parallel_size", tensor), ("data_parallel_size", data_size)):
        if getattr(config, option) not in (None, size):
            raise AgreementError(f"{option}={getattr(config, option)}, but the mesh has {size}", fix="make them equal")
    return mesh, config.replace(tensor_model_parallel_size=tensor, data_parallel_size=data_size)


@dataclass
class Form:
    """One kind of call. program: as captured (its CallSpec says whether it serves a call). graphs: of all stages."""

    number: int
    whole: Whole
    graphs: list[StageGraph]
    modes: Any
    draws: bool

    def serves(self, tree: Any, modes: Any) -> bool:
        spec = self.whole.program.call
        assert spec is not None
        return modes == self.modes and spec.mismatch(*tree) is None


class Pipeline(nn.Module):
    """What `megafx.pipeline` returns: this rank's parameters by the names of the whole model, and a step of all stages."""

    _pipe: _Run

    def step(self, *args: Any, loss_inputs: Mapping[str, Any] | None = None, **kwargs: Any) -> torch.Tensor:
        """The loss of this batch (0-d, the same on every stage), with its gradients added to `.grad` of the parameters.

        The call is one of the whole model, on every rank: the ranks of a pipeline, of a tensor-parallel group and of one
        sequence give the same batch, data-parallel ranks their own rows. Without gradients (torch.no_grad) it is forward alone.
        loss_inputs: for loss_fn. Raises UsageError where micro-batches do not divide the rows, CaptureError and PlanError for a
        new kind of call.
        """
        return self._pipe.step(args, kwargs, loss_inputs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ of the whole model: the norm (0-d) of gradients of all stages. Collective."""
        return self._pipe.clip(max_norm, norm_type, error_if_nonfinite, foreach)

    @property
    def pipeline_stages(self) -> list[Stage]:
        """Of the whole pipeline, in order: their modules, and the modelled time of a micro-batch."""
        return self._pipe.stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _called()


def _called() -> UsageError:
    return UsageError(
        "a stage of a pipeline is called", fix="call step(...) on every rank, with the whole model's call"
    )


class _Maker:
    """The making of a Pipeline: what is known of the whole model before it is cut."""

    def __init__(
        self, model: nn.Module, config: Config, mesh: DeviceMesh, microbatches: int, kind: Any, loss_fn: Any
    ) -> None:
        self.model, self.config, self.mesh = model, config, mesh
        self.microbatches, self.kind, self.loss_fn = microbatches, kind, loss_fn
        self.device, self.data = device_of(model), DataAxis.of(config)
        self.hardware = hardware_of(config, self.device)
        named = list(model.named_parameters(remove_duplicate=False))
        self.trained = {n for n, p in named if p.requires_grad}
        self.stand_ins = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in named}
        self.uncaptured = Uncaptured(model, config)
        self.everyone = _everyone(mesh)
        self.forms: list[Form] = []
        self.holders: dict[str, tuple[int, ...]] = {}
        self.cut: Cut | None = None

    @property
    def context(self) -> CompileContext:
        t = self.config.tensor_model_parallel_size or 1
        return CompileContext(self.config, t, self.hardware, self.data, wants_grad=in_training(frozenset()))

    def whole(self, tree: Any) -> Whole:
        """One micro-batch of a call of the whole model. Collective."""
        args, kwargs, loss_inputs = tree
        ranks = (
            1
            if self.config.data_parallel_loss == "average"
            else self.microbatches * (self.config.data_parallel_size or 1)
        )
        device = None if self.device.type == "meta" else self.device
        with agreement.raising_together(self.everyone):
            program = self.uncaptured.capture(
                args,
                kwargs,
                loss_fn=self.loss_fn if loss_inputs else None,
                loss_inputs=loss_inputs or None,
                device=device,
                stand_ins=self.stand_ins,
                data_ranks=ranks,
            )
            whole = share_out(program, self.context, self.microbatches)
        agreement.check_same("what the model computes", whole.program.gm.code, self.everyone)
        return whole

    def made(self, args: Any, kwargs: dict[str, Any], stages: int | Sequence[str]) -> Pipeline:
        loss_inputs = kwargs.pop("loss_inputs", None) if self.loss_fn is not None else None
        args, kwargs = Normalizer(self.model.forward)(args, kwargs)
        tree = taken_apart(call_tree(args, kwargs, loss_inputs))
        whole = self.whole(tree)
        with agreement.raising_together(self.everyone):
            made = divide(whole, self.context, self.kind, stages, self.mesh[PIPELINE_AXIS].size(), self.trained)
            plan, found, graphs, self.cut = made.plan, made.stages, made.graphs, made.cut
        agreement.check_same("the plan of a pipeline", f"{plan.params}{found}", self.everyone)
        self.forms.append(Form(0, whole, graphs, self.modes(self.model.training), _draws(whole.program)))
        return self._pipeline(found, graphs, plan)

    def modes(self, training: bool) -> Any:
        """What a capture depends on beside the call. training: whether the pipeline is in training mode."""
        return training, torch.is_grad_enabled(), tuple(tuple(c.values()) for c in ambient_autocast())

    def form(self, tree: Any, training: bool) -> Form:
        """The graphs of a call, captured where it is the first of its kind."""
        modes = self.modes(training)
        for form in self.forms:
            if form.serves(tree, modes):
                return form
        assert self.cut is not None
        with in_modes({m: m.training and training for m in self.model.modules()}):
            whole = self.whole(tree)
        with agreement.raising_together(self.everyone):
            graphs = cut_program(whole, self.cut, self.trained, len(self.forms))
            for k, spec in [(k, spec) for k, graph in enumerate(graphs) for spec in graph.program.inputs]:
                if spec.kind == "param" and k % self.mesh[PIPELINE_AXIS].size() not in self.holders[spec.name]:
                    what = f"this kind of call reads parameter '{spec.name}' in stage {k}, which does not hold it"
                    raise UsageError(
                        what, fix="give megafx.pipeline example_inputs= of a call that reads all parameters"
                    )
        self.forms.append(Form(len(self.forms), whole, graphs, modes, _draws(whole.program)))
        return self.forms[-1]

    # -- what this rank holds

    def _pipeline(self, found: list[Stage], graphs: list[StageGraph], plan: Plan) -> Pipeline:
        ranks, here = self.mesh[PIPELINE_AXIS].size(), self.mesh[PIPELINE_AXIS].get_local_rank()
        assert self.cut is not None
        self.holders = holders = self._holders(graphs, ranks)
        pipe = Pipeline().train(self.model.training)
        _move(self.model, pipe, {name for name, at in holders.items() if here in at})
        inner = tuple(n for n in self.mesh.mesh_dim_names or () if n != PIPELINE_AXIS)
        alone = math.prod(self.mesh[n].size() for n in inner) == 1
        meshes = Meshes(None) if alone else make_meshes(self.config, self.mesh[inner], self.device)
        runtime = Runtime(pipe, self.config, meshes, self.hardware)
        runtime.uncaptured = cast(Any, _Graphs(self))
        mine = {name for name, _ in pipe.named_parameters(remove_duplicate=False)}
        runtime.settled.plan = replace(plan, params={n: p for n, p in plan.params.items() if n in mine})
        names = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        runtime.elsewhere = frozenset(names - mine)
        runtime.received = RECEIVED if self.config.context_parallel_size > 1 else ""
        runtime.borrowed = frozenset(n for n, _ in pipe.named_buffers() if (self.cut.of(n) or 0) % ranks != here)
        make_parallel(runtime)
        runtime._adopt(runtime.settled.plan.params)
        runtime.note(
            "pipeline", "stages are compiled at each start, and run op by op: no cache on disk, no CUDA graphs"
        )
        run = _Run(self, pipe, runtime, found, {name: at for name, at in holders.items() if len(at) > 1})
        object.__setattr__(pipe, "_pipe", run)
        return pipe

    def _holders(self, graphs: list[StageGraph], ranks: int) -> dict[str, tuple[int, ...]]:
        """First name of each parameter -> the pipeline ranks that hold it: of stages that read it, else where its module is."""
        assert self.cut is not None
        at: dict[str, set[int]] = {}
        for number, graph in enumerate(graphs):
            for spec in graph.program.inputs:
                if spec.kind == "param":
                    at.setdefault(spec.name, set()).add(number % ranks)
        names: dict[int, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        found = {}
        for first, *_ in names.values():
            found[first] = tuple(sorted(at.get(first, {(self.cut.of(first) or 0) % ranks})))
        return found


def _draws(program: Program) -> bool:
    return any(spec.kind == "seed" for spec in program.inputs)


def _everyone(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    return (mesh if mesh.ndim == 1 else mesh[tuple(names)]._flatten("_".join(names))).get_group()


def _move(model: nn.Module, pipe: nn.Module, held: Collection[str]) -> None:
    """Give the pipeline the parameters of these (first) names, under all their names, and all buffers. Parameters of the model
    go to meta."""
    first: dict[int, str] = {}
    empty: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []
    for name, slot in list(parameter_slots(model)):
        if (param := slot.get()) is None:
            continue
        if first.setdefault(id(param), name) in held:
            _container(pipe, name.rpartition(".")[0]).register_parameter(slot.key, param)
        kept.append(param)  # so that no other gets its id
        empty.setdefault(id(param), nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad))
        slot.module._parameters[slot.key] = empty[id(param)]
    for fqn, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                persistent = key not in module._non_persistent_buffers_set
                _container(pipe, fqn).register_buffer(key, buffer, persistent)


def _container(pipe: nn.Module, fqn: str) -> nn.Module:
    for name in fqn.split(".") if fqn else ():
        if name not in pipe._modules:
            if hasattr(pipe, name):
                raise UsageError(
                    f"the model has a part '{name}', and a pipeline a method of this name", fix="rename the part"
                )
            pipe.add_module(name, nn.Module())
        pipe = pipe._modules[name]  # type: ignore[assignment]  # it is there
    return pipe


class _Graphs:
    """What Runtime captures by: the graph that a stage's call names."""

    eager: tuple[str, ...] = ()

    def __init__(self, maker: _Maker) -> None:
        self.maker = maker

    def capture(self, args: Any, kwargs: Mapping[str, Any], **_: Any) -> Program:
        if FORM not in kwargs:
            raise _called()
        form, number = map(int, kwargs[FORM].split(":"))
        return self.maker.forms[form].graphs[number].program.copy()


# -- running


class _Run:
    """Steps of a pipeline on this rank. ties: first name of each parameter that several pipeline ranks hold -> those ranks."""

    def __init__(
        self, maker: _Maker, pipe: nn.Module, runtime: Runtime, stages: list[Stage], ties: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.maker, self.pipe, self.runtime, self.stages = maker, pipe, runtime, stages
        self.group, self.here = maker.mesh.get_group(PIPELINE_AXIS), maker.mesh[PIPELINE_AXIS].get_local_rank()
        self.ranks, self.count = maker.mesh[PIPELINE_AXIS].size(), maker.microbatches
        self.normalize = Normalizer(maker.model.forward)
        self.mine = [k for k in range(len(stages)) if k % self.ranks == self.here]
        self.schedules: dict[Any, Any] = {}
        self.values: list[dict[str, torch.Tensor]] = []
        parameters = dict(pipe.named_parameters(remove_duplicate=False))
        self.tied = {n: (parameters[n], self._group_of(at), at) for n, at in sorted(ties.items()) if self.here in at}

    def _group_of(self, at: tuple[int, ...]) -> dist.ProcessGroup:
        if len(at) == self.ranks:
            return self.group
        of_all = dist.get_process_group_ranks(self.group)
        return agreement.group_of([of_all[k] for k in at])

    def step(self, args: Any, kwargs: dict[str, Any], loss_inputs: Mapping[str, Any] | None) -> torch.Tensor:
        if self.runtime.state.held.now:
            raise UsageError(
                "step of a pipeline within no_sync", fix="step outside of no_sync, and add micro-batches instead"
            )
        args, kwargs = self.normalize(args, kwargs)
        tree = taken_apart(call_tree(args, kwargs, loss_inputs))
        form = self.maker.form(tree, self.pipe.training)
        self.values = self._cut_rows(form, tree)
        sizes = self._sizes(form)
        schedule, last = self._schedule(form, sizes)
        state = self.runtime.state
        if form.draws and self.maker.config.data_parallel_loss == "batch":
            state.drawn = agreement.draw_seed(state.device, self.maker.everyone)
        losses: list[torch.Tensor] = []
        target = {"target": torch.arange(self.count)} if last else {}
        run = schedule.step if torch.is_grad_enabled() else schedule.eval
        try:
            with self._ties(), stopping_with_others("a step of a pipeline"):
                run(index=torch.arange(self.count), losses=losses, return_outputs=False, **target)
        except RuntimeError as error:
            raise _own(error) from None
        finally:
            state.drawn, self.values = None, []
        loss = torch.stack([x.detach() for x in losses]).sum() if last else self._loss_like(form)
        dist.broadcast(loss, group_src=(len(self.stages) - 1) % self.ranks, group=self.group)
        return loss

    def _loss_like(self, form: Form) -> torch.Tensor:
        program = form.graphs[-1].program
        pairs = zip(program.results(), program.outputs, strict=True)
        dtype = next(node.meta[VAL].dtype for node, spec in pairs if spec.loss)
        return torch.zeros((), dtype=dtype, device=self.runtime.state.device)

    # -- inputs

    def _cut_rows(self, form: Form, tree: Any) -> list[dict[str, torch.Tensor]]:
        """The inputs of each micro-batch by name, and the sums over all of them that the graphs take."""
        leaves = pytree.tree_flatten_with_path(tree)[0]
        values = {leaf_name(path): x for path, x in leaves if isinstance(x, torch.Tensor)}
        rows, count = form.whole.rows, self.count
        sizes = {name: values[name].shape[dim] for name, dim in rows.items()}
        if any(size % count for size in sizes.values()):
            raise UsageError(
                f"{count} micro-batches do not divide the rows of the batch ({sizes})",
                fix="give batches of a multiple of microbatches= rows (a DataLoader's drop_last=True), or change microbatches=",
            )
        wanted = next((n for n, x in values.items() if x.requires_grad and torch.is_grad_enabled()), None)
        if wanted is not None:
            raise UsageError(
                f"input '{wanted}' of a pipeline requires a gradient", fix="detach it, or compute it in the model"
            )
        parts = [
            {n: x.chunk(count, rows[n])[i].contiguous() if n in rows else x for n, x in values.items()}
            for i in range(count)
        ]
        stored = {f"buffer:{n}": x for n, x in self.pipe.named_buffers()}
        stored |= {f"constant:{n}": x for n, x in form.whole.program.constants.items()}
        taken = {name for k in self.mine for name in form.graphs[k].takes.values() if name.startswith("total[")}
        for i, total in enumerate(form.whole.totals if taken else ()):
            summands = torch.stack([total_of(total, {**stored, **part}) for part in parts])
            whole = summands.sum(0, dtype=summands.dtype)
            if (batch := self.runtime.meshes.rows) is not None:
                dist.all_reduce(whole, group=batch)
            for part in parts:
                part[f"total[{i}]"] = whole
        return parts

    def _sizes(self, form: Form) -> dict[sympy.Symbol, int]:
        """The sizes of a micro-batch."""
        spec = form.whole.program.call
        assert spec is not None
        found: dict[sympy.Symbol, int] = {}
        for leaf in spec.leaves:
            for dim, size in enumerate(leaf.dims):
                if isinstance(size, sympy.Symbol):
                    found.setdefault(size, self.values[0][leaf.name].shape[dim])
        return found

    # -- stages of torch.distributed.pipelining

    def _schedule(self, form: Form, sizes: Mapping[sympy.Symbol, int]) -> tuple[Any, bool]:
        """(the schedule for calls of these sizes, whether the last stage is here). Compiles what is not compiled yet."""
        last = (len(self.stages) - 1) in self.mine
        key = form.number, tuple(sizes.values()), torch.is_grad_enabled()
        if key in self.schedules:
            self.schedules[key] = self.schedules.pop(key)
            return self.schedules[key], last
        made = []
        with agreement.raising_together(self.maker.everyone):
            for k in self.mine:
                part = _Part(self, form, k)
                receives = self._like(form.graphs[k].receives, sizes)
                self.runtime.start((), part.call(0, receives), compile=True)
                made.append((part, receives, self._like(form.graphs[k].sends, sizes)))
        parts = [
            _Stage(self, part, k, receives, sends) for k, (part, receives, sends) in zip(self.mine, made, strict=True)
        ]
        schedule = made_schedule(self.maker.kind, parts, self.count)
        self.schedules[key] = schedule
        if len(self.schedules) > KEPT_SCHEDULES:
            self.schedules.pop(next(iter(self.schedules)))
        return schedule, last

    def _like(self, crossing: Sequence[Any], sizes: Mapping[sympy.Symbol, int]) -> tuple[torch.Tensor, ...]:
        device, grad = self.runtime.state.device, torch.is_grad_enabled()
        return tuple(
            torch.zeros(bound_shape(c.value, sizes), dtype=c.value.dtype, device=device).requires_grad_(
                c.differentiable and grad
            )
            for c in crossing
        )

    # -- parameters that several stages hold

    @contextlib.contextmanager
    def _ties(self) -> Iterator[None]:
        """Gradients of tied parameters that the body makes are summed over the stages that hold them."""
        before = {name: p.grad for name, (p, _, _) in self.tied.items()}
        for p, _, _ in self.tied.values():
            p.grad = None
        yield
        for name, (p, group, _) in self.tied.items():
            if not (p.requires_grad and torch.is_grad_enabled()):
                p.grad = before[name]
                continue
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(local_of(grad), group=group)
            old = before[name]
            p.grad = grad if old is None else old.add_(grad)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
        all_parameters = list(self.pipe.parameters())
        others = {id(p) for p, _, at in self.tied.values() if at[0] != self.here}
        own = [p.grad for p in all_parameters if p.grad is not None and id(p) not in others]
        norm = torch.nn.utils.get_total_norm(own, norm_type, False, foreach)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        whole = whole.to(self.runtime.state.device)
        if norm_type == float("inf"):
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=self.group)
        else:
            whole = whole**norm_type
            dist.all_reduce(whole, group=self.group)
            whole = whole ** (1.0 / norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(whole)):
            what = f"the norm of order {norm_type} of the gradients of all stages is {float(whole)}"
            raise RuntimeError(f"{what}, so they are not clipped")
        torch.nn.utils.clip_grads_with_norm_(all_parameters, max_norm, whole, foreach)
        return whole


def _own(error: BaseException) -> BaseException:
    """The error of megafx that torch's schedule has wrapped, if there is one."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MegafxError):
            return found
        found = found.__cause__
    return error


class _Part(nn.Module):
    """One stage as torch.distributed.pipelining calls it: values that cross the cut before it -> those that cross the one after
    it, or the loss."""

    def __init__(self, run: _Run, form: Form, number: int) -> None:
        super().__init__()
        self.run, self.form, self.number, self.graph = run, form, number, form.graphs[number]

    def call(self, index: int, received: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The keywords of the graph's call for a micro-batch."""
        known = {f"value:{c.name}": x for c, x in zip(self.graph.receives, received, strict=True)}
        values = {**self.run.values[index], **known}
        given: dict[str, Any] = {FORM: f"{self.form.number}:{self.number}"}
        return given | {keyword: values[name] for keyword, name in self.graph.takes.items()}

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        place = int(index)
        with microbatch(place, self.run.count):
            made = self.run.runtime.call((), self.call(place, received))
        if self.number == len(self.run.stages) - 1:
            return made[-1]
        values = {c.name: x.view_as(x) for c, x in zip(self.graph.receives, received, strict=True)}
        values |= zip(self.graph.made, made, strict=True)
        return tuple(values[c.name] for c in self.graph.sends)


class _Stage(PipelineStage):
    """Backward draws for the rows of its micro-batch; the last one of a step reduces gradients over data-parallel ranks. Memory
    to receive into is there while a micro-batch is under way, not for all of them at all times: else the buffers are meta."""

    def __init__(self, run: _Run, part: _Part, number: int, receives: Any, sends: Any) -> None:
        if number == len(run.stages) - 1:
            sends = (run._loss_like(part.form).requires_grad_(),)
        device = run.runtime.state.device
        super().__init__(part, number, len(run.stages), device, tuple(receives), tuple(sends), group=run.group)
        self.run = run

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with meanwhile(self, device=torch.device("meta")):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with meanwhile(self, device=torch.device("meta")):
            return super()._prepare_backward_infra(*args, **kwargs)

    def _move(self, infos: Sequence[Any], device: torch.device) -> None:
        """Give what is received memory on this device, where it is on another one."""
        for info in infos:
            old = getattr(info, "buffer", None)
            if old is not None and old.device.type != device.type:
                info.buffer = torch.empty_like(old, device=device).requires_grad_(old.requires_grad)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            self._move(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        made = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._move(self.args_recv_info[fwd_chunk_id], torch.device("meta"))
        return made

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        runtime = self.run.runtime
        holds = runtime.meshes.data is not None and not last_backward
        with microbatch(bwd_chunk_id, self.run.count), runtime.no_sync() if holds else contextlib.nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for infos in (self.args_recv_info, self.grad_recv_info):
            self._move(infos.get(bwd_chunk_id, ()), torch.device("meta"))
