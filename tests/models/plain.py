"""Models of the matrix that are plain modules: no config, no base class, the forms in which such models are published."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from catalogue import BATCH, SEQ, VOCAB, Architecture, Inputs, floats, ids, token_labels
from torch import Tensor, nn
from torch.nn import functional as F

H, HEADS, WIDE, LAYERS = 30, 5, 53, 2


def tokens(model: nn.Module) -> dict[str, Any]:
    return {"ids": ids(BATCH, SEQ), "labels": token_labels(BATCH, SEQ)}


def loss_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class MixedWithTheLast(nn.Module):
    """RWKV's channel mixing: each token is mixed with the one before, a channel at a time; no attention, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mix_key, self.mix_gate = (nn.Parameter(torch.rand(1, 1, H)) for _ in range(2))
        self.key, self.gate = nn.Linear(H, WIDE, bias=False), nn.Linear(H, H, bias=False)
        self.value = nn.Linear(WIDE, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        last = self.shift(x)
        key = self.key(x * self.mix_key + last * (1 - self.mix_key))
        gate = self.gate(x * self.mix_gate + last * (1 - self.mix_gate))
        return torch.sigmoid(gate) * self.value(torch.relu(key).square())


class TokenShift(nn.Module):
    """RWKV-like: normed embeddings, residual blocks of `MixedWithTheLast`."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.first = nn.Embedding(VOCAB, H), nn.LayerNorm(H)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(LAYERS))
        self.blocks = nn.ModuleList(MixedWithTheLast() for _ in range(LAYERS))
        self.last, self.head = nn.LayerNorm(H), nn.Linear(H, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.emb(ids))
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        logits = self.head(self.last(x))
        return logits, loss_of_tokens(logits, labels)


class HandWrittenGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MaskedAttention(nn.Module):
    """minGPT's: one linear for q, k and v, a causal mask that is a buffer, softmax and two dropouts by hand."""

    def __init__(self, longest: int, p: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.attn_dropout, self.resid_dropout = nn.Dropout(p), nn.Dropout(p)
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.size()
        q, k, v = self.c_attn(x).split(h, dim=2)
        q, k, v = (y.view(b, s, HEADS, h // HEADS).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
        mixed = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).contiguous().view(b, s, h)))


class MinGPTBlock(nn.Module):
    def __init__(self, longest: int, p: float) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(H), MaskedAttention(longest, p), nn.LayerNorm(H)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(H, WIDE),
                "c_proj": nn.Linear(WIDE, H),
                "act": HandWrittenGelu(),
                "dropout": nn.Dropout(p),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.dropout(m.c_proj(m.act(m.c_fc(self.ln_2(x)))))


class MinGPT(nn.Module):
    """The form of minGPT's published model: modules in a ModuleDict, positions from an arange that is unsqueezed."""

    def __init__(self, p: float, longest: int = 16) -> None:
        super().__init__()
        self.block_size = longest
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, H),
                "wpe": nn.Embedding(longest, H),
                "drop": nn.Dropout(p),
                "h": nn.ModuleList([MinGPTBlock(longest, p) for _ in range(LAYERS)]),
                "ln_f": nn.LayerNorm(H),
            }
        )
        self.lm_head = nn.Linear(H, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, s = ids.size()
        assert s <= self.block_size, f"{s} tokens are more than {self.block_size}"
        at = torch.arange(0, s, dtype=torch.long, device=ids.device).unsqueeze(0)
        parts = self.transformer
        x = parts.drop(parts.wte(ids) + parts.wpe(at))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)
        return logits, loss


class Translator(nn.Module):
    """nn.Transformer between two tables, with a causal mask and masks of padding."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, H), nn.Embedding(VOCAB, H)
        self.body = nn.Transformer(H, HEADS, 1, 1, WIDE, dropout=p, activation="gelu", batch_first=True)
        self.head = nn.Linear(H, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        given = labels.clamp(min=0)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=torch.float64)
        x = self.body(self.source(ids), self.target(given), tgt_mask=causal, tgt_is_causal=True)
        logits = self.head(x)
        return logits, loss_of_tokens(logits, labels)


class Quantized(nn.Module):
    """A vector quantizer (van den Oord et al. 2017): nearest code by argmin, straight-through, codebook and commitment loss."""

    def __init__(self, codes: int, width: int, cost: float = 0.25) -> None:
        super().__init__()
        self.codebook, self.cost = nn.Embedding(codes, width), cost

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.reshape(-1, z.shape[-1])
        table = self.codebook.weight
        far = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ table.t() + table.pow(2).sum(1)
        nearest = far.argmin(1).view(z.shape[:-1])
        chosen = self.codebook(nearest)
        loss = F.mse_loss(chosen, z.detach()) + self.cost * F.mse_loss(z, chosen.detach())
        return z + (chosen - z).detach(), nearest, loss


class VQAutoencoder(nn.Module):
    """Encoder of convolutions and a residual MLP, quantizer, decoder; reconstruction and quantizer losses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(7, H, 3, padding=1), nn.Conv1d(H, 7, 3, padding=1)
        self.up, self.down = nn.Linear(H, WIDE), nn.Linear(WIDE, H)
        self.quantizer = Quantized(19, H)
        self.grow, self.shrink = nn.Linear(H, WIDE), nn.Linear(WIDE, H)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = F.relu(self.enter(x.transpose(1, 2))).transpose(1, 2)
        z = z + self.down(F.relu(self.up(z)))
        q, nearest, loss = self.quantizer(z)
        q = q + self.shrink(F.relu(self.grow(q)))
        made = self.leave(q.transpose(1, 2)).transpose(1, 2)
        return {"loss": F.mse_loss(made, x) + loss, "made": made, "codes": nearest}


def row(name: str, kind: str, make: Callable[[float], nn.Module], inputs: Inputs, **more: Any) -> Architecture:
    return Architecture(name, kind, "", "", {}, inputs, ("own",), make=make, **more)


ROWS = [
    row("RWKV-like token shift", "recurrence", lambda p: TokenShift(), tokens),
    row("minGPT", "dense decoder", MinGPT, tokens),
    row("nn.Transformer", "encoder-decoder", Translator, tokens, least_sharded=0.8),
    row(
        "VQ autoencoder",
        "vector quantizer",
        lambda p: VQAutoencoder(),
        lambda m: {"x": floats(BATCH, SEQ, 7)},
        least_sharded=0.0,
    ),
]
