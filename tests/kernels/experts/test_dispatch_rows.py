"""Tokens that travel to the ranks of their experts: one rank against the plain formula, gradients, sums of rows as a kernel.

Covers: kernels/experts/dispatch_rows.py, sum_rows.py, sum_rows_triton.py, zero_tail_triton.py. Several ranks: test_on_ranks.py.
"""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, run_as_script

from megafx.checks.simulate import EXCHANGES
from megafx.kernels.experts import dispatch_rows as _defines_them  # noqa: F401
from megafx.kernels.experts import group_rows as _defines_the_ops  # noqa: F401
from megafx.kernels.experts import sum_rows as sums
from megafx.ops.axes import AxisContext, on_mesh

ops = torch.ops.megafx
IDS = torch.tensor([3, 0, 3, 1, 0, 3, 2, 2, 1, 0])  # two choices of five tokens
EXPERTS, CHOICES = 4, 2


def way(ids: torch.Tensor = IDS) -> tuple[torch.Tensor, ...]:
    """Of one rank that has all experts: places, sizes, rows."""
    order, ends = ops.group_order(ids, EXPERTS), ops.group_ends(ids, EXPERTS)
    with on_mesh({"ep": AxisContext(0, 1)}):
        places = ops.places_of(ids, CHOICES, EXPERTS, 1)
        received = ops.count_received(ends, places, EXPERTS, 1, "ep")
        sizes = ops.exchange_sizes(ends, places, received)
        rows = ops.received_rows(order, "u0", ends, places, received, sizes, CHOICES, "ep")
    return places, sizes, rows


def test_one_rank_sends_to_itself() -> None:
    x, order = torch.randn(5, 3, dtype=torch.float64), ops.group_order(IDS, EXPERTS)
    at = way()
    assert at[0].tolist() == [[0, 1, 2, 3, 4]] and at[1].tolist() == [[10], [5], [10], [5]]
    assert torch.equal(at[2], order)
    arrived = ops.dispatch_rows(x, *at, CHOICES, False, "ep")
    assert torch.equal(arrived, ops.group_rows(x, order, CHOICES))
    torch.testing.assert_close(ops.combine_rows(arrived, *at, CHOICES, False, "ep"), 2 * x)
    weights = torch.randn(10, 1, dtype=torch.float64)
    entries = ops.dispatch_rows(weights, *at, CHOICES, True, "ep")
    assert torch.equal(entries, weights[order])
    assert torch.equal(ops.combine_rows(entries, *at, CHOICES, True, "ep"), weights)


@pytest.mark.parametrize("entries", [False, True])
def test_each_is_the_others_gradient(entries: bool) -> None:
    at = way()
    x = torch.randn(10 if entries else 5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: ops.dispatch_rows(a, *at, CHOICES, entries, "ep"), (x,))
    assert torch.autograd.gradcheck(lambda a: ops.combine_rows(a, *at, CHOICES, entries, "ep"), (y,))


def test_rows_of_no_expert_travel_nowhere() -> None:
    ids = torch.tensor([4, 0, 4, 4])
    at = way(ids)
    assert at[1].tolist() == [[1], [1], [1], [1]] and at[0].tolist() == [[0, -1]]
    x = torch.randn(2, 3, dtype=torch.float64)
    back = ops.combine_rows(ops.dispatch_rows(x, *at, CHOICES, False, "ep"), *at, CHOICES, False, "ep")
    assert torch.equal(back, torch.stack([x[0], torch.zeros(3, dtype=torch.float64)]))


def test_no_token_at_all() -> None:
    at = way(IDS[:0])
    assert ops.dispatch_rows(torch.randn(0, 3), *at, CHOICES, False, "ep").shape == (0, 3)
    assert ops.combine_rows(torch.randn(0, 3), *at, CHOICES, False, "ep").shape == (0, 3)


def test_what_the_simulator_says_of_one_rank() -> None:
    """Its definitions share nothing with the ops."""
    at, x, y = way(), torch.randn(5, 3), torch.randn(10, 3)
    order, ends = ops.group_order(IDS, EXPERTS), ops.group_ends(IDS, EXPERTS)
    received = ops.count_received(ends, at[0], EXPERTS, 1, "ep")
    given = (order, "u0", ends, at[0], received, at[1], CHOICES, "ep")
    assert torch.equal(EXCHANGES[ops.received_rows.default]([given])[0], at[2])
    assert torch.equal(EXCHANGES[ops.count_received.default]([(ends, at[0], EXPERTS, 1, "ep")])[0], received)
    for op, value in ((ops.dispatch_rows.default, x), (ops.combine_rows.default, y)):
        call = (value, *at, CHOICES, False, "ep")
        torch.testing.assert_close(EXCHANGES[op]([call])[0], op(*call))


def test_kernels() -> None:
    run_as_script(__file__, 120)


def compare_sums(dtype: torch.dtype) -> None:
    from megafx.kernels.experts import sum_rows_triton

    y, table = torch.randn(37, 70, device=DEVICE).to(dtype), torch.randint(-1, 37, (11, 3), device=DEVICE)
    wanted = torch.cat([y, y.new_zeros(1, 70)]).double()[table].sum(1)
    for found in (sums.sum_rows(y, table), sum_rows_triton.sum_rows(y, table)):
        torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    none = torch.full((2, 3), -1, device=DEVICE)
    assert not sum_rows_triton.sum_rows(y[:0], none).any() and not sums.sum_rows(y[:0], none).any()


def compare_tail(last: int) -> None:
    from megafx.kernels.experts.zero_tail_triton import zero_tail

    y = torch.randn(300, 1500, device=DEVICE)
    wanted = y.clone()
    wanted[last:] = 0
    zero_tail(y, torch.tensor([0, last], device=DEVICE))
    assert torch.equal(y, wanted)


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compare_sums(dtype)
    for last in (0, 5, 200, 300):
        compare_tail(last)
