"""Covers: placements/slices.py, Layout.cuts_alike, weights/state.py. Boxes of shards in original coordinates, and the tensors
that a state consists of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafx.distributed.tensor import slices_of
from megafx.placements.slices import shard_slices
from megafx.placements.tensors import shard_tensor
from megafx.placements.types import Layout, S
from megafx.weights.state import stored_tensors

# (shape, dim, blocks, rep): even, uneven, blocked as fused q|k|v, unequal blocks with fewer units than ranks, a middle dim
CUTS = [
    ((12, 5), 0, [(12, 1)], 1),
    ((19, 3), 0, [(19, 1)], 1),
    ((3, 67), 1, [(67, 1)], 1),
    ((24,), 0, [(4, 2)], 3),
    ((2, 50), 1, [(5, 6), (2, 6), (1, 8)], 1),
    ((2, 15, 3), 1, [(5, 1)], 3),
    ((2, 4), 0, [(2, 1)], 1),
]


@pytest.mark.parametrize("t", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape, dim, blocks, rep", CUTS)
def test_boxes_are_what_sharding_cuts(shape, dim, blocks, rep, t) -> None:
    placement = S(dim, Layout.of(blocks, t, rep))
    full = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    covered = torch.zeros(shape, dtype=torch.long)
    for rank in range(t):
        local = torch.zeros_like(shard_tensor(full, placement, rank, t))  # what is in no box is padding: zero
        for box in shard_slices(shape, ((placement, t),), rank):
            assert full[box.original].shape == box.sizes and 0 not in box.sizes
            local[box.local] = full[box.original]
            covered[box.original] += 1
        assert torch.equal(local, shard_tensor(full, placement, rank, t))
    assert (covered == 1).all()


@pytest.mark.parametrize("t", [2, 3, 7])
@pytest.mark.parametrize("a", [[(40, 1)], [(12, 2)], [(4, 6), (5, 1)]])
@pytest.mark.parametrize("b", [[(40, 1)], [(20, 2)], [(10, 4)], [(6, 4)], [(8, 3), (5, 1)]])
def test_cuts_are_alike_where_every_rank_holds_the_same(a, b, t) -> None:
    one, other = Layout.of(a, t), Layout.of(b, t)
    same = one.size == other.size
    if same:
        full = torch.arange(1, 1 + one.size)  # 0 is padding
        shards = [[shard_tensor(full, S(0, cut), rank, t) for cut in (one, other)] for rank in range(t)]
        same = all(x.shape == y.shape and torch.equal(x, y) for x, y in shards)
    assert one.cuts_alike(other, t) == same
    assert Layout.of([(40, 1)], 7).cuts_alike(Layout.of([(20, 2)], 7), 7)


def test_whole_tensors_are_one_box() -> None:
    (box,) = shard_slices((3, 4), (), 1)
    assert box.original == box.local == (slice(0, 3), slice(0, 4))
    (scalar,) = shard_slices((), (), 1)
    assert torch.ones(())[scalar.original].shape == ()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3, 3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_state_has_each_tensor_once() -> None:
    model = Net()
    found = stored_tensors(model)
    assert [s.names for s in found[:3]] == [("table.weight", "head.weight"), ("norm.weight",), ("norm.bias",)]
    assert {n for s in found for n in s.names} == model.state_dict().keys()
    assert all(s.local.data_ptr() == s.tensor.data_ptr() for s in found)
    assert slices_of(model.mask)[0].sizes == (3, 3)
