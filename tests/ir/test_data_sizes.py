"""Covers: ir/data_sizes.py: hints that meet what a trace relies on, and sizes that are equal by it."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, ToFloat

from megafx.ir.data_sizes import DataShapeEnv, hints_that_meet

a, b, c, n = sympy.symbols("u0 u1 u2 s0", integer=True)


def test_hints_meet_all_relations() -> None:
    found = hints_that_meet([sympy.Eq(a + b, n), sympy.Le(a, b)], {n: 61})
    assert found[a] + found[b] == 61 and 2 <= found[a] <= found[b] - 2
    grids = hints_that_meet([sympy.Eq(a * b + c, 24)], {})
    assert grids[a] * grids[b] + grids[c] == 24
    assert hints_that_meet([sympy.Eq(2 * a, 7)], {}) == {}
    steps = hints_that_meet([sympy.Le(6, CeilToInt(FloatTrueDiv(ToFloat(a), sympy.Float(0.5)))), sympy.Le(a, 9)], {})
    assert 3 <= steps[a] <= 9  # torch.arange(0, float(n), 0.5)


def _named(relation: Callable[..., sympy.Basic]) -> tuple[DataShapeEnv, list[sympy.Symbol]]:
    env = DataShapeEnv()
    unbacked = [env.create_unbacked_symint().node.expr for _ in range(3)]
    u, v, w = unbacked
    whole = env.row_count("whole").node.expr
    env.demand([relation(u, v, w, whole)], {})
    env.rely([])
    for symbol in unbacked:
        env.row_count(str(symbol))
    env.name({s: str(s) for s in unbacked})
    return env, [*(env.with_names(s) for s in unbacked), whole]


def test_equal_sizes_are_one() -> None:
    env, (x, y, z, whole) = _named(lambda u, v, w, whole: sympy.Eq(u + v + w, whole))
    assert env.replace(x + y + z) == whole and env.replace(4 * x + 4 * y + 4 * z) == 4 * whole
    assert env.replace(whole - x - y) == z and env.replace(x + y) == env.replace(whole - z)
    assert isinstance(env, ShapeEnv) and env.evaluate_expr(sympy.Eq(x, y)) == sympy.false


def test_sizes_are_not_fixed_by_questions() -> None:
    env, (x, y, *_) = _named(lambda u, v, w, whole: sympy.Le(u, v))
    assert env.evaluate_expr(x <= y) == sympy.true
    assert env.evaluate_expr(x < 1000) == sympy.true  # by the hint, and without a guard
    assert env.replace(x) == x and isinstance(env.row_counts["u0"], torch.SymInt)
