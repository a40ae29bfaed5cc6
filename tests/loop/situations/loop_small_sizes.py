"""Branches on sizes of one and of none: a last batch of one row, a decode step, an empty batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from loop import Loop, situation
from torch import nn

SPECIALIZED = "https://github.com/pytorch/pytorch/issues/133653"  # sizes of 0 and 1 are not those of other sizes


class Mixer(nn.Module):
    """x [batch, length, 8] -> whatever `head` makes of the hidden values [batch, length, 8]."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def _calls(loop: Loop, head: Callable[[torch.Tensor], torch.Tensor], *sizes: tuple[int, int]) -> None:
    model = loop.model(Mixer(head))
    for batch, length in sizes:
        out = model(torch.randn(batch, length, 8))
        out.square().sum().backward()
        loop.see(out=out)
    loop.see_gradients(model)


@situation(SPECIALIZED)
def a_branch_on_a_length_of_one(loop: Loop) -> None:
    def change(h: torch.Tensor) -> torch.Tensor:
        return h[:, 1:] - h[:, :-1] if h.shape[1] > 1 else 3 * h

    _calls(loop, change, (3, 5), (3, 1), (1, 5), (1, 1))


@situation("https://github.com/pytorch/pytorch/issues/150842")
def a_first_call_with_one_row(loop: Loop) -> None:
    _calls(loop, lambda h: h * 2 if h.shape[0] == 1 else h, (1, 4), (3, 4), (1, 6))


@situation("https://github.com/pytorch/pytorch/pull/170264")
def squeeze_takes_the_batch_away_where_it_is_one_row(loop: Loop) -> None:
    _calls(loop, lambda h: h.mean(1).squeeze().cumsum(0), (3, 5), (1, 5))


@situation(SPECIALIZED)
def an_even_length(loop: Loop) -> None:
    _calls(loop, lambda h: h if h.shape[1] % 2 == 0 else -h, (3, 4), (3, 1), (2, 3))


@situation(SPECIALIZED, slow=(2,))
def a_deviation_that_needs_two_tokens(loop: Loop) -> None:
    _calls(loop, lambda h: h / (1 + h.std(1, keepdim=True)) if h.size(1) > 1 else h, (3, 5), (3, 1))


@situation(SPECIALIZED, slow=(2,))
def an_empty_batch(loop: Loop) -> None:
    _calls(loop, lambda h: h.sum() if h.size(0) == 0 else h * 2, (3, 5), (0, 5), (1, 5))


@situation(SPECIALIZED, slow=(2,))
def scales_are_looked_up_by_length(loop: Loop) -> None:
    scales = {1: 2.0, 4: 0.5}
    _calls(loop, lambda h: h * scales.get(h.shape[1], 1.0), (3, 4), (3, 1), (3, 5))
