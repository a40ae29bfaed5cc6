"""Covers passes/plan/insert_transitions.py: the golden text and the numbers of each case (and of its localized form,
on ranks)."""

from __future__ import annotations

import pytest
import small_plans
import torch

from megafx.errors import PlacementError
from megafx.ir.contracts import is_transition, verify
from megafx.ir.program import PLACEMENT, Phase, Program
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.placements.types import I, R
from megafx.planner.context import CompileContext
from megafx.testing import assert_same, expect

aten = torch.ops.aten
X, W = "f32[t=4 k=8]", "param f32[n=6 k=8]"


def check(placed: tuple[Program, Program, CompileContext], text: str, t: int = 2) -> None:
    """The placed graph is this text, and it computes what the graph before does; so do t ranks after localizing."""
    before, after, context = placed
    verify(after)
    expect(after, text, t=1)
    assert_same(before, after)
    localize_shapes(after, context)
    verify(after)
    assert_same(before, after, t)


def test_row_parallel_gets_one_all_reduce() -> None:
    check(
        small_plans.placed(lambda x, w: aten.linear(x, w), {"linear": "S1, S1 -> P", "w": "S1"}, x=X, w=W),
        """
        %0 = x                        # f32[4 8] I@tp
        %1 = w                        # f32[6 8] S1@tp param
        %2 = transition(%0, I -> S1)  # f32[4 8] S1@tp
        %3 = linear(%2, %1)           # f32[4 6] P@tp
        %4 = transition(%3, P -> I)   # f32[4 6] I@tp
        return %4
        """,
    )


def test_q_k_and_v_share_one_conversion() -> None:
    """Column-parallel: x becomes R once, whose backward is one all-reduce of three gradients' sum."""
    check(
        small_plans.placed(
            lambda x, q, k, v: aten.add(aten.mul(aten.linear(x, q), aten.linear(x, k)), aten.linear(x, v)),
            {"linear": "R, S0 -> S1", "linear_1": "R, S0 -> S1", "linear_2": "R, S0 -> S1"},
            x=X,
            q=W,
            k=W,
            v=W,
        ),
        """
        %0 = x                         # f32[4 8] I@tp
        %1 = q                         # f32[6 8] S0@tp param
        %2 = k                         # f32[6 8] S0@tp param
        %3 = v                         # f32[6 8] S0@tp param
        %4 = transition(%0, I -> R)    # f32[4 8] R@tp
        %5 = linear(%4, %1)            # f32[4 6] S1@tp
        %6 = linear(%4, %2)            # f32[4 6] S1@tp
        %7 = mul(%5, %6)               # f32[4 6] S1@tp
        %8 = linear(%4, %3)            # f32[4 6] S1@tp
        %9 = add(%7, %8)               # f32[4 6] S1@tp
        %10 = transition(%9, S1 -> I)  # f32[4 6] I@tp
        return %10
        """,
    )


def test_a_gathered_shard_serves_every_reader() -> None:
    """Sequence parallelism: one all-gather of the norm's result, not one for each projection."""
    before, after, context = small_plans.placed(
        lambda x, q, k: aten.mul(aten.linear(aten.relu(x), q), aten.linear(aten.relu(x), k)),
        {"relu": "S0 -> S0", "relu_1": "S0 -> S0", "linear": "R, S0 -> S1", "linear_1": "R, S0 -> S1"},
        x=X, q=W, k=W,
    )  # fmt: skip
    assert sum(is_transition(n) and n.args[1:3] == ("I", "S0") for n in after.graph.nodes) == 1, "x is sliced once"
    localize_shapes(after, context)
    assert_same(before, after)


def test_a_row_parallel_bias_is_added_once() -> None:
    check(
        small_plans.placed(
            lambda x, w, b: aten.linear(x, w, b), {"linear": "S1, S1, P -> P", "b": "I"}, x=X, w=W, b="param f32[n=6]"
        ),
        """
        %0 = x                        # f32[4 8] I@tp
        %1 = w                        # f32[6 8] S1@tp param
        %2 = b                        # f32[6] I@tp param
        %3 = transition(%0, I -> S1)  # f32[4 8] S1@tp
        %4 = transition(%2, I -> P)   # f32[6] P@tp
        %5 = linear(%3, %1, %4)       # f32[4 6] P@tp
        %6 = transition(%5, P -> I)   # f32[4 6] I@tp
        return %6
        """,
    )


