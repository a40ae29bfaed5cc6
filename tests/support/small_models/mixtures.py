"""Sizes and inputs of the mixtures that tests of experts use."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN, FFN, EXPERTS, TOP = 6, 7, 5, 2


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
