"""Routers of experts that data-parallel ranks share out, against one process at fp64: what is of all tokens, what is drawn.

Covers: passes/experts/dispatch_experts.py with the routers of Switch, GShard, BASE layers, DeepSeek-V3 and GPT-OSS.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sorted_mixtures import EXPERTS, HIDDEN, TOP, Mixture, a_call, as_transformers
from torch import Tensor, nn
from torch.nn import functional as F

import megafx

SLOW = pytest.mark.slow
Scores = tuple[Tensor, Tensor, Tensor]  # weights of the choices, experts chosen, a loss


class Routed(nn.Module):
    """[batch, seq, hidden]; `router` names the method that chooses, each in a layer of its own."""

    def __init__(self, *routers: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routers, self.layers = routers, nn.ModuleList(Mixture() for _ in routers)
        self.register_buffer("bias", torch.zeros(EXPERTS))  # of the scores by which experts are chosen

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer, router in zip(self.layers, self.routers, strict=True):
            tokens = F.layer_norm(x, [HIDDEN]).flatten(0, 1)
            weights, chosen, loss = getattr(self, router)(layer.router, tokens)
            x, total = x + as_transformers(layer, tokens, weights, chosen).view_as(x), total + loss
        return F.mse_loss(x, wanted) + 0.1 * total

    def softmax_first(self, router: nn.Linear, x: Tensor) -> Scores:
        """Switch's: the loss balances, by the share of first choices and the mean probability, of all tokens."""
        probabilities = router(x).softmax(-1)
        weights, chosen = probabilities.topk(TOP)
        share = F.one_hot(chosen[:, 0], EXPERTS).to(x.dtype).mean(0)
        return weights / weights.sum(-1, keepdim=True), chosen, EXPERTS * (share * probabilities.mean(0)).sum()

    def softmax_of_chosen(self, router: nn.Linear, x: Tensor) -> Scores:
        """GPT-OSS's; with a z-loss."""
        scores = router(x)
        top, chosen = scores.topk(TOP)
        return top.softmax(-1), chosen, scores.logsumexp(-1).square().mean()

    def jitter(self, router: nn.Linear, x: Tensor) -> Scores:
        """Switch's: what the router sees is multiplied by numbers that are drawn for each token."""
        return self.softmax_of_chosen(router, x * (0.9 + 0.2 * torch.rand_like(x)))

    def sinkhorn(self, router: nn.Linear, x: Tensor) -> Scores:
        """BASE layers': assignments that are balanced over all tokens."""
        scores = router(x)
        with torch.no_grad():
            cost = scores.exp()
            rows = torch.ones_like(cost[:, :1])
            for _ in range(3):
                columns = 1 / (EXPERTS * (rows * cost).sum(0, keepdim=True) / cost.shape[0] + 1e-8)
                rows = 1 / ((columns * cost).sum(1, keepdim=True) + 1e-8)
            chosen = (rows * cost * columns).topk(TOP).indices
        return scores.sigmoid().gather(1, chosen), chosen, scores.new_zeros(())

    def balanced_by_bias(self, router: nn.Linear, x: Tensor) -> Scores:
        """DeepSeek-V3's: a bias decides who is chosen, and changes by how many tokens an expert got."""
        scores = router(x).sigmoid()
        chosen = (scores + self.bias).topk(TOP).indices
        with torch.no_grad():
            got = torch.bincount(chosen.flatten(), minlength=EXPERTS).to(x.dtype)
            self.bias += 0.1 * (got.mean() - got).sign()
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen, scores.new_zeros(())


ROUTERS = ("softmax_first", "softmax_of_chosen", "jitter", "sinkhorn", "balanced_by_bias")


def verified(routers: tuple[str, ...], mesh: dict[str, int], **options: Any) -> Any:
    config = megafx.Config(**options)
    return megafx.verify(
        Routed(*routers).double(), config, example_inputs=a_call(2 * mesh["dp"]), mesh=mesh, tolerance=1e-10
    )


@pytest.mark.parametrize(
    ("routers", "mesh", "options"),
    [
        (ROUTERS, {"dp": 2}, {"expert_model_parallel_size": 2}),
        pytest.param(ROUTERS, {"dp": 3, "tp": 2}, {"expert_model_parallel_size": 3}, marks=SLOW),
        pytest.param(ROUTERS, {"dp": 4}, {"expert_model_parallel_size": 2, "data_parallel": "fsdp"}, marks=SLOW),
        pytest.param(ROUTERS[:2], {"dp": 6}, {"expert_model_parallel_size": 6}, marks=SLOW),  # a rank has none
    ],
)
def test_as_one_process(routers: tuple[str, ...], mesh: dict[str, int], options: dict[str, Any]) -> None:
    verdict = verified(routers, mesh, **options)
    assert verdict, str(verdict)
