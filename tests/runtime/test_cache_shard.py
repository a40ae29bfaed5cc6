"""Covers: cache_shard.py. What is done to a shard of a cache between calls is the shard of what is done to the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megafx.errors import UsageError
from megafx.placements.types import Layout, S
from megafx.runtime.cache_shard import CacheShard

WHOLE = torch.arange(2 * 6 * 1 * 5).view(2, 6, 1, 5)
HALF = 3  # heads of each of two ranks
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "select before": lambda x: x[1],
    "select behind": lambda x: x[:, :, 0],
    "unsqueeze before": lambda x: x[None],
    "unsqueeze behind": lambda x: x.unsqueeze(-1),
    "stack before": lambda x: torch.stack([x, x.clone()]),
    "stack behind": lambda x: torch.stack([x, x], dim=2),
    "squeeze": lambda x: x.squeeze(2),
    "squeeze of a longer dim": lambda x: x.squeeze(0),
    "rows of a batch, apart and together": lambda x: torch.stack([x[i][None] for i in (1, 0)]).squeeze(1),
    "cat with what a cache begins as": lambda x: torch.cat([x, torch.empty(0, dtype=x.dtype)], dim=-2),
    "reordered": lambda x: x.index_select(0, torch.tensor([1, 1, 0])),
    "cropped": lambda x: x[..., :3],
    "repeated": lambda x: x.repeat_interleave(2, dim=0),
}


def shard(rank: int) -> CacheShard:
    local = WHOLE[:, rank * HALF : (rank + 1) * HALF].clone()
    return CacheShard(local, S(1, Layout.contiguous(6, 2)), None)  # type: ignore[arg-type]  # no rank is asked for anything


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_the_shard_of_the_result(form: str, rank: int) -> None:
    found, wanted = FORMS[form](shard(rank)), FORMS[form](WHOLE)
    assert isinstance(found, CacheShard) and found.shape == wanted.shape
    assert torch.equal(found.local, wanted.narrow(found.placement.dim, rank * HALF, HALF))


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x[:, 0],
        lambda x: x.squeeze(1),
        lambda x: x.squeeze(),
        lambda x: torch.stack([x, WHOLE]),
        lambda x: torch.cat([x, x], dim=1),
        lambda x: x.sum(1),
    ],
)
def test_what_needs_other_ranks_is_refused(form: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(UsageError, match="full_tensor"):
        form(shard(0))
