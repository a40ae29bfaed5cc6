"""All-gathers and reduce-scatters in pieces, beside the matrix products that use or make them.

    gather_start, gather_wait            all_gather_into_tensor and wait_tensor
    regather_start                       after a reduce-scatter: the second half of an all-reduce
    gather_matmul                        a gather, and products with each rank's rows as they arrive; of bf16 or of FP8
    scatter_start, scatter_wait          reduce_scatter_tensor ("sum") and wait_tensor
    matmul_scatter_start                 a product whose rows leave for their rank as soon as they are made

Each rank has slots of memory that the others of its group can read and write (`Transport.allocate`), used in turn. A gather
puts its rows into its slot, meets the others at a barrier, and copies their rows from theirs. A reduce-scatter copies its
summands into the slots of the others, meets them, and sums what came. On GPUs the memory is torch's symmetric memory, copies
are made by the copy engines on a stream of their own, and products do not share their multiprocessors with a collective's
kernel. Nothing but copies runs on that stream: a kernel there can starve behind a product.

The op that makes the rows of a gather may write them straight into the slot (`rows_of_next`), which saves a copy.

When a slot may be written again. Each operation has one barrier, and it is finished (its copies have arrived, its sum is made)
before this rank enters the barrier of the next. A reduce-scatter is finished before the next operation begins. Ranks call the
same operations in the same order. So a rank that begins operation n + SLOTS has passed the barrier of operation n + SLOTS - 1
(of n + SLOTS - 2 where it makes rows ahead), which its readers entered after they had finished n. From this follows:

    a gathered value in the slot           can be read until the barrier of operation n + SLOTS - 1: others write there later
    this rank's own rows, in its own slot  can be read until operation n + SLOTS begins: nobody else writes there

Two slots would do. The third lets rows of a residual stream lie in a slot until the next rows of that stream are made.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.nn import functional as F

from megafx.distributed.agreement import gather_objects
from megafx.distributed.failures import timeout_of
from megafx.kernels.fp8.scaled_mm import scaled_mm

SLOTS = 3


class Transport(ABC):
    """How the ranks of a group reach each other's memory. rank, size: of the group."""

    rank: int
    size: int

    @abstractmethod
    def allocate(self, nbytes: int) -> list[Tensor]:
        """Memory of each rank as this one sees it: uint8[nbytes]. Collective. Nobody copies from or to what was allocated
        before; values may still be in it until `release`."""

    def release(self) -> None:
        """Free all allocations but the last."""
        return None

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks. What each did before, copies it waited for included, is then visible to all."""

    def begin(self) -> None:
        """A graph begins to run, here and on this thread."""
        return None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        """Start copies (to, from) of what is computed by now; give each to `arrived` before its target is read."""
        for target, source in pairs:
            target.copy_(source)
        return [None] * len(pairs)

    def arrived(self, copy: Any) -> None:
        """What follows runs after the copy."""
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
        self.before: list[Any] = []  # handles and tensors of earlier allocations
        self.begin()

    def allocate(self, nbytes: int) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        if self.handle is not None:  # a rank may still use the old memory
            torch.cuda.synchronize(self.device)
            self.barrier()
            torch.cuda.synchronize(self.device)
            self.before.append((self.handle, self.memory))
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.handle = symmetric.rendezvous(own, self.group)
        self.memory = [self.handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        return self.memory

    def release(self) -> None:
        if self.before:
            torch.cuda.synchronize(self.device)
            self.before.clear()

    def barrier(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=self.milliseconds)

    def begin(self) -> None:
        self.current = torch.cuda.current_stream(self.device)  # asked for once: that takes longer than a launch

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        self.stream.wait_stream(self.current)
        events = []
        torch.cuda.set_stream(self.stream)
        try:
            for target, source in pairs:
                target.copy_(source)
                events.append(self.stream.record_event())
        finally:
            torch.cuda.set_stream(self.current)
        return events

    def arrived(self, copy: Any) -> None:
        self.current.wait_event(copy)


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


class Slot:
    """One slot of each rank, as tensors [ranks, *rows].

    parts: this rank's; of: the same by rank. rows: each rank's own rows in its own slot; here: this rank's place in each slot.
    """

    def __init__(self, slots: Sequence[Tensor], rank: int) -> None:
        self.parts, self.of = slots[rank], slots[rank].unbind()
        self.rows = [slot[r] for r, slot in enumerate(slots)]
        self.here = [slot[rank] for slot in slots]


@dataclass(eq=False)
class Pending:
    """A gather or a reduce-scatter under way."""

    parts: Tensor  # [ranks, rows, ...], in this rank's slot but for gathers to memory of their own
    of: Sequence[Tensor]  # the same by rank
    scatters: bool
    shape: Sequence[int]
    # what was started, by rank: of a gather that rank's rows, of a reduce-scatter the rows that leave for it
    copies: dict[int, Any] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)  # memory that copies read
    mine: Tensor | None = None  # of a gather, this rank's rows in its slot
    value: Tensor | None = None  # its result, once finished


class Exchange:
    """The slots of one group, and what is under way in them."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.count = self.slot_bytes = 0
        self.memory: list[Tensor] = []
        self.slots: dict[Any, Slot] = {}  # of this memory, by place, shape and dtype
        self.under_way: list[Pending] = []  # in order; a reduce-scatter is the last of them
        self.next: Slot | None = None  # of the gather to come, whose rows are being made there

    def begin(self) -> None:
        """Start with the first slot, which the others may have read last."""
        self._finish_all()
        self.next = None
        self.transport.begin()
        self.transport.release()
        if self.count:
            self.transport.barrier()
            self.count = 0

    def _open(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """The next slot of each rank. shape: of one rank's rows."""
        if self.under_way and self.under_way[-1].scatters:
            self._finish_all()
        nbytes = self.size * math.prod(shape) * dtype.itemsize
        if nbytes > self.slot_bytes:
            self._finish_all()
            self.slot_bytes = (nbytes + 255) // 256 * 256
            self.memory, self.slots = [], {}
            with torch.inference_mode(False):  # later runs may not be in that mode
                self.memory = self.transport.allocate(SLOTS * self.slot_bytes)
        return self._slots(shape, dtype)

    def _slots(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        assert self.next is None, "rows were made for a gather that did not come"
        self.count += 1
        start = self.count % SLOTS * self.slot_bytes
        key = start, *shape, dtype
        found = self.slots.get(key)
        if found is None:
            end = start + self.size * math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):
                views = [m[start:end].view(dtype).view(self.size, *shape) for m in self.memory]
                found = self.slots[key] = Slot(views, self.rank)
        return found

    def _finish_all(self) -> None:
        for pending in list(self.under_way):
            self.finish(pending)

    def rows_of_next(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's rows in the slot of the gather that comes next, to be written."""
        self.next = self._open(shape, dtype)
        return self.next.rows[self.rank]

    def gather(self, x: Tensor, own: bool) -> Pending:
        """x: [rows, ...] -> [ranks x rows, ...], under way. own: to memory of its own, not in the slot."""
        slot, self.next = self.next, None
        if slot is None or slot.rows[self.rank].data_ptr() != x.data_ptr():
            slot = self._open(x.shape, x.dtype) if slot is None else slot
            slot.rows[self.rank].copy_(x)
        parts = x.new_empty(slot.parts.shape) if own else slot.parts
        of = parts.unbind() if own else slot.of
        self._finish_all()
        self.transport.barrier()
        shape = (self.size * x.shape[0], *x.shape[1:])
        pending = Pending(parts, of, False, shape, mine=slot.rows[self.rank])
        sources = [*self.others, self.rank] if own else self.others
        copies = self.transport.copy([(of[rank], slot.rows[rank]) for rank in sources])
        pending.copies = dict(zip(sources, copies, strict=True))
        self.under_way.append(pending)
        return pending

    def regather(self, pending: Pending, own: bool) -> Pending:
        """A reduce-scatter under way -> a gather of what it gives, which is summed in the slot: together an all-reduce."""
        rows = None
        if pending.value is None:
            for earlier in self.under_way[: self.under_way.index(pending)]:
                self.finish(earlier)
            self.next = self._slots(pending.shape, pending.parts.dtype)  # as large as that of the reduce-scatter
            rows = self.next.rows[self.rank]
        return self.gather(self.finish(pending, rows), own)

    def scatter(self, rows: Sequence[int], dtype: torch.dtype) -> tuple[Pending, Slot]:
        """A reduce-scatter of summands [ranks, *rows] to come, each rank's by `send`; and the slot, for `send`."""
        slot = self._open(rows, dtype)
        pending = Pending(slot.parts, slot.of, True, rows)
        self.under_way.append(pending)
        return pending, slot

    def send(self, pending: Pending, slot: Slot, summands: Mapping[int, Tensor]) -> None:
        """Let summands leave, by the rank that they are for."""
        pending.held += summands.values()
        copies = self.transport.copy([(slot.here[to], summand) for to, summand in summands.items()])
        pending.copies.update(zip(summands, copies, strict=True))

    def arrived(self, pending: Pending, rank: int) -> None:
        """What follows may read the rows of that rank."""
        if rank in pending.copies:
            self.transport.arrived(pending.copies.pop(rank))

    def finish(self, pending: Pending, out: Tensor | None = None) -> Tensor:
        """The result. out: memory for it; only of a reduce-scatter that is the first under way."""
        while pending.value is None:  # operations end in order
            first = self.under_way.pop(0)
            for rank in list(first.copies):
                self.arrived(first, rank)
            if first.scatters:
                self.transport.barrier()
                parts = first.parts
                first.value = torch.add(parts[0], parts[1], out=out) if self.size == 2 else torch.sum(parts, 0, out=out)
            else:
                first.value = first.parts.view(first.shape)
            first.held.clear()
        return pending.value


# -- exchanges by group

_exchanges: dict[tuple[str, int], Exchange] = {}  # by name of the group and rank in it
_reasons: dict[str, str] = {}  # name of a group -> why it has none
# which group had the name, and what it wanted: names are reused
_asked: dict[str, tuple[dist.ProcessGroup, bool | str]] = {}


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


@has_side_effect  # keeps it from dead-code elimination
def begin(group: str, rank: int) -> None:
    """First op of a graph: each run uses the slots in the same order, as replaying a CUDA graph requires."""
    _exchanges[group, rank].begin()


def gather_start(x: Tensor, group: str, rank: int, own: bool) -> Pending:
    """x: [rows, ...] of this rank -> under way: [ranks x rows, ...]. Ends with `gather_wait`.

    own: in memory of its own; else in the slot, which others may write after the next operation's barrier.
    """
    return _exchanges[group, rank].gather(x, own)


def rows_of_next(x: Tensor, dtype: torch.dtype, group: str, rank: int) -> Tensor:
    """Memory for this rank's rows of the gather that comes next, in its slot: of the shape of x. No operation may begin before
    that gather does."""
    return _exchanges[group, rank].rows_of_next(x.shape, dtype)


def regather_start(pending: Pending, group: str, rank: int, own: bool) -> Pending:
    """A reduce-scatter under way -> under way: the gather of what it gives. Together an all-reduce; for `gather_wait`."""
    return _exchanges[group, rank].regather(pending, own)


def gather_wait(pending: Pending, group: str, rank: int) -> Tensor:
    """-> [ranks x rows, ...]"""
    return _exchanges[group, rank].finish(pending)


def gather_matmul(x: Tensor, rights: Sequence[tuple[Any, ...]], group: str, rank: int, own: bool) -> tuple[Tensor, ...]:
    """x: [rows, ..., k] of this rank -> (gathered, a product [all rows, n] for each right operand).

    rights: (weight [k, n], bias [n] or None); of FP8, `scaled_mm`'s operands after the first, with scales of all rows.
    gathered, own: as of `gather_start`. The product with this rank's rows runs while those of others come.
    """
    exchange = _exchanges[group, rank]
    pending = exchange.gather(x, own)
    assert pending.mine is not None
    rows, flat = math.prod(x.shape[:-1]), len(x.shape) == 2
    made = [_made(x, right) for right in rights]
    products = [x.new_empty((exchange.size, rows, n), dtype=dtype) for n, dtype in made]
    targets = [product.unbind() for product in products]
    for source in (exchange.rank, *exchange.others):
        part = pending.mine
        if source != exchange.rank:
            exchange.arrived(pending, source)
            part = pending.of[source]
        part = part if flat else part.view(rows, x.shape[-1])
        for right, target in zip(rights, targets, strict=True):
            _product(part, right, source * rows, target[source])
    return exchange.finish(pending), *(product.view(-1, product.shape[-1]) for product in products)


def scatter_start(x: Tensor, group: str, rank: int) -> Pending:
    """x: summands [ranks x rows, ...] -> under way: the sum of all ranks' summands of this rank's rows. For `scatter_wait`."""
    exchange = _exchanges[group, rank]
    summands = x.view(exchange.size, x.shape[0] // exchange.size, *x.shape[1:]).unbind()
    pending, slot = exchange.scatter(summands[0].shape, x.dtype)
    exchange.send(pending, slot, {to: summands[to] for to in exchange.others})
    pending.of[exchange.rank].copy_(summands[exchange.rank])
    return pending


def scatter_wait(pending: Pending, group: str, rank: int) -> Tensor:
    """-> [rows, ...]"""
    return _exchanges[group, rank].finish(pending)


def matmul_scatter_start(a: Tensor, right: tuple[Any, ...], shape: Sequence[int], group: str, rank: int) -> Pending:
    """a: [all rows, k] -> its product with `right`, seen as summands of this shape [ranks x rows, ..., n], on their way.

    right: as of `gather_matmul`. Rows beyond those of a are zero padding. Rows for other ranks are made first, this rank's own
    last.
    """
    exchange = _exchanges[group, rank]
    ranks = exchange.size
    dtype = _made(a, right)[1]
    pending, slot = exchange.scatter((shape[0] // ranks, *shape[1:]), dtype)
    rows, flat = math.prod(shape[:-1]) // ranks, len(shape) == 2
    made = a.new_empty((ranks - 1, *pending.shape), dtype=dtype).unbind()
    summands = dict(zip(exchange.others, made, strict=True)) | {exchange.rank: pending.of[exchange.rank]}
    for to, summand in summands.items():
        target, part = summand if flat else summand.view(rows, shape[-1]), a[to * rows : (to + 1) * rows]
        if part.shape[0] < rows:
            target[part.shape[0] :].zero_()
            target = target[: part.shape[0]]
        if part.shape[0]:
            _product(part, right, to * rows, target)
        if to != exchange.rank:
            exchange.send(pending, slot, {to: summand})
    return pending


def _made(a: Tensor, right: tuple[Any, ...]) -> tuple[int, torch.dtype]:
    """Columns and dtype of a product."""
    return (right[0].shape[1], a.dtype) if len(right) == 2 else (right[0].shape[0], right[-1])


def _product(a: Tensor, right: tuple[Any, ...], first: int, out: Tensor) -> None:
    """out: [rows, n] <- a, which are rows `first` and following of all, times `right`."""
    if len(right) > 2:
        b, scale, columns, format_a, format_b, dtype = right
        if scale.dim():
            scale = scale[first : first + a.shape[0]]
            scale = F.pad(scale, (0, a.shape[0] - scale.shape[0]), value=1.0)  # rows of padding have none
        scaled_mm(a, b, scale, columns, format_a, format_b, dtype, out)
    elif right[1] is None:
        torch.mm(a, right[0], out=out)
    else:
        torch.addmm(right[1], a, right[0], out=out)
