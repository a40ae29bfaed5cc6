"""The pipeline: from a captured call to graphs that this rank runs. Read it top to bottom.

capture -> canonicalize -> own experts -> share log-sum-exps -> fuse -> describe masks -> (place batch) -> plan
        -> insert transitions -> localize shapes
        -> fuse linear + loss -> fuse what has several results -> merge linears -> joint graph -> postpone lazy outputs
        -> coalesce gradients -> check types -> join gradients of slices -> pack those of attention -> sum gradients in products
        -> recompute activations -> merge and expand transitions -> (data parallel) -> schedule -> bind -> partition
(those in brackets where there is a data-parallel axis)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from megafx.analysis.communication import Communication, collective_nodes, communication
from megafx.checks.types import check_types
from megafx.compiler.executable import Executable
from megafx.compiler.gathered_parameters import GatheredParameters
from megafx.compiler.runner import Pass, insert_user_passes, run_passes
from megafx.config import Config
from megafx.debugging import current
from megafx.errors import PlacementError
from megafx.ir.program import RECOMPUTE, VAL, Input, Note, Phase, Program, is_floating
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.backward.accumulate_products import accumulate_products
from megafx.passes.backward.build_joint_graph import build_joint_graph
from megafx.passes.backward.join_slice_gradients import join_slice_gradients
from megafx.passes.backward.pack_attention_gradients import pack_attention_gradients
from megafx.passes.backward.postpone_lazy_outputs import postpone_lazy_outputs
from megafx.passes.backward.recompute_activations import recompute_activations
from megafx.passes.canonicalize.canonicalize import canonicalize, canonicalize_nodes
from megafx.passes.communicate.coalesce_gradients import coalesce_gradients
from megafx.passes.communicate.data_parallel import data_parallel
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.passes.communicate.gather_parameters import gather_parameters
from megafx.passes.communicate.merge_transitions import merge_transitions
from megafx.passes.communicate.schedule_collectives import schedule_collectives
from megafx.passes.experts.join_experts import join_experts
from megafx.passes.experts.own_experts import own_experts
from megafx.passes.fuse.describe_masks import describe_masks
from megafx.passes.fuse.fuse import fuse
from megafx.passes.fuse.fuse_linear_loss import fuse_linear_loss
from megafx.passes.fuse.fuse_local import fuse_local
from megafx.passes.fuse.merge_linears import merge_linears
from megafx.passes.fuse.native_attention import native_attention
from megafx.passes.fuse.share_logsumexp import share_logsumexp
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.lower.bind_mesh import bind_mesh
from megafx.passes.lower.partition import partition
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.place_batch import place_batch
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.placements.data_axis import DataAxis
from megafx.placements.types import Placement
from megafx.planner.context import Planning
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan
from megafx.report import describe


@dataclass
class Compiled:
    """One graph of a model, the same on every rank. program: lowered, joint where gradients are taken.

    wrt: indices of inputs whose gradients the program gives; differentiated: indices of outputs that bring a tangent.
    """

    program: Program
    plan: Plan
    wrt: list[int]
    differentiated: list[int]

    def executable(
        self, axes: Mapping[str, AxisContext] | None, gathered: GatheredParameters | None = None
    ) -> Executable:
        """What this rank runs. axes: this rank's place on each axis; None without a process group (one rank). gathered:
        parameters of the model that its graphs have gathered and keep."""
        if axes is None:
            return Executable.of(self.program)
        return Executable.of(bind_mesh(self.program, axes), lambda: on_mesh(axes), gathered)

    def communication(self, sizes: Mapping[str, int]) -> list[Communication]:
        """Every collective of one step, those that backward repeats included. sizes: of the axes besides the plan's."""
        if not any(n.meta.get(RECOMPUTE) for n in collective_nodes(self.program.graph)):
            return communication(self.program, self.plan.t, sizes)
        parts = partition(self.program)
        found = []
        for direction, part in (("forward", parts.forward), ("backward", parts.backward)):
            if part is not None:
                made = communication(dataclasses.replace(self.program, gm=part), self.plan.t, sizes)
                found += [dataclasses.replace(c, direction=direction) for c in made]
        return found

    def held_back(
        self, gradients: Literal["hold", "add"], axes: Mapping[str, AxisContext], request: Request
    ) -> tuple[Executable, list[Input]]:
        """The same with another backward, which takes what this one's forward keeps (`data_parallel`); its pending inputs."""
        assert self.program.unreduced is not None and request.data is not None
        program = self.program.unreduced.copy()
        data_parallel(program, request.data, request.t, self.plan.params, gradients=gradients)
        schedule_collectives(program, request.hardware)
        made = Executable.of(bind_mesh(program, axes), lambda: on_mesh(axes))
        return made, [spec for spec in program.inputs if spec.kind == "pending"]


@dataclass(frozen=True)
class Request:
    """How to compile a captured call.

    fixed: storage of parameters that an earlier graph settled. given: a plan to apply. wants_grad: (index, Input) -> whether
    the gradient of that input is wanted; None: a graph without backward. agree: this rank's plan -> the plan of all ranks.
    caches: by path in a key-value cache, the placement that it leaves graphs at. data: the data-parallel axis, if there is one.
    """

    config: Config
    t: int
    hardware: Hardware
    fixed: dict[str, Placement]
    given: Plan | None = None
    wants_grad: Callable[[int, Any], bool] | None = None
    agree: Callable[[Plan], Plan] | None = None
    caches: Mapping[str, Placement] = field(default_factory=dict)
    data: DataAxis | None = None

    def planning(self) -> Planning:
        training = self.wants_grad is not None
        planning = Planning(self.config, self.t, self.hardware, training, self.fixed, self.given, self.agree)
        planning.caches = dict(self.caches)
        return planning


