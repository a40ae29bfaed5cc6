"""The pipeline: from a captured call to graphs that this rank runs. Read its lists top to bottom.

A pass is a function `(program, planner) -> number of changes`, which changes the program in place. It returns 0 where it has
nothing to do, as those of data parallelism have on one rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from megafx.analysis.communication import Communication, collective_nodes, communication
from megafx.analysis.costed_graph import costed_graph
from megafx.analysis.memory import Memory, memory
from megafx.capture.prepare import alone
from megafx.checks import types
from megafx.checks.numbers import NumberCheck
from megafx.compiler.executable import Executable
from megafx.compiler.gathered_parameters import GatheredParameters
from megafx.compiler.runner import Pass, PassFunction, Runner, insert_user_passes
from megafx.config import FIT, Config
from megafx.debugging import Debug, current
from megafx.errors import PlacementError, PlanError
from megafx.ir.program import RECOMPUTE, VAL, Note, Program
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.backward.accumulate_products import accumulate_products
from megafx.passes.backward.build_joint_graph import build_joint_graph
from megafx.passes.backward.gradients_in_fp32 import gradients_in_fp32
from megafx.passes.backward.join_slice_gradients import join_slice_gradients
from megafx.passes.backward.pack_attention_gradients import pack_attention_gradients
from megafx.passes.backward.postpone_lazy_outputs import postpone_lazy_outputs
from megafx.passes.backward.recompute_activations import recompute_activations
from megafx.passes.backward.scaled_products import scaled_products
from megafx.passes.canonicalize.canonicalize import canonicalize
from megafx.passes.communicate.add_pending import add_pending
from megafx.passes.communicate.coalesce_gradients import coalesce_gradients
from megafx.passes.communicate.data_parallel import data_parallel
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.passes.communicate.gather_parameters import gather_parameters
from megafx.passes.communicate.merge_transitions import merge_transitions
from megafx.passes.communicate.schedule_collectives import schedule_collectives
from megafx.passes.experts.drop_expert_values import drop_expert_values
from megafx.passes.experts.join_experts import join_experts
from megafx.passes.experts.own_experts import own_experts
from megafx.passes.fuse.describe_masks import describe_masks
from megafx.passes.fuse.fuse import fuse
from megafx.passes.fuse.fuse_linear_loss import fuse_linear_loss
from megafx.passes.fuse.fuse_local import fuse_local
from megafx.passes.fuse.group_experts import group_experts
from megafx.passes.fuse.merge_linears import merge_linears
from megafx.passes.fuse.share_logsumexp import share_logsumexp
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.lower.bind_mesh import bind_mesh
from megafx.passes.lower.call_directly import call_directly
from megafx.passes.lower.compile_chains import compile_chains
from megafx.passes.lower.name_ranges import name_ranges
from megafx.passes.lower.overlap_products import overlap_products
from megafx.passes.lower.partition import partition
from megafx.passes.lower.regather import regather
from megafx.passes.lower.reuse_buffers import reuse_buffers
from megafx.passes.lower.schedule_offload import schedule_offload
from megafx.passes.lower.write_padded_rows import write_padded_rows
from megafx.passes.plan.flatten_tokens import flatten_tokens
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.place_batch import place_batch
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.passes.recompute.choose_kept import choose_kept
from megafx.planner.context import Gradients, Planner
from megafx.planner.plan import Plan
from megafx.planner.timeline import LEAST_GAIN, graphs_pay, timeline
from megafx.report.alternatives import price_alternatives
from megafx.report.describe import describe
from megafx.report.report import refresh_notes


def describe_plan(program: Program, planner: Planner) -> int:
    """Make the report of the plan, which `megafx.explain` shows."""
    report = planner.solved.report = describe(program, planner)
    report.picture = costed_graph(program, planner)
    report.step = timeline(report.picture)
    planner.solved.step_us = report.step.total_us
    report.header["modelled step"] = f"{report.step.total_us:.0f} us"
    if planner.config.cuda_graphs == "auto":
        pays, why = graphs_pay(report.step, planner.hardware)
        expected = "expects CUDA graphs to pay" if pays else "expects no gain of CUDA graphs"
        program.note("cuda graphs", f"'auto' {expected} at the sizes that are priced ({why}); calls are measured")
        refresh_notes(report, program.notes)
    if planner.problem is not None:
        price_alternatives(report.picture, planner.problem, planner.solved)
    return 0


def check_types(program: Program, planner: Planner) -> int:
    """Derive the placement of every value of the joint graph from its operands, and compare with what is promised."""
    if planner.t == 1:
        return 0  # all placements mean the same
    try:
        types.check_types(program, planner.solved, planner.t)
    except PlacementError as error:
        if current().check or planner.config.passes:
            raise
        # It reads local shapes, which can be ambiguous: a refusal is no proof, and is said instead of stopping the user.
        what = f"the type checker cannot confirm this graph: {error.found}; megafx.verify compares it with eager"
        program.notes.append(Note("types", what, error.module or "", error.source))
    return 0


# Whole shapes: find the form in which the model is planned, plan it, and put transitions where placements change.
PLANNING: tuple[PassFunction, ...] = (
    canonicalize,
    own_experts,
    share_logsumexp,
    fuse,
    describe_masks,
    place_batch,
    join_experts,
    flatten_tokens,
    plan_sharding,
    insert_transitions,
    describe_plan,
)
# One rank's shapes.
LOCAL: tuple[PassFunction, ...] = (
    localize_shapes,
    fuse_linear_loss,
    fuse_local,
    merge_linears,
    group_experts,
)
# Forward and backward in one graph. A graph without gradients goes without these.
BACKWARD: tuple[PassFunction, ...] = (
    build_joint_graph,
    postpone_lazy_outputs,
    gradients_in_fp32,
    coalesce_gradients,
    scaled_products,
    check_types,
    join_slice_gradients,
    pack_attention_gradients,
    accumulate_products,
    recompute_activations,
)
# Transitions become collectives that start and are waited for apart.
COMMUNICATION: tuple[PassFunction, ...] = (
    merge_transitions,
    expand_transitions,
    gather_parameters,
    choose_kept,
    add_pending,
    data_parallel,
    schedule_collectives,
)
# What one rank runs, made of a copy of the program of all ranks.
RANK: tuple[PassFunction, ...] = (
    drop_expert_values,
    bind_mesh,
    partition,
    schedule_offload,
    regather,
    overlap_products,
    write_padded_rows,
    reuse_buffers,
    compile_chains,
    call_directly,
    name_ranges,
)
STAGES: dict[str, tuple[PassFunction, ...]] = {
    "planning": PLANNING,
    "local": LOCAL,
    "backward": BACKWARD,
    "communication": COMMUNICATION,
    "rank": RANK,
}
EVERY_RANK = ("planning", "local", "backward", "communication")  # stages whose program is that of all ranks


def pipeline(config: Config) -> dict[str, list[Pass]]:
    """Stage -> its passes, with the user's own at their places."""
    stages = {name: [Pass.of(function) for function in stage] for name, stage in STAGES.items()}
    insert_user_passes([*stages.values()], config)
    return stages


