"""Mixtures whose experts have a capacity, dispatched by one-hot einsums (GShard, Switch in Mesh TensorFlow), in fp64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, FFN, EXPERTS, TOP = 6, 7, 5, 2


class Mixture(nn.Module):
    """Of [batch, seq, hidden], where each sequence is a group, with its own capacity: [batch, seq, experts, capacity]."""

    def __init__(self, gated: bool, bias: bool) -> None:
        super().__init__()
        self.gated = gated
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN * (2 if gated else 1)))
        self.down = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN))
        self.bias = nn.Parameter(torch.randn(EXPERTS, FFN)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(TOP, -1)
        capacity = 2  # drops tokens
        hot = F.one_hot(chosen, EXPERTS)  # [b, s, k, e]
        taken = hot.transpose(1, 2).flatten(1, 2)  # first choices of all tokens come first
        place = (taken.cumsum(1) * taken - 1).view(x.shape[0], TOP, -1, EXPERTS).transpose(1, 2)
        kept = (place >= 0) & (place < capacity)
        slots = F.one_hot(place.clamp(0, capacity - 1), capacity) * kept[..., None]  # [b, s, k, e, c]
        combine = (weights[..., None, None] * slots).sum(2)
        dispatch = slots.sum(2).to(x.dtype)
        rows = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        h = torch.einsum("ebcm,emf->ebcf", rows, self.up)
        if self.bias is not None:
            h = h + self.bias[:, None, None].repeat(1, 1, 1, h.shape[-1] // FFN)
        if self.gated:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h)
        y = torch.einsum("ebcf,efm->ebcm", h, self.down)
        share = hot[:, :, 0].to(x.dtype).mean((0, 1))
        return torch.einsum("bsec,ebcm->bsm", combine, y), EXPERTS * (share * probabilities.mean((0, 1))).sum()


class Model(nn.Module):
    def __init__(self, gated: bool = True, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = nn.Linear(HIDDEN, HIDDEN), Mixture(gated, bias)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        x = self.first(x)
        y, loss = self.moe(x)
        return 0.1 * loss + (x + y - wanted).square().mean()


def a_call(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, wanted = torch.randn(2, rows, 5, HIDDEN, generator=generator, dtype=torch.float64)
    return x, wanted
