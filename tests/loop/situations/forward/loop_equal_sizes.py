"""Sizes of inputs that the model's code makes equal, and arguments that say sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import CaptureError

LLAMAGEN = "https://github.com/FoundationVision/LlamaGen/blob/main/autoregressive/models/gpt.py"
TRANSFORMER_XL = "https://github.com/kimiyoung/transformer-xl/blob/master/pytorch/utils/proj_adaptive_softmax.py"
FASTSPEECH2 = "https://github.com/ming024/FastSpeech2/blob/master/dataset.py"
SASREC = "https://github.com/pmixer/SASRec.pytorch/blob/main/python/model.py"


class OfClasses(nn.Module):
    """A class in front of the tokens, whose last one is a target alone: targets are longer by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.classes, self.head = nn.Embedding(11, 8), nn.Embedding(5, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, label: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        h = torch.cat([self.classes(label)[:, None], self.tokens(ids)], 1)
        losses = F.cross_entropy(self.head(h).flatten(0, 1), targets.view(-1), reduction="none")
        counted = valid[:, None].repeat(1, targets.shape[1]).view(-1)
        return (losses * counted).sum() / max(counted.sum(), 1)


@situation(LLAMAGEN, ranks=(2,))
def targets_have_one_token_more_than_inputs(loop: Loop) -> None:
    model = loop.model(OfClasses())
    for rows, length in ((2, 6), (3, 6), (1, 9)):
        targets = torch.randint(11, (rows, length))
        valid = torch.rand(rows).round()
        loss = model(targets[:, :-1], torch.randint(5, (rows,)), targets, valid)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)
    loop.see_error(lambda: model(targets[:, :-2], torch.randint(5, (1,)), targets, valid))


class Clusters(nn.Module):
    """A softmax of the frequent words and of clusters; only clusters of which a word occurs are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.out = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 14, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden, target = torch.tanh(self.up(self.words(ids))).view(-1, 8), targets.view(-1)
        if hidden.size(0) != target.size(0):
            raise RuntimeError("Input and target should have the same size in the batch dimension.")
        head = F.log_softmax(F.linear(hidden, self.out.weight[[0, 1, 2, 3, 12, 13]]), 1)
        losses, offset = torch.zeros_like(target, dtype=hidden.dtype), 0
        for i, (first, last) in enumerate(((0, 4), (4, 8), (8, 12))):
            rows = ((target >= first) & (target < last)).nonzero().squeeze()
            if rows.numel() == 0:
                continue
            words, chosen = target.index_select(0, rows) - first, head.index_select(0, rows)
            if i == 0:
                chosen = chosen.gather(1, words[:, None]).squeeze(1)
            else:
                tail = F.log_softmax(F.linear(hidden.index_select(0, rows), self.out.weight[first:last]), 1)
                chosen = chosen[:, -i] + tail.gather(1, words[:, None]).squeeze(1)
            losses[offset : offset + chosen.size(0)].copy_(-chosen)
            offset += chosen.size(0)
        return losses.view(targets.shape)


@situation(TRANSFORMER_XL)
def losses_of_clusters_are_written_one_after_another(loop: Loop) -> None:
    model = loop.model(Clusters())
    few = torch.tensor([[0, 1, 2], [3, 0, 9]])  # one word of a cluster, none of the other
    for ids, targets in [
        (torch.randint(12, (5, 3)),) * 2,
        (torch.randint(12, (4, 7)), torch.randint(12, (4, 7))),
        (few, few),
    ]:
        losses = model(ids, targets)
        losses.mean().backward()
        loop.see(losses=losses)
    loop.see_gradients(model)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, lengths: Tensor, longest: int, scale: float = 1.0) -> Tensor:
        mask = torch.arange(longest)[None] < lengths[:, None]
        return (self.up(self.words(ids)) * mask[..., None] * scale).square().mean()


@situation(FASTSPEECH2)
def a_length_is_a_number_of_numpy(loop: Loop) -> None:
    """As `max(lengths)` is, of lengths that a collate function has in an array."""
    model = loop.model(Padded())
    for lengths in (np.array([4, 6]), np.array([7, 2, 5])):
        ids = torch.randint(12, (len(lengths), int(max(lengths))))
        loss = model(ids, torch.from_numpy(lengths), max(lengths), scale=np.float32(0.5))
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


@situation(SASREC)
def arguments_are_arrays_of_numpy(loop: Loop) -> None:
    """Refused; the advice is followed."""
    model, ids, lengths = loop.model(Padded()), torch.randint(12, (2, 6)), np.array([4, 6])
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"argument lengths is a numpy.ndarray.*\n  fix: pass torch.as_tensor"):
            model(ids, lengths, 6)
    loss = model(ids, torch.as_tensor(lengths), 6)
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)
