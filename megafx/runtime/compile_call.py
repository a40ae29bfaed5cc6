"""From a call of a model to the graph that this rank runs: capture, agree on the plan, compile, bind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from megafx.analysis.communication import Communication
from megafx.capture.export import capture_call
from megafx.compiler.executable import Executable
from megafx.compiler.gathered_parameters import GatheredParameters
from megafx.compiler.pipeline import Compiled, compile_program, plan_only
from megafx.config import Config
from megafx.distributed.agreement import broadcast_object
from megafx.distributed.mesh import Meshes
from megafx.errors import UsageError
from megafx.ir import dump
from megafx.ir.program import PLACEMENT, Program
from megafx.ops.axes import AxisContext
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import I, Placement
from megafx.planner.context import Planner
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan
from megafx.report import Report, fused, refresh_notes
from megafx.runtime.bound_graph import CompiledCall
from megafx.runtime.cache_shard import CacheShard
from megafx.runtime.held_gradients import HeldBack
from megafx.runtime.keys import Call
from megafx.runtime.runtime import CompileRequest, Runtime


class Parallelizer:
    """Compiles the calls of one model. plan: of its training call, which settles how parameters are stored; last: what
    `readable` shows; caches: how key-value caches leave graphs, by path in the cache, from the first graph that has them."""

    def __init__(
        self, config: Config, meshes: Meshes, hardware: Hardware, loss_fn: Callable[..., torch.Tensor] | None
    ) -> None:
        self.config, self.meshes, self.hardware, self.loss_fn = config, meshes, hardware, loss_fn
        self.mesh = meshes.tensor
        self.t = self.mesh.size() if self.mesh is not None else 1
        self.plan: Plan | None = None
        self.last: Compiled | None = None
        self.runtime: Runtime | None = None
        self.caches: dict[str, Placement] = {}
        self.gathered = GatheredParameters()

    # -- what the runtime asks for

    def compile_call(self, request: CompileRequest) -> CompiledCall:
        """Graph of one call; the first one plans, with a training call even where the user's first call is not."""
        fixed, planned = request.fixed, None
        if fixed is None:
            planned = self._settle(request)
            assert self.plan is not None
            fixed = self.plan.params
        wanted = request.wants_grad
        wants = None if wanted is None else (lambda spec: bool(wanted & {spec.name, *spec.aliases}))
        if planned is not None and wanted is not None and all(m.training for m in request.model.modules()):
            made = Planner(self.config, self.t, self.hardware, self.meshes.data, wants, dict(fixed), self.plan)
            compiled = compile_program(planned, made)  # this call is the one that was planned
        else:
            program = self.capture(request, wanted is not None)
            compiled = compile_program(program, self._planner(dict(fixed) | _shards_of(request.call), wants))
        self._settle_caches(compiled.program)
        executable = compiled.executable(self._axes(), self.gathered)
        if self.config.compile:
            executable = executable.compiled()
        if (wanted is not None and not request.call.part) or self.last is None:
            self.last = compiled
        names = [spec.name for spec in compiled.program.inputs]
        parts = executable.parts
        joined = [[names[i] for i in indices] for k, indices in enumerate(parts.joins) if k not in parts.gathered]
        call = CompiledCall(compiled.program, executable, compiled.wrt, compiled.differentiated, dict(fixed), joined)
        if compiled.program.unreduced is not None:
            call.holding = HeldBack(functools.cache(lambda kind: self._held_back(compiled, executable, kind)))
        return call

    def _held_back(
        self, compiled: Compiled, executable: Executable, gradients: Literal["hold", "add"]
    ) -> tuple[Executable, list[str]]:
        """Another backward of a compiled call, and the names of the gradients that it takes besides."""
        axes = self._axes()
        assert axes is not None
        made, pending = compiled.held_back(gradients, axes)
        assert made.takes_what(executable), "the backward graphs of one call keep the same"
        return made.compiled() if self.config.compile else made, [spec.name for spec in pending]

    def settle(self, request: CompileRequest) -> dict[str, Placement]:
        """Storage of every parameter, from the plan of the training form of this call."""
        self._settle(request)
        assert self.plan is not None
        return dict(self.plan.params)

    def _settle(self, request: CompileRequest) -> Program | None:
        """Make the plan; the captured training form of this call, unless there was a plan already."""
        if self.plan is not None:
            return None
        with _training(request.model):
            program = self.capture(request, True)
        self.plan = self._plan(program.copy())
        return program

    def capture(self, request: CompileRequest, grad: bool) -> Program:
        call, model = request.call, request.model
        with torch.set_grad_enabled(grad):
            return capture_call(
                model,
                call.args,
                call.kwargs,
                loss_fn=self.loss_fn if call.loss_inputs else None,
                loss_inputs=call.loss_inputs or None,
                device=_device_of(model, call.leaves),
                forward=type(model).forward,
                stand_ins=_logical_shapes(model),
                varying=request.varying,
                eager=self.config.eager_modules,
                part=call.part,
            )

    def _settle_caches(self, program: Program) -> None:
        """Later graphs take and give caches as this one gives them."""
        for spec, node in zip(program.outputs, program.results(), strict=True):
            if spec.cache and (placement := node.meta.get(PLACEMENT)) is not None:
                self.caches.setdefault(spec.cache, placement if placement.is_shard else I)

    # -- agreement: TP rank 0 plans, the others apply its plan

    def _plan(self, program: Program) -> Plan:
        return plan_only(program, self._planner({}, lambda spec: True))

    def _planner(self, fixed: dict[str, Placement], wants: Any) -> Planner:
        agree, caches = self._from_rank_0, dict(self.caches)
        return Planner(self.config, self.t, self.hardware, self.meshes.data, wants, fixed, agree=agree, caches=caches)

    def _from_rank_0(self, plan: Plan) -> Plan:
        """Rank 0's plan on every rank, in the sizes of this rank's graph."""
        if self.mesh is None:
            return plan
        text = broadcast_object(plan.to_json() if self.mesh.get_local_rank() == 0 else None, self.mesh.get_group())
        return Plan.from_json(text, plan.sizes)

    def _axes(self) -> dict[str, AxisContext] | None:
        if self.mesh is None:
            return None
        tensor = AxisContext(self.mesh.get_local_rank(), self.t, self.mesh.get_group().group_name)
        return {TENSOR_AXIS: tensor, **self.meshes.axes}

    # -- what users ask for

    def readable(self, fqn: str = "") -> str:
        """The graph of the last compiled call (a training one, where there is one) under one module path, as Python."""
        if self.last is None:
            raise UsageError("no call is compiled yet", fix="call the model once, or pass example_inputs=")
        return dump.readable(self.last.program, fqn, t=self.t)

    def communication(self) -> list[Communication]:
        """Collectives of one step of the same call, with the bytes that a rank sends."""
        if self.last is None:
            return []
        return self.last.communication({name: place.size for name, place in self.meshes.axes.items()})

    def report(self) -> Report:
        """Of the training plan, with the notes of everything since."""
        if self.plan is None or self.plan.report is None:
            raise UsageError("no call is planned yet", fix="call the model once, or pass example_inputs=")
        notes = self.runtime.notes if self.runtime is not None else []
        refresh_notes(self.plan.report, notes)
        if self.runtime is not None:
            self.plan.report.header["graphs captured"] = self.runtime.captures
        self.plan.report.emitted = None if self.last is None else self.communication()
        if self.last is not None:
            self.plan.report.fusions = fused(self.last.program.fusions)
        return self.plan.report


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Every module in training mode, and back as it was."""
    modes = {m: m.training for m in model.modules()}
    for module in modes:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _shards_of(call: Call) -> dict[str, Placement]:
    """Name -> placement of the inputs of a call that are shards of caches."""
    pairs = zip(call.names(), call.leaves, strict=True)
    return {name: value.placement for name, value in pairs if isinstance(value, CacheShard)}


def _device_of(model: nn.Module, leaves: list[Any]) -> torch.device | None:
    """Where the graph will run; None leaves it to capture (a model on meta)."""
    tensors = [*model.parameters(), *(x for x in leaves if isinstance(x, torch.Tensor))]
    return next((x.device for x in tensors if x.device.type != "meta"), None)


def _logical_shapes(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """FQN -> meta tensor of the parameter's logical shape, which is what graphs are captured on."""
    return {
        name: torch.empty(p.shape, dtype=p.dtype, device="meta")
        for name, p in model.named_parameters(remove_duplicate=False)
    }
