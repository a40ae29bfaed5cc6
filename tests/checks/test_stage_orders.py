"""Covers: megafx/stage_orders.py, staging.py: orders by the schedule itself, both ends of messages, ranks in a circle."""

import dataclasses
from typing import Any

import pytest

from megafx.errors import ConfigError, PlacementError
from megafx.planner.pipeline_step import Split, under_way
from megafx.stage_orders import Batch, Compute, Ends, Message, Order, Wait, check_messages, most_alive, orders_of
from megafx.staging import SCHEDULES

RUNS = [
    ("gpipe", 3, 3, 5),
    ("1f1b", 4, 4, 6),
    ("1f1b", 2, 2, 2),
    ("interleaved1f1b", 8, 4, 8),
    ("interleaved1f1b", 6, 2, 4),
]


def orders(name: str, stages: int, ranks: int, microbatches: int, values: int = 2) -> list[Order]:
    """Of stages that send `values` values, the last of which has no gradient."""
    crossing = tuple((f"v{i}", "float32[2 3]") for i in range(values))
    ends = []
    for k in range(stages):
        before, after = crossing if k else (), crossing if k < stages - 1 else ()
        ends.append(Ends(before, after, before[:-1], after[:-1]))
    return orders_of(SCHEDULES[name], ends, ranks, microbatches)


def messages(order: Order, sends: bool) -> int:
    return sum(m.sends is sends for act in order if isinstance(act, Batch) for m in act.messages)


@pytest.mark.parametrize(("name", "stages", "ranks", "count"), RUNS)
def test_schedules_as_they_are(name: str, stages: int, ranks: int, count: int) -> None:
    found = orders(name, stages, ranks, count)
    check_messages(found)
    for rank, order in enumerate(found):
        work = [(act.direction, act.stage, act.microbatch) for act in order if isinstance(act, Compute)]
        mine = range(rank, stages, ranks)
        assert len({*work}) == len(work) == 2 * count * len(mine)
        assert all(work.index(("forward", k, i)) < work.index(("backward", k, i)) for k in mine for i in range(count))
        assert [act.last for act in order if isinstance(act, Compute)].count(True) == len(mine)
        assert messages(order, True) == sum(count * (2 * (k < stages - 1) + (k > 0)) for k in mine)
        assert messages(order, False) == sum(count * ((k < stages - 1) + 2 * (k > 0)) for k in mine)


def test_micro_batches_that_are_alive() -> None:
    """Also what plans count (planner/pipeline_step.py)."""
    assert [most_alive(order) for order in orders("gpipe", 3, 3, 5)] == [5, 5, 5]
    assert [most_alive(order) for order in orders("1f1b", 3, 3, 5)] == [3, 2, 1]
    for name, stages, ranks, count in [*RUNS[1:], ("interleaved1f1b", 64, 16, 32), ("1f1b", 16, 16, 64)]:
        split = Split(ranks, stages // ranks, count)
        found = [most_alive(order) for order in orders(name, stages, ranks, count)]
        assert found == [under_way(split, rank) * split.chunks for rank in range(ranks)], (name, stages)


def test_micro_batches_that_a_schedule_does_not_take() -> None:
    with pytest.raises(ConfigError, match="greater than"):
        orders("1f1b", 4, 4, 3)
    with pytest.raises(ConfigError, match="multiple of the number of rounds"):
        orders("interleaved1f1b", 8, 4, 9)


def changed(order: Order, at: int, **fields: Any) -> None:
    """Another first message in a rank's `at`-th batch."""
    places = [i for i, act in enumerate(order) if isinstance(act, Batch)]
    batch: Any = order[places[at]]
    first, *rest = batch.messages
    order[places[at]] = Batch(batch.number, (dataclasses.replace(first, **fields), *rest))


@pytest.mark.parametrize(("name", "stages", "ranks", "count"), RUNS)
@pytest.mark.parametrize(
    "fields", [{"what": "float64[2 3]"}, {"what": "float32[3 2]"}, {"value": "v9"}, {"microbatch": 9}]
)
def test_a_message_that_is_another_on_one_rank(
    fields: dict[str, Any], name: str, stages: int, ranks: int, count: int
) -> None:
    for rank in range(ranks):
        found = orders(name, stages, ranks, count)
        for at in (0, -1):
            changed(found[rank], at, **fields)
            with pytest.raises(
                PlacementError, match=r"two ends of message \d+ differ: rank \d of 'pp' sends .*, rank \d of"
            ):
                check_messages(found)


@pytest.mark.parametrize(("name", "stages", "ranks", "count"), RUNS)
def test_messages_that_are_left_out_or_swapped(name: str, stages: int, ranks: int, count: int) -> None:
    for rank in range(ranks):
        for at in (0, -1):
            found = orders(name, stages, ranks, count)
            batches = [act for act in found[rank] if isinstance(act, Batch)]
            gone: Any = batches[at]
            found[rank] = [act for act in found[rank] if act is not gone and act != Wait(gone.number)]
            with pytest.raises(PlacementError, match="differ"):
                check_messages(found)
        found = orders(name, stages, ranks, count)
        i = next(i for i, act in enumerate(found[rank]) if isinstance(act, Batch) and len(act.messages) > 1)
        batch: Any = found[rank][i]
        found[rank][i] = Batch(batch.number, (batch.messages[1], batch.messages[0], *batch.messages[2:]))
        if batch.messages[0].sends is batch.messages[1].sends:
            with pytest.raises(PlacementError, match="differ"):
                check_messages(found)


def test_ranks_that_wait_in_a_circle() -> None:
    """Each pair agrees, but the second rank wants a gradient before it has sent what the gradient is of."""
    found = orders("1f1b", 3, 3, 4)
    order, wanted = found[1], list[Message]()
    for i, act in enumerate(order):
        if isinstance(act, Batch) and not wanted:
            wanted = [m for m in act.messages if m.stages == (2, 1)]
            order[i] = Batch(act.number, tuple(m for m in act.messages if m not in wanted))
    at = next(
        i for i, act in enumerate(order) if isinstance(act, Batch) and any(m.stages == (1, 2) for m in act.messages)
    )
    order[at:at] = [Batch(90, tuple(wanted)), Wait(90)]
    with pytest.raises(
        PlacementError, match=r"rank 0 of 'pp' waits for ever where it sends a value of stage 0, 'v0' .*circle"
    ):
        check_messages(found)
