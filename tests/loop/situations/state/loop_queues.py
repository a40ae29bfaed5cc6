"""Lists and deques that forward extends, takes items from, and reads: memory banks, moving windows."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

BANK = "https://github.com/facebookresearch/moco/issues/42"
WINDOW = "https://github.com/pytorch/pytorch/issues/93751"
Step = Callable[[Any, Tensor], Tensor]


class Queued(nn.Module):
    """use(model, y): what is done with the queue in each call, and what is made of it."""

    def __init__(self, queue: Any, use: Step) -> None:
        super().__init__()
        self.up, self.down, self.queue, self.use = nn.Linear(7, 12), nn.Linear(12, 5), queue, use

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.down(y + self.use(self, y)).square().mean()


def _train(loop: Loop, model: Any, sizes: tuple[int, ...] = (4,) * 6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in sizes:
        loss = model(torch.randn(rows, 7))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.see(loss=loss, queue=[*model.queue])
    loop.see_state(model)


def _popped(model: Any, y: Tensor) -> Tensor:
    model.queue.append(y.detach())
    if len(model.queue) > 3:
        model.queue.popleft() if isinstance(model.queue, collections.deque) else model.queue.pop(0)
    return torch.stack(list(model.queue)).mean(0)


def _limited(model: Any, y: Tensor) -> Tensor:
    past = torch.stack([*model.queue]).mean(0) if model.queue else torch.zeros_like(y)
    model.queue.append(y.detach())
    return past


@situation(BANK)
def a_window_of_the_last_calls_is_kept_in_a_deque(loop: Loop) -> None:
    _train(loop, loop.model(Queued(collections.deque(), _popped)))


@situation(BANK, like="a_window_of_the_last_calls_is_kept_in_a_deque")
def a_window_of_the_last_calls_is_kept_in_a_list(loop: Loop) -> None:
    _train(loop, loop.model(Queued([], _popped)))


@situation(WINDOW)
def a_deque_with_a_greatest_length_is_read_before_it_is_extended(loop: Loop) -> None:
    _train(loop, loop.model(Queued(collections.deque(maxlen=3), _limited)))


def _rings(model: Any, y: Tensor) -> Tensor:
    model.queue.rotate(1)
    model.queue.appendleft(y.mean(0).detach())
    return sum(model.queue) / len(model.queue)


def _pairs(model: Any, y: Tensor) -> Tensor:
    model.queue.append((y.detach().sum(), {"count": len(y), "mean": y.detach().mean()}))
    del model.queue[:-2]
    return sum(a + b["mean"] * b["count"] for a, b in model.queue)


def _numbers(model: Any, y: Tensor) -> Tensor:
    scale = sum(model.queue) / len(model.queue) if model.queue else 1.0
    model.queue.append(y.norm().item())
    if len(model.queue) > 2:
        model.queue.pop(0)
    return y / scale


def _learned(model: Any, y: Tensor) -> Tensor:
    out = y
    for past in model.queue:
        out = out + past.detach()
    model.queue.insert(0, y)
    while len(model.queue) > 2:
        model.queue.pop()
    return out


def _sliced(model: Any, y: Tensor) -> Tensor:
    model.queue.append(y.detach())
    model.queue = model.queue[-2:]
    return torch.cat(model.queue, 1).mean(1, keepdim=True)


def _chosen(model: Any, y: Tensor) -> Tensor:
    model.queue.append(y.mean(0).detach())
    model.queue.reverse()
    return torch.stack(list(itertools.islice(model.queue, 2))).sum(0)


@situation(BANK, slow=(2,))
def queues_are_turned_cut_and_filled_with_pairs_and_numbers(loop: Loop) -> None:
    uses: list[tuple[Any, Step]] = [(collections.deque(maxlen=3), _rings), ([], _pairs), ([], _numbers), ([], _learned)]
    uses += [([], _sliced), ([], _chosen)]
    for queue, use in uses:
        torch.manual_seed(0)
        _train(loop, loop.model(Queued(queue, use)))


@situation(WINDOW, slow=(2,))
def batches_of_other_sizes_are_in_a_queue(loop: Loop) -> None:
    def use(model: Any, y: Tensor) -> Tensor:
        bank = torch.cat([*model.queue, y.detach()])
        model.queue.append(y.detach())
        return (y @ bank.T).softmax(-1) @ bank

    _train(loop, loop.model(Queued(collections.deque(maxlen=2), use)), (4, 4, 3, 4, 1, 4))


@situation(WINDOW)
def one_queue_is_that_of_all_blocks(loop: Loop) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue: Any = collections.deque(maxlen=3)
            self.blocks = nn.ModuleList(Queued(self.queue, _limited) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x) + self.blocks[1](x)

    _train(loop, loop.model(Blocks()))
