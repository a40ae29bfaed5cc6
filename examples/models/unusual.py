"""A model that no library has: attention and MLP in parallel, one KV head, ALiBi, an activation and an op of its own.

It tests that nothing in the compiler knows a model: the op `unusual::decaying_sum` in particular has no sharding rule, so its
operand must be brought together, and the report must say so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class UnusualConfig:
    vocab_size: int = 101
    n_layer: int = 2
    n_head: int = 6
    n_embd: int = 48
    ffn_hidden_size: int = 112


def squared_tanh_gate(x: Tensor, slope: Tensor) -> Tensor:
    """An activation with a learned slope per channel: relu(x)^2 * tanh(slope x)."""
    return F.relu(x).square() * torch.tanh(slope * x)


def alibi(n_head: int, seq: int, like: Tensor) -> Tensor:
    """[heads, seq, seq]: minus slope times distance, minus infinity ahead of the query."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, n_head + 1, device=like.device) / n_head)
    position = torch.arange(seq, device=like.device)
    distance = position[:, None] - position[None, :]
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, float("-inf")).to(like.dtype)


@torch.library.custom_op("unusual::decaying_sum", mutates_args=())
def decaying_sum(x: Tensor, decay: float) -> Tensor:
    """[batch, seq, channels]: y[t] = x[t] + decay * y[t - 1], as a kernel of the user's would compute it."""
    rows: list[Tensor] = []
    for row in x.unbind(1):
        rows.append(row + decay * rows[-1] if rows else row)
    return torch.stack(rows, 1)


@decaying_sum.register_fake
def _(x: Tensor, decay: float) -> Tensor:
    return torch.empty_like(x)


def _keep_decay(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.decay = inputs[1]


def _decaying_sum_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    return decaying_sum(grad.flip(1), ctx.decay).flip(1), None


decaying_sum.register_autograd(_decaying_sum_backward, setup_context=_keep_decay)


class ParallelBlock(nn.Module):
    def __init__(self, config: UnusualConfig) -> None:
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.n_embd // config.n_head
        self.norm = nn.LayerNorm(config.n_embd)
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.kv = nn.Linear(config.n_embd, 2 * self.head_dim, bias=False)
        self.fc = nn.Linear(config.n_embd, config.ffn_hidden_size)
        self.slope = nn.Parameter(torch.ones(config.ffn_hidden_size))
        self.attn_out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.mlp_out = nn.Linear(config.ffn_hidden_size, config.n_embd)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.n_head, self.head_dim)).transpose(1, 2)
        k, v = self.kv(y)[:, None].chunk(2, dim=-1)  # one head for all queries
        weights = torch.softmax(q @ k.transpose(-1, -2) * self.head_dim**-0.5 + bias, dim=-1)
        attention = self.attn_out((weights @ v).transpose(1, 2).flatten(2))
        mlp = self.mlp_out(squared_tanh_gate(self.fc(y), self.slope))
        return x + attention + mlp


class Unusual(nn.Module):
    def __init__(self, config: UnusualConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(ParallelBlock(config) for _ in range(config.n_layer))
        self.mix = nn.Parameter(torch.zeros(config.n_embd))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(ids)
        bias = alibi(self.config.n_head, ids.shape[1], like=x)
        for layer in self.layers:
            x = layer(x, bias)
        x = x + self.mix * decaying_sum(x, 0.5)  # no sharding rule
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
