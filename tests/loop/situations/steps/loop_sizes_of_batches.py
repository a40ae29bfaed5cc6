"""Code that makes numbers of the batch's size: of all rows, also where each data-parallel rank has some of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import MegafxError

FORMS = ("ddp", "zero1", "fsdp")
BATCH = "https://github.com/huggingface/transformers/issues/34198"
Of = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """of: (the model, rows, labels) -> a loss."""

    def __init__(self, of: Of) -> None:
        super().__init__()
        self.up, self.down, self.of = nn.Linear(7, 12), nn.Linear(12, 5), of

    def logits(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of(self, x, y)


def train(loop: Loop, of: Of, rows: tuple[int, ...] = (6, 4, 8)) -> None:
    model = loop.model(Net(of))
    for n in rows:
        model.zero_grad()
        loss = model(loop.rows(torch.randn(n, 7)), loop.rows(torch.randint(0, 5, (n,))))
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)


@situation(BATCH, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def a_loss_is_divided_by_len(loop: Loop) -> None:
    total: Of = lambda m, x, y: F.cross_entropy(m.logits(x), y, reduction="sum")
    train(loop, lambda m, x, y: total(m, x, y) / len(x))
    train(loop, lambda m, x, y: total(m, x, y) / max(int(x.size(0)), 1) + total(m, x, y) / float(len(y)))
    train(loop, lambda m, x, y: total(m, x / math.sqrt(len(x)), y) / math.sqrt(x.shape[0]))
    train(loop, lambda m, x, y: -F.log_softmax(m.logits(x), -1)[torch.arange(len(x)), y].sum() / len(y))
    train(loop, lambda m, x, y: total(m, x, y) / (round(x.shape[0] * 0.7) + 1))


@situation(BATCH, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def code_decides_by_the_size_of_the_batch(loop: Loop) -> None:
    def by_size(m: Net, x: Tensor, y: Tensor) -> Tensor:
        x = x * 1.5 if x.shape[0] > 4 else x
        x = x + 1 if len(x) % 4 == 0 else x
        return F.cross_entropy(m.logits(x), y) * (2.5 if x.size(0) >= 8 else 1.5)

    train(loop, by_size, (6, 4, 8, 2, 12))


@situation("https://github.com/pytorch/pytorch/issues/93460", slow=(2,))
def weights_of_means_are_made_of_sizes(loop: Loop) -> None:
    """What a gradient takes a number of: refused, and with a plain number as in eager mode."""
    if not loop.eager:
        for of in (
            lambda m, x, y: m.up(x).exp().pow(1 / x.shape[0]).mean(),
            lambda m, x, y: F.celu(m.up(x), 1.0 * x.shape[0]).mean(),
        ):
            with pytest.raises(MegafxError, match="fixes the sizes .* to the traced ones, at aten") as error:
                loop.model(Net(of))(torch.randn(6, 7), torch.zeros(6, dtype=torch.long)).backward()
            assert "a plain number, int(x.shape[0])" in error.value.fix
    torch.manual_seed(0)
    train(loop, lambda m, x, y: torch.lerp(m.up(x), x[:, :1], 1 / x.shape[0]).mean())
    train(loop, lambda m, x, y: m.up(x).exp().pow(1 / int(x.shape[0])).mean())
    train(loop, lambda m, x, y: F.celu(m.up(x), 1.0 * int(x.shape[0])).mean())


def margin(m: Net, x: Tensor, y: Tensor, fill: Callable[[Tensor], Tensor], accumulate: bool = False) -> Tensor:
    logits = m.logits(x).clone()
    logits.index_put_((torch.arange(x.shape[0]), y), fill(logits), accumulate=accumulate)
    return logits.sin().mean()


@situation("https://github.com/ronghuaiyang/arcface-pytorch/issues/24", data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def margins_are_written_into_logits(loop: Loop) -> None:
    """One number in each row, by torch.arange of the rows and labels (also counted from the end)."""

    def taken_off(m: Net, x: Tensor, y: Tensor) -> Tensor:
        logits = m.logits(x)
        logits[torch.arange(len(x)), y] -= 0.35
        return F.cross_entropy(logits * 4, y)

    train(loop, taken_off)
    train(loop, lambda m, x, y: margin(m, x, y - 5, lambda h: torch.tensor(-3.0)))
    train(loop, lambda m, x, y: margin(m, x, y, lambda h: h.tanh().mean(1)))
    train(loop, lambda m, x, y: margin(m, x, y, lambda h: h.tanh().mean(1), accumulate=True))


@situation(BATCH, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def sizes_that_forward_leaves_or_returns_are_those_of_all_rows(loop: Loop) -> None:
    class Counted(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            total = self.logits(x).sum() * getattr(self, "before", 1)
            self.before, self.share = len(x), 1 / len(x)
            return total, len(y), {"rows": x.shape[0]}

    model = loop.model(Counted(lambda m, x, y: x))
    for n in (6, 4, 6):
        loss, *sizes = model(loop.rows(torch.randn(n, 7)), loop.rows(torch.zeros(n)))
        loss.backward()
        loop.see(loss=loss, sizes=sizes, before=model.before, share=model.share)
    loop.see_gradients(model)


@situation(BATCH, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def functions_of_the_size_of_the_batch_are_those_of_all_rows(loop: Loop) -> None:
    entropy: Of = lambda m, x, y: F.cross_entropy(m.logits(x), y)
    train(loop, lambda m, x, y: entropy(m, x, y) / math.log(x.shape[0]), (6, 4, 6))
    train(loop, lambda m, x, y: entropy(m, x, y) * math.exp(-len(x) / 10) / math.log2(y.size(0)), (6, 4, 6))
    train(loop, lambda m, x, y: entropy(m, x, y) * sum(1 / (i + 1) for i in range(len(x))), (6, 4, 6))
    train(loop, lambda m, x, y: entropy(m, x, y) * {6: 1.5, 4: 2.5}[len(x)], (6, 4, 6))
    train(loop, lambda m, x, y: entropy(m, x, y) * (2.0 if len(x) == 6 or x.shape[0] in (1, 4) else 3.0), (6, 4, 8))


@situation(BATCH, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def texts_and_keys_of_the_size_of_the_batch_are_those_of_all_rows(loop: Loop) -> None:
    class Named(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, x, y: F.cross_entropy(m.logits(x), y))
            self.seen: dict[object, int] = {}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.name = f"a step of {len(x)} rows, {tuple(x.shape)}"
            for key in (f"rows {x.shape[0]}", x.shape[0]):
                self.seen[key] = self.seen.get(key, 0) + 1
            return super().forward(x, y) * self.seen[len(x)]

    model = loop.model(Named())
    for n in (6, 4, 6):
        loss = model(loop.rows(torch.randn(n, 7)), loop.rows(torch.randint(0, 5, (n,))))
        loss.backward()
        loop.see(loss=loop.mean(loss), name=model.name, seen={str(key): n for key, n in model.seen.items()})
    loop.see_gradients(model)