def compile_program(program: Program, request: Request) -> Compiled:
    """CAPTURED program -> LOWERED; raises what the passes raise."""
    planning = request.planning()
    _run(program, compile_passes(planning, request), planning, request)
    wrt, outputs = _gradients_of(program, request)
    return Compiled(program, planning.solved, wrt, outputs)


def plan_only(program: Program, request: Request) -> Plan:
    """CAPTURED program -> its plan, with the report; the program is left PLACED."""
    planning = request.planning()
    _run(program, planning_passes(planning, request.data), planning, request)
    return planning.solved


def _run(program: Program, passes: list[Pass], planning: Planning, request: Request) -> None:
    """Users' passes and flags may name any pass of a training graph, also where this graph has no need of it."""
    known = [p.name for p in compile_passes(planning, replace(request, wants_grad=lambda index, spec: True))]
    run_passes(
        program, insert_user_passes(passes, request.config, known), ranks=request.t, data=request.data, known=known
    )


def compile_passes(planning: Planning, request: Request) -> list[Pass]:
    """From capture to collectives that start and wait apart; a graph without gradients goes without the joint passes."""

    def differentiate(program: Program) -> int:
        return build_joint_graph(program, *_gradients_of(program, request))

    def check(program: Program) -> int:
        try:
            check_types(program, planning.solved, request.t)
        except PlacementError as error:
            if current().check or request.config.passes:
                raise
            # It reads local shapes, which can be ambiguous: a refusal is no proof, and is said instead of stopping the user.
            what = f"the type checker cannot confirm this graph: {error.found}; megafx.verify compares it with eager"
            program.notes.append(Note("types", what, error.module or "", error.source))
        return 0

    passes = [
        *planning_passes(planning, request.data),
        Pass.of(localize_shapes, planning),
        Pass.of(fuse_linear_loss, planning),
        Pass.of(fuse_local, planning, canonicalize, canonicalize_nodes),
        Pass.of(merge_linears, planning, request.wants_grad, request.data),
    ]
    if request.wants_grad is not None:
        passes += [
            Pass("build_joint_graph", differentiate, (Phase.LOCAL,), Phase.JOINT),
            Pass.of(postpone_lazy_outputs),
            Pass.of(coalesce_gradients),
            Pass("check_types", check, (Phase.JOINT,)),
            Pass.of(join_slice_gradients),
            Pass.of(pack_attention_gradients),
            Pass.of(accumulate_products),
            *([Pass.of(recompute_activations)] if request.config.recompute_activation_func else []),
        ]
    return [
        *passes,
        Pass.of(merge_transitions),
        Pass.of(expand_transitions),
        *(_data_passes(planning, request.data) if request.data is not None else []),
        Pass.of(schedule_collectives, request.hardware),
    ]


def _data_passes(planning: Planning, data: DataAxis) -> list[Pass]:
    """Collectives of the data-parallel axis. Where parameters are stored is known once the passes before have run."""

    def gather(program: Program) -> int:
        return gather_parameters(program, data, planning.t, planning.solved.params)

    def reduce(program: Program) -> int:
        program.unreduced = program.copy()
        return data_parallel(program, data, planning.t, planning.solved.params)

    gathers = [Pass("gather_parameters", gather, (Phase.LOWERED,))] if data.sharded else []
    return [*gathers, Pass("data_parallel", reduce, (Phase.LOWERED,))]


def planning_passes(planning: Planning, data: DataAxis | None = None) -> list[Pass]:
    """From capture to transitions in the graph, on global shapes; the plan and its report end up in `planning`."""

    def describe_plan(program: Program) -> int:
        planning.solved.report = describe(program, planning)
        return 0

    return [
        Pass.of(canonicalize),
        Pass.of(own_experts, planning, data),
        Pass.of(share_logsumexp, planning.config),
        Pass.of(fuse, planning, canonicalize, canonicalize_nodes),
        Pass.of(describe_masks, planning.config),
        *(
            [Pass.of(place_batch, data.ranks, planning.config.data_parallel_loss == "batch")]
            if data is not None
            else []
        ),
        Pass.of(join_experts, planning),
        *([Pass.of(native_attention, planning)] if planning.config.attention_dropout_rng == "native" else []),
        Pass.of(plan_sharding, planning),
        Pass.of(insert_transitions, planning),
        Pass("describe_plan", describe_plan),
    ]


def _gradients_of(program: Program, request: Request) -> tuple[list[int], list[int]]:
    """(inputs whose gradients are wanted, outputs to differentiate): the loss alone, or every floating output."""
    if request.wants_grad is None:
        return [], []
    wrt = [
        i
        for i, (node, spec) in enumerate(program.input_nodes())
        if spec.kind in ("param", "user") and is_floating(node) and request.wants_grad(i, spec)
    ]
    values = program.results()
    losses = [i for i, spec in enumerate(program.outputs) if spec.loss]
    if losses and not request.config.differentiable_outputs:
        return wrt, losses
    return wrt, [
        i
        for i, (node, spec) in enumerate(zip(values, program.outputs, strict=True))
        if spec.kind == "user" and isinstance(node, fx.Node) and _has_gradient(node)
    ]


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get(VAL)
    return isinstance(value, torch.Tensor) and value.is_floating_point() and node.op != "placeholder"
