"""The planner's optimum is the one that an integer program finds, on problems built from real models.

Each instance is one layer of a published model at its own widths, with policies and without, at several degrees.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import real_sizes
from milp import milp_optimum

from megafx.planner import problem as problem_module
from megafx.planner.problem import Problem
from megafx.planner.solver import Solution, solve

# (model, t, sequence_parallel, policy)
INSTANCES = [
    ("nanogpt", 2, False, "megatron"),
    ("nanogpt", 8, True, "megatron"),
    ("nanogpt", 4, "auto", "free"),
    ("gpt2", 8, False, "megatron"),
    ("gpt2", 4, True, "megatron"),
    ("gpt2", 2, "auto", "free"),
    ("llama", 2, True, "megatron"),
    ("llama", 8, "auto", "megatron"),
    ("llama", 4, "auto", "free"),
    ("bert", 4, False, "megatron"),
    ("bert", 8, True, "megatron"),
    ("bert", 8, "auto", "free"),
    ("t5", 2, False, "megatron"),
    ("t5", 8, True, "megatron"),
    ("t5", 4, "auto", "free"),
]


@cache
def _problem(name: str, t: int, sequence_parallel: bool | str, policy: str) -> Problem:
    return real_sizes.problem(name, t, layers=1, sequence_parallel=sequence_parallel, planner_policy=policy)


def _solved(problem: Problem) -> Solution:
    return solve(problem.sizes_of_domains, problem.tables)


@pytest.mark.parametrize(("name", "t", "sequence_parallel", "policy"), INSTANCES)
def test_elimination_finds_the_optimum_of_the_integer_program(
    name: str, t: int, sequence_parallel: bool | str, policy: str
) -> None:
    problem = _problem(name, t, sequence_parallel, policy)
    assert len(problem.sizes_of_domains) > 50, "no real instance"
    optimum = milp_optimum(problem.sizes_of_domains, [(table.scope, table.cost) for table in problem.tables])
    assert optimum is not None
    assert _solved(problem).cost == pytest.approx(optimum, rel=1e-9)


def _cost(problem: Problem, assignment: dict[Any, int]) -> float:
    return float(sum(table.cost[tuple(assignment[v] for v in table.scope)] for table in problem.tables))


def test_the_cost_is_that_of_the_assignment_and_no_single_change_lowers_it() -> None:
    problem = _problem("llama", 2, True, "megatron")
    solution = _solved(problem)
    assert _cost(problem, solution.assignment) == pytest.approx(solution.cost, rel=1e-12)
    for variable, size in problem.sizes_of_domains.items():
        for choice in range(size):
            other = {**solution.assignment, variable: choice}
            assert _cost(problem, other) >= solution.cost * (1 - 1e-12)


@pytest.mark.parametrize("name", ["llama"])
def test_tables_shared_by_repeated_layers_are_those_built_one_by_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shared = real_sizes.problem(name, 4, layers=2, sequence_parallel="auto")
    monkeypatch.setattr(Problem, "_cached", lambda self, key, make: make())
    alone = real_sizes.problem(name, 4, layers=2, sequence_parallel="auto")
    assert [t.scope for t in shared.tables] == _renamed(alone, shared)
    for a, b in zip(shared.tables, alone.tables, strict=True):
        np.testing.assert_array_equal(a.cost, b.cost)
    assert len({id(t.cost) for t in shared.tables}) < len(shared.tables) / 1.5, "nothing was shared"


def _renamed(problem: Problem, like: Problem) -> list[Any]:
    """The scopes of the tables of `problem` with the nodes of `like`."""
    nodes = {n.name: n for n in like.program.graph.nodes}
    scopes: list[Any] = [table.scope for table in problem.tables]
    return [tuple((kind, nodes[node.name]) for kind, node in scope) for scope in scopes]


@pytest.mark.parametrize("name", ["nanogpt", "llama"])
def test_three_further_placements_of_a_value_are_no_better_than_two(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """problem.MAX_EXTRA_PLACEMENTS cuts the domains of values; no optimum is lost here."""
    two = _solved(_problem(name, 4, "auto", "free"))
    monkeypatch.setattr(problem_module, "MAX_EXTRA_PLACEMENTS", 3)
    three = _solved(real_sizes.problem(name, 4, layers=1, sequence_parallel="auto", planner_policy="free"))
    assert three.cost == pytest.approx(two.cost, rel=1e-12)
