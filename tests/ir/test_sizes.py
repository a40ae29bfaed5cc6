"""Covers: ir/sizes.py: factors of sizes."""

from __future__ import annotations

import time

import pytest
import sympy

from megafx.ir.sizes import Sizes, _factors

A, B, C = sympy.symbols("a b c", integer=True, positive=True)
SUMS = [A + B, 2 * A + 4 * B, A - B, B - A, 3 * A + 6, A + B - C, 6 * A - 4 * B + 10 * C, A + 1, 5 - A]


@pytest.mark.parametrize("expr", SUMS, ids=str)
def test_a_sum_is_what_sympy_factors_it_to(expr: sympy.Expr) -> None:
    sizes = Sizes()
    assert sympy.Mul(*(base**power for base, power in _factors(expr).items())).expand() == expr
    by_sympy = sympy.factor(expr).as_powers_dict()
    number = abs(int(sympy.Mul(*(base**power for base, power in by_sympy.items() if base.is_number))))
    assert sizes.factors(sizes.of_expr(expr))[0] == number
    assert sizes.expr(sizes.of_expr(expr)).expand() == expr


def test_products_are_factored() -> None:
    sizes = Sizes()
    assert sizes.of_expr((A * B + A * C).expand()) == sizes.of_expr(A) * sizes.of_expr(B + C)


def test_the_rows_of_many_experts() -> None:
    """A sum of sizes that data decides: sympy takes 2 s of a CPU to factor one of 64."""
    rows, sizes = sympy.symbols("u0:128", integer=True, positive=True), Sizes()
    begin = time.process_time()
    found = [sizes.of_expr(sympy.Add(*rows[:n])) for n in range(2, 129)]
    assert time.process_time() - begin < 5
    assert len({*found}) == len(found)
