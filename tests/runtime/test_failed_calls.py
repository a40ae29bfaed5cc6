"""Covers: what a process can still do after a call that failed, and generators made in forward (findings C7, C12)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megafx
from megafx.errors import MegafxError


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("module, text", [(Draws(), "Generator"), (Decides(), "x.sum\\(\\) > 0")])
def test_the_process_is_usable_after_a_failed_call(module: Any, text: str) -> None:
    with pytest.raises(MegafxError, match=text):
        megafx.parallelize(nn.Sequential(nn.Linear(4, 4), module), megafx.Config(uncaptured="error"))(torch.ones(2, 4))
    plain = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    wanted = plain(x)
    torch.testing.assert_close(megafx.parallelize(plain)(x), wanted)
