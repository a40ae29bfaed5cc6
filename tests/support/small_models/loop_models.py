"""Small models of the situations in tests/loop. Few of their sizes divide by two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """[rows, 7] -> [rows, 5]."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """Causal attention of 3 heads, and an MLP; [rows, tokens, 12] -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm2, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 22), nn.Linear(22, 12)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (y.view(rows, tokens, 3, 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Ids [rows, tokens] -> logits [rows, tokens, 19]. tied: the head has the embedding's weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.block, self.norm = nn.Embedding(19, 12), Block(), nn.LayerNorm(12)
        self.head = nn.Linear(12, 19, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.block(self.embed(ids), mask)))


def tokens(rows: int = 4, count: int = 6) -> Tensor:
    return torch.randint(0, 19, (rows, count))
