"""Covers: passes/backward/accumulate_products.py."""

from __future__ import annotations

from typing import Any

import torch
from local_programs import local_program
from torch import nn
from torch.nn import functional as F

from megafx.checks.simulate import run_logical
from megafx.ir.program import VAL, Program
from megafx.passes.backward.accumulate_products import accumulate_products
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.testing import make_context


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"q": (6, 4), "k": (2, 4), "v": (2, 4)}
    return {n: nn.Parameter(torch.randn(s).double()) for n, s in sizes.items()}


def three(q: Any, k: Any, v: Any, x: Any) -> tuple[Any, ...]:
    return (torch.cat([F.linear(x, q).sin(), F.linear(x, k).cos(), F.linear(x, v)], -1),)


def count(program: Program, op: Any) -> int:
    return sum(n.target is op for n in program.graph.nodes)


def test_three_linears_on_one_input() -> None:
    values = weights() | {"x": nn.Parameter(torch.randn(3, 5, 4).double())}
    program = local_program(three, values)
    differentiate(program, [0, 1, 2, 3], [0])
    tangent = torch.randn(3, 5, 10).double()
    assert count(program, torch.ops.aten.add.Tensor) == 2
    assert accumulate_products(program, make_context()) == 2
    assert count(program, torch.ops.aten.add.Tensor) == 0 and count(program, torch.ops.aten.addmm.default) == 2
    assert all(VAL in n.meta for n in program.graph.nodes if n.op == "call_function")
    got = run_logical(program, {**values, "0": tangent}, {}, 1).gradients
    want = torch.autograd.grad(three(**values)[0], list(values.values()), tangent)
    for name, expected in zip(values, want, strict=True):
        torch.testing.assert_close(got[name], expected, rtol=1e-12, atol=1e-13)


def test_one_of_the_products_is_seen_through_a_view() -> None:
    values = weights() | {"x": torch.randn(5, 4).double()}
    for flip in (False, True):

        def function(q: Any, k: Any, v: Any, x: Any, flip: bool = flip) -> tuple[Any, ...]:
            one, other = torch.mm(x, k.t()), torch.mm(x, v.t()).view(5, 2)
            return (other + one if flip else one + other,)

        program = local_program(function, values)
        assert accumulate_products(program, make_context()) == 1
        torch.testing.assert_close(program.gm(*values.values())[0], function(**values)[0])


def test_a_product_that_is_used_again_is_left() -> None:
    def function(q: Any, k: Any, v: Any, x: Any) -> tuple[Any, ...]:
        a = torch.mm(x, k.t())
        return (a + torch.mm(x, v.t()), a)

    values = weights() | {"x": torch.randn(5, 4).double()}
    program = local_program(function, values)
    before = str(program.graph)
    assert accumulate_products(program, make_context()) == 0 and str(program.graph) == before


def test_a_product_plus_itself_and_sums_of_others_are_left() -> None:
    def function(q: Any, k: Any, v: Any, x: Any) -> tuple[Any, ...]:
        a, b = torch.mm(x, k.t()), torch.mm(x, v.t())
        return (a + a, b + 1.0)

    values = weights() | {"x": torch.randn(5, 4).double()}
    program = local_program(function, values)
    assert accumulate_products(program, make_context()) == 0
