"""Covers: passes/lower/reuse_buffers.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import fx, nn

import megafx
from megafx.compiler.executable import Executable
from megafx.passes.lower.reuse_buffers import write_in_place

aten = torch.ops.aten


A, X, W = torch.randn(5, 3), torch.randn(5, 4), torch.randn(4, 3)


def graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    return local_program(lambda a, x, w: (function(a, x, w),), {"a": A, "x": X, "w": W}).gm


def in_place(gm: fx.GraphModule, given: tuple[str, ...] = ()) -> int:
    return sum(n.target is aten.addmm_.default for n in write_in_place(gm, given)[0].graph.nodes)


def test_a_value_that_nobody_reads_again_is_overwritten() -> None:
    gm = graph_of(lambda a, x, w: torch.addmm(a.sin().view(5, 3), x, w))
    made = write_in_place(gm)[0]
    assert in_place(gm) == 1 and in_place(made) == 1
    torch.testing.assert_close(made(A, X, W)[0], A.sin() + X @ W)
    assert aten.addmm_.default not in [n.target for n in gm.graph.nodes]  # the graph given is left as it is


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x, w: torch.addmm(a, x, w),  # the caller's
        lambda a, x, w: (lambda s: torch.addmm(s, x, w) + s.view(-1).sum())(a.sin()),  # read again through a view
        lambda a, x, w: (lambda s: torch.addmm(s, x, s[:4]))(a.sin()),  # read by the product too
        lambda a, x, w: torch.addmm(a[0].sin(), x, w),  # a row, broadcast
        lambda a, x, w: torch.addmm(a.t().contiguous().sin().t(), x, w),  # strided
        lambda a, x, w: torch.cat([torch.addmm(s := a.sin(), x, w), s]),  # a result too
    ],
)
def test_memory_that_is_read_by_others_is_not(function: Callable[..., Any]) -> None:
    gm = graph_of(function)
    assert any(n.target is aten.addmm.default for n in gm.graph.nodes) and in_place(gm) == 0


def test_values_kept_for_this_graph_may_be_overwritten() -> None:
    gm = graph_of(lambda a, x, w: torch.addmm(a, x, w))
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    assert in_place(gm, (names[0],)) == 1 and in_place(gm, (names[1],)) == 0


class Twice(nn.Module):
    """The gradient of h is a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).tanh()
        return (self.a(h) * self.b(h)).sum()


def test_backward_twice_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    seen: list[Executable] = []
    made = Executable.__init__
    monkeypatch.setattr(Executable, "__init__", lambda self, *a, **k: (made(self, *a, **k), seen.append(self))[0])
    model, x = Twice().double(), torch.randn(5, 4).double()
    want = torch.autograd.grad(model(x), list(model.parameters()))
    model = megafx.parallelize(model, example_inputs=(x,))
    loss = model(x)
    for retain in (True, True, False):
        got = torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-14)
    code = seen[-1]._last_backward.__self__.code  # type: ignore[union-attr]
    assert "addmm_.default" in code and "addmm_.default" not in seen[-1].parts.backward.code  # type: ignore[union-attr]
