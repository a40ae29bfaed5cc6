"""Any type-correct plan is right, not only the cheapest: random strategies for every op and parameter, executed exactly.

The property test of rules, transitions, insertion, localization and padding: each plan is compared with one process at fp64,
output, loss and every gradient. Policies are off, so batch, hidden and K/V shards, gathers of weights and all-to-alls occur.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import harness
import pytest

from megafx.compiler.stages import passes_of
from megafx.passes.plan.plan_sharding import ask, make_problem
from megafx.testing import make_context

SIZES = (3, 10)  # batch and sequence of the compared call: 2 and 4 divide one of them at most


class _Plans:
    """The random plans of one model on t ranks."""

    def __init__(self, name: str, t: int, options: tuple[tuple[str, Any], ...]) -> None:
        self.case, self.t = harness.Case.of(name, **dict(options)), t
        program = self.case.program.copy()
        context = make_context(t)
        for step in passes_of(context, "planning"):
            if step.name == "plan_sharding":
                break
            if step.name == "flatten_tokens":  # plans of values in their own dims, of which there are more
                continue
            step.run(program, context)
            if step.name == "canonicalize":
                harness.promote_casts(program)
        active, order = ask(program, context)
        self.problem, _ = make_problem(program, context, active, order, free=True)
        self.program = program
        self.inputs = self.case.inputs(*SIZES)
        self.wanted = self.case.reference(self.inputs)

    def draw(self, seed: int) -> Any:
        """A plan with a uniformly drawn strategy for each op; shards are drawn three times as often as the rest."""
        rng = random.Random(seed)
        assignment = {}
        for node, domain in self.problem.domains.items():
            weights = [3 if s.out.is_shard or any(p.is_shard for p in s.ins) else 1 for s in domain]
            assignment["op", node] = rng.choices(range(len(domain)), weights)[0]
        plan = self.problem.plan_of(assignment)
        plan.sizes = self.program.sizes
        return plan

    def check(self, seed: int) -> Counter:
        plan = self.draw(seed)
        compiled = self.case.compile(self.t, given=plan)
        harness.assert_equal(self.case.run(compiled, self.inputs), self.wanted)
        return Counter((c.src.kind, c.dst.kind) for moves in plan.transitions.values() for c in moves)


@cache
def _plans(name: str, t: int, options: tuple[tuple[str, Any], ...] = ()) -> _Plans:
    return _Plans(name, t, options)


CASES = [
    ("nanogpt", 2, (), 40),
    ("nanogpt", 3, (), 30),
    ("llama", 2, (), 30),
    ("llama", 4, (), 20),
    ("gpt2", 3, (("attn", "eager"),), 15),
    ("bert", 2, (), 15),
    ("t5", 2, (), 5),
]
LATER = {("nanogpt", 2), ("llama", 2), ("gpt2", 3), ("t5", 2)}  # in the slow tests alone
CHUNK = 3


@pytest.mark.parametrize(
    ("name", "t", "options", "first"),
    [
        pytest.param(n, t, o, first, marks=[pytest.mark.slow] if first or (n, t) in LATER else [])
        for n, t, o, count in CASES
        for first in range(0, count, CHUNK)
    ],
    ids=lambda v: str(v) if isinstance(v, (str, int)) else "",
)
def test_random_plans_are_exact(name: str, t: int, options: Any, first: int) -> None:
    moves: Counter = Counter()
    for seed in range(first, first + CHUNK):
        try:
            moves += _plans(name, t, options).check(seed)
        except Exception as error:
            error.add_note(f"random plan {seed} of {name} on {t} ranks")
            raise
    assert len(moves) >= 5, f"these plans exercise too few transitions: {moves}"


def test_there_are_at_least_150_plans() -> None:
    assert sum(count for *_, count in CASES) >= 150