class Pending(NamedTuple):
    """A gradient of earlier calls that a backward graph takes: this rank's, as the graph makes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Compiled:
    """One graph of a model, the same on every rank. program: lowered, joint where gradients are taken."""

    program: Program
    planner: Planner
    runner: Runner | None = None  # which has run its passes so far

    @property
    def plan(self) -> Plan:
        return self.planner.solved

    @property
    def wrt(self) -> list[int]:
        """Indices of inputs whose gradients the program gives."""
        names = {spec.name: i for i, spec in enumerate(self.program.inputs) if spec.kind in ("param", "user")}
        return [names[spec.name] for spec in self.program.outputs if spec.kind == "gradient"]

    @property
    def differentiated(self) -> list[int]:
        """Indices of outputs that bring a tangent."""
        names = [spec.name for spec in self.program.outputs]
        return [names.index(spec.name) for spec in self.program.inputs if spec.kind == "tangent"]

    def executable(self, gathered: GatheredParameters | None = None) -> Executable:
        """What this rank runs. gathered: parameters of the model that its graphs have gathered and keep."""
        program = self.program.copy()
        made = _executable(program, self.planner, self.runner or _runner(self.planner, "lowered"), gathered)
        self.program.notes += [note for note in program.notes if note not in self.program.notes]
        wanted = self.planner.config.cuda_graphs
        if wanted is False:
            return made
        note = partial(self.program.note, "cuda graphs")
        if not torch.cuda.is_available():
            note("calls run op by op: there is no CUDA device")
        elif self.planner.config.cpu_offloading:
            note("calls run kernel by kernel: copies of cpu_offloading are on streams of their own")
        else:
            made = made.recorded(wanted is True, note)
        return made

    def for_rank(self, axes: Mapping[str, AxisContext] | None) -> Program:
        """PARTITIONED: what the rank at this place runs. Nothing is logged or dumped."""
        program, planner = self.program.copy(), replace(self.planner, axes=axes)
        quiet = replace(current(), level=0, dump=None)
        _runner(planner, "lowered", quiet).run(program, passes_of(planner, "rank"))
        return program

    def held_back(self, gradients: Gradients) -> tuple[Executable, list[Pending]]:
        """The same with another backward, which takes what this one's forward keeps (`add_pending`, `data_parallel`), and the
        gradients that it takes in addition."""
        assert self.program.before_reduction is not None
        program, planner = self.program.before_reduction.copy(), replace(self.planner, gradients=gradients)
        runner, passes = _runner(planner, "before_reduction"), passes_of(planner, "communication")
        first = [p.name for p in passes].index(add_pending.__name__)
        with alone():
            runner.run(program, passes[first:])
        made = _executable(program, planner, runner)
        late = [(i.name, n.meta[VAL]) for n, i in program.input_nodes() if i.kind == "pending"]
        return made, [Pending(name, tuple(map(int, value.shape)), value.dtype) for name, value in late]

    def memory(self, optimizer: str = "adamw", held: int | None = None) -> Memory:
        """Predicted memory of one rank, as `analysis.memory.memory` says."""
        program = self.program.copy()
        for step in (partition, schedule_offload, regather, reuse_buffers):
            step(program, self.planner)
        with program.sizes.at_call() if self.planner.at_call else contextlib.nullcontext():
            return memory(program, optimizer, held)

    def communication(self, sizes: Mapping[str, int]) -> list[Communication]:
        """Every collective of one step, those that backward repeats included. sizes: of the axes other than the plan's."""
        if not any(n.meta.get(RECOMPUTE) for n in collective_nodes(self.program.graph)):
            return communication(self.program, self.plan.t, sizes)
        program = self.program.copy()
        partition(program, self.planner)
        regather(program, self.planner)
        assert program.partition is not None
        found = []
        for direction, part in (("forward", program.partition.forward), ("backward", program.partition.backward)):
            if part is not None:
                made = communication(replace(program, gm=part), self.plan.t, sizes)
                found += [replace(c, direction=direction) for c in made]
        return found


