"""Tokens that travel to the ranks of their experts: one rank against the plain formula, several against the simulator's; how
many kernels that takes; gradients, sums of rows as a kernel.

Covers: kernels/experts/dispatch_rows.py, sum_rows.py, sum_rows_triton.py, zero_tail_triton.py. Processes: test_on_ranks.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, run_as_script
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.checks.simulate import EXCHANGES
from megafx.kernels.common.op import computes
from megafx.kernels.experts import dispatch_rows as moves
from megafx.kernels.experts import group_rows as _defines_the_ops  # noqa: F401
from megafx.kernels.experts import sum_rows as sums
from megafx.ops.axes import AxisContext, on_mesh

ops = torch.ops.megafx
IDS = torch.tensor([3, 0, 3, 1, 0, 3, 2, 2, 1, 0])  # two choices of five tokens
EXPERTS, CHOICES = 4, 2


def way(ids: torch.Tensor = IDS) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Of one rank that has all experts -> (order, ends, counts, received), what its exchanges have in common."""
    order, ends = ops.group_order(ids, EXPERTS), ops.group_ends(ids, EXPERTS)
    with on_mesh({"ep": AxisContext(0, 1)}):
        places = ops.places_of(ids, CHOICES, EXPERTS, 1)
        counts = ops.counts_sent(ends, places, EXPERTS)
        received = ops.count_received(counts, "ep")
        sizes = ops.exchange_sizes(counts, received)
        rows = ops.received_rows(order, "u0", ids, places, counts, received, sizes, CHOICES, "ep")
    table = ops.rows_of_tokens(rows, "a0", sizes, CHOICES)
    return (order, ends, counts, received), (places, ops.tokens_sent(places), sizes, rows, table, CHOICES)


def test_one_rank_sends_to_itself() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    (order, *_), at = way()
    places, sent, sizes, rows, table, _ = at
    assert places.tolist() == [[0], [1], [2], [3], [4]] and sizes.tolist() == [[10], [5], [10], [5]]
    assert sent[:5].tolist() == [0, 1, 2, 3, 4] and torch.equal(rows, order)
    assert torch.equal(rows[table.flatten()], torch.arange(10))
    arrived = ops.dispatch_rows(x, *at, False, "ep")
    assert torch.equal(arrived, ops.group_rows(x, order, CHOICES))
    torch.testing.assert_close(ops.combine_rows(arrived, *at, False, "ep"), 2 * x)
    weights = torch.randn(10, 1, dtype=torch.float64)
    entries = ops.dispatch_rows(weights, *at, True, "ep")
    assert torch.equal(entries, weights[order])
    assert torch.equal(ops.combine_rows(entries, *at, True, "ep"), weights)


@pytest.mark.parametrize("entries", [False, True])
def test_each_is_the_others_gradient(entries: bool) -> None:
    _, at = way()
    x = torch.randn(10 if entries else 5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: ops.dispatch_rows(a, *at, entries, "ep"), (x,))
    assert torch.autograd.gradcheck(lambda a: ops.combine_rows(a, *at, entries, "ep"), (y,))


def test_rows_of_no_expert_travel_nowhere() -> None:
    ids = torch.tensor([4, 0, 4, 4])
    _, at = way(ids)
    assert at[2].tolist() == [[1], [1], [1], [1]] and at[0].tolist() == [[0], [-1]]
    x = torch.randn(2, 3, dtype=torch.float64)
    back = ops.combine_rows(ops.dispatch_rows(x, *at, False, "ep"), *at, False, "ep")
    assert torch.equal(back, torch.stack([x[0], torch.zeros(3, dtype=torch.float64)]))


def test_no_token_at_all() -> None:
    _, at = way(IDS[:0])
    assert ops.dispatch_rows(torch.randn(0, 3), *at, False, "ep").shape == (0, 3)
    assert ops.combine_rows(torch.randn(0, 3), *at, False, "ep").shape == (0, 3)
    assert ops.combine_rows(torch.randn(0, 3), *at, True, "ep").shape == (0, 3)


