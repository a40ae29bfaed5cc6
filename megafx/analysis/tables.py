"""Numbers that a model keeps in buffers, as far as they are a pattern: a triangle, a band, one number.

nanoGPT and GPT-2 keep their causal mask in a buffer, which is only an input of the graph. `read_table` finds out what the mask
is; a `TableGuard` (runtime/guards.py) checks at each call that the buffer still holds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 1 << 28  # elements that are looked at


class Band(NamedTuple):
    """x[..., i, j] is `on` where 0 <= i - j, and i - j < window where window > 0; else `off`."""

    on: float | bool
    off: float | bool
    window: int = 0


Table = Band | float | bool


def read_table(x: Tensor) -> Table | None:
    """What a buffer holds; None for anything else, and for tensors without values."""
    if x.is_meta or x.is_complex() or x.numel() > LARGEST or not x.numel():
        return None
    if x.numel() == 1 and x.dim() <= 1:
        return x.item() if x.dim() == 0 else None
    if x.dim() < 2 or x.shape[-1] != x.shape[-2] or x.numel() != x.shape[-1] ** 2 or x.shape[-1] < 2:
        return None
    x = x.detach().reshape(x.shape[-2:])
    on, off, n = x[0, 0].item(), x[0, 1].item(), x.shape[0]
    if on == off:
        return None
    window = int((x[-1] == on).sum())
    distance = torch.arange(n, device=x.device)[:, None] - torch.arange(n, device=x.device)
    inside = (distance >= 0) & (distance < window)
    if not torch.equal(x == on, inside) or not torch.equal(x == off, ~inside):
        return None
    return Band(on, off, 0 if window == n else window)
