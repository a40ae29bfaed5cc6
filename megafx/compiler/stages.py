"""The pipeline: every pass of a compile, in its order. Read the lists top to bottom; pipeline.py runs them.

A pass is a function `(program, context) -> number of changes`, which changes the program in place. It returns 0 where it has
nothing to do, as those of data parallelism have on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megafx.analysis.costed_graph import costed_graph
from megafx.checks import types
from megafx.compiler.cut_sequence import cut_sequence
from megafx.compiler.runner import Pass, PassFunction, Runner, insert_user_passes
from megafx.config import Config
from megafx.debugging import current
from megafx.errors import PlacementError
from megafx.ir.program import Note, Program
from megafx.passes.backward.accumulate_products import accumulate_products
from megafx.passes.backward.build_joint_graph import build_joint_graph
from megafx.passes.backward.gradients_in_fp32 import gradients_in_fp32
from megafx.passes.backward.join_slice_gradients import join_slice_gradients
from megafx.passes.backward.pack_attention_gradients import pack_attention_gradients
from megafx.passes.backward.postpone_lazy_outputs import postpone_lazy_outputs
from megafx.passes.backward.recompute_activations import recompute_activations
from megafx.passes.backward.scaled_products import scaled_products
from megafx.passes.backward.store_activation_inputs import store_activation_inputs
from megafx.passes.canonicalize.canonicalize import canonicalize
from megafx.passes.communicate.add_pending import add_pending
from megafx.passes.communicate.coalesce_gradients import coalesce_gradients
from megafx.passes.communicate.coalesce_maxima import coalesce_maxima
from megafx.passes.communicate.data_parallel import data_parallel
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.passes.communicate.gather_casts import gather_casts
from megafx.passes.communicate.gather_parameters import gather_parameters
from megafx.passes.communicate.hold_experts import hold_experts
from megafx.passes.communicate.merge_transitions import merge_transitions
from megafx.passes.communicate.schedule_collectives import schedule_collectives
from megafx.passes.experts.dispatch_experts import dispatch_experts
from megafx.passes.experts.drop_expert_values import drop_expert_values
from megafx.passes.experts.drop_idle_masks import drop_idle_masks
from megafx.passes.experts.group_by_expert import group_by_expert
from megafx.passes.experts.join_experts import join_experts
from megafx.passes.experts.own_experts import own_experts
from megafx.passes.experts.stack_lists import stack_lists
from megafx.passes.fuse.describe_masks import describe_masks
from megafx.passes.fuse.fuse import fuse
from megafx.passes.fuse.fuse_linear_loss import fuse_linear_loss
from megafx.passes.fuse.fuse_local import fuse_local
from megafx.passes.fuse.group_experts import group_experts
from megafx.passes.fuse.join_stacks import join_stacks
from megafx.passes.fuse.merge_linears import merge_linears
from megafx.passes.fuse.share_logsumexp import share_logsumexp
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.lower.bind_mesh import bind_mesh
from megafx.passes.lower.call_directly import call_directly
from megafx.passes.lower.compile_chains import compile_chains
from megafx.passes.lower.fuse_maxima import fuse_maxima
from megafx.passes.lower.keep_casts import keep_casts
from megafx.passes.lower.name_ranges import name_ranges
from megafx.passes.lower.overlap_products import overlap_products
from megafx.passes.lower.pair_casts import pair_casts
from megafx.passes.lower.partition import partition
from megafx.passes.lower.regather import regather
from megafx.passes.lower.reuse_buffers import reuse_buffers
from megafx.passes.lower.schedule_offload import schedule_offload
from megafx.passes.lower.start_exchanges import start_exchanges
from megafx.passes.lower.write_padded_rows import write_padded_rows
from megafx.passes.plan.flatten_tokens import flatten_tokens
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.place_axes import place_axes
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.passes.recompute.choose_kept import choose_kept
from megafx.planner.context import CompileContext
from megafx.planner.timeline import graphs_pay, timeline
from megafx.report.alternatives import price_alternatives
from megafx.report.describe import describe
from megafx.report.report import refresh_notes


def describe_plan(program: Program, context: CompileContext) -> int:
    """Make the report of the plan, which `megafx.explain` shows."""
    report = context.solved.report = describe(program, context)
    report.costed = costed_graph(program, context)
    report.step = timeline(report.costed)
    context.solved.step_us = report.step.total_us
    report.header["modelled step"] = f"{report.step.total_us:.0f} us"
    if context.config.cuda_graphs == "auto":
        pays, why = graphs_pay(report.step, context.hardware)
        expected = "expects CUDA graphs to pay" if pays else "expects no gain of CUDA graphs"
        program.note("cuda graphs", f"'auto' {expected} at the sizes that are priced ({why}); calls are measured")
        refresh_notes(report, program.notes)
    if context.problem is not None:
        price_alternatives(report.costed, context.problem, context.solved)
    return 0


def check_types(program: Program, context: CompileContext) -> int:
    """Derive the placement of every value of the joint graph from its operands, and compare with what is promised."""
    if current().check:
        types.check_batch_types(program)
    if context.t == 1:
        return 0  # all placements mean the same
    try:
        types.check_types(program, context.solved, context.t)
    except PlacementError as error:
        if current().check or context.config.passes:
            raise
        # It reads local shapes, which can be ambiguous: a refusal is no proof: it is a note, and does not stop the user.
        what = f"the type checker cannot confirm this graph: {error.found}; megafx.verify compares it with eager"
        program.notes.append(Note("types", what, error.module or "", error.source))
    return 0


# Whole shapes: find the form in which the model is planned, plan it, and put transitions where placements change.
PLANNING: tuple[PassFunction, ...] = (
    canonicalize,
    drop_idle_masks,
    own_experts,
    share_logsumexp,
    fuse,
    describe_masks,
    stack_lists,
    group_by_expert,
    place_axes,
    cut_sequence,
    dispatch_experts,
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
    join_stacks,
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
    store_activation_inputs,
)
# Transitions become collectives that start and are waited for apart.
COMMUNICATION: tuple[PassFunction, ...] = (
    hold_experts,
    merge_transitions,
    expand_transitions,
    gather_parameters,
    gather_casts,
    coalesce_maxima,
    choose_kept,
    add_pending,
    data_parallel,
    schedule_collectives,
)
# What one rank runs, made of a copy of the program of all ranks.
RANK: tuple[PassFunction, ...] = (
    drop_expert_values,
    bind_mesh,
    keep_casts,
    partition,
    schedule_offload,
    regather,
    pair_casts,
    overlap_products,
    start_exchanges,
    fuse_maxima,
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


def passes_of(context: CompileContext, *stages: str) -> list[Pass]:
    """The passes that a graph goes through in these stages."""
    found = pipeline(context.config)
    return [p for stage in stages if context.training or stage != "backward" for p in found[stage]]


def before(function: PassFunction, passes: Iterable[Pass]) -> list[Pass]:
    """The passes up to this one, which is one of them."""
    found = [*passes]
    return found[: [p.run for p in found].index(function)]


def since(function: PassFunction, passes: Iterable[Pass]) -> list[Pass]:
    """This pass and those after it."""
    found = [*passes]
    return found[[p.run for p in found].index(function) :]


def runner_of(context: CompileContext, start: str = "capture", *, quiet: bool = False, stops: bool = True) -> Runner:
    """start: what its first dump is called. quiet: nothing is logged or dumped. stops: where MEGAFX_STOP_AFTER says.

    Flags may name any pass of the pipeline, also where this graph has no need of it.
    """
    names = [p.name for stage in pipeline(context.config).values() for p in stage]
    settings = replace(current(), level=0, dump=None) if quiet else current()
    return Runner(context, names, settings if stops else replace(settings, stop_after=None), start)
