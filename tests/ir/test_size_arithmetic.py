"""Covers: ir/size_arithmetic.py."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from megafx.ir.size_arithmetic import remembering


def size_of(env: ShapeEnv, hint: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"size_{hint}")
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    made = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(made, torch.SymInt)
    return made


def test_an_operation_is_computed_once_for_the_same_expressions() -> None:
    env, other, before = ShapeEnv(), ShapeEnv(), vars(SymNode)["_mul"]
    n, m = size_of(env, 5), size_of(other, 5)
    with remembering(env):
        assert (n * 3).node is (n * 3).node and (n * 3 + 1).node is (3 * n + 1).node
        assert (n * 3).node is not (n * 4).node and (n + 3).node is not (n * 3).node
        assert (m * 3).node is not (m * 3).node, "another environment's"
    assert vars(SymNode)["_mul"] is before and (n * 3).node is not (n * 3).node


def test_questions_are_asked_of_what_is_remembered() -> None:
    env = ShapeEnv()
    n = size_of(env, 5)
    with remembering(env):
        assert n * 3 > 12 and n * 3 > 12
    assert [str(guard.expr.rhs) for guard in env.guards] in (["12"], ["4"]), env.guards


@pytest.mark.parametrize("remember", [True, False])
def test_a_graph_has_one_node_for_it(remember: bool) -> None:
    env = ShapeEnv()
    n = size_of(env, 5)

    def sizes(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] * 2) + x.new_ones(x.shape[0] * 2)

    with torch._subclasses.FakeTensorMode(shape_env=env):
        x = torch.empty(n)
    if not remember:
        gm = make_fx(sizes, tracing_mode="real")(x)
    else:
        with remembering(env):
            gm = make_fx(sizes, tracing_mode="real")(x)
    assert len(gm.graph.find_nodes(op="call_function", target=operator.mul)) == (1 if remember else 2)
