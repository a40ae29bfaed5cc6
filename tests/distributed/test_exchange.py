"""Covers: gathers and scatters through memory that ranks share, with copies that come as late as they may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megafx.distributed import exchange
from megafx.kernels.fp8.scaled_mm import scaled_mm

GROUP = "a test's ranks"


class Threads(exchange.Transport):
    """Ranks are threads. A copy is made when it is waited for: the latest that a copy engine may be."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self.shared = rank, size, shared

    def allocate(self, nbytes: int) -> list[Tensor]:
        self.barrier()
        if self.rank == 0:
            self.shared["memory"] = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(self.size)]
        self.barrier()
        return self.shared["memory"]

    def barrier(self) -> None:
        self.shared["barrier"].wait(timeout=20)

    def copy(self, pairs: Any) -> list[Any]:
        return [*pairs]

    def arrived(self, copy: Any) -> None:
        copy[0].copy_(copy[1])


def run(size: int, function: Callable[[int], Any]) -> list[Any]:
    """function(rank) on threads that share an exchange."""
    results: list[Any] = [None] * size
    shared: dict[str, Any] = {"barrier": threading.Barrier(size)}

    def one(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error
            shared["barrier"].abort()

    for rank in range(size):
        exchange.install(GROUP, Threads(rank, size, shared))
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        exchange.remove(GROUP)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def values(size: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("own", [True, False])
def test_gather_and_products(size, own):
    xs, (w, v, bias) = values(size, 3, 5), values(3, 5, 4, seed=1)
    whole = torch.cat(xs)

    def gather(rank: int) -> Any:
        found, y, z = exchange.gather_matmul(xs[rank], [(w, None), (v, bias[0])], GROUP, rank, own)
        started = exchange.gather_start(xs[rank], GROUP, rank, True)
        return found.clone(), y, z, exchange.gather_wait(started, GROUP, rank)

    for found, y, z, again in run(size, gather):
        assert torch.equal(found, whole) and torch.equal(again, whole)
        torch.testing.assert_close(y, whole @ w)
        torch.testing.assert_close(z, whole @ v + bias[0])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("each", [False, True])
def test_products_of_fp8(size, each):
    """Bytes are gathered and multiplied in pieces; with a scale for each row, rows of padding have none."""
    rows, missing = 3, 1
    whole = torch.randint(0, 119, (size * rows, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    right = torch.randint(0, 119, (4, 5), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scale = torch.rand([size * rows - missing] if each else [], dtype=torch.float64)
    columns = torch.rand([4] if each else [], dtype=torch.float64)
    operands = (right, scale, columns, "e4m3", "e4m3", torch.float64)
    real = whole[: size * rows - missing]
    wanted = scaled_mm(real, *operands)

    def both(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        found, y = exchange.gather_matmul(whole[rank * rows :][:rows], [operands], GROUP, rank, False)
        found = found.clone()
        begun = exchange.matmul_scatter_start(real, operands, [size * rows, 4], GROUP, rank)
        return found, y, exchange.scatter_wait(begun, GROUP, rank)

    for rank, (found, y, summed) in enumerate(run(size, both)):
        assert torch.equal(found, whole) and y.dtype == torch.float64
        torch.testing.assert_close(y[: len(wanted)], wanted)
        padded = torch.cat([size * wanted, torch.zeros(missing, 4, dtype=torch.float64)])
        torch.testing.assert_close(summed, padded[rank * rows :][:rows])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("missing", [0, 1, 4])
def test_products_and_scatter(size, missing):
    """Rows that are missing at the end are padding: one, or all of the last rank's and one of another's."""
    rows = 3
    lefts, rights = values(size, size * rows - missing, 5), values(size, 5, 4, seed=1)
    whole = torch.zeros(size * rows, 4, dtype=torch.float64)
    whole[: size * rows - missing] = sum(a @ b for a, b in zip(lefts, rights, strict=True))

    def scatter(rank: int) -> tuple[Tensor, Tensor]:
        begun = exchange.matmul_scatter_start(lefts[rank], (rights[rank], None), [size * rows, 4], GROUP, rank)
        first = exchange.scatter_wait(begun, GROUP, rank)
        padded = torch.zeros(size * rows, 4, dtype=torch.float64)
        padded[: lefts[rank].shape[0]] = lefts[rank] @ rights[rank]
        return first, exchange.scatter_wait(exchange.scatter_start(padded, GROUP, rank), GROUP, rank)

    for rank, found in enumerate(run(size, scatter)):
        for value in found:
            torch.testing.assert_close(value, whole[rank * rows : (rank + 1) * rows])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("own", [True, False])
def test_all_reduce(size, own):
    lefts, rights = values(size, size * 2 - 1, 5), values(size, 5, 4, seed=1)
    whole = sum(a @ b for a, b in zip(lefts, rights, strict=True))

    def reduce(rank: int) -> list[Tensor]:
        found = []
        for _ in range(4):
            begun = exchange.matmul_scatter_start(lefts[rank], (rights[rank], None), [size * 2, 4], GROUP, rank)
            begun = exchange.regather_start(begun, GROUP, rank, own)
            found.append(exchange.gather_wait(begun, GROUP, rank)[:-1].clone())
        begun = exchange.matmul_scatter_start(lefts[rank], (rights[rank], None), [size * 2, 4], GROUP, rank)
        other = exchange.gather_start(lefts[rank], GROUP, rank, True)  # ends the reduce-scatter
        begun = exchange.regather_start(begun, GROUP, rank, own)
        found.append(exchange.gather_wait(begun, GROUP, rank)[:-1].clone())
        assert torch.equal(exchange.gather_wait(other, GROUP, rank), torch.cat(lefts))
        return found

    for found in run(size, reduce):
        for value in found:
            torch.testing.assert_close(value, whole)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_made_in_the_slot(size):
    """They can be read until the third operation after theirs begins; larger ones are of other memory."""
    xs = values(size, 3, 5)

    def gather(rank: int) -> list[tuple[Tensor, Tensor]]:
        found, kept = [], None
        for step in range(8):
            shape = 3 + step // 4, 5
            rows = exchange.rows_of_next(torch.empty(shape), torch.float64, GROUP, rank)
            rows.copy_(xs[rank].new_full(shape, rank + 10 * step) if kept is None else kept[: shape[0]].new_ones(shape))
            if kept is not None:
                rows[:3] += kept[:3]
            kept = rows
            y = exchange.gather_wait(exchange.gather_start(rows, GROUP, rank, step % 2 == 0), GROUP, rank)
            if step % 3 == 0:
                exchange.scatter_wait(exchange.scatter_start(y * 2, GROUP, rank), GROUP, rank)
            found.append(y.view(size, *shape)[:, :3].clone())
        return found

    for found in run(size, gather):
        for step, y in enumerate(found):
            assert [float(y[r].unique()) for r in range(size)] == [r + step for r in range(size)]


def chain(size: int) -> tuple[list[Any], list[Tensor]]:
    """(what the ranks get, what they should): operations of all kinds and sizes, some begun before the last one ended."""
    xs = values(size, 2, 3)
    wide = values(size, size * 6, 3, seed=5)

    def several(rank: int) -> list[Tensor]:
        found = []
        for step in range(4):
            x = xs[rank] + step
            begun = exchange.gather_start(x, GROUP, rank, True)
            scattered = exchange.scatter_start(wide[rank] * (step + 1), GROUP, rank)
            found.append(exchange.gather_wait(begun, GROUP, rank))
            later = exchange.gather_start(x * 2, GROUP, rank, True)  # ends the scatter
            found.append(exchange.scatter_wait(scattered, GROUP, rank))
            found.append(exchange.gather_wait(later, GROUP, rank))
        return found

    def wanted(rank: int) -> list[Tensor]:
        found = []
        for step in range(4):
            whole = torch.cat([x + step for x in xs])
            found += [whole, sum(wide)[rank * 6 : (rank + 1) * 6] * (step + 1), whole * 2]
        return found

    return run(size, several), [wanted(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_operations_after_one_another(size):
    for found, wanted in zip(*chain(size), strict=True):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_one_slot_is_not_enough(monkeypatch):
    """The copies of these tests are late enough to see memory that is written too early."""
    monkeypatch.setattr(exchange, "SLOTS", 1)
    pairs = [pair for found, wanted in zip(*chain(2), strict=True) for pair in zip(found, wanted, strict=True)]
    assert not all(torch.allclose(a, b) for a, b in pairs)


def test_reasons():
    assert exchange.why_not("nobody's", 0) == "the ranks are not those of a process group"
