"""Several documents in one row: masks, positions, and losses that know where they end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Loop, situation
from loop_adapters import llama
from loop_models import Language, tokens
from torch import Tensor

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])


def mask_of(documents: Tensor) -> Tensor:
    """[rows, 1, tokens, tokens]: earlier tokens of the same document."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).tril())[:, None]


def labels_of(ids: Tensor, documents: Tensor) -> Tensor:
    return ids.roll(-1, 1).masked_fill(documents != documents.roll(-1, 1), -100)


@situation("https://github.com/huggingface/transformers/issues/25452", slow=(1, "ddp"), data=("ddp",))
def documents_by_a_mask_of_blocks(loop: Loop) -> None:
    model, ids = loop.model(Language()), tokens(2, 8)
    for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
        logits = model(loop.rows(ids), loop.rows(mask_of(documents)))
        labels = loop.rows(labels_of(ids, documents))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        losses = losses * loop.parts / 13  # gradients are averaged over ranks
        losses.backward()
        loop.see(loss=loop.mean(losses))
    loop.see_gradients(model)


@situation("https://github.com/huggingface/trl/issues/2805", slow=(2,))
def a_loss_for_each_document(loop: Loop) -> None:
    """Means over documents of unequal lengths, summed by index."""
    model, ids = loop.model(Language()), tokens(2, 8)
    losses = F.cross_entropy(model(ids, mask_of(DOCUMENTS)).flatten(0, 1), ids.flatten(), reduction="none")
    which = (DOCUMENTS + torch.tensor([[0], [3]])).flatten()
    each = torch.zeros(5).index_add(0, which, losses) / which.bincount(minlength=5)
    each.mean().backward()
    loop.see(each=each)
    loop.see_gradients(model)


@situation("https://github.com/huggingface/transformers/issues/31629", slow=(2,), rtol=2e-6)
def documents_by_their_positions(loop: Loop) -> None:
    """transformers finds packed rows by positions that begin again."""
    model, ids = loop.model(llama()), tokens(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    out = model(input_ids=ids, position_ids=positions, labels=labels_of(ids, DOCUMENTS[:1]))
    out.loss.backward()
    loop.see(loss=out.loss)
    loop.see_gradients(model)
