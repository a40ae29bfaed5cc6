"""Gathers and reduce-scatters in pieces, beside the products that use or make the pieces.

    gather_start, gather_wait            all_gather_into_tensor and wait_tensor
    gather_matmul                        the same, and products with each rank's rows as they arrive
    scatter_start, scatter_wait          reduce_scatter_tensor ("sum") and wait_tensor
    matmul_scatter_start                 a product whose rows leave for their rank as soon as they are made

Each rank has two slots of memory that the others of its group can read and write (`Transport.allocate`), used in turn. A gather
puts its rows into its slot, meets the others at a barrier, and copies their rows from theirs. A reduce-scatter copies its
summands into the slots of the others, meets them, and sums what came. On GPUs the memory is torch's symmetric memory, copies
are made by the copy engines on a stream of their own, and products do not share their multiprocessors with a collective's
kernel. Nothing but copies runs on that stream: a kernel there can starve behind a product.

Why two slots are enough: each operation has one barrier, and an operation is finished (its copies have arrived, its sum is
made) before this rank enters the barrier of the next. So who writes a slot again has passed the barrier of the operation in
between, which its readers entered after they had finished. Ranks call the same operations in the same order.

Sums are those of ranks 0, 1, ... in this order on every rank, accumulated as torch.sum does.

Source of the scheme: Flux (arXiv 2406.06858); torch's `_symmetric_memory` fuses the same pairs. Here one gather serves several
products, and starts and waits can be apart.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect

from megafx.distributed.agreement import gather_objects
from megafx.distributed.failures import timeout_of

SLOTS = 2


class Transport(ABC):
    """How the ranks of a group reach each other's memory. rank, size: of the group."""

    rank: int
    size: int

    @abstractmethod
    def allocate(self, nbytes: int) -> list[Tensor]:
        """Memory of each rank as this one sees it: uint8[nbytes]. Collective. What was allocated before may go."""

    @abstractmethod
    def barrier(self) -> None:
        """What this rank has done so far, its copies that were waited for included, is seen by those that come out."""

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy of what is computed by now; give it to `arrived` before the target is read."""
        target.copy_(source)
        return None

    def arrived(self, copy: Any) -> None:
        """What follows comes after the copy."""
        assert copy is None, "copies that are under way need another `arrived`"


class PeerMemory(Transport):
    """GPUs that read and write each other's memory, by torch's symmetric memory and the copy engines."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.group, self.device = group, torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.milliseconds = max(1, int(timeout_of(group).total_seconds() * 1000))
        self.handle: Any = None
        self.memory: list[Tensor] = []

    def allocate(self, nbytes: int) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        if self.handle is not None:  # somebody may still read what is about to go
            torch.cuda.synchronize(self.device)
            self.barrier()
            torch.cuda.synchronize(self.device)
        self.memory = []
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.handle = symmetric.rendezvous(own, self.group)
        self.memory = [self.handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        return self.memory

    def barrier(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=self.milliseconds)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source)
            return self.stream.record_event()

    def arrived(self, copy: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(copy)


class SharedFiles(Transport):
    """Processes of one host, whose tensors are on the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = group.rank(), group.size(), group

    def allocate(self, nbytes: int) -> list[Tensor]:
        file, name = tempfile.mkstemp(prefix="megafx-exchange-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        try:
            os.ftruncate(file, nbytes)
            names = gather_objects(name, self.group)
            memory = [torch.from_file(each, shared=True, size=nbytes, dtype=torch.uint8) for each in names]
            self.barrier()
        finally:
            os.close(file)
            os.unlink(name)
        return memory

    def barrier(self) -> None:
        dist.barrier(self.group)


@dataclass
class Pending:
    """A gather or a reduce-scatter under way. value: what it gives, once finished.

    parts: [ranks, rows, ...], in this rank's slot but for gathers to memory of their own. copies: by rank, what was started:
    of a gather that rank's rows, of a reduce-scatter the rows that leave for it. held: memory that copies read.
    """

    parts: Tensor
    scatters: bool
    shape: Sequence[int]
    copies: dict[int, Any] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)
    value: Tensor | None = None


class Exchange:
    """The slots of one group, and what is under way in them."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.count = self.slot_bytes = 0
        self.memory: list[Tensor] = []
        self.under_way: list[Pending] = []  # in order; a reduce-scatter is the last of them

    def begin(self) -> None:
        """Start with the first slot, which the others may have read last."""
        self._finish_all()
        if self.count:
            self.transport.barrier()
            self.count = 0

    def _open(self, shape: Sequence[int], like: Tensor) -> list[Tensor]:
        """The next slot of each rank as a tensor [ranks, *shape], shape being that of one rank's rows."""
        if self.under_way and self.under_way[-1].scatters:
            self._finish_all()
        nbytes = self.size * math.prod(shape) * like.element_size()
        if nbytes > self.slot_bytes:
            self._finish_all()
            self.slot_bytes = (nbytes + 255) // 256 * 256
            self.memory = []
            self.memory = self.transport.allocate(SLOTS * self.slot_bytes)
        self.count += 1
        start = self.count % SLOTS * self.slot_bytes
        return [m[start : start + nbytes].view(like.dtype).view(self.size, *shape) for m in self.memory]

    def _finish_all(self) -> None:
        for pending in list(self.under_way):
            self.finish(pending)

    def gather(self, x: Tensor, own: bool) -> Pending:
        """x: [rows, ...] -> [ranks x rows, ...], under way. own: to memory of its own, not in the slot."""
        slots = self._open(x.shape, x)
        parts = slots[self.rank]
        parts[self.rank].copy_(x)
        if own:
            parts = x.new_empty(parts.shape)
            parts[self.rank].copy_(x)
        self._finish_all()
        self.transport.barrier()
        pending = Pending(parts, False, (self.size * x.shape[0], *x.shape[1:]))
        for rank in self.others:
            pending.copies[rank] = self.transport.copy(parts[rank], slots[rank][rank])
        self.under_way.append(pending)
        return pending

    def scatter(self, rows: Sequence[int], like: Tensor) -> tuple[Pending, list[Tensor]]:
        """A reduce-scatter of summands [ranks, *rows] to come, each rank's by `send`; and the slots, for `send`."""
        slots = self._open(rows, like)
        pending = Pending(slots[self.rank], True, rows)
        self.under_way.append(pending)
        return pending, slots

    def send(self, pending: Pending, slots: list[Tensor], to: int, summand: Tensor) -> None:
        pending.held.append(summand)
        pending.copies[to] = self.transport.copy(slots[to][self.rank], summand)

    def arrived(self, pending: Pending, rank: int) -> None:
        """What follows may read the rows of that rank."""
        if rank in pending.copies:
            self.transport.arrived(pending.copies.pop(rank))

    def finish(self, pending: Pending) -> Tensor:
        while pending.value is None:  # operations end in order
            first = self.under_way.pop(0)
            for rank in list(first.copies):
                self.arrived(first, rank)
            if first.scatters:
                self.transport.barrier()
                parts = first.parts
                first.value = torch.add(parts[0], parts[1]) if self.size == 2 else parts.sum(0)
            else:
                first.value = first.parts.view(first.shape)
            first.held.clear()
        return pending.value


# -- what ranks have

_exchanges: dict[tuple[str, int], Exchange] = {}  # by name of the group and rank in it
_reasons: dict[str, str] = {}  # name of a group -> why it has none
_asked: dict[
    str, tuple[dist.ProcessGroup, bool | str]
] = {}  # which group had the name, and what it wanted: names come again


def prepare(group: dist.ProcessGroup, device: torch.device, wanted: bool | str) -> None:
    """Make the exchange of a group, or note why there is none. Collective over the group. wanted: Config.tp_comm_overlap."""
    name, asked = group.group_name, (group, wanted)
    known, before = _asked.get(name, (None, False))
    if not wanted or (known is group and (before == wanted or (name, group.rank()) in _exchanges)):
        return
    remove(name)
    _asked[name], _reasons[name] = asked, _refusal(group, device, wanted)
    if not _reasons[name]:
        install(name, PeerMemory(group) if device.type == "cuda" else SharedFiles(group))


def install(name: str, transport: Transport) -> None:
    """Let graphs that are bound to a group of this name exchange over this transport."""
    _exchanges[name, transport.rank] = Exchange(transport)


def remove(name: str) -> None:
    for key in [k for k in _exchanges if k[0] == name]:
        del _exchanges[key]


def why_not(name: str, rank: int) -> str:
    """'' where a group has an exchange; else the reason why it has none."""
    return "" if (name, rank) in _exchanges else _reasons.get(name, "the ranks are not those of a process group")


def _refusal(group: dist.ProcessGroup, device: torch.device, wanted: bool | str) -> str:
    """Why the ranks of a group cannot reach each other's memory, or need not."""
    if device.type != "cuda":
        if wanted == "auto":
            return "the ranks compute on CPUs, where nothing runs beside a product"
        hosts = gather_objects(socket.gethostname(), group)
        return "" if len({*hosts}) == 1 else f"the ranks are on several hosts ({', '.join(sorted({*hosts}))})"
    index = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != index]
    reach = all(torch.cuda.can_device_access_peer(index, i) for i in others)
    places = gather_objects((socket.gethostname(), index, reach), group)
    if len({host for host, _, _ in places}) > 1:
        return "the ranks are on several hosts"
    if len({index for _, index, _ in places}) < len(places):
        return "ranks share a device"
    return next((f"GPU {index} cannot reach the memory of another one" for _, index, all_ in places if not all_), "")


