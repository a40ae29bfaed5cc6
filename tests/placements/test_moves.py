"""Covers megafx/placements/moves.py and megafx/placements/tensors.py: whole dim <-> stacked shards, against Layout.pieces."""

from __future__ import annotations

import pytest
import torch

from megafx.errors import PlacementError
from megafx.placements.moves import apply_transition, from_stacked, shape_after, to_stacked
from megafx.placements.tensors import shard_tensor, unshard_tensors
from megafx.placements.types import Layout, S

LAYOUTS = {
    "even": lambda t: Layout.of([(4 * t, 1)], t),
    "padded": lambda t: Layout.of([(2 * t + 1, 1)], t),
    "fewer than ranks": lambda t: Layout.of([(t - 1, 2)], t),
    "units": lambda t: Layout.of([(t + 1, 3)], t),
    "blocks": lambda t: Layout.of([(2 * t, 2), (t, 2), (t, 3)], t),
    "padded blocks": lambda t: Layout.of([(t + 1, 2), (1, 4), (2 * t, 1)], t),
    "repeated": lambda t: Layout.of([(2 * t, 1)], t, rep=3),
    "repeated padded": lambda t: Layout.of([(2 * t - 1, 2)], t, rep=2),
    "repeated blocks": lambda t: Layout.of([(t, 2), (t + 1, 1)], t, rep=2),
    "head-tail": lambda t: Layout.of([(4 * t, 1)], t, head_tail=True),
    "head-tail padded": lambda t: Layout.of([(2 * t + 1, 2)], t, head_tail=True),
    "head-tail fewer than chunks": lambda t: Layout.of([(t, 1)], t, head_tail=True),
    "head-tail repeated": lambda t: Layout.of([(4 * t - 1, 1), (2 * t, 2)], t, 3, head_tail=True),
}


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_stacked_shards_are_the_pieces(name: str, dim: int, t: int) -> None:
    layout = LAYOUTS[name](t)
    shape = [2, 3, 5]
    shape[dim] = layout.size
    full = torch.randn(shape)
    stacked = to_stacked(full, dim, layout.flat(), t)
    shards = [shard_tensor(full, S(dim, layout), r, t) for r in range(t)]
    assert torch.equal(stacked, torch.stack(shards))
    assert torch.equal(unshard_tensors(shards, S(dim, layout), t), full)
    padding_holds_garbage = torch.stack(shards) + (torch.stack(shards) == 0)
    back = from_stacked(padding_holds_garbage, dim, layout.flat(), t)
    assert torch.equal(back, full) and back.is_contiguous()


def test_a_rank_of_a_head_tail_layout_has_early_and_late_elements() -> None:
    layout = Layout.of([(10, 1)], 2, head_tail=True)
    held = [shard_tensor(torch.arange(1, 11), S(0, layout), rank, 2).tolist() for rank in range(2)]
    assert held == [[1, 2, 3, 10, 0, 0], [4, 5, 6, 7, 8, 9]]
    assert Layout.from_flat(layout.flat()) == layout != Layout.of([(10, 1)], 2) and not layout.simple()


@pytest.mark.parametrize("transposed", [False, True])
def test_whole_tensor_may_be_strided(transposed: bool) -> None:
    full = torch.randn(6, 4, 10).transpose(0, 2) if transposed else torch.randn(10, 8, 6)[:, ::2]
    layout = Layout.of([(4, 1), (6, 1)], 2)
    expected = torch.stack([shard_tensor(full, S(0, layout), r, 2) for r in range(2)])
    assert torch.equal(to_stacked(full, 0, layout.flat(), 2), expected)


def test_contiguous_even_dim0_is_a_view_both_ways() -> None:
    full = torch.randn(8, 3)
    flat = Layout.contiguous(8, 4).flat()
    stacked = to_stacked(full, 0, flat, 4)
    assert stacked.data_ptr() == full.data_ptr()
    assert from_stacked(stacked, 0, flat, 4).data_ptr() == full.data_ptr()


def test_a_batch_of_one_needs_no_copy_to_be_put_together() -> None:
    stacked = torch.randn(2, 1, 4, 3)
    whole = from_stacked(stacked, 1, Layout.contiguous(8, 2).flat(), 2)
    assert whole.data_ptr() == stacked.data_ptr()


def test_local_shape_of_a_transition() -> None:
    rows, blocks = Layout.contiguous(7, 2).flat(), Layout.of([(3, 2), (1, 2)], 2).flat()
    assert shape_after([4, 8], "S0", "S1", rows, blocks, 2) == [7, 6]
    assert shape_after([4, 8], "S0", "I", rows, [], 2) == [7, 8]
    assert shape_after([7, 8], "P", "S0", [], rows, 2) == [4, 8]
    assert shape_after([7, 8], "P", "S0", [], rows, 1) == [7, 8]


def test_a_transition_that_is_no_row_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"no transition from P to Q") as error:
        apply_transition(torch.zeros(2), "P", "Q", [], [], 2, None)  # type: ignore[arg-type]
    assert "TRANSITIONS" in str(error.value)


def test_a_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(PlacementError, match="it must be 8"):
        shard_tensor(torch.zeros(6), S(0, Layout.contiguous(8, 2)), 0, 2)
    with pytest.raises(PlacementError, match="it must be 4"):
        unshard_tensors([torch.zeros(3)] * 2, S(0, Layout.contiguous(8, 2)), 2)
    with pytest.raises(PlacementError, match="2 local tensors for 3 ranks"):
        unshard_tensors([torch.zeros(3)] * 2, S(0, Layout.contiguous(8, 2)), 3)
