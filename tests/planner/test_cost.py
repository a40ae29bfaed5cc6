"""Bytes and seconds of collectives, transitions and ops, by hand-computed numbers."""

from __future__ import annotations

import pytest

from megafx.placements.types import TRANSITIONS, I, Layout, P, Placement, R, S, collectives
from megafx.planner.cost import (
    Cost,
    collective_bytes,
    collective_seconds,
    matmul_seconds,
    memory_seconds,
    op_bytes,
    op_flops,
    op_seconds,
    optimizer_seconds,
    transition_cost,
    transition_seconds,
)
from megafx.planner.hardware import Hardware

HW = Hardware("test", {"bfloat16": 100.0, "float32": 10.0}, 50.0, 8.0, 3.0, "made up")
S0, S1 = S(0, Layout.contiguous(64, 4)), S(1, Layout.contiguous(64, 4))


def some(kind: str, other: bool = False) -> Placement:
    return {"I": I, "R": R, "P": P}.get(kind, S1 if other else S0)


def test_collective_bytes_are_what_one_rank_sends():
    # 64 elements of 2 bytes on 4 ranks
    assert collective_bytes("all_reduce", 64, 2, 4) == 2 * 48 * 2
    assert collective_bytes("all_gather", 64, 2, 4) == 48 * 2
    assert collective_bytes("reduce_scatter", 64, 2, 4) == 48 * 2
    assert collective_bytes("all_to_all", 64, 2, 4) == 12 * 2
    assert collective_bytes("local", 64, 2, 4) == collective_bytes("all_reduce", 64, 2, 1) == 0


def test_collective_seconds_are_alpha_plus_bytes_over_bandwidth():
    assert collective_seconds("all_gather", 64, 2, HW, 4) == 3.0 + 96 / 8.0
    assert collective_seconds("all_gather", 64, 2, HW, 4, alphas=0.5) == 1.5 + 96 / 8.0
    assert collective_seconds("local", 64, 2, HW, 4) == collective_seconds("all_reduce", 64, 2, HW, 1) == 0.0


@pytest.mark.parametrize("kinds", [row for row in TRANSITIONS if "M" not in row], ids="->".join)
def test_every_transition_costs_what_its_row_says(kinds):
    src, dst = some(kinds[0]), some(kinds[1], other=True)
    row = TRANSITIONS[kinds]
    cost = transition_cost(src, dst, 64, 2, HW, 4)
    assert cost.forward_seconds == collective_seconds(row.forward, 64, 2, HW, 4)
    assert cost.backward_seconds == collective_seconds(row.backward, 64, 2, HW, 4)
    assert cost.forward_bytes == collective_bytes(row.forward, 64, 2, 4)
    assert cost.backward_bytes == collective_bytes(row.backward, 64, 2, 4)
    without = transition_cost(src, dst, 64, 2, HW, 4, needs_grad=False)
    assert without == Cost(cost.forward_seconds, 0.0, cost.forward_bytes, 0)
    assert transition_seconds(src, dst, 64, 2, HW, 4) == pytest.approx(cost.seconds + 1e-9, abs=1e-15)


def test_equal_placements_cost_nothing_not_even_the_tie_break():
    for p in (I, R, P, S0):
        assert collectives(p, p).forward == "local"
        assert transition_cost(p, p, 64, 2, HW, 4) == Cost()
        assert transition_seconds(p, p, 64, 2, HW, 4) == 0.0


def test_parameter_gradients_share_one_launch():
    param = transition_cost(I, R, 64, 2, HW, 4, is_param=True)
    assert param.backward_seconds == pytest.approx(0.05 * 3.0 + 192 / 8.0)
    # only the coalesced gradient all-reduce is cheap: a gathered parameter pays its launches
    assert transition_cost(S0, R, 64, 2, HW, 4, is_param=True) == transition_cost(S0, R, 64, 2, HW, 4)


def test_megatron_layouts_move_the_same_bytes():
    """All-reduce = all-gather + reduce-scatter: sequence parallelism is free in bytes."""
    tp = transition_cost(I, R, 4096, 2, HW, 4).bytes_moved + transition_cost(P, I, 4096, 2, HW, 4).bytes_moved
    sp = transition_cost(S0, R, 4096, 2, HW, 4).bytes_moved + transition_cost(P, S0, 4096, 2, HW, 4).bytes_moved
    assert tp == sp == 4 * 3072 * 2


def test_matmul_and_memory():
    assert matmul_seconds(1000, "bfloat16", HW) == 10.0
    assert matmul_seconds(1000, "float32", HW) == 100.0
    assert matmul_seconds(1000, "float64", HW) == 100.0  # not in the profile: the slowest listed
    assert memory_seconds(100, HW) == 2.0
    assert optimizer_seconds(10, HW) == 240 / 50.0


def test_op_work():
    assert op_flops("linear", 12, 5) == 120
    assert op_flops("scaled_dot_product_attention", 12, 5) == op_flops("attention_forward", 12, 5) == 240
    assert op_flops("grouped_mm", 12, 5) == 120
    assert op_flops("embedding", 12, 50257) == 0
    assert op_bytes("embedding", 24, [10_000, 8]) == 48
    assert op_bytes("add", 24, [24, 24]) == 72
    assert op_bytes("transpose", 24, [24]) == op_bytes("getitem", 24, [48]) == op_bytes("owner_input", 24, [24]) == 0


def seconds(name, training, contraction=1):
    return op_seconds(
        name,
        out_numel=100,
        out_itemsize=2,
        operand_bytes=[200, 200],
        contraction=contraction,
        hardware=HW,
        training=training,
    )


def test_op_seconds_take_the_slower_of_arithmetic_and_memory():
    assert seconds("mm", training=False) == 600 / 50.0  # memory-bound: 200 FLOPs
    assert seconds("mm", training=False, contraction=1000) == 200_000 / 100.0
    assert seconds("mm", training=True) == 3 * 12.0 + 200 / 50.0
    assert seconds("view", training=True) == 0.0


def test_cost_units():
    cost = Cost(1e-6, 2e-6, 10, 20)
    assert (cost.seconds, cost.bytes_moved) == (3e-6, 30)
    assert cost.cost_us == pytest.approx(3.0)
