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


def way(ids: torch.Tensor = IDS, spare: int = 0) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Of one rank that has all experts -> (order, ends, counts, what arrives), what its exchanges have in common. spare: room
    for so many tokens and rows more than there are."""
    order, ends = ops.group_order(ids, EXPERTS), ops.group_ends(ids, EXPERTS)
    with on_mesh({"ep": AxisContext(0, 1)}):
        numbers = ops.tokens_to_ranks(ids, CHOICES, EXPERTS, 1)
        counts = ops.counts_sent(ends, numbers, EXPERTS)
        room = ops.room(ops.room_needed(counts, "ep"), 0) + spare
        places = ops.places_of(numbers, room)
        sent = ops.tokens_sent(places, "a0", room)
        arrived = ops.experts_received(ids, places, sent, CHOICES, EXPERTS, "ep")
    rows = ops.received_rows(arrived, "u0", room, EXPERTS)
    at = places, sent, rows, ops.rows_of_tokens(rows, arrived), CHOICES
    return (order, ends, counts, arrived), at


@pytest.mark.parametrize("spare", [0, 3])
def test_one_rank_sends_to_itself(spare: int) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    (order, ends, counts, arrived), at = way(spare=spare)
    places, sent, rows, table, _ = at
    assert places.tolist() == [[0], [1], [2], [3], [4]] and counts.tolist() == [[5, 10]]
    assert sent.tolist() == [0, 1, 2, 3, 4] + [-1] * spare and torch.equal(rows[:10], order)
    assert rows[10:].tolist() == [-1] * spare and torch.equal(ops.ends_received(arrived, rows, EXPERTS), ends)
    assert torch.equal(rows[table.flatten()][:10], torch.arange(10)) and (table[5:] == -1).all()
    there = ops.dispatch_rows(x, *at, False, "ep")
    assert torch.equal(there[:10], ops.group_rows(x, order, CHOICES)) and not there[10:].any()
    torch.testing.assert_close(ops.combine_rows(there, *at, False, "ep"), 2 * x)
    weights = torch.randn(10, 1, dtype=torch.float64)
    entries = ops.dispatch_rows(weights, *at, True, "ep")
    assert torch.equal(entries[:10], weights[order]) and not entries[10:].any()
    assert torch.equal(ops.combine_rows(entries, *at, True, "ep"), weights)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("entries", [False, True])
def test_each_is_the_others_gradient(entries: bool, spare: int) -> None:
    _, at = way(spare=spare)
    x = torch.randn(10 if entries else 5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(10 + spare, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: ops.dispatch_rows(a, *at, entries, "ep"), (x,))
    assert torch.autograd.gradcheck(lambda a: ops.combine_rows(a, *at, entries, "ep"), (y,))


def test_rows_of_no_expert_travel_nowhere() -> None:
    ids = torch.tensor([4, 0, 4, 4])
    (_, _, counts, _), at = way(ids)
    assert counts.tolist() == [[1, 1]] and at[0].tolist() == [[0], [-1]]
    x = torch.randn(2, 3, dtype=torch.float64)
    back = ops.combine_rows(ops.dispatch_rows(x, *at, False, "ep"), *at, False, "ep")
    assert torch.equal(back, torch.stack([x[0], torch.zeros(3, dtype=torch.float64)]))


def test_no_token_at_all() -> None:
    _, at = way(IDS[:0])
    assert ops.dispatch_rows(torch.randn(0, 3), *at, False, "ep").shape == (0, 3)
    assert ops.combine_rows(torch.randn(0, 3), *at, False, "ep").shape == (0, 3)
    assert ops.combine_rows(torch.randn(0, 3), *at, True, "ep").shape == (0, 3)


def test_one_expert_counts_the_rows_of_no_other() -> None:
    assert ops.group_ends(torch.tensor([0, 1, 0, 2, 1]), 1).tolist() == [2]


def test_too_little_room_keeps_to_its_memory() -> None:
    """The call runs once more; until then indices stay inside."""
    _, at = way(spare=-3)
    assert at[1].tolist() == [0, 1] and at[2].tolist()[-1] == -1 and at[0].tolist() == [[0], [1], [-1], [-1], [-1]]


def test_what_the_simulator_says_of_one_rank() -> None:
    """Its definitions share nothing with the ops."""
    x = torch.randn(5, 3)
    (_, _, counts, arrived), at = way(spare=2)
    y = torch.randn(len(at[2]), 3)
    received = EXCHANGES[ops.experts_received.default]([(IDS, at[0], at[1], CHOICES, EXPERTS, "ep")])
    assert torch.equal(received[0], arrived.clamp(max=EXPERTS))
    assert torch.equal(EXCHANGES[ops.room_needed.default]([(counts, "ep")])[0], counts[None])
    for op, value in ((ops.dispatch_rows.default, x), (ops.combine_rows.default, y)):
        call = (value, *at, False, "ep")
        torch.testing.assert_close(EXCHANGES[op]([call])[0], op(*call))


# -- several ranks, each a thread

Rank = Callable[[int], Any]
PER_RANK: dict[int, list[int]] = {2: [5, 3], 3: [4, 0, 6], 4: [3, 2, 1, 5]}  # tokens


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Rank], list[Any]]:
    """(ranks, what each does) -> what each gives; their exchanges are cut into equal parts."""

    def run(ranks: int, of: Rank) -> list[Any]:
        brought: list[Any] = [None] * ranks
        made: list[Any] = [None] * ranks
        mine, meet = threading.local(), threading.Barrier(ranks)

        def meeting(x: torch.Tensor) -> list[torch.Tensor]:
            brought[mine.rank] = x
            meet.wait()
            every = [*brought]
            meet.wait()
            return every

        def started(x: torch.Tensor, ranks: int, axis: str) -> torch.Tensor:
            return torch.cat([parts.view(ranks, -1, *parts.shape[1:])[mine.rank] for parts in meeting(x)])

        def gathered(x: torch.Tensor, axis: str) -> torch.Tensor:
            return torch.stack(meeting(x))

        def runs(rank: int) -> None:
            mine.rank = rank
            try:
                made[rank] = of(rank)
            except BaseException:
                meet.abort()
                raise

        monkeypatch.setattr(moves, "_started", started)
        monkeypatch.setattr(moves, "_gathered", gathered)
        monkeypatch.setattr(moves, "axis_context", lambda axis: AxisContext(mine.rank, ranks))
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
@pytest.mark.parametrize("spare", [0, 1])
def test_as_the_simulator_says_of_several_ranks(together: Any, ranks: int, experts: int, how: str, spare: int) -> None:
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
        numbers = ops.tokens_to_ranks(mine, CHOICES, here, ranks)
        needed = call(ops.room_needed.default, ops.counts_sent(ops.group_ends(mine, experts), numbers, here), "ep")
        room = ops.room(needed, 0) + torch.tensor([2, 0]) * spare
        places = ops.places_of(numbers, room)
        sent = ops.tokens_sent(places, "a0", room)
        theirs = call(ops.experts_received.default, mine, places, sent, CHOICES, here, "ep")
        rows = ops.received_rows(theirs, "u0", room + 3 * spare, here)
        way = (places, sent, rows, ops.rows_of_tokens(rows, theirs), CHOICES)
        arrived = call(ops.dispatch_rows.default, x[rank], *way, False, "ep")
        entries = call(ops.dispatch_rows.default, weights[rank], *way, True, "ep")
        call(ops.combine_rows.default, arrived * entries, *way, False, "ep")
        call(ops.combine_rows.default, entries, *way, True, "ep")
        return calls

    for calls in zip(*together(ranks, of), strict=True):
        wanted = EXCHANGES[calls[0][0]]([args for _, args, _ in calls])
        for (op, _, found), value in zip(calls, wanted, strict=True):
            torch.testing.assert_close(
                found if op is not ops.experts_received.default else found.clamp(max=here),
                value,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, op=op: f"{op}: {m}",
            )


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
    assert there == ["index", "div", "sum_rows"] and own == ["index", "index", "lt", "masked_fill_"], own
    assert home == ["sum_rows", "sum_rows"]
    to_x, _ = launched(lambda: torch.autograd.grad(arrived.sum(), x)[0])
    to_weights, _ = launched(lambda: torch.autograd.grad(entries.sum(), weights)[0])
    moved = [name for name in (*to_x, *to_weights) if name != "sum"]
    assert moved == ["sum_rows", "sum_rows", "index", "lt", "masked_fill_", "sum_rows"], moved
    grad, y = torch.ones(5, 3), arrived.detach().requires_grad_()
    to_rows, _ = launched(lambda: torch.autograd.grad(ops.combine_rows(y, *at, False, "ep"), y, grad)[0])
    assert to_rows == ["sum_rows", "sum_rows", *there]
    assert len(tables) - len(grouping) == 39, tables  # four of them where the host waits


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
