"""What each rank of a pipeline does in a step, in order, by the schedule itself.

The schedule of torch.distributed.pipelining runs here on stages that compute and send nothing, and write down what they are
asked for. So there is no second list of who sends what and when.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from megafx.errors import PlacementError
from megafx.meanwhile import meanwhile
from megafx.staging import made_schedule


@dataclass(frozen=True)
class Message:
    """One value of a micro-batch between two stages."""

    sends: bool
    peer: int  # the pipeline rank at the other end
    stages: tuple[int, int]  # from, to
    microbatch: int
    value: str  # its name in the graph of the whole call
    what: str  # dtype and shape

    @property
    def content(self) -> tuple[Any, ...]:
        """What both ends have to agree on."""
        return self.stages, self.microbatch, self.value, self.what

    def __str__(self) -> str:
        way = "a gradient" if self.stages[0] > self.stages[1] else "a value"
        verb = "sends" if self.sends else "receives"
        return f"{verb} {way} of stage {self.stages[0]}, '{self.value}' {self.what} of micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Compute:
    """Forward or backward of a micro-batch. last: the backward after which gradients are complete."""

    direction: str
    stage: int
    microbatch: int
    last: bool = False


@dataclass(frozen=True)
class Batch:
    """Messages that start together. number: of the rank."""

    number: int
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Wait:
    """For a batch of this number."""

    number: int


Order = list[Compute | Batch | Wait]


@dataclass(frozen=True)
class Ends:
    """What crosses the cuts around a stage, as (value, dtype and shape): what it gets from the stage before it and sends to the
    one after it, and the gradients in the other direction."""

    receives: tuple[tuple[str, str], ...] = ()
    sends: tuple[tuple[str, str], ...] = ()
    sends_gradients: tuple[tuple[str, str], ...] = ()
    receives_gradients: tuple[tuple[str, str], ...] = ()


def orders_of(kind: Any, ends: Sequence[Ends], ranks: int, microbatches: int) -> list[Order]:
    """The order of each pipeline rank. kind: class of the schedule; ends: of all stages. Raises ConfigError where the schedule
    does not take so many micro-batches."""
    return [_order(kind, ends, rank, ranks, microbatches) for rank in range(ranks)]


def _order(kind: Any, ends: Sequence[Ends], rank: int, ranks: int, microbatches: int) -> Order:
    order: Order = []
    mine = range(rank, len(ends), ranks)
    schedule = made_schedule(kind, [_Recorded(order, ends, k, rank, ranks, microbatches) for k in mine], microbatches)
    schedule._initialize_stage = schedule._initialize_stages = lambda *_, **__: None
    nothing = [() for _ in range(microbatches)]
    with _recording(order):
        schedule._step_microbatches(nothing, [{} for _ in nothing], [*range(microbatches)], None, return_outputs=False)
    return order


class _Recorded(_PipelineStageBase):
    """A stage as schedules see it."""

    def __init__(self, order: Order, ends: Sequence[Ends], number: int, rank: int, ranks: int, count: int) -> None:
        self.order, self.ends, self.count, self.done = order, ends[number], count, 0
        self.submod, self.device, self.group = nn.Module(), torch.device("meta"), None
        self.stage_index, self.num_stages = number, len(ends)
        self.group_rank, self.group_size, self.has_backward, self.chunks = rank, ranks, True, count
        self.stage_index_to_group_rank = {k: k % ranks for k in range(len(ends))}

    def _messages(self, sends: bool, other: int, values: Sequence[tuple[str, str]], index: int) -> list[Any]:
        stages = (self.stage_index, other) if sends else (other, self.stage_index)
        peer = other % self.group_size
        return [_Posted(Message(sends, peer, stages, index, value, what)) for value, what in values]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._messages(False, self.stage_index - 1, self.ends.receives, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._messages(True, self.stage_index + 1, self.ends.sends, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._messages(False, self.stage_index + 1, self.ends.receives_gradients, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._messages(True, self.stage_index - 1, self.ends.sends_gradients, bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> int:
        self.order.append(Compute("forward", self.stage_index, fwd_chunk_id))
        return fwd_chunk_id

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.order.append(Compute("backward", self.stage_index, bwd_chunk_id, last_backward))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        pass

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        pass

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        pass

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()


@dataclass(frozen=True)
class _Posted:
    """In place of torch's P2POp."""

    message: Message

    @property
    def peer(self) -> int:
        return self.message.peer


