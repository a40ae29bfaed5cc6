"""Build the report of a plan: a placed program (global shapes, transitions as nodes) and its plan -> `Report`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from megafx.analysis.costed_graph import is_move, priced, statistics, style_of, text_of
from megafx.config import Config
from megafx.ir.contracts import is_transition
from megafx.ir.facts import ATTENTION
from megafx.ir.nodes import op_name
from megafx.ir.program import PLACEMENT, VAL, Note, Program, fqn_of, source_of
from megafx.placements.data_axis import CONTEXT_AXIS, TENSOR_AXIS
from megafx.placements.types import LOCAL, Owned, Placement
from megafx.planner.context import CompileContext
from megafx.planner.cost import cost_kind, in_pieces
from megafx.planner.costed import PricedTransition
from megafx.planner.plan import INDEX
from megafx.report.report import Line, Report, fused


def describe(program: Program, context: CompileContext) -> Report:
    """PLACED program -> Report."""
    plan = context.solved
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n in context.rules]
    rows = [row for node in calls if (row := _row(program, context, node)) is not None]
    params = {}
    for node, spec in program.input_nodes():
        if spec.kind == "param":
            placement = plan.params[spec.name]
            shape = "x".join(str(n) for n in node.meta[VAL].shape)
            params[spec.name] = (shape, str(placement), plan.replicated.get(spec.name, ""))
            transitions = _transitions(program, context, node)
            if any(m.forward != LOCAL or m.backward != LOCAL for m in transitions):
                style = "gradient all-reduce"
                rows.append(Line(spec.name, "parameter", style, str(placement), shape, transitions, ""))
    removed: dict[str, int] = defaultdict(int)
    for removal in plan.removals:
        removed[removal.reason] += removal.count
    _note_unknown_network(program, context)
    _note_idle_ranks(program, plan.params, plan.t)
    _note_shared_heads(program, context, calls)
    if context.fusions is not None:
        fusions = f"all but those that were slower as measured on {context.fusions.device}"
    else:
        profile = context.config.fusion_profile
        fusions = (
            "all (fusion_profile)" if profile is not None else f"all (no measurements for {context.hardware.name})"
        )
    header = {
        "axis": f"{plan.axis}={plan.t}",
        "sequence_parallel": plan.sequence_parallel,
        "workload": _workload(plan.workload, context.config),
        "hardware": plan.hardware,
        "fusions": fusions,
        "modelled step": f"{plan.cost_us:.0f} us",
        "planning": f"{plan.statistics.get('planning_seconds', 0.0):.2f} s",
    }
    if plan.sequence_parallel:
        header["tokens"] = _tokens(program, context, calls)
    if program.batch is not None:
        summed, averaged = "summed: the loss is of all their rows", "averaged: each has a loss of its own rows"
        header["data-parallel ranks"] = (
            f"{program.batch.ranks} (gradients {summed if program.batch.summed else averaged})"
        )
    notes = [str(n) for n in program.notes]
    return Report(header, rows, params, dict(removed), notes, fusions=fused(program.fusions))


def _tokens(program: Program, context: CompileContext, calls: Iterable[fx.Node]) -> str:
    """How ranks share the tokens. A note says where gathers and scatters of them copy, and why."""
    copied: dict[str, fx.Node] = {}
    for node in calls:
        ends = [end for c in context.solved.transitions.get(node.name, ()) for end in (c.src, c.dst)]
        shape = program.sizes.shape(node.meta[VAL]) if ends else ()
        if any(in_pieces(p, shape) and p.dim < len(shape) - 1 for p in ends):
            copied.setdefault(INDEX.sub(".*", fqn_of(node)) + op_name(node), node)
    if copied:
        first = next(iter(copied.values()))
        others = f" and {len(copied) - 1} more kinds of ops" if len(copied) > 1 else ""
        program.note(
            "tokens",
            f"gathers and scatters of {first.target}{others} copy what they move: ranks hold pieces of each sequence of "
            f"[{', '.join(map(str, first.meta[VAL].shape))}], since the tokens of an op there are not computed one by one",
            first,
        )
    return "in several dims" if copied else "in one dim, so that gathers and scatters copy nothing"


def _workload(sizes: dict[str, int], config: Config) -> str:
    """The sizes that are priced, and which of them nobody has given."""
    default = {"batch"} if config.micro_batch_size is None and sizes.get("batch") == 1 else set()
    return ", ".join(f"{k}={v}{' (default)' * (k in default)}" for k, v in sizes.items()) or "static"


def _note_unknown_network(program: Program, context: CompileContext) -> None:
    """Note where ranks of an axis are on several hosts, and the profile does not know what these send each other."""
    hardware, cp = context.hardware, 1 if context.data is None else context.data.cp
    for axis, ranks, inner in ((TENSOR_AXIS, context.t, 1), (CONTEXT_AXIS, cp, context.t)):
        if hardware.hosts(ranks, inner) > 1 and hardware.network_bytes_per_second is None:
            program.note(
                "link",
                f"the {ranks} ranks of '{axis}' are on several hosts of {hardware.gpus_per_host} GPUs, and the profile "
                f"'{hardware.name}' has no network_bytes_per_second: their collectives are priced as on one host",
            )


def _note_idle_ranks(program: Program, params: Mapping[str, Placement], t: int) -> None:
    """Note where fewer ranks than t have any of a parameter (2 heads on 4 ranks): the others compute on padding."""
    idle: dict[str, str] = {}
    for fqn, placement in params.items():
        for count, unit in placement.cut.blocks if placement.is_shard and not isinstance(placement, Owned) else ():
            busy = -(-count // -(-count // t))  # ranks of each part
            if busy < t:
                units = f"{count} units of {unit}" if unit != 1 else f"{count} rows"
                text = f"{units} are shared by {busy} of {t} ranks; the others hold padding, and compute on it"
                idle.setdefault(re.sub(r"\.\d+(?=\.)", ".*", fqn), text)
    notes = [Note("padding", text, fqn) for fqn, text in idle.items()]
    program.notes += [note for note in notes if note not in program.notes]


def _note_shared_heads(program: Program, context: CompileContext, calls: Iterable[fx.Node]) -> None:
    """Note where ranks share key-value heads: their query heads are shards, k and v are whole."""
    found: dict[Any, Any] = {}
    t = context.t
    for node in calls:
        choice = context.solved.ops[node.name]
        if cost_kind(op_name(node)) != ATTENTION or not choice.out.is_shard or choice.ins[1].is_shard:
            continue
        if (heads := node.meta[VAL].shape[choice.out.dim]) != choice.out.cut.size or choice.out.dim != 1:
            continue
        kv_heads, local = context.rules[node].operands[1].node.meta[VAL].shape[1], choice.out.cut.local_size(t)
        ranges = [piece for rank in range(t) for piece in choice.out.cut.pieces(rank, t)]
        if heads % kv_heads:
            continue
        group, served = heads // kv_heads, [0] * kv_heads
        for start, _, count in ranges:
            for head in range(start // group, (start + count - 1) // group + 1):
                served[head] += 1
        each = " to ".join(map(str, dict.fromkeys((min(served), max(served)))))
        plural = "s" if kv_heads > 1 else ""
        text = (
            f"{kv_heads} key-value head{plural} on {t} ranks: k and v are gathered, and each head serves {each} ranks, which "
            f"have {local} of the {heads} query heads"
        )
        found.setdefault(INDEX.sub(".*", fqn_of(node)), text)
    program.notes += [note for fqn, text in found.items() if (note := Note("heads", text, fqn)) not in program.notes]


def _row(program: Program, context: CompileContext, node: fx.Node) -> Line | None:
    choice = context.solved.ops[node.name]
    rule = context.rules[node]
    transitions = _transitions(program, context, node)
    communicates = any(m.forward != LOCAL or m.backward != LOCAL for m in transitions)
    weights = rule.weights(context.weights)
    has_weight = bool(weights) and node not in context.weights
    no_rule = rule.kind == "none" and node not in context.owners
    if not (communicates or has_weight or no_rule):
        return None
    placements, ins = [choice.ins[i] for i in weights], ", ".join(text_of(p, program) for p in choice.ins)
    shape = "x".join(map(str, rule.operands[weights[0]].node.meta[VAL].shape)) if weights else ""
    return Line(
        fqn_of(node) or "<root>",
        str(node.target).removeprefix("aten.").removesuffix(".default"),
        style_of(node, choice.out, placements) if has_weight else ("replicated" if no_rule else ""),
        f"{ins} -> {text_of(choice.out, program)}",
        shape,
        transitions,
        str(source_of(node) or ""),
    )


def _transitions(program: Program, context: CompileContext, node: fx.Node) -> tuple[PricedTransition, ...]:
    """The transitions made of this value, found in the graph."""
    transitions, stack = [], [node]
    while stack:
        value = stack.pop()
        for user in value.users:
            if is_move(user) and PLACEMENT in value.meta:
                transitions.append(priced(program, context, value, user))
                if is_transition(user):
                    stack.append(user)
    gathered = statistics(program, context, node)
    return tuple(transitions) if gathered is None else (*transitions, gathered)