def compile_program(program: Program, planner: Planner) -> Compiled:
    """CAPTURED program -> LOWERED; raises what the passes raise."""
    if planner.config.activation_memory_budget == FIT and planner.training:
        return _fitting(program, planner)
    return Compiled(program, planner, _run(program, planner, *EVERY_RANK))


# Of the device's memory, what is left to the CUDA context, NCCL's buffers and blocks that do not fit together.
MARGIN = 0.06


def _fitting(program: Program, planner: Planner) -> Compiled:
    """The program with the largest budget whose predicted peak the device has room for, with AdamW's moments."""
    if planner.device_bytes is None:
        found = f"activation_memory_budget='fit' on a device whose memory is not known ({planner.hardware.name})"
        raise PlanError(found, fix="give the bytes (activation_memory_budget='24GiB'), or a profile with memory_bytes")
    room, peaks = int((1 - MARGIN) * planner.device_bytes), []
    passes = passes_of(planner, *EVERY_RANK)
    place = [p.name for p in passes].index(choose_kept.__name__)
    with alone():
        runner = _runner(planner, "capture")
        runner.run(program, passes[:place])
        for tenths in range(10, -1, -1):
            tried, other = program.copy(), copy.copy(planner)
            other.config, other.fits = planner.config.replace(activation_memory_budget=tenths / 10), True
            try:
                _runner(other, "lowered", replace(current(), level=0, dump=None)).run(tried, passes[place:])
            except PlanError:
                break
            peaks.append(Compiled(tried, other).memory().peak)
            if peaks[-1] <= room:
                return Compiled(tried, other, runner)
    least = min(peaks) / 2**30
    raise PlanError(
        f"the model does not fit: {room / 2**30:.1f} GiB are to be had, and the least that a step takes is {least:.1f} GiB",
        fix="more tensor-parallel ranks, sequence_parallel=True, data_parallel='fsdp', or a smaller batch",
    )


