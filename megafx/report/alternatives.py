"""What else could be done with an op that has a weight, and what it would add to a step while all else stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx

from megafx.analysis.costed_graph import style_of
from megafx.ir.program import VAL
from megafx.placements.types import LOCAL, collectives
from megafx.planner.cost import transition_cost
from megafx.planner.costed import CostedGraph
from megafx.planner.plan import Plan, Transition
from megafx.planner.problem import Neighbourhood, Problem
from megafx.units import bytes_text

Sent = Counter[tuple[str, int]]  # (collective, bytes that a rank sends) -> how many, forward and backward


def price_alternatives(costed: CostedGraph, problem: Problem, plan: Plan) -> None:
    """Fill `alternatives` of each op with a weight: the cheapest strategy of each other style, and the collectives that differ.

    problem: without policies, whose strategies have a price too; `why` has the reasons why they were taken away.
    """
    nodes, around = {n.name: n for n in problem.context.rules}, Neighbourhood(problem, plan)
    for op in costed.nodes:
        if not op.has_weight:
            continue
        node = nodes[op.name]
        rule, choice = problem.context.rules[node], plan.ops[node.name]
        weights = rule.weights(problem.policy.weights)
        rows = [(s.ins, s.out) for s in problem.domains[node]]
        if (choice.ins, choice.out) not in rows:
            continue
        now, had = around.cost(node, rows.index((choice.ins, choice.out)))
        before, found = _sent(problem, had), dict[str, tuple[float, str]]()
        for index, (ins, out) in enumerate(rows):
            style = style_of(node, out, [ins[i] for i in weights])
            seconds, moves = around.cost(node, index)
            added_us = 1e6 * (seconds - now)
            if style == op.style or added_us == float("inf") or added_us >= found.get(style, (float("inf"), ""))[0]:
                continue
            sent = ", ".join(_difference(before, _sent(problem, moves)))
            row = f"{', '.join(map(plan.text_of, ins))} -> {plan.text_of(out)}"
            text = f"{style} ({row}) here would cost {added_us:+.1f} us" + (f": {sent}" if sent else "")
            if added_us < 0:  # the plan is the optimum of what policies leave
                text += "; a policy rules it out"
            found[style] = (added_us, text)
        op.alternatives = [text for _, text in sorted(found.values())]


def _sent(problem: Problem, moves: Iterable[tuple[fx.Node, Transition]]) -> Sent:
    """Their collectives, forward and backward."""
    context, sent = problem.context, Sent()
    for node, move in moves:
        row, size = collectives(move.src, move.dst), (problem.numel(node), node.meta[VAL].dtype.itemsize)
        needs_grad = node in context.differentiable
        cost = transition_cost(move.src, move.dst, *size, context.hardware, context.t, needs_grad=needs_grad)
        for collective, moved in ((row.forward, cost.forward_bytes), (row.backward, cost.backward_bytes)):
            if collective != LOCAL and moved:
                sent[collective, moved] += 1
    return sent


def _difference(before: Sent, after: Sent) -> Iterator[str]:
    for sign, changed in (("more", after - before), ("fewer", before - after)):
        for (collective, moved), count in changed.items():
            yield f"{count} {sign} {collective} of {bytes_text(moved)}"