# -- what graphs call. group, rank: which exchange


@has_side_effect  # dead-code elimination leaves it
def begin(group: str, rank: int) -> None:
    """What a graph begins with: its operations use the slots in the same turns each time, as a recorded graph must."""
    _exchanges[group, rank].begin()


def gather_start(x: Tensor, group: str, rank: int, own: bool) -> Pending:
    """x: [rows, ...] of this rank -> under way: [ranks x rows, ...]. Ends with `gather_wait`.

    own: in memory of its own; else in the slot, which others may write after the next operation's barrier.
    """
    return _exchanges[group, rank].gather(x, own)


def gather_wait(pending: Pending, group: str, rank: int) -> Tensor:
    """-> [ranks x rows, ...]"""
    return _exchanges[group, rank].finish(pending)


def gather_matmul(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: str, rank: int, own: bool
) -> tuple[Tensor, ...]:
    """x: [rows, ..., k] of this rank; weights: [k, n] each; biases: [n] each -> (gathered, a product [all rows, n] for each).

    gathered, own: as of `gather_start`. The product with this rank's rows runs while those of others come.
    """
    exchange = _exchanges[group, rank]
    pending = exchange.gather(x, own)
    parts = pending.parts.view(exchange.size, -1, x.shape[-1])
    rows = parts.shape[1]
    products = [x.new_empty(exchange.size * rows, w.shape[1]) for w in weights]
    for source in (exchange.rank, *exchange.others):
        exchange.arrived(pending, source)
        for weight, bias, product in zip(weights, biases, products, strict=True):
            _product(parts[source], weight, bias, product[source * rows : (source + 1) * rows])
    return exchange.finish(pending), *products


