"""A small transformer whose linears run in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EVERY: dict[str, Any] = {"fp8": "hybrid", "first_last_layers_bf16": False}  # fields of Config: all layers


class Block(nn.Module):
    def __init__(self, width: int, ffn: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.p = nn.LayerNorm(width), nn.LayerNorm(width), p
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (w(y).view(b, s, 4, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.o(a), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.p, self.training)


class Model(nn.Module):
    def __init__(self, ffn: int = 48, layers: int = 3, p: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width, ffn, p) for _ in range(layers))
        self.head = nn.Linear(width, 40, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seq: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 40, (2, seq), generator=torch.Generator().manual_seed(1))
    return ids, ids
