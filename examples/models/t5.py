"""A T5 in plain PyTorch: encoder and decoder, relative position bias, cross-attention, RMS norms, tied embeddings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class T5Config:
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    head_dim: int = 16
    ffn_hidden_size: int = 128
    buckets: int = 8
    max_distance: int = 32
    dropout: float = 0.1
    start_id: int = 0


class Norm(nn.Module):
    """T5's layer norm: no mean, no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class PositionBias(nn.Module):
    """One learned bias per head and bucket of distance: near distances have one each, far ones share by logarithm."""

    def __init__(self, config: T5Config, *, causal: bool) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.table = nn.Embedding(config.buckets, config.n_head)

    def bucket(self, distance: Tensor) -> Tensor:
        """key position - query position -> bucket."""
        buckets, offset = self.config.buckets, 0
        if self.causal:
            distance = (-distance).clamp(min=0)
        else:
            buckets //= 2
            offset = (distance > 0).long() * buckets
            distance = distance.abs()
        near = buckets // 2
        scale = (buckets - near) / math.log(self.config.max_distance / near)
        far = near + (torch.log(distance.clamp(min=1).float() / near) * scale).long()
        return offset + torch.where(distance < near, distance, far.clamp(max=buckets - 1))

    def forward(self, seq: int, device: torch.device) -> Tensor:
        """-> [1, heads, seq, seq], causal mask included."""
        position = torch.arange(seq, device=device)
        distance = position[None, :] - position[:, None]
        bias = self.table(self.bucket(distance)).permute(2, 0, 1)[None]
        return bias.masked_fill(distance > 0, float("-inf")) if self.causal else bias


class Attention(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        inner = config.n_head * config.head_dim
        self.q = nn.Linear(config.n_embd, inner, bias=False)
        self.k = nn.Linear(config.n_embd, inner, bias=False)
        self.v = nn.Linear(config.n_embd, inner, bias=False)
        self.o = nn.Linear(inner, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.n_head, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(context)), self.heads(self.v(context))
        scores = q @ k.transpose(-1, -2)  # T5 does not scale
        if bias is not None:
            scores = scores + bias
        weights = self.drop(torch.softmax(scores, dim=-1))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: T5Config, *, cross: bool) -> None:
        super().__init__()
        self.self_norm, self.self_attention = Norm(config.n_embd), Attention(config)
        if cross:
            self.cross_norm, self.cross_attention = Norm(config.n_embd), Attention(config)
        self.ff_norm = Norm(config.n_embd)
        self.wi = nn.Linear(config.n_embd, config.ffn_hidden_size, bias=False)
        self.wo = nn.Linear(config.ffn_hidden_size, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.self_norm(x)
        x = x + self.drop(self.self_attention(y, y, bias))
        if context is not None:
            x = x + self.drop(self.cross_attention(self.cross_norm(x), context, None))
        return x + self.drop(self.wo(self.drop(F.relu(self.wi(self.ff_norm(x))))))


class T5(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.n_embd)
        self.encoder_bias = PositionBias(config, causal=False)
        self.decoder_bias = PositionBias(config, causal=True)
        self.encoder = nn.ModuleList(Layer(config, cross=False) for _ in range(config.n_layer))
        self.decoder = nn.ModuleList(Layer(config, cross=True) for _ in range(config.n_layer))
        self.encoder_norm, self.decoder_norm = Norm(config.n_embd), Norm(config.n_embd)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """ids [batch, source], labels [batch, target] -> logits [batch, target, vocab], loss."""
        x = self.drop(self.shared(ids))
        bias = self.encoder_bias(ids.shape[1], ids.device)
        for layer in self.encoder:
            x = layer(x, bias)
        context = self.drop(self.encoder_norm(x))

        shifted = F.pad(labels[:, :-1], (1, 0), value=self.config.start_id)
        y = self.drop(self.shared(shifted.clamp(min=0)))
        bias = self.decoder_bias(labels.shape[1], ids.device)
        for layer in self.decoder:
            y = layer(y, bias, context)
        y = self.drop(self.decoder_norm(y)) * self.config.n_embd**-0.5
        logits = F.linear(y, self.shared.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
