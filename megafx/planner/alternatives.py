"""What the planner could have done instead, and what it would have cost (MEGAFX_DEBUG=3).

For one op of each kind of layer that has a weight, every other strategy is priced exactly: the optimum of the whole plan
with that strategy fixed, against the optimum. Layers that differ in their index alone are priced once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from torch import fx

from megafx.ir.program import fqn_of
from megafx.planner.plan import Plan
from megafx.planner.problem import Problem
from megafx.planner.solver import InfeasibleError, Solution, Table, solve
from megafx.rules.strategies import Strategy


def alternatives(problem: Problem, plan: Plan, solution: Solution) -> Iterator[str]:
    """Lines of text: an op, and below it its strategies from the cheapest on, with what they would add to a step."""
    seen: set[tuple[str, str]] = set()
    for node in problem.planner.rules:
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", fqn_of(node)), str(node.target)
        if not _has_weight(problem, node) or kind in seen:
            continue
        seen.add(kind)
        chosen, total = solution.assignment["op", node], len(problem.domains[node])
        yield f"alternatives of %{node.name} [{fqn_of(node)}] {node.target}: {total} strategies"
        priced = [(0.0, chosen), *((_added_us(problem, solution, node, i), i) for i in range(total) if i != chosen)]
        for added_us, index in sorted(priced):
            text = _text(plan, problem.domains[node][index])
            price = "chosen" if index == chosen else "impossible" if added_us == np.inf else f"+{added_us:.1f} us"
            yield f"  {text:60s} {price}"


def _has_weight(problem: Problem, node: fx.Node) -> bool:
    return any(o.node in problem.policy.weights for o in problem.planner.rules[node].operands)


def _added_us(problem: Problem, solution: Solution, node: fx.Node, index: int) -> float:
    """What the best plan in which `node` uses strategy `index` costs more than the best plan."""
    only = np.full(len(problem.domains[node]), np.inf)
    only[index] = 0.0
    forced = Table((("op", node),), only)
    try:
        return 1e6 * (solve(problem.sizes_of_domains, [*problem.tables, forced]).cost - solution.cost)
    except InfeasibleError:
        return float("inf")


def _text(plan: Plan, strategy: Strategy) -> str:
    return f"{', '.join(map(plan.text_of, strategy.ins))} -> {plan.text_of(strategy.out)}"
