"""Cut the sequence over the ranks of the context-parallel axis, and make the program that of one of its ranks.

Before:  %x = embedding(%w, %ids)                        # [b s h]
         %k = reshape(linear(%x, %wk), [b, s, n, d]);  ...;  %y = attention(%q, %k, %v, causal)
After:   %i = transition(%ids, I -> S1, 'cp', 2);  %x = embedding(%w, %i)            # [b ceil(s/2) h]
         %k = reshape(linear(%x, %wk), [b, ceil(s/2), n, d]);  ...
         %g = transition(%k, S2 -> R, 'cp', 2);  %y = attention(%q, %g, %h, causal, 2, [1, s, 1], 'cp')
Legal because: it is what `plan_sharding`, `insert_transitions` and `localize_shapes` do for the tensor-parallel axis, here
for another. The result is canonical again: to the next axis, transitions are ops with a rule.

What differs is the policy. No size is cut but that of a sequence; wherever an op's rule lets it be cut, it is. An attention may
have some of the heads on each rank instead, and all tokens (`cp_comm_type`): q, k and v are exchanged before it, S2 -> S1, and
its result after it, S1 -> S2. Where attention with cut queries is causal each rank has a part of the head of the sequence and
the mirrored part of the tail, so that all have as many keys to see. Parameters
are whole (R), so that their gradients are summands, which `data_parallel` adds up with those of the other ranks. Inputs and
outputs are whole on every rank. An op whose rule does not let the sequence be cut gets it gathered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

import megafx.kernels.attention.attention  # noqa: F401  registers megafx::attention
from megafx.errors import PlanError
from megafx.ir.contracts import is_transition
from megafx.ir.facts import ATTENTION
from megafx.ir.nodes import CASTS, COPIES, argument, behind, draw_of, is_draw, op_name, set_arguments
from megafx.ir.program import HELD, PLACEMENT, VAL, Batch, Builder, Phase, Program
from megafx.ops.axes import DrawAxis
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.passes.plan.turn_transitions import turn_transitions
from megafx.placements.data_axis import CONTEXT_AXIS, TENSOR_AXIS
from megafx.placements.types import R
from megafx.planner.context import CompileContext
from megafx.planner.cost import cost_kind
from megafx.rules.candidates import HEADS
from megafx.units import bytes_text

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "cut_sequence"
sdpa, megafx_attention = torch.ops.aten.scaled_dot_product_attention.default, torch.ops.megafx.attention.default


def cut_sequence(program: Program, context: CompileContext) -> int:
    """Return the number of transitions of the context-parallel axis. Raises PlanError where there is no sequence to cut."""
    if context.data is None or context.data.cp == 1:
        return 0
    if program.batch is not None and program.batch.cp > 1:  # a stage of a pipeline was cut with the whole
        return 0
    if program.batch is None:
        program.batch = Batch(1, {}, (R,) * len(program.outputs), any(spec.loss for spec in program.outputs), True)
    names = [name for name in program.sizes.symbols if name == "seq" or name.startswith("target")]
    if not names and _has_rows_of_tokens(program):
        names = ["batch"]
    if not context.training and (not names or any(spec.cache for spec in program.outputs)):
        program.note(
            "context parallel",
            "without gradients, and with a key-value cache or one token, each rank computes the whole",
        )
        return 0
    if not names:
        raise PlanError(
            "the sequence of this call is no size that may vary, so it cannot be cut over context-parallel ranks",
            fix="give token ids [batch, sequence] (or [tokens]) of several tokens to a model that takes any number of them (no "
            "loop over them), or set context_parallel_size to 1",
        )
    program.batch = replace(program.batch, cp=context.data.cp, equal=True, axes=context.data.mesh)
    _count_queries(program)
    _name_axis_of_draws(program, CONTEXT_AXIS)
    config = context.config.replace(  # outputs are whole on every rank, those beside a loss too
        planner_policy="free", overrides={}, sequence_parallel=False, gather_outputs=True, differentiable_outputs=True
    )
    params = {spec.name: R for spec in program.inputs if spec.kind == "param"}
    attentions = _attentions(program)
    axis = CompileContext(
        config, context.data.cp, context.hardware, None, context.wants_grad, params, axis=CONTEXT_AXIS, cuts=names,
        head_tail=any(map(_sees_what_came_before, attentions)), by_heads=_may_exchange_heads(program, context, attentions),
        always_by_heads=config.cp_comm_type == "a2a",
    )  # fmt: skip
    plan_sharding(program, axis)
    exchanged = [
        n for n in axis.by_heads if axis.solved.ops[n.name].out.is_shard and axis.solved.ops[n.name].out.dim == HEADS
    ]
    if axis.head_tail and not any(map(_sees_what_came_before, set(attentions) - set(exchanged))):
        # No rank has late queries alone, so a rank's tokens can be one range, which is exchanged without one more copy.
        program.phase, axis.head_tail, axis.by_heads, axis.always_by_heads = Phase.CANONICAL, False, exchanged, True
        plan_sharding(program, axis)
    count = insert_transitions(program, axis)
    _say_where_it_is_gathered(program, axis)
    _say_what_is_exchanged(program, attentions, exchanged)
    localize_shapes(program, axis)
    turn_transitions(program, axis)
    for node in program.graph.nodes:  # the next axis has placements of its own
        if (placement := node.meta.pop(PLACEMENT, None)) is not None:
            node.meta[HELD] = {**node.meta.get(HELD, {}), CONTEXT_AXIS: placement}
    for i, spec in enumerate(program.outputs):
        program.outputs[i] = replace(spec, placement=None)
    _name_axis_of_draws(program, TENSOR_AXIS)
    if context.t > 1:
        _say_what_draws(program)
    program.phase = Phase.CANONICAL
    return count


def _has_rows_of_tokens(program: Program) -> bool:
    """True if the model is given token ids [t], of documents one after the other: it looks them up, and nothing that is as
    long has more than two dims."""
    inputs = {node: node.meta[VAL] for node, spec in program.input_nodes() if spec.kind == "user"}
    long = {
        node: value
        for node, value in inputs.items()
        if isinstance(value, torch.Tensor)
        and value.dim()
        and program.sizes.mentions(program.sizes.of(value.shape[0]), "batch")
    }
    tables = program.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    ids = [behind(node.args[1], COPIES | CASTS) for node in tables]
    return all(value.dim() <= 2 for value in long.values()) and any(x in long and long[x].dim() == 1 for x in ids)


def _attentions(program: Program) -> list[fx.Node]:
    """Attentions whose result is [b, heads, s, d]."""
    found = [n for n in program.graph.nodes if n.op == "call_function" and n.target in (sdpa, megafx_attention)]
    return [n for n in found if n.meta[VAL].dim() == 4]


def _sees_what_came_before(attention: fx.Node) -> bool:
    """True if its queries see all keys before them: late ones cost more, so each rank gets early and late."""
    causal = attention.target is megafx_attention and argument(attention, "causal")
    return bool(causal and not argument(attention, "window"))


def _may_exchange_heads(program: Program, context: CompileContext, attentions: list[fx.Node]) -> list[fx.Node]:
    """Those whose ranks may have some of the heads each, instead of some of the queries; a note where the user asks in vain.

    Key-value heads go with their query heads. Where 'auto' chooses, tensor-parallel ranks have whole groups of both as well:
    else they would gather q, k and v first, which this axis' prices do not know.
    """
    assert context.data is not None
    ranks, wanted = context.data.cp, context.config.cp_comm_type
    found = list[fx.Node]()
    for node in attentions if wanted != "all_gather" else ():
        heads = node.args[1].meta[VAL].shape[HEADS]
        if not isinstance(heads, int) or heads < ranks:
            if wanted == "a2a":
                has = f"{heads} key-value head{'s' * (heads != 1)}, fewer than the {ranks} ranks of '{CONTEXT_AXIS}'"
                found_out = f"attention has {has}: keys and values are gathered, not heads exchanged"
                program.note("context parallel", found_out, node)
        elif wanted == "a2a" or heads % (ranks * context.t) == 0:
            found.append(node)
            if heads % ranks:
                held = f"{heads} key-value heads on {ranks} ranks: each computes {-(-heads // ranks)}, some of them padding"
                program.note("context parallel", f"heads are exchanged: {held}", node)
    return found


def _name_axis_of_draws(program: Program, axis: str) -> None:
    """Ops that draw, and are not cut, name the axis that is to cut them."""
    for node in filter(is_draw, program.graph.nodes):
        drop = draw_of(node)
        if drop.shard_dim < 0:
            set_arguments(node, axis=str(DrawAxis.parse(drop.axis)._replace(axis=axis)))


def _count_queries(program: Program) -> None:
    """Write causal attention as the op that has an argument for the queries of a rank."""
    for node in program.graph.find_nodes(op="call_function", target=sdpa):
        q, k, v, mask = (argument(node, name) for name in ("query", "key", "value", "attn_mask"))
        if not argument(node, "is_causal") or mask is not None or q.meta[VAL].dim() not in (3, 4):
            continue
        scale, alone = argument(node, "scale"), q.meta[VAL].dim() == 3  # [heads, t, d] of packed tokens
        scale = q.meta[VAL].shape[-1] ** -0.5 if scale is None else scale
        build = Builder(program, node, node, NAME)
        options: Any = (scale, True, 0, 0.0, 0, 0.0, 0, -1, [], TENSOR_AXIS)
        q, k, v = (build(torch.ops.aten.unsqueeze.default, x, 0) if alone else x for x in (q, k, v))
        made = build(torch.ops.megafx.attention.default, q, k, v, None, None, None, None, None, *options)
        node.replace_all_uses_with(build(torch.ops.aten.squeeze.dim, made, 0) if alone else made)
        program.graph.erase_node(node)


def _say_what_draws(program: Program) -> None:
    """Attention with dropout is cut once; other draws are seldom cut on the next axis."""
    for node in filter(is_draw, program.graph.nodes):
        drop = draw_of(node)
        if drop.shard_dim >= 0 and drop.p and drop.seed is not None and cost_kind(op_name(node)) == ATTENTION:
            cut = "its queries are cut" if drop.shard_dim == 2 else f"'{CONTEXT_AXIS}' cuts its heads"
            found = f"attention with dropout: {cut}, so tensor-parallel ranks compute all heads that are left"
            program.note("context parallel", found, node)


def _say_where_it_is_gathered(program: Program, axis: CompileContext) -> None:
    """What keys and values take, and a note for each other op that has the sequence whole."""
    total, others = 0, dict[fx.Node, int]()
    for node in program.graph.nodes:
        if not is_transition(node, CONTEXT_AXIS) or node.args[1][0] != "S" or node.args[2] not in ("R", "I"):
            continue
        size = program.sizes.bytes(node.meta[VAL])
        readers = [n for n in node.users if n.op != "output"]
        total += size if readers else 0
        for reader in readers:
            if cost_kind(op_name(reader)) != ATTENTION or node in (reader.args[0], *reader.args[3:4]):
                others[reader] = others.get(reader, 0) + size
    if total:
        program.note(
            "context parallel", f"a forward pass gathers {bytes_text(total)} of the sequence over '{CONTEXT_AXIS}'"
        )
    for reader, size in others.items():
        rule = axis.rules.get(reader)
        reasons = [] if rule is None else [rule.reason, *rule.forbidden.values()]
        why = next((f" ({reason})" for reason in reasons if reason), "")
        program.note(
            "context parallel",
            f"{op_name(reader)} has the sequence whole{why}: {bytes_text(size)} are gathered",
            reader,
        )


def _say_what_is_exchanged(program: Program, attentions: list[fx.Node], exchanged: list[fx.Node]) -> None:
    """What a rank sends where heads are exchanged."""
    moved = [
        n for n in program.graph.nodes if is_transition(n, CONTEXT_AXIS) and n.args[1][0] == "S" and n.args[2][0] == "S"
    ]
    if exchanged:
        size, of = sum(program.sizes.bytes(n.meta[VAL]) for n in moved), f"{len(exchanged)} of {len(attentions)}"
        text = f"{of} attentions have some of the heads on each rank: a forward pass exchanges {bytes_text(size)}"
        program.note("context parallel", f"{text} over '{CONTEXT_AXIS}'")
