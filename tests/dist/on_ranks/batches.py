"""Covers: distributed/data.py. One rank's batch on all ranks of its group, on real gloo ranks: two groups of two."""

from __future__ import annotations

from collections import UserDict, namedtuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import check

import megafx
from megafx.errors import AgreementError

Pair = namedtuple("Pair", "left right")


def a_batch(seed: int, rows: int) -> dict:
    """Dtypes, an empty tensor, a scalar, a view that is not contiguous, nested containers and plain values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 2**60, (rows, 3), generator=generator),
        "mask": torch.rand(rows, generator=generator) > 0.5,
        "half": torch.randn(3, rows, generator=generator).to(torch.bfloat16).t(),
        "none": torch.zeros(0, 5, dtype=torch.float64),
        "scalar": torch.tensor(float("nan")),
        "more": [torch.ones(1, dtype=torch.uint8), (1, "text", None), Pair(torch.full((2,), 2.5), {"deep": 3})],
    }


def assert_equal(found, wanted) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_equal(a, b)
    else:
        assert found == wanted


@check(4)
def a_batch_of_one_rank_on_its_group() -> None:
    on_its_group(dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    on_its_group(dist.device_mesh.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp")))


def on_its_group(mesh: dist.device_mesh.DeviceMesh) -> None:
    rank = dist.get_rank()
    replica, reads = rank // 2, rank % 2 == 0
    for step, rows in enumerate((4, 7, 2, 9000, 9000, 1)):
        batch = a_batch(10 * step + replica, rows)
        garbage = (None, torch.zeros(3), {"ids": "other"})[step % 3]
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
            found = megafx.broadcast_data(batch if reads else garbage, mesh)
        assert_equal(found, batch)
        assert sent.call_count == 1, "all tensors go in one message, after the structure"
        megafx.check_data(found, mesh, step)
    assert_equal(megafx.broadcast_data({"text": "no tensor"} if reads else None, mesh), {"text": "no tensor"})
    user = UserDict(x=torch.ones(2))
    assert_equal(megafx.broadcast_data(user if reads else None, mesh)["x"], torch.ones(2))
    same = {"x": torch.arange(4.0)}
    with pytest.raises(AgreementError, match="replicas 0 and 1 of dim 'dp' of the mesh got the same batch"):
        megafx.check_data(same, mesh, 5)
    with pytest.raises(
        AgreementError, match=r"step 6: input batch.x is not the same on all .* \(rank 1 against rank 0\)"
    ):
        megafx.check_data({"x": torch.arange(4.0) + rank}, mesh, 6)
    with pytest.raises(AgreementError, match="differ in the call of step 7"):
        megafx.check_data({"x": torch.zeros(4 + rank)}, mesh, 7)
