"""Covers: passes/lower/write_padded_rows.py and megafx::mm_rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_programs import local_program

from megafx.ir.dump import target_text
from megafx.ir.nodes import changed_copy
from megafx.passes.lower.write_padded_rows import write_in_padded

ops = torch.ops.megafx
A, B = torch.randn(5, 4).double(), torch.randn(4, 3).double()


def written(function: Callable[..., Any]) -> tuple[Any, list[str], int]:
    gm = local_program(lambda a, b: (function(a, b),), {"a": A, "b": B}).gm
    made, changes = changed_copy(gm, write_in_padded)
    return made, [target_text(n.target) for n in made.graph.nodes if n.op == "call_function"], changes


@pytest.mark.parametrize("rows", [5, 6, 8])
def test_a_product_is_written_where_its_padding_is(rows: int) -> None:
    made, names, changes = written(lambda a, b: ops.pad_rows(torch.mm(a, b), rows))
    assert (names, changes) == (["mm_rows"], 1)
    assert torch.equal(made(A, B)[0], torch.cat([A @ B, A.new_zeros(rows - 5, 3)]))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: ops.pad_rows(a.sin(), 6),
        lambda a, b: (lambda y: ops.pad_rows(y, 6).sum() + y.sum())(torch.mm(a, b)),
    ],
)
def test_other_values_and_products_that_are_read_elsewhere_are_left(function: Callable[..., Any]) -> None:
    assert written(function)[2] == 0
