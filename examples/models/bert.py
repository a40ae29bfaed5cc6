"""A BERT in plain PyTorch: post-norm blocks, token types, attention with a padding mask, tied masked-LM head."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class BertConfig:
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    ffn_hidden_size: int = 256
    max_positions: int = 64
    dropout: float = 0.1
    pad_id: int = 0


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.n_embd, padding_idx=config.pad_id)
        self.position = nn.Embedding(config.max_positions, config.n_embd)
        self.token_type = nn.Embedding(2, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, token_types: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.drop(self.norm(self.word(ids) + self.token_type(token_types) + self.position(positions)))


class Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.output = nn.Linear(config.n_embd, config.n_embd)
        self.norm_1 = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, config.ffn_hidden_size)
        self.down = nn.Linear(config.ffn_hidden_size, config.n_embd)
        self.norm_2 = nn.LayerNorm(config.n_embd)
        self.drop = nn.Dropout(config.dropout)

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq, embd = x.shape
        heads = (batch, seq, self.n_head, embd // self.n_head)
        q, k, v = (p(x).view(heads).transpose(1, 2) for p in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / (embd // self.n_head) ** 0.5
        weights = self.drop(torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1))
        return self.drop(self.output((weights @ v).transpose(1, 2).reshape(batch, seq, embd)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm_1(x + self.attention(x, mask))
        return self.norm_2(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.transform = nn.Linear(config.n_embd, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd)
        self.decoder = nn.Linear(config.n_embd, config.vocab_size)
        self.apply(_init)
        self.decoder.weight = self.embeddings.word.weight

    def forward(self, ids: Tensor, token_types: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """ids, token_types [batch, seq] -> logits, and the loss over the positions whose label is not -100."""
        mask = (ids == self.config.pad_id)[:, None, None, :]
        x = self.embeddings(ids, token_types)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.decoder(self.norm(F.gelu(self.transform(x))))
        if labels is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
