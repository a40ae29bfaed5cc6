"""Exceptions that the model's own code raises arrive as in eager mode: type and message, also in a later call."""

from __future__ import annotations

import functools
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


def _backward(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


class Counts(nn.Module):
    """Counts, keeps a list and calls hooks before it raises in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.calls, self.seen = 0, list[Tensor]()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach().mean())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        h = self.up(x)
        if self.calls == 2:
            raise TooLong(f"call {self.calls}")
        return self.down(h.relu()).square().mean()


@situation("https://github.com/Lightning-AI/pytorch-lightning/issues/9580")
def a_loop_goes_on_after_an_error(loop: Loop) -> None:
    """What forward and hooks have done before the error counts, so that the next call does not raise again."""
    model, calls = Counts(), list[str]()
    model.up.register_forward_hook(lambda module, args, out: calls.append("up"))
    model = loop.model(model)
    for _ in range(4):
        x = torch.randn(5, 6)
        seen(loop, functools.partial(_backward, model, x))
        loop.see(calls=model.calls, kept=torch.stack(model.seen), hooks=list(calls), mean=model.mean)
    loop.see_gradients(model)


class Positive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.linear(x)
        raise TooLong("numbers above 0 are wanted")


@situation("https://github.com/Lightning-AI/pytorch-lightning/issues/9580")
def a_part_that_stays_eager_raises_for_some_data(loop: Loop) -> None:
    model = loop.model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), Positive()))
    for sign in (1, -1, 1):
        with torch.no_grad():
            model[2].bias.fill_(9.0 * sign)
        x = torch.randn(5, 6)
        seen(loop, functools.partial(_backward, model, x))
    loop.see_gradients(model)
