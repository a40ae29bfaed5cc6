"""Layers of experts in lists, called one by one; their tokens are selected in any of FORMS."""

from __future__ import annotations

import index_dispatch
import torch
from index_dispatch import EXPERTS, HIDDEN, Form, Mixture
from torch import Tensor, nn


def above(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: int, expert: nn.Module) -> Tensor:
    """Any number of experts a token, none too; each reads a score of its own."""
    scores = x[:, :EXPERTS].sigmoid()
    rows = (scores[:, e] > 0.5).nonzero().squeeze(-1)
    return out.index_add(0, rows, expert(x[rows]) * scores[rows, e, None])


def best(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: int, expert: nn.Module) -> Tensor:
    """One expert a token."""
    scores = x[:, :EXPERTS].sigmoid()
    mask = scores.argmax(-1) == e
    out[mask] += expert(x[mask]) * scores[mask, e, None]
    return out


FORMS: dict[str, Form] = {**index_dispatch.FORMS, "above": above, "best": best}


class Model(nn.Module):
    """bias: of experts. Router losses of all tokens are in the loss."""

    def __init__(self, *forms: str, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Mixture(FORMS[form], bias) for form in forms)

    def forward(self, x: Tensor) -> Tensor:
        x, loss = self.first(x), x.new_zeros(())
        for layer in self.layers:
            y, balance = layer(x)
            x, loss = x + y, loss + 0.1 * balance
        return loss + x.square().mean()