@dataclass(frozen=True)
class _Work:
    order: Order
    number: int

    def wait(self) -> None:
        self.order.append(Wait(self.number))


@contextmanager
def _recording(order: Order) -> Iterator[None]:
    """Messages that a schedule starts are written down instead."""
    numbers = itertools.count()

    def started(ops: Sequence[_Posted], desc: str | None = None) -> list[_Work]:
        if not ops:
            return []
        batch = Batch(next(numbers), tuple(op.message for op in ops))
        order.append(batch)
        return [_Work(order, batch.number)]

    with meanwhile(schedules, _batch_p2p=started):
        yield


# -- proofs


def check_messages(orders: Sequence[Order], named: Callable[[int], str] = lambda rank: f"rank {rank} of 'pp'") -> None:
    """Raise PlacementError where the two ends of a message differ, or ranks wait for one another in a circle."""
    sent, received = (_between(orders, sends) for sends in (True, False))
    for pair in sorted({*sent, *received}):
        for i, (a, b) in enumerate(itertools.zip_longest(sent.get(pair, []), received.get(pair, []))):
            if a is None or b is None or a.content != b.content:
                one, two = (
                    f"{named(r)} {m or other}"
                    for r, m, other in ((pair[0], a, "sends nothing"), (pair[1], b, "receives nothing"))
                )
                raise PlacementError(f"the two ends of message {i} differ: {one}, {two}")
    _run(orders, named)


def _between(orders: Sequence[Order], sends: bool) -> dict[tuple[int, int], list[Message]]:
    """(rank that sends, rank that receives) -> what one of them has, in its order."""
    found: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, order in enumerate(orders):
        for act in order:
            for message in act.messages if isinstance(act, Batch) else ():
                if message.sends is sends:
                    found[(rank, message.peer) if sends else (message.peer, rank)].append(message)
    return found


def _run(orders: Sequence[Order], named: Callable[[int], str]) -> None:
    """Every rank goes on where it does not wait. As with NCCL, a message is sent once both ends have reached it, and what two
    ranks have started between them goes one after the other, but for what was started together."""
    at = [0] * len(orders)
    left: dict[tuple[int, int], int] = defaultdict(int)  # (rank, number of a batch) -> its messages that are under way
    lines: dict[tuple[int, int], list[tuple[int, list[Message]]]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                act = order[at[rank]]
                if isinstance(act, Wait) and left[rank, act.number]:
                    break
                if isinstance(act, Batch):
                    left[rank, act.number] = len(act.messages)
                    for peer in dict.fromkeys(m.peer for m in act.messages):
                        lines[rank, peer].append((act.number, [m for m in act.messages if m.peer == peer]))
                at[rank] += 1
                moved = True
        for (rank, peer), line in list(lines.items()):
            other = lines.get((peer, rank))
            while line and other and (pair := _meeting(line[0][1], other[0][1])) is not None:
                for (key, queue), message in zip(((rank, line), (peer, other)), pair, strict=True):
                    queue[0][1].remove(message)
                    left[key, queue[0][0]] -= 1
                    if not queue[0][1]:
                        queue.pop(0)
                moved = True
    for rank, order in enumerate(orders):
        if at[rank] < len(order):
            waits: Any = order[at[rank]]
            late = next(
                m
                for (r, _), line in lines.items()
                for n, batch in line
                for m in batch
                if (r, n) == (rank, waits.number)
            )
            raise PlacementError(
                f"{named(rank)} waits for ever where it {late}: ranks wait for one another in a circle"
            )


def _meeting(ours: Sequence[Message], theirs: Sequence[Message]) -> tuple[Message, Message] | None:
    """A message that both ends have reached."""
    for one in ours:
        for two in theirs:
            if one.sends is not two.sends and one.content == two.content:
                return one, two
    return None


def most_alive(order: Order) -> int:
    """Micro-batches between forward and backward at most, each of one stage."""
    now = most = 0
    for act in order:
        if isinstance(act, Compute):
            now += 1 if act.direction == "forward" else -1
            most = max(most, now)
    return most
