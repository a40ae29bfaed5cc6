"""Covers: planner/problem.py (`alternatives`), and MEGAFX_DEBUG=3."""

from __future__ import annotations

import re

import pytest
import zoo

import megafx
from megafx.capture.export import capture_call
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.plan.plan_sharding import ask, make_problem
from megafx.planner.problem import Problem, alternatives
from megafx.planner.solver import solve
from megafx.testing import make_context


@pytest.fixture(scope="module")
def problem() -> Problem:
    model, inputs = zoo.build("nanogpt", layers=2)
    program = capture_call(model, (), inputs(2, 16))
    canonicalize_program(program)
    context = make_context(2)
    active, order = ask(program, context)
    return make_problem(program, context, active, order)[0]


def test_the_chosen_strategy_is_the_cheapest_and_every_price_is_that_of_a_plan(problem: Problem) -> None:
    solution = solve(problem.sizes_of_domains, problem.tables)
    plan = problem.plan_of(solution.assignment)
    plan.sizes = problem.program.sizes
    lines = list(alternatives(problem, plan, solution))
    heads = [line for line in lines if line.startswith("alternatives of %")]
    assert len(heads) == sum(line.endswith("chosen") for line in lines) == len(set(heads))
    assert not any("h.1." in head for head in heads), "layers that are alike are priced once"

    head = next(h for h in heads if "attn.qkv]" in h)
    node = next(n for n in problem.context.rules if head.startswith(f"alternatives of %{n.name} "))
    below = lines[lines.index(head) + 1 :][: len(problem.domains[node])]
    assert len(below) > 2 and below[0].endswith("chosen")
    prices = [float(re.search(r"\+([\d.]+) us$", line)[1]) for line in below[1:]]  # type: ignore[index]
    assert prices == sorted(prices) and prices[0] >= 0
    others = [i for i in range(len(below)) if i != solution.assignment["op", node]]
    costs = []
    for index in others:
        domains = {**problem.domains, node: [problem.domains[node][index]]}
        forced = Problem(problem.program, problem.context, domains, problem.policy)
        forced.build()
        costs.append(1e6 * (solve(forced.sizes_of_domains, forced.tables).cost - solution.cost))
    assert prices == pytest.approx(sorted(costs), abs=0.06)


def test_debug_level_3_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = zoo.build("nanogpt")
    config = megafx.Config(tensor_model_parallel_size=2)
    for level, wanted in ((2, False), (3, True)):
        with megafx.debug(level=level):
            megafx.plan(model, config, example_inputs=((), inputs(2, 16)))
        assert ("alternatives of %" in capsys.readouterr().err) == wanted
