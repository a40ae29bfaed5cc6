"""Mixtures of experts whose rows are sorted by expert, written in several ways; grouped products in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.kernels.experts import grouped_mm as _defines_the_op  # noqa: F401

HIDDEN, FFN, EXPERTS, TOP = 6, 7, 5, 2
grouped_mm = torch.ops.megafx.grouped_mm


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * FFN))
        self.down = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN))
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: Tensor, form: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """-> the result, and the loss of the router: it balances experts, and keeps its scores small."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        probabilities = scores.softmax(-1)
        weights, chosen = probabilities.topk(TOP)
        share = torch.histc(chosen.flatten().double(), EXPERTS, 0, EXPERTS) / (0.0 + chosen.shape[0])
        loss = (share * probabilities.mean(0)).sum() + 0.1 * scores.logsumexp(-1).square().mean()
        return form(self, tokens, weights, chosen).view_as(x), loss

    def unit(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_mm(x, self.up, ends).chunk(2, -1)
        return grouped_mm(F.silu(gate) * up, self.down, ends)


def as_transformers(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    ids, order = chosen.flatten().sort()
    ends = torch.histc(ids.double(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    y = (of.unit(x[order // TOP], ends) + of.bias[ids]) * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=x.device)
    return y[back].view(-1, TOP, HIDDEN).sum(1)


def added_to_tokens(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    ids = chosen.flatten()
    order = ids.argsort(stable=True)
    tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(TOP)[order]
    ends = F.one_hot(chosen, EXPERTS).sum((0, 1)).cumsum(0)
    y = (of.unit(x[tokens], ends) + of.bias[ids[order]]) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, tokens, y)


def repeated(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Counts that are used twice; the inverse as the order of the order."""
    ids = chosen.flatten()
    order = torch.argsort(ids)
    counts = F.one_hot(ids, EXPERTS).sum(0)
    y = of.unit(x.repeat_interleave(TOP, 0).index_select(0, order), counts.cumsum(0))[order.argsort()]
    return (y.view(-1, TOP, HIDDEN) * weights[..., None]).sum(1) + 0.01 * (counts * weights.sum()).sum()


def put_back(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One expert a token."""
    ids = chosen[:, 0]
    order = ids.argsort()
    y = of.unit(x[order], F.one_hot(ids, EXPERTS).sum(0).cumsum(0))
    made = torch.zeros_like(y)
    made[order] = y
    return made * weights[:, :1]


FORMS = (as_transformers, added_to_tokens, repeated, put_back)


class Model(nn.Module):
    def __init__(self, *forms: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forms, self.layers = forms, nn.ModuleList(Mixture() for _ in forms)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer, form in zip(self.layers, self.forms, strict=True):
            y, loss = layer(x, form)
            x, total = x + y, total + loss
        return F.mse_loss(x, wanted) + 0.1 * total


def a_call(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, wanted = torch.randn(2, rows, 5, HIDDEN, generator=generator, dtype=torch.float64)
    return x, wanted
