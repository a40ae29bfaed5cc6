"""Submodules are called before the first call of the whole model, or instead of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

EMBEDS = "https://github.com/huggingface/transformers/issues/6535"
FORMS = ("ddp", "zero1", "fsdp")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 8)), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x)), y)


def batch(loop: Loop) -> tuple[Tensor, Tensor]:
    return loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))


@situation(EMBEDS, data=FORMS, slow=("zero1", "fsdp"))
def an_encoder_is_called_before_its_model(loop: Loop) -> None:
    model = loop.model(Classifier())
    with torch.no_grad():
        loop.see(mean=loop.mean(model.encoder(batch(loop)[0]).mean()))
    loss = model.encoder(batch(loop)[0]).square().mean()
    loss.backward()
    loop.see(of_part=loop.mean(loss))
    loss = model(*batch(loop))
    loss.backward()
    loop.see(loss=loop.mean(loss))
    loop.see_gradients(model)


@situation(EMBEDS, data=FORMS, slow=(1, "zero1", "fsdp"))
def parts_are_trained_before_the_model(loop: Loop) -> None:
    model = loop.model(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(5):
        x, y = batch(loop)
        loss = F.cross_entropy(model.head(model.encoder(x)), y) if step < 3 else model(x, y)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loop.see(loss=loop.mean(loss), norm=norm)
    loop.see_state(model)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, embeds: Tensor, labels: Tensor) -> Tensor:
        out = self.head(embeds + self.down(F.gelu(self.up(embeds))))
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())


@situation(EMBEDS)
def embeddings_are_computed_outside_of_the_model(loop: Loop) -> None:
    model = loop.model(Language())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        ids = torch.randint(0, 20, (4, 5))
        loss = model(model.embed(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.see(loss=loss)
    loop.see_state(model)
