"""Models whose code reads numbers from tensors and computes with tensors of these sizes: one for each way of doing so.

Of each: calls with other numbers and sizes, which one graph serves, and a call that eager mode refuses or that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN = 8, 12


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.positions, self.qkv = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Split(Model):
    """A part for each image, of as many rows as a tensor says."""

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        parts = x.split(sizes.tolist())
        return torch.cat([self.mlp(part) * (1 + i) for i, part in enumerate(parts)]).square().sum()


class Parts(Model):
    """The parts are returned, too."""

    def forward(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        parts = self.mlp(x).split((sizes // 2).tolist())
        return sum(part.square().mean() for part in parts), parts


class Segments(Model):
    """Attention within each of the segments of one sequence."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        lengths = (ends[1:] - ends[:-1]).tolist()
        q, k, v = (each.split(lengths) for each in self.qkv(x).chunk(3, -1))
        found = [
            F.scaled_dot_product_attention(*(x[None, None] for x in each))[0, 0] for each in zip(q, k, v, strict=True)
        ]
        return self.mlp(torch.cat(found)).square().mean()


class Slices(Model):
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        at = ends.tolist()
        return sum(self.mlp(x[at[i] : at[i + 1]]).square().sum() * (i + 1) for i in range(2))


class Longest(Model):
    """As long as the longest sequence, with positions and a mask of that length."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        n = lengths.max().item()
        places = torch.arange(n)
        seen = places < lengths[:, None]
        hidden = self.mlp(x[:, :n] + self.positions(places))
        return (hidden * seen[..., None]).square().sum(), seen


class Rest(Model):
    """Both sides of a place, and the number as a factor."""

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        k = place.item()
        return self.mlp(x[:, k:]).square().sum() + self.mlp(x[:, :k]).sum() * k


class Repeated(Model):
    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.mlp(torch.repeat_interleave(self.mlp(x), times, dim=0)).square().sum()


class RepeatedTo(Model):
    """As many rows as another input has."""

    def forward(self, x: Tensor, y: Tensor, times: Tensor) -> Tensor:
        return (self.mlp(x).repeat_interleave(times, 0) * y).square().sum()


class Selected(Model):
    """As many rows of the mask as another input has."""

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return (self.mlp(x[mask]) * y).square().sum()


class Grids(Model):
    """A grid for each image: the arange of its height and width."""

    def forward(self, x: Tensor, grids: Tensor) -> Tensor:
        found = []
        for h, w in grids.tolist():
            rows = torch.arange(h)[:, None].expand(h, w).reshape(-1)
            columns = torch.arange(w).repeat(h)
            found.append(self.positions(rows) + 2 * self.positions(columns))
        return self.mlp(x + torch.cat(found)).square().mean()


class Read(Model):
    """The number itself is returned as a tensor of its size, and unused otherwise."""

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        n = count.item()
        return self.mlp(x).square().mean(), x.new_full((n, 2), 0.5)


@dataclass(frozen=True)
class Case:
    model: type[Model]
    calls: list[tuple[Any, ...]]
    wrong: tuple[Any, ...]
    captures: int = 1  # where sizes of the calls differ that no batch or sequence is


def of(*numbers: Any) -> Tensor:
    return torch.tensor(numbers)


CASES = {
    "split": Case(
        Split,
        [(x_of(12, 8), of(3, 4, 5)), (x_of(12, 8), of(1, 0, 11)), (x_of(20, 8), of(10, 9, 1))],
        (x_of(12, 8), of(3, 3, 5)),
    ),
    "parts": Case(Parts, [(x_of(6, 8), of(6, 7)), (x_of(9, 8), of(16, 3))], (x_of(6, 8), of(6, 5))),
    "segments": Case(
        Segments, [(x_of(12, 8), of(0, 3, 7, 12)), (x_of(20, 8), of(0, 12, 13, 20))], (x_of(12, 8), of(0, 3, 7, 13))
    ),
    "slices": Case(Slices, [(x_of(12, 8), of(0, 5, 12)), (x_of(20, 8), of(3, 9, 11))], (x_of(12, 8), of(0, 5, 13))),
    "longest": Case(
        Longest,
        [(x_of(3, 9, 8), of(3, 9, 4)), (x_of(3, 9, 8), of(1, 1, 0)), (x_of(4, 19, 8), of(1, 19, 0, 2))],
        (x_of(3, 9, 8), of(3, 10, 4)),
    ),
    "rest": Case(Rest, [(x_of(3, 9, 8), of(4)[0]), (x_of(4, 11, 8), of(0)[0])], (x_of(3, 9, 8), of(-2)[0])),
    "repeated": Case(
        Repeated, [(x_of(3, 8), of(2, 1, 3)), (x_of(5, 8), of(1, 1, 0, 4, 0))], (x_of(3, 8), of(1, 1, -1))
    ),
    "repeated to": Case(
        RepeatedTo,
        [(x_of(3, 8), x_of(6, 8), of(2, 1, 3)), (x_of(4, 8), x_of(9, 8), of(2, 1, 3, 3))],
        (x_of(3, 8), x_of(6, 8), of(2, 1, 2)),
        captures=2,
    ),
    "selected": Case(
        Selected,
        [
            (x_of(5, 8), of(1, 0, 1, 1, 0).bool(), x_of(3, 8)),
            (x_of(9, 8), of(1, 1, 1, 1, 0, 0, 0, 0, 0).bool(), x_of(4, 8)),
        ],
        (x_of(5, 8), of(1, 0, 1, 1, 1).bool(), x_of(3, 8)),
        captures=2,
    ),
    "grids": Case(
        Grids,
        [(x_of(24, 8), of([4, 2], [4, 4])), (x_of(24, 8), of([2, 9], [1, 6])), (x_of(30, 8), of([2, 9], [3, 4]))],
        (x_of(24, 8), of([4, 2], [4, 5])),
        captures=2,
    ),
    "read": Case(Read, [(x_of(3, 8), of(4)[0]), (x_of(3, 8), of(0)[0])], (x_of(3, 8), of(-1)[0])),
}