def test_a_replicated_parameter_on_a_shard() -> None:
    """A norm's weight under sequence parallelism: I -> R, whose backward is the gradient all-reduce."""
    check(
        small_plans.placed(
            lambda x, w: aten.layer_norm(x, [8], w), {"layer_norm": "S0, R -> S0"}, x=X, w="param f32[k=8]"
        ),
        """
        %0 = x                        # f32[4 8] I@tp
        %1 = w                        # f32[8] I@tp param
        %2 = transition(%0, I -> S0)  # f32[4 8] S0@tp
        %3 = transition(%1, I -> R)   # f32[8] R@tp
        %4 = layer_norm(%2, [8], %3)  # f32[4 8] S0@tp
        %5 = transition(%4, S0 -> I)  # f32[4 8] I@tp
        return %5
        """,
    )


def test_a_value_without_gradient_is_sliced() -> None:
    """A mask is computed whole everywhere and sliced without communication; a mask of one row is not."""
    check(
        small_plans.placed(
            lambda x, mask: aten.where(mask, x, aten.mul(x, 0.5)),
            {"where": "S0, S0, S0 -> S0"},
            x=X,
            mask="bool[t=4 k=8]",
        ),
        """
        %0 = x                        # f32[4 8] I@tp
        %1 = mask                     # bool[4 8]
        %2 = transition(%0, I -> S0)  # f32[4 8] S0@tp
        %3 = transition(%1, I -> S0)  # bool[4 8] S0@tp
        %4 = mul(%2, 0.5)             # f32[4 8] S0@tp
        %5 = where.self(%3, %2, %4)   # f32[4 8] S0@tp
        %6 = transition(%5, S0 -> I)  # f32[4 8] I@tp
        return %6
        """,
    )


def test_sizes_of_layouts_are_emitted_once() -> None:
    check(
        small_plans.placed(lambda x: aten.relu(aten.relu(x)), {"relu": "S1 -> S1", "relu_1": "S0 -> S0"}, x="f32[b s]"),
        """
        %0 = x                         # f32[b s] I@tp
        %1 = sym_size.int(%0, 1)       # int s
        %2 = transition(%0, I -> S1)   # f32[b s] S1@tp
        %3 = sym_size.int(%0, 0)       # int b
        %4 = relu(%2)                  # f32[b s] S1@tp
        %5 = transition(%4, S1 -> S0)  # f32[b s] S0@tp
        %6 = relu(%5)                  # f32[b s] S0@tp
        %7 = transition(%6, S0 -> I)   # f32[b s] I@tp
        return %7
        """,
    )


def test_nothing_to_do() -> None:
    program, context = small_plans.planned(lambda x, w: aten.linear(x, w), {"linear": "I, I -> I"}, x=X, w=W)
    assert insert_transitions(program, context) == 0
    assert not any(is_transition(n) for n in program.graph.nodes)
    assert program.phase == Phase.PLACED
    assert all(n.meta[PLACEMENT] == I for n in program.graph.nodes if n.op != "output")


def test_an_output_leaves_whole() -> None:
    program, context = small_plans.planned(lambda x: aten.relu(x), {"relu": "S0 -> S0"}, x=X)
    assert insert_transitions(program, context) == 2  # x sliced, the result gathered
    assert program.results()[0].meta[PLACEMENT] == I


def test_a_plan_that_mixes_invariant_and_replicated_is_refused() -> None:
    """What the pass writes is checked, not believed: an invariant operand beside a replicated result loses gradients."""
    program, context = small_plans.planned(lambda x, w: aten.linear(x, w), {"linear": "I, I -> I"}, x=X, w=W)
    choice = context.solved.ops["linear"]
    context.solved.ops["linear"] = type(choice)(choice.ins, R)
    insert_transitions(program, context)
    with pytest.raises(PlacementError) as raised:
        verify(program)
    assert str(raised.value) == (
        "%linear (aten.linear.default): is R, but its operand %x is I\n"
        "  in module '<root>'\n"
        "  fix: an op takes invariant operands only with an invariant result: insert a transition"
    )
