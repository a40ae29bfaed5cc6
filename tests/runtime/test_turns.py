"""Threads that call one model: while one of them captures it, its parameters are fakes."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import megafx

X = torch.randn(4, 6, dtype=torch.float64)


class Slow(nn.Module):
    """Python that takes a while: other threads come to their calls while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        for _ in range(2_000_000):
            pass
        return self.down(hidden.tanh())


def test_first_calls_of_several_threads() -> None:
    model = Slow().double()
    wanted = [model(X * k).detach() for k in range(4)]
    model, start = megafx.parallelize(model), threading.Barrier(4)

    def call(k: int) -> Tensor:
        start.wait()
        return model(X * k).detach()

    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(call, range(4)), wanted, strict=True):
            assert type(found) is Tensor
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_call_beside_a_capture() -> None:
    """A steady call beside one of other modes, which makes a graph."""
    model = Slow().double()
    plain = copy.deepcopy(model)
    model = megafx.parallelize(model, example_inputs=(X,))
    model(X)
    wanted, done = plain(X).detach(), threading.Event()

    def evaluate() -> None:
        with torch.no_grad():
            model(X)
        done.set()

    thread = threading.Thread(target=evaluate)
    thread.start()
    while not done.is_set():
        torch.testing.assert_close(model(X).detach(), wanted, rtol=1e-12, atol=0)
    thread.join()
