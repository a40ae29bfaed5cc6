"""Models that write into memory, or read it as it lies: in-place ops, views by storage, strides. At fp64 against eager.

Covers: passes/canonicalize/inplace.py, passes/canonicalize/views.py, passes/backward/functional.py and `_free_of_strides`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import compare
from harness import RTOL
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import CaptureError

F64 = torch.float64


def rotated(x: Tensor) -> Tensor:
    """An empty tensor, every other element of which is written at a time."""
    y = torch.empty_like(x)
    y[..., 0::2], y[..., 1::2] = x[..., 1::2], -x[..., 0::2]
    return y


def clipped(x: Tensor) -> Tensor:
    w = x * 3
    w[w > 2] = 2.0
    return w


def rows_by_mask(x: Tensor) -> Tensor:
    """What is written has the trailing dims alone."""
    y = x * 1
    y[y[:, 0] > 0] = torch.arange(x.shape[1], dtype=x.dtype)
    return y


def added_by_mask(x: Tensor) -> Tensor:
    y = x * 1
    return y.index_put_((y > 0,), torch.tensor(2.0, dtype=x.dtype), accumulate=True)


def mask_and_index(x: Tensor) -> Tensor:
    y = x * 1
    y[y[:, 0] > 0, torch.tensor([1])] = 3.0
    return y


def filled(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 2:6].masked_fill_(y[:, 2:6] > 1, 0.5)
    return y


def copied(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2].copy_(x[:, ::2])
    y.t()[1::2] = x.t()[1::2] * 2
    return y


def halves(x: Tensor) -> Tensor:
    """Parts of hsplit and tensor_split are views that may be written, unlike those of split."""
    y = x * 1
    y.hsplit(2)[0].mul_(2)
    y.tensor_split(3, 1)[1].zero_()
    y.vsplit(2)[0].add_(1)
    return y


WRITES: list[Callable[[Tensor], Tensor]] = [
    rotated, clipped, rows_by_mask, added_by_mask, mask_and_index, filled, copied, halves,
]  # fmt: skip

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "of rows": lambda x: x.as_strided((4, 4), (8, 2)),
    "overlapping": lambda x: x.as_strided((6, 4), (5, 1), 1),
    "of a transpose": lambda x: x.t().as_strided((4, 4), (8, 2)),
    "of what follows a transpose": lambda x: torch.relu(x.t()).as_strided((4, 4), (8, 2)),
    "of a copy": lambda x: x.t().contiguous().as_strided((4, 4), (8, 2)),
    "of a part": lambda x: x[1:].as_strided((2, 4), (8, 2)),
    "copied view": lambda x: torch.view_copy(x, [8, 4]),
    # torch 2.11 traces rows, the kernel writes columns
    "of a transform": lambda x: torch.view_as_real(torch.fft.fft(x, dim=0)).reshape(16, 4),
}


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(6, 8), nn.Linear(width, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x))).square().sum()


def check(model: nn.Module, x: Tensor, t: int) -> None:
    off, _ = compare(model.double(), {"x": x}, t, promoted=False)
    worst = max(off, key=lambda name: off[name])
    assert len(off) > 4 and off[worst] <= RTOL, f"{worst} is off by {off[worst]:.1e}"


@pytest.mark.parametrize("t", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", WRITES, ids=lambda f: f.__name__)
def test_writes(function: Callable[[Tensor], Tensor], t: int) -> None:
    check(Between(function), torch.randn(4, 6, dtype=F64), t)


@pytest.mark.parametrize("name", READS)
def test_reads_of_memory(name: str) -> None:
    """A transition may lay a value out in another way than eager does."""
    function = READS[name]
    check(Between(function, width=4), torch.randn(4, 6, dtype=F64), 2)


def test_what_cannot_be_a_value_is_refused() -> None:
    def through_einsum(x: Tensor) -> Tensor:
        y = x * 1
        torch.einsum("ij->ji", y)[0].mul_(2.0)  # its result is a view, which its schema does not say
        return y

    with pytest.raises(CaptureError, match="writes into a view made by aten.einsum"):
        check(Between(through_einsum), torch.randn(4, 6, dtype=F64), 2)
    # eager writes so into what lies otherwise only where that has no gradient
    scattered = Between(lambda x: x.detach().t().as_strided_scatter(x[:, :4], (4, 4), (4, 1)).t()).double()
    scattered(torch.randn(4, 6, dtype=F64))
    with pytest.raises(CaptureError, match="does not fill it densely"):
        check(scattered, torch.randn(4, 6, dtype=F64), 2)


class Heads(nn.Module):
    """An activation of transposed heads: its gradient lies in memory as the kernel likes."""

    def __init__(self, function: Callable[[Tensor], Tensor], products: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o, self.function, self.products = nn.Linear(6, 12), nn.Linear(12, 6), function, products

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.function(self.q(x).view(b, s, 4, 3).transpose(1, 2))
        if self.products:
            y = y @ y.transpose(-1, -2) @ y
        return (x + self.o(y.transpose(1, 2).reshape(b, s, -1))).square().sum()


STRIDED: dict[str, tuple[Any, bool, int]] = {
    "elu": (F.elu, True, 2),
    "hardswish": (F.hardswish, True, 2),
    "softplus": (F.softplus, True, 3),
    "logit": (lambda x: torch.logit(x.sigmoid() * 0.9 + 0.01), True, 2),
    "log_softmax": (lambda x: F.log_softmax(x, -1), False, 3),
    "logsigmoid": (F.logsigmoid, False, 3),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_that_differ_from_the_traced_ones(name: str) -> None:
    function, products, t = STRIDED[name]
    check(Heads(function, products), torch.randn(2, 5, 6, dtype=F64), t)
