"""Plans for small graphs of `megafx.testing`, by saying what matters: the strategies of some ops, the rest at least cost.

    program, context = planned(lambda x, w: aten.linear(x, w), {"linear": "S1, S1 -> P"}, x="f32[4 8]", w="param f32[6 8]")

A choice names an op by its graph name (`linear`, `linear_1`) or a parameter, and says its placements as they print.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megafx.ir.program import Program
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.plan_sharding import ask, make_problem
from megafx.planner.context import CompileContext
from megafx.planner.fusion_profile import MODES, FusionProfile, Measured, Times
from megafx.planner.problem import Problem
from megafx.planner.solver import solve
from megafx.rules.strategies import Strategy
from megafx.testing import graph, make_context


def text_of(strategy: Strategy) -> str:
    """'R, S0 -> S1'; of a parameter its storage alone."""
    ins = ", ".join(map(str, strategy.ins))
    return f"{ins} -> {strategy.out}" if strategy.ins else str(strategy.out)


def planned(
    fn: Callable[..., Any], choices: dict[str, str], mesh: str = "tp=2", **values: Any
) -> tuple[Program, CompileContext]:
    """The PLANNED program and the cheapest plan with these choices."""
    program = graph(fn, mesh=mesh, **values)
    context = make_context(int(mesh.split("=")[1]))
    active, order = ask(program, context)
    free, _ = make_problem(program, context, active, order, free=True)
    domains = dict(free.domains)
    for name, wanted in choices.items():
        node = next(n for n in order if n.name == name)
        domains[node] = [s for s in domains[node] if text_of(s) == wanted]
        assert domains[node], f"{name} has {[text_of(s) for s in free.domains[node]]}"
    problem = Problem(program, context, domains, free.policy)
    problem.build()
    context.plan = problem.plan_of(solve(problem.sizes_of_domains, problem.tables).assignment)
    context.plan.sizes = program.sizes
    context.weights = free.policy.weights
    return program, context


def placed(
    fn: Callable[..., Any], choices: dict[str, str], mesh: str = "tp=2", **values: Any
) -> tuple[Program, Program, CompileContext]:
    """(program before, after insert_transitions, context)."""
    program, context = planned(fn, choices, mesh, **values)
    before = program.copy()
    insert_transitions(program, context)
    return before, program, context


def local(
    fn: Callable[..., Any], choices: dict[str, str], mesh: str = "tp=2", **values: Any
) -> tuple[Program, Program]:
    """(program before planner, one rank's program)."""
    before, program, context = placed(fn, choices, mesh, **values)
    localize_shapes(program, context)
    return before, program


# -- measured fusions, made up

FAST, SLOW = (1.0, 2.0), (2.0, 1.0)  # fused, unfused


def measured(*patterns, small=SLOW, large=SLOW, needs=()):
    rows = [Times(n, dict.fromkeys(MODES, pair)) for n, pair in ((1_000, small), (1_000_000, large))]
    return Measured(patterns, needs, tuple(rows))


def profile(**fusions):
    return FusionProfile("a test's device", ("nowhere",), "made up", fusions)


def saved(path, **fusions):
    profile(**fusions).save(path)
    return str(path)
