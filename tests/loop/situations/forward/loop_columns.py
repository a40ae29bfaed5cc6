"""Columns of embedded tokens that are picked, permuted and written: ops whose arguments name dims."""

from __future__ import annotations

from collections.abc import Callable

import torch
from loop import Loop, situation
from torch import Tensor, nn

SOURCE = "https://github.com/pytorch/pytorch/issues/123298"
PERM = torch.tensor([3, 1, 4, 7, 5, 0, 2, 6])
Change = Callable[[Tensor], Tensor]


class Columns(nn.Module):
    """An embedding, `change` of its columns, a norm and two linears."""

    def __init__(self, *changes: Change) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.changes = changes
        self.register_buffer("perm", PERM.clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for change in self.changes:
            x = change(x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


def run(loop: Loop, *changes: Change) -> None:
    model = loop.model(Columns(*changes))
    y = model(torch.randint(11, (3, 5)))
    (y * torch.randn(3, 5, 8)).sum().backward()
    loop.see(y=y)
    loop.see_gradients(model)


@situation(SOURCE, slow=(1,))
def columns_are_permuted(loop: Loop) -> None:
    run(loop, lambda x: x[..., PERM], lambda x: x[:, :, PERM[:3].repeat(3)[:8]])


@situation(SOURCE, like="columns_are_written")
def columns_are_selected_and_gathered(loop: Loop) -> None:
    run(
        loop,
        lambda x: torch.index_select(x, -1, PERM),
        lambda x: torch.gather(x, 2, PERM.expand(x.shape)),
        lambda x: torch.take_along_dim(x, PERM[None, None], dim=-1),
    )


@situation(SOURCE)
def columns_are_written(loop: Loop) -> None:
    def written(x: Tensor) -> Tensor:
        x = x * 1.5
        x[..., PERM[:4]] = x[..., PERM[4:]] * 2
        return x

    run(
        loop,
        written,
        lambda x: x.index_put((torch.arange(3)[:, None], torch.tensor([0, 2])), x.new_ones(3, 2, 8), accumulate=True),
        lambda x: x.scatter(-1, PERM[:4].expand(*x.shape[:2], 4), x[..., 4:]),
        lambda x: x.index_add(2, PERM[:2], x[..., :2]),
    )


@situation(SOURCE, like="columns_are_permuted")
def tokens_and_columns_are_turned(loop: Loop) -> None:
    run(
        loop,
        lambda x: x.flip(-1).roll(2, -1),
        lambda x: x[torch.tensor([2, 0, 1])][:, torch.tensor([4, 3, 2, 1, 0])],
        lambda x: x[torch.tensor([0, 1, 2])[:, None, None], torch.arange(5)[:, None], PERM],
    )


class Counted(nn.Module):
    """Rows, tokens and columns by numbers in tensors that count from the end, of values that may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 12)
        self.table = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: Tensor, at: Tensor, some: Tensor) -> Tensor:
        h = self.down(self.up(x).sin())
        numbers = h[at] + h[:, at, :1].mean() + h[..., at].sum() + h[None, ..., 1, at].mean()
        columns = h[..., some] @ self.table[some] + h @ self.table[:, torch.tensor([-1, 0, 2])].repeat(1, 2)
        h = h.clone()
        h[:, :, some[:2]] = h[..., :2] * 3
        return numbers.sum() + columns.square().sum() + h.index_put((some[:1],), h.new_ones(())).square().mean()


@situation(SOURCE)
def numbers_in_tensors_count_from_the_end(loop: Loop) -> None:
    model = loop.model(Counted())
    for rows, at, some in ((4, -1, [-1, 2, -5]), (6, 3, [0, -4, -12]), (4, -4, [1, -2, 0])):
        loss = model(torch.randn(rows, 6, 7), torch.tensor(at), torch.tensor(some).clamp(min=-rows))
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)
    x, some = torch.randn(4, 6, 7), torch.tensor([-1, 2, 1])
    loop.see_error(lambda: model(x, torch.tensor(-1), torch.tensor([13, 0, 1])))
    loop.see(after=model(x, torch.tensor(-1), some))
