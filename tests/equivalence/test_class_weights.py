"""Covers: class weights of a cross entropy (passes/canonicalize/loss.py): the vocabulary stays sharded, numbers are eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafx


class Weighted(nn.Module):
    def __init__(self, reduction: str, ignore: int) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(11, 12), nn.Linear(12, 24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 11, bias=False)
        self.reduction, self.ignore = reduction, ignore
        self.register_buffer("weight", torch.rand(11) + 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        logits = self.head(x + self.down(F.gelu(self.up(x)))).flatten(0, 1)
        loss = F.cross_entropy(
            logits, labels.flatten(), self.weight, ignore_index=self.ignore, reduction=self.reduction
        )
        return loss.square().mean() if self.reduction == "none" else loss


@pytest.mark.parametrize("reduction,ignore,t", [("mean", -100, 2), ("mean", 3, 3), ("sum", -1, 4), ("none", 0, 2)])
def test_a_weighted_loss_is_eagers_with_a_sharded_vocabulary(reduction: str, ignore: int, t: int) -> None:
    torch.manual_seed(0)
    model = Weighted(reduction, ignore).double()
    ids, labels = torch.randint(0, 11, (2, 3, 5)).unbind()
    labels[1, 2:] = ignore
    config = megafx.Config(tensor_model_parallel_size=t)
    assert megafx.verify(model, config, example_inputs=(ids, labels), tolerance=1e-10)
    plan = megafx.plan(model, config, example_inputs=(ids, labels))
    assert plan.params["head.weight"].is_shard
