"""Rows grouped by expert, and back: values, gradients, ranks that each group their own rows.

Covers: kernels/experts/group_rows.py, and its rules on outer axes.
"""

from __future__ import annotations

import pytest
import torch

from megafx.kernels.experts import group_rows as _defines_the_ops  # noqa: F401

ops = torch.ops.megafx
IDS = torch.tensor([3, 0, 3, 1, 0, 3])  # nobody is given to expert 2


def test_rows_of_one_expert_follow_one_another() -> None:
    order, ends = ops.group_order(IDS, 4), ops.group_ends(IDS, 4)
    assert order.tolist() == [1, 4, 3, 0, 2, 5] and ends.tolist() == [2, 3, 3, 6]
    assert torch.equal(ops.group_of_rows(order, ends), IDS[order])
    assert ops.group_ends(IDS, 3).tolist() == [2, 3, 3]  # rows of no expert come last
    assert ops.group_ends(torch.zeros(2, dtype=torch.int64), 1).tolist() == [2]
    assert ops.group_order(IDS[:0], 4).shape == (0,) and ops.group_ends(IDS[:0], 4).tolist() == [0] * 4


@pytest.mark.parametrize("times", [1, 2, 3])
def test_there_and_back(times: int) -> None:
    x = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)[: 6 // times].requires_grad_()
    order = ops.group_order(IDS, 4)
    grouped = ops.group_rows(x, order, times)
    assert torch.equal(grouped, x.repeat_interleave(times, 0)[order])
    assert torch.equal(ops.ungroup_rows(grouped, order), x.repeat_interleave(times, 0))
    assert torch.autograd.gradcheck(lambda a: ops.group_rows(a, order, times), (x,))
    y = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: ops.ungroup_rows(a, order), (y,))
    torch.library.opcheck(ops.group_rows.default, (x, order, times))
    torch.library.opcheck(ops.ungroup_rows.default, (y, order))
    assert ops.group_rows(x[:0], order[:0], times).shape == (0, 2)


@pytest.mark.parametrize("times", [1, 2])
def test_ranks_group_their_own_rows(times: int) -> None:
    """What the rule `outer` says: there, products by expert, and back, of the rows of a rank alone, are those of all rows."""
    x, weight = torch.randn(6 // times, 3, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)

    def mixture(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        order = ops.group_order(ids, 4)
        return ops.ungroup_rows(ops.grouped_mm(ops.group_rows(x, order, times), weight, ops.group_ends(ids, 4)), order)

    for cut in (2, 4):
        parts = [mixture(a, b) for a, b in ((x[: cut // times], IDS[:cut]), (x[cut // times :], IDS[cut:]))]
        torch.testing.assert_close(torch.cat(parts), mixture(x, IDS), rtol=0, atol=1e-14)
