"""Exceptions that the model's own code raises arrive as in eager mode: type and message, also in a later call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

EITHER = "https://github.com/huggingface/transformers/issues/24310"
LONG = "https://github.com/karpathy/nanoGPT/issues/320"


class TooLong(ValueError):
    """The model's own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.limit = nn.Embedding(11, 6), nn.Linear(6, 11), 8
        self.scales = {"half": 0.5, "one": 1.0}

    def forward(
        self, ids: Tensor | None = None, embeds: Tensor | None = None, scale: str = "one", labels: Tensor | None = None
    ) -> Tensor:
        if (ids is None) == (embeds is None):
            raise ValueError("You must specify exactly one of ids or embeds")
        x = embeds if ids is None else self.embed(ids)
        assert x is not None and x.dim() == 3, f"three dims are needed, and there are {x.dim()}"
        if x.shape[1] > self.limit:
            raise TooLong(f"a sequence of {x.shape[1]} tokens, and the longest is {self.limit}")
        out = self.head(x * self.scales[scale]).flatten(0, 1)
        return F.cross_entropy(out, out.argmax(-1) if labels is None else labels)


def seen(loop: Loop, call: Callable[[], Any]) -> None:
    """The type and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        loop.see(error=f"{type(error).__name__}: {error}")
    else:
        loop.see(error=None)


@situation(EITHER)
def the_first_call_is_wrong(loop: Loop) -> None:
    model = loop.model(Net())
    seen(loop, lambda: model())
    seen(loop, lambda: model(torch.randint(11, (2, 9))))
    loss = model(torch.randint(11, (2, 5)))
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation(LONG)
def a_later_call_is_wrong(loop: Loop) -> None:
    model = loop.model(Net())
    for size in (5, 9, 10, 6):
        seen(loop, lambda size=size: model(torch.randint(11, (2, size))).backward())  # type: ignore[misc]  # a default for size
    seen(loop, lambda: model(torch.randint(11, (2, 5)), scale="two"))
    seen(loop, lambda: model(torch.randint(11, (2, 5)), scale="half"))
    seen(loop, lambda: model(torch.randint(11, (2, 5)), torch.randn(2, 5, 6)))
    seen(loop, lambda: model(embeds=torch.randn(2, 6)))
    seen(loop, lambda: model(torch.randint(11, (2, 5)), labels=torch.zeros(3, dtype=torch.long)))
    loop.see_gradients(model)