def plan_only(program: Program, planner: Planner) -> Plan:
    """CAPTURED program -> its plan, with the report; the program is left PLACED.

    With sequence_parallel='auto' the layout that the solver takes, by its sum of costs, is compared with the other one by what
    their schedules come to.
    """
    config, passes = planner.config, passes_of(planner, "planning")
    place = [p.name for p in passes].index(flatten_tokens.__name__)
    with alone():
        runner = _runner(planner, "capture")
        numbers = NumberCheck(planner.t, planner.data) if runner.settings.check >= 2 else None
        runner.run(program, passes[:place], numbers)
        try:
            planner.config = config.replace(sequence_parallel=_sequence_parallel(program, planner, passes[place:]))
            runner.run(program, passes[place:], numbers)
        finally:
            planner.config = config
    return planner.solved


def _sequence_parallel(program: Program, planner: Planner, passes: list[Pass]) -> bool | str:
    """What to plan with. passes: that plan."""
    wanted = planner.config.sequence_parallel
    free = planner.given is None and not planner.config.passes and planner.config.planner_policy != "free"
    chosen = _tried(program, planner, passes, wanted) if wanted == "auto" and planner.t > 1 and free else None
    other = None if chosen is None else _tried(program, planner, passes, not chosen[1])
    if chosen is None or other is None or chosen[1] == other[1] or other[0] > (1 - LEAST_GAIN) * chosen[0]:
        return wanted
    times = f"{other[0]:.0f} us by its schedule, against {chosen[0]:.0f} us"
    program.note("plan", f"sequence parallelism is {'on' if other[1] else 'off'}: a step takes {times}")
    return other[1]


def _tried(program: Program, planner: Planner, passes: list[Pass], wanted: bool | str) -> tuple[float, bool] | None:
    """(microseconds of a step by its schedule, whether ranks share tokens) of a plan; None where there is none."""
    own = copy.copy(planner)
    own.config, own.agree, own.keeps_problem = planner.config.replace(sequence_parallel=wanted), None, False
    try:
        _runner(own, "capture", replace(current(), level=0, dump=None, stop_after=None)).run(program.copy(), passes)
    except PlanError:
        return None
    return own.solved.step_us, own.solved.sequence_parallel


def passes_of(planner: Planner, *stages: str) -> list[Pass]:
    """The passes that a graph goes through in these stages."""
    found = pipeline(planner.config)
    return [p for stage in stages if planner.training or stage != "backward" for p in found[stage]]


def _run(program: Program, planner: Planner, *stages: str) -> Runner:
    """Under MEGAFX_CHECK=2 each pass is followed by a comparison of numbers."""
    with alone():
        runner = _runner(planner, "capture")
        numbers = NumberCheck(planner.t, planner.data) if runner.settings.check >= 2 else None
        runner.run(program, passes_of(planner, *stages), numbers)
        return runner


def _runner(planner: Planner, start: str, settings: Debug | None = None) -> Runner:
    """Flags may name any pass of the pipeline, also where this graph has no need of it."""
    names = [p.name for stage in pipeline(planner.config).values() for p in stage]
    return Runner(planner, names, settings, start)


def _executable(
    program: Program, planner: Planner, runner: Runner, gathered: GatheredParameters | None = None
) -> Executable:
    with alone():
        runner.run(program, passes_of(planner, "rank"))
    axes = planner.axes
    return Executable(program, contextlib.nullcontext if axes is None else lambda: on_mesh(axes), gathered)
