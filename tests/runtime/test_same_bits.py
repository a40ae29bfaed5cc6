"""Covers: docs/megatron.md, `deterministic_mode`: with torch's switch, two runs on a GPU have the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafx


class Mixture(nn.Module):
    """Attention over many tokens, and experts whose results are put back by `index_add`: not deterministic by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(1000, 512), nn.Linear(512, 1536), nn.Linear(512, 512)
        self.router, self.head = nn.Linear(512, 8), nn.Linear(512, 1000)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(8)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, tokens, _ = x.shape
        q, k, v = (y.view(rows, tokens, 8, 64).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(4, -1)
        mixed = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            at, which = torch.where(chosen == n)
            mixed.index_add_(0, at, expert(x[at]) * weights[at, which, None])
        return F.cross_entropy(self.head(x + mixed)[:-1].float(), ids.flatten()[1:])


def trained() -> Tensor:
    torch.manual_seed(0)
    model = megafx.parallelize(Mixture().cuda().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(8):
        torch.manual_seed(step)
        model(torch.randint(0, 1000, (2, 8192), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_runs_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(trained(), trained())
    finally:
        torch.use_deterministic_algorithms(False)