def scatter_start(x: Tensor, group: str, rank: int) -> Pending:
    """x: summands [ranks x rows, ...] -> under way: the sum of all ranks' summands of this rank's rows. For `scatter_wait`."""
    exchange = _exchanges[group, rank]
    summands = x.view(exchange.size, x.shape[0] // exchange.size, *x.shape[1:])
    pending, slots = exchange.scatter(summands.shape[1:], x)
    for to in exchange.others:
        exchange.send(pending, slots, to, summands[to])
    pending.parts[exchange.rank].copy_(summands[exchange.rank])
    return pending


def scatter_wait(pending: Pending, group: str, rank: int) -> Tensor:
    """-> [rows, ...]"""
    return _exchanges[group, rank].finish(pending)


def matmul_scatter_start(a: Tensor, weight: Tensor, shape: Sequence[int], group: str, rank: int) -> Pending:
    """a: [all rows, k], weight: [k, n] -> a @ weight, seen as summands of this shape [ranks x rows, ..., n], on their way.

    Rows that a has not, at the end, are padding: zeros. What goes farthest is made first, this rank's own rows last.
    """
    exchange = _exchanges[group, rank]
    ranks = exchange.size
    pending, slots = exchange.scatter((shape[0] // ranks, *shape[1:]), a)
    rows = math.prod(shape[:-1]) // ranks
    made = a.new_empty(ranks, rows, shape[-1])
    for to in (*exchange.others, exchange.rank):
        own = to == exchange.rank
        target = pending.parts[to].view(rows, shape[-1]) if own else made[to]
        part = a[to * rows : (to + 1) * rows]
        if part.shape[0] < rows:
            target[part.shape[0] :].zero_()
        if part.shape[0]:
            torch.mm(part, weight, out=target[: part.shape[0]])
        if not own:
            exchange.send(pending, slots, to, made[to].view(pending.parts.shape[1:]))
    return pending


def _product(a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, weight, out=out)
    else:
        torch.addmm(bias, a, weight, out=out)