def test_what_the_simulator_says_of_one_rank() -> None:
    """Its definitions share nothing with the ops."""
    x, y = torch.randn(5, 3), torch.randn(10, 3)
    (order, _, counts, received), at = way()
    given = (order, "u0", IDS, at[0], counts, received, at[2], CHOICES, "ep")
    assert torch.equal(EXCHANGES[ops.received_rows.default]([given])[0], at[3])
    assert torch.equal(EXCHANGES[ops.count_received.default]([(counts, "ep")])[0], received)
    for op, value in ((ops.dispatch_rows.default, x), (ops.combine_rows.default, y)):
        call = (value, *at, False, "ep")
        torch.testing.assert_close(EXCHANGES[op]([call])[0], op(*call))


# -- several ranks, each a thread

Rank = Callable[[int], Any]
PER_RANK: dict[int, list[int]] = {2: [5, 3], 3: [4, 0, 6], 4: [3, 2, 1, 5]}  # tokens


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Rank], list[Any]]:
    """(ranks, what each does) -> what each gives; their exchanges are made by the lists of sizes alone."""

    def run(ranks: int, of: Rank) -> list[Any]:
        brought: list[Any] = [None] * ranks
        made: list[Any] = [None] * ranks
        mine, meet = threading.local(), threading.Barrier(ranks)

        def started(x: torch.Tensor, received: list[int], sent: list[int], axis: str) -> torch.Tensor:
            brought[mine.rank] = x.split(sent)
            meet.wait()
            arrived = torch.cat([parts[mine.rank] for parts in brought])
            assert [len(parts[mine.rank]) for parts in brought] == received
            meet.wait()
            return arrived

        def runs(rank: int) -> None:
            mine.rank = rank
            try:
                made[rank] = of(rank)
            except BaseException:
                meet.abort()
                raise

        monkeypatch.setattr(moves, "_started", started)
        threads = [threading.Thread(target=runs, args=(rank,)) for rank in range(ranks)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return made

    return run


def routed(how: str, tokens: int, experts: int) -> torch.Tensor:
    if how == "all to one":
        return torch.ones(tokens * CHOICES, dtype=torch.int64)
    ids = torch.randint(0, experts + (how == "some to none"), (tokens * CHOICES,))
    return torch.where(ids == experts, 2**30, ids)


@pytest.mark.parametrize("how", ["anywhere", "all to one", "some to none"])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 4), (3, 4), (3, 7), (4, 2)])  # divided, unevenly, fewer than ranks
def test_as_the_simulator_says_of_several_ranks(together: Any, ranks: int, experts: int, how: str) -> None:
    torch.manual_seed(ranks)
    here = -(-experts // ranks)
    ids = [routed(how, tokens, experts) for tokens in PER_RANK[ranks]]
    x = [torch.randn(tokens, 3, dtype=torch.float64) for tokens in PER_RANK[ranks]]
    weights = [torch.randn(len(i), 1, dtype=torch.float64) for i in ids]

    def of(rank: int) -> list[tuple[Any, tuple[Any, ...], torch.Tensor]]:
        calls: list[tuple[Any, tuple[Any, ...], torch.Tensor]] = []

        def call(op: Any, *args: Any) -> torch.Tensor:
            made = computes(op)(*args)  # type: ignore[misc]  # they are ops of ours
            calls.append((op, args, made))
            return made  # type: ignore[no-any-return]  # a Tensor

        mine = ids[rank]
        order, ends = ops.group_order(mine, experts), ops.group_ends(mine, experts)
        places = ops.places_of(mine, CHOICES, here, ranks)
        counts = ops.counts_sent(ends, places, here)
        received = call(ops.count_received.default, counts, "ep")
        sizes = ops.exchange_sizes(counts, received)
        given = (order, "u0", mine, places, counts, received, sizes, CHOICES, "ep")
        rows = call(ops.received_rows.default, *given)
        way = (places, ops.tokens_sent(places), sizes, rows, ops.rows_of_tokens(rows, "a0", sizes, CHOICES), CHOICES)
        arrived = call(ops.dispatch_rows.default, x[rank], *way, False, "ep")
        entries = call(ops.dispatch_rows.default, weights[rank], *way, True, "ep")
        call(ops.combine_rows.default, arrived * entries, *way, False, "ep")
        call(ops.combine_rows.default, entries, *way, True, "ep")
        return calls

    for calls in zip(*together(ranks, of), strict=True):
        wanted = EXCHANGES[calls[0][0]]([args for _, args, _ in calls])
        for (op, _, found), value in zip(calls, wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12, msg=lambda m, op=op: f"{op}: {m}")


# -- how many kernels


class Launches(TorchDispatchMode):
    """Ops that compute, those inside of the functions of our ops too; `sum_rows` and grouped products are one each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        with self:
            if func.namespace == "megafx" and name != "sum_rows":
                return computes(func)(*args)  # type: ignore[misc]  # an op of ours
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        result = func(*args, **(kwargs or {}))
        shows = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if not shows and not name.startswith(("new_empty", "empty", "scalar_tensor")) and name != "ones_like":
            self.names.append(name)
        return result


def launched(step: Callable[[], Any]) -> tuple[list[str], Any]:
    with Launches() as found:
        made = step()
    return found.names, made


def test_a_mixture_finds_the_places_of_rows_once() -> None:
    """Of one rank, whose exchanges are none: 55 kernels, forward and backward; 114 where each move found its rows."""
    tables, (_, at) = launched(way)
    grouping, _ = launched(lambda: (ops.group_order(IDS, EXPERTS), ops.group_ends(IDS, EXPERTS)))
    x, weights = torch.randn(5, 3, requires_grad=True), torch.randn(10, 1, requires_grad=True)
    there, arrived = launched(lambda: ops.dispatch_rows(x, *at, False, "ep"))
    own, entries = launched(lambda: ops.dispatch_rows(weights, *at, True, "ep"))
    home, _ = launched(lambda: ops.combine_rows(arrived.detach(), *at, False, "ep"))
    assert there == ["index", "floor_divide", "index"] and own == ["index", "index"]
    assert home == ["sum_rows", "sum_rows"]
    to_x, _ = launched(lambda: torch.autograd.grad(arrived.sum(), x)[0])
    to_weights, _ = launched(lambda: torch.autograd.grad(entries.sum(), weights)[0])
    moved = [name for name in (*to_x, *to_weights) if name != "sum"]
    assert moved == ["sum_rows", "sum_rows", "new_zeros", "index_copy_", "sum_rows"], moved
    grad, y = torch.ones(5, 3), arrived.detach().requires_grad_()
    to_rows, _ = launched(lambda: torch.autograd.grad(ops.combine_rows(y, *at, False, "ep"), y, grad)[0])
    assert to_rows == ["sum_rows", "sum_rows", *there]
    assert len(tables) - len(grouping) == 40, tables


def test_kernels() -> None:
    run_as_script(__file__, 120)


def compare_sums(dtype: torch.dtype) -> None:
    from megafx.kernels.experts import sum_rows_triton

    y, table = torch.randn(37, 70, device=DEVICE).to(dtype), torch.randint(-1, 37, (11, 3), device=DEVICE)
    wanted = torch.cat([y, y.new_zeros(1, 70)]).double()[table].sum(1)
    for found in (sums.sum_rows(y, table), sum_rows_triton.sum_rows(y, table)):
        torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    none = torch.full((2, 3), -1, device=DEVICE)
    assert not sum_rows_triton.sum_rows(y[:0], none).any() and not sums.sum_rows(y[:0], none).any()


def compare_tail(last: int) -> None:
    from megafx.kernels.experts.zero_tail_triton import zero_tail

    y = torch.randn(300, 1500, device=DEVICE)
    wanted = y.clone()
    wanted[last:] = 0
    zero_tail(y, torch.tensor([0, last], device=DEVICE))
    assert torch.equal(y, wanted)


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compare_sums(dtype)
    for last in (0, 5, 200, 300):
        compare_tail(last)
