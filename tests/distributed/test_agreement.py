"""Hashes of tensors, and who may be on the mesh."""

from __future__ import annotations

import pytest
import torch

import megafx
from megafx.config import Config
from megafx.distributed import agreement
from megafx.distributed.agreement import draw_seed, tensor_hash
from megafx.distributed.mesh import make_meshes
from megafx.errors import AgreementError


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
)
def test_equal_tensors_have_equal_hashes_and_others_do_not(dtype):
    x = torch.arange(1, 60).to(dtype)
    assert tensor_hash(x) == tensor_hash(x.clone())
    seen = {int(tensor_hash(x))}
    for i in (0, 7, 58):
        y = x.clone()
        y[i] += 1
        seen.add(int(tensor_hash(y)))
    seen.add(int(tensor_hash(x.flip(0))))
    assert len(seen) == 5


def test_views_nans_and_empty_tensors_are_hashed_by_their_bits():
    x = torch.arange(12.0).view(3, 4)
    assert tensor_hash(x.t()) == tensor_hash(x.t().contiguous()) != tensor_hash(x)
    assert tensor_hash(torch.tensor([float("nan")])) == tensor_hash(torch.tensor([float("nan")]))
    assert tensor_hash(torch.tensor([True, False])) != tensor_hash(torch.tensor([False, True]))
    assert tensor_hash(torch.empty(0)) == 0


def test_chunks_do_not_change_the_hash(monkeypatch):
    x = torch.randn(100)
    whole = tensor_hash(x)
    monkeypatch.setattr(agreement, "_CHUNK", 7)
    assert tensor_hash(x) == whole


def test_seeds_follow_the_default_generator():
    torch.manual_seed(3)
    first = [int(draw_seed(torch.device("cpu"), None)) for _ in range(4)]
    torch.manual_seed(3)
    assert [int(draw_seed(torch.device("cpu"), None)) for _ in range(4)] == first
    assert len(set(first)) == 4


def test_one_rank_needs_no_process_group_and_more_do():
    cpu = torch.device("cpu")
    assert make_meshes(Config(), None, cpu).tensor is None
    assert make_meshes(Config(tensor_model_parallel_size=1, data_parallel_size=1), None, cpu).tensor is None
    for sizes, ranks in (
        ({"tensor_model_parallel_size": 2}, 2),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": 3}, 6),
    ):
        with pytest.raises(AgreementError) as error:
            make_meshes(Config(**sizes), None, cpu)
        asked = ", ".join(f"{name}={n}" for name, n in sizes.items())
        assert str(error.value) == (
            f"{asked}, but there is no process group\n"
            f"  fix: start with `torchrun --standalone --nproc-per-node {ranks}`"
        )


def test_one_process_keeps_its_batch():
    batch = {"x": torch.ones(2)}
    assert megafx.broadcast_data(batch) is batch
    megafx.check_data(batch)
