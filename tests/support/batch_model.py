"""A small model and its batch on data-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, LENGTH, VOCAB = 3, 7, 67


class Block(nn.Module):
    """3 heads and 19 features: neither divides by 2."""

    def __init__(self, h: int, heads: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj, self.up, self.down = (nn.Linear(*s) for s in ((h, 3 * h), (h, h), (h, 19), (19, h)))
        self.drop, self.heads, self.p = nn.Dropout(p), heads, p

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = [y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        p = self.p if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    """Without labels it returns logits: the loss is then the user's, of each rank's own rows."""

    def __init__(self, p: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.positions, self.drop = nn.Embedding(VOCAB, 12), nn.Embedding(32, 12), nn.Dropout(p)
        self.blocks = nn.ModuleList([Block(12, 3, p) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int, parts: int) -> tuple[Tensor, Tensor]:
    """ids and labels of all ranks; the parts have unequal numbers of labels."""
    draw = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCAB, (parts * ROWS, LENGTH), generator=draw) for _ in range(2))
    labels[0, : LENGTH - 2] = -100
    return ids, labels


def mine(x: Tensor, parts: int, tensor_ranks: int) -> Tensor:
    return x.chunk(parts)[dist.get_rank() // tensor_ranks]
