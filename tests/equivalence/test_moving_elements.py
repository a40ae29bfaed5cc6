"""Covers: rules/families_dims.py, families_math.py. Ops that keep the size of a dim and move elements along it, beside sharded
tokens and sharded features: a dim is not kept because its size is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx

HIDDEN, VOCAB, SEQ = 12, 32, 12
Move = Callable[[Tensor], Tensor]

ALONG_TOKENS: dict[str, Move] = {
    "pad": lambda x: F.pad(x, (0, 0, 1, -1)),
    "pad_cut_in_front": lambda x: F.pad(x, (0, 0, -2, 2)),
    "zero_pad_module": nn.ZeroPad2d((0, 0, 1, -1)),
    "roll": lambda x: torch.roll(x, 1, 1),
    "flip": lambda x: x.flip(1),
    "slice_and_cat": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "cumsum": lambda x: x.cumsum(1),
    "cummax": lambda x: x.cummax(1).values,
    "index_select": lambda x: x.index_select(1, torch.arange(SEQ).flip(0)),
    "index": lambda x: x[:, (torch.arange(x.shape[1]) + 1) % x.shape[1]],
    "gather": lambda x: x.gather(1, torch.arange(SEQ).flip(0)[None, :, None].expand_as(x)),
    "sort": lambda x: x.sort(1).values,
    "unfold": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "conv": lambda x: F.conv1d(x.mT, torch.ones(HIDDEN, 1, 3, dtype=x.dtype), padding=1, groups=HIDDEN).mT,
    "avg_pool": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "tril": lambda x: x.tril(),
}
ALONG_FEATURES: dict[str, Move] = {
    "pad": lambda x: F.pad(x, (2, -2)),
    "pad_both_dims": lambda x: F.pad(x, (1, -1, 1, -1)),
    "roll": lambda x: torch.roll(x, 3, -1),
    "roll_flat": lambda x: torch.roll(x, 5),
    "flip": lambda x: x.flip(-1),
    "slice_and_cat": lambda x: torch.cat([x[..., 5:], x[..., :5]], -1),
    "cumsum": lambda x: x.cumsum(-1),
    "index_select": lambda x: x.index_select(-1, torch.arange(x.shape[-1]).flip(0)),
    "triu": lambda x: x.triu(),
}


class Block(nn.Module):
    """One MLP with an op on its input (tokens) and one on its hidden features."""

    def __init__(self, tokens: Move | None, features: Move | None) -> None:
        super().__init__()
        self.tokens, self.features = tokens, features
        self.embed, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down, self.head = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        h = self.up(h if self.tokens is None else self.tokens(h))
        h = h if self.features is None else self.features(h)
        return F.cross_entropy(self.head(x + self.down(torch.relu(h))).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("t, sequence_parallel", [(2, True), (3, False)])
@pytest.mark.parametrize("name", [*(f"tokens.{n}" for n in ALONG_TOKENS), *(f"features.{n}" for n in ALONG_FEATURES)])
def test_loss_and_gradients_are_eagers(name: str, t: int, sequence_parallel: bool) -> None:
    along, op = name.split(".")
    torch.manual_seed(0)
    model = Block(ALONG_TOKENS[op] if along == "tokens" else None, ALONG_FEATURES[op] if along == "features" else None)
    ids, labels = torch.randint(0, VOCAB, (2, 2, SEQ))
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel)
    verdict = megafx.verify(model.double(), config, example_inputs=(ids, labels), tolerance=1e-10)
    assert verdict, verdict
