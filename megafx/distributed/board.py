"""Ranks tell each other every call that they are about to make, and stop before collectives of different calls meet.

Before the first collective of a forward or a backward a rank posts an `Entry`, and compares those of the other ranks with its
own as they come. Whoever comes second sees the difference before it communicates. Where collectives are gloo's, which ends the
process when sizes differ, a rank waits for the others (its first collective would wait for them too), so that all of them
see it.

Ranks of one host post to memory that they share, which takes a few microseconds (benchmarks/host_overhead.py --calls). Ranks
of several hosts send their entries over a gloo group of their own, which takes tens of microseconds beside the step.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import struct
import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megafx.distributed.agreement import OTHER_BATCHES, SAME_BATCH, broadcast_object, first_rank, group_of
from megafx.distributed.failures import timeout_of
from megafx.errors import AgreementError

FORWARD, BACKWARD = 0, 1
# how lines of a call's text begin
GRADIENTS, TRAINING, AUTOCAST, WANTED = "gradients ", "training mode ", "autocast ", "gradients are wanted of "
STATE = "Python state "
RECORDS, NUMBERS, TEXT = 64, 25, 1 << 20  # entries that a rank keeps, numbers of an entry, bytes of a rank's texts
_HEAD = struct.Struct("<q")  # number of the entry, written last: it says that the rest is there
_BODY = struct.Struct(f"<{6 + NUMBERS}q")  # place and length of the text; phase, step, crc and count; numbers
_SIZE, _PLACES, _ZEROS = _HEAD.size + _BODY.size, _HEAD.size + 16, (0,) * NUMBERS  # what comes after places is compared
_LOOK = 0.1  # seconds between looks whether the ranks that are waited for are still there


BYTES = RECORDS * _SIZE + TEXT


class Entry(NamedTuple):
    """What a rank is about to run: the `step`-th call's forward or backward."""

    phase: int
    step: int
    text: str  # what it is
    # of a forward, how often optimizers have stepped the model, then sizes and values; of a backward, none
    numbers: Sequence[int]

    def body(self, at: int, length: int, crc: int) -> bytes:
        """The entry as bytes. at, length, crc: of its text."""
        few = self.numbers
        if len(few) > NUMBERS:
            few = (*few[: NUMBERS - 1], hash(tuple(few[NUMBERS - 1 :])))
        return _BODY.pack(at, length, self.phase, self.step, crc, len(self.numbers), *few, *_ZEROS[len(few) :])


class Difference(NamedTuple):
    """Two ranks of a group that are about to run different things. The first is the lower one."""

    ranks: tuple[int, int]
    entries: tuple[Entry, Entry]


class Board(ABC):
    """The board of one group, made by all its ranks, which exchange the same number of entries in the same order."""

    def __init__(self, me: int, ranks: int, waits: bool) -> None:
        """waits: whether each entry waits for all ranks."""
        self.me, self.ranks, self.waits = me, ranks, waits
        self.number = 0
        self.own: deque[Entry] = deque(maxlen=RECORDS)

    @abstractmethod
    def exchange(self, entry: Entry) -> Difference | None:
        """Post what this rank is about to run; a difference to what another rank runs, where one is known by now."""

    def look(self) -> Difference | None:
        """A difference that is known by now, in what was posted."""
        return None

    def _between(self, rank: int, theirs: Entry, number: int) -> Difference:
        mine = self.own[number - self.number - 1]
        first, second = ((self.me, mine), (rank, theirs)) if self.me < rank else ((rank, theirs), (self.me, mine))
        return Difference((first[0], second[0]), (first[1], second[1]))


def make_board(group: dist.ProcessGroup | None, device: torch.device) -> Board | None:
    """None where there is nobody to compare with. device: of the model. Collective over the group."""
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return None
    file, waits = _shared(group), device.type == "cpu"
    if file is None:
        return _Messages(group, waits)
    seconds = timeout_of(group).total_seconds()
    return SharedBoard(dist.get_rank(group), dist.get_world_size(group), waits, file, seconds)


def _shared(group: dist.ProcessGroup) -> io.FileIO | None:
    """A file that all ranks of the group have, with a lock of each on a byte; None where they are on several hosts."""
    path, mark, file = "", os.urandom(16), None
    if dist.get_rank(group) == 0:
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="megafx-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            size = dist.get_world_size(group) * BYTES
            os.ftruncate(handle, size + len(mark))
            os.pwrite(handle, mark, size)
            os.close(handle)
    path, mark = broadcast_object((path, mark), group)
    with contextlib.suppress(OSError):
        file = io.FileIO(path, "r+")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, dist.get_rank(group))  # held until this process ends
        file.seek(-len(mark), os.SEEK_END)
    everywhere = first_rank(file is None or file.read() != mark, group) is None
    if dist.get_rank(group) == 0:
        with contextlib.suppress(OSError):
            os.unlink(path)  # freed when the last rank has closed it
    return file if everywhere else None


class SharedBoard(Board):
    """Shared memory: RECORDS places, each with an entry of every rank, and a row of texts for every rank.

    Ranks that make the same calls write the same bytes, texts at the same places of their rows: comparing bytes is enough.
    """

    def __init__(self, me: int, ranks: int, waits: bool, file: io.FileIO, timeout: float) -> None:
        """file: at least BYTES for each rank. timeout: seconds to wait for the other ranks."""
        super().__init__(me, ranks, waits)
        self.file, self.memory, self.timeout = file, mmap.mmap(file.fileno(), 0), timeout
        self.texts: dict[str, tuple[int, int, int]] = {}
        self.end = 0
        # number -> this rank's bytes, of entries that are not compared with all ranks yet
        self.open: dict[int, bytes] = {}

    def exchange(self, entry: Entry) -> Difference | None:
        self.number += 1
        self.own.append(entry)
        body = entry.body(*(self.texts.get(entry.text) or self._write(entry.text)))
        record = _HEAD.pack(self.number) + body
        at = self._at(self.me, self.number)
        self.memory[at + _HEAD.size : at + _SIZE] = body
        self.memory[at : at + _HEAD.size] = record[: _HEAD.size]
        self.open[self.number] = record
        if self.waits:
            self._wait(record)
        return self.look()

    def look(self) -> Difference | None:
        for number, mine in [*self.open.items()]:
            at = self._at(0, number)
            done = self.memory[at : at + self.ranks * _SIZE] == mine * self.ranks or number <= self.number - RECORDS
            found, complete = (None, True) if done else self._difference(number, mine)
            if complete or found is not None:
                del self.open[number]
            if found is not None:
                return found
        return None

    def _write(self, text: str) -> tuple[int, int, int]:
        whole = text.encode()
        data, at = whole[: TEXT - self.end], self._row(self.me) + self.end
        self.memory[at : at + len(data)] = data
        self.texts[text] = self.end, len(data), zlib.crc32(whole)
        self.end += len(data)
        return self.texts[text]

    def _row(self, rank: int) -> int:
        return RECORDS * self.ranks * _SIZE + rank * TEXT

    def _at(self, rank: int, number: int) -> int:
        return (number % RECORDS * self.ranks + rank) * _SIZE

    def _arrived(self, rank: int, number: int) -> bool:
        return bool(_HEAD.unpack_from(self.memory, self._at(rank, number))[0] >= number)

    def _wait(self, record: bytes) -> None:
        """Until all ranks have come. Raises RuntimeError where one has ended, or does not come within the timeout."""
        at, begin, looked, pause = self._at(0, self.number), time.monotonic(), 0.0, 0.0
        while self.memory[at : at + self.ranks * _SIZE] != record * self.ranks:
            missing = [r for r in range(self.ranks) if not self._arrived(r, self.number)]
            if not missing:
                return
            waited = time.monotonic() - begin
            if waited > self.timeout:
                raise RuntimeError(f"timed out: rank {missing[0]} of the group made no call for {waited:.0f} s")
            if waited > looked + _LOOK:
                looked = waited
                if any(map(self._is_gone, missing)) and not all(self._arrived(r, self.number) for r in missing):
                    raise RuntimeError(f"connection closed: rank {missing[0]} of the group is gone")
            time.sleep(pause)
            pause = min(pause + 1e-6, 1e-3)

    def _is_gone(self, rank: int) -> bool:
        """True if the lock that a process holds as long as it lives is free."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return True

    def _difference(self, number: int, mine: bytes) -> tuple[Difference | None, bool]:
        """(difference to a rank whose entry of this number is still on the board; whether all ranks have come)"""
        complete, first, head = True, self._at(0, number), mine[: _HEAD.size]
        for rank in range(self.ranks):
            at = first + rank * _SIZE
            for pause in (0.0, 0.001, 0.1):  # a processor may show the number before the rest
                if self.memory[at : at + _HEAD.size] != head:
                    complete = complete and self._arrived(rank, number)
                    break  # it has not come, or gone on since
                if self.memory[at + _PLACES : at + _SIZE] == mine[_PLACES:]:
                    break
                time.sleep(pause)
            else:
                place, length, phase, step, _, count, *numbers = _BODY.unpack_from(self.memory, at + _HEAD.size)
                text = self.memory[self._row(rank) + place : self._row(rank) + place + length].decode(errors="replace")
                return self._between(rank, Entry(phase, step, text, numbers[:count]), number), complete
        return None, complete


class _Messages(Board):
    """One all-reduce an entry, over gloo, of its largest and smallest numbers over all ranks: what a rank sends does not grow
    with them. The last entry is compared before the next is sent, so none is skipped; a difference is looked up among all.
    """

    def __init__(self, group: dist.ProcessGroup, waits: bool) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), waits)
        self.side = group_of(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout_of(group))
        self.under_way: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def exchange(self, entry: Entry) -> Difference | None:
        if (found := self._finish()) is not None:
            return found
        self.number += 1
        self.own.append(entry)
        mine = torch.frombuffer(bytearray(_sent(entry)), dtype=torch.int64)
        mine = torch.cat([mine, ~mine])  # the largest ~x is that of the smallest x
        largest = mine.clone()
        self.under_way = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.side, async_op=True), mine, largest
        return self._finish() if self.waits else None

    def _finish(self) -> Difference | None:
        if self.under_way is None:
            return None
        (work, mine, largest), self.under_way = self.under_way, None
        work.wait()
        if torch.equal(mine, largest):
            return None
        # all ranks come here: where two differ, neither has both ends
        own = self.own[-1]
        of_first = broadcast_object(own, self.side)
        other = first_rank(_sent(own) != _sent(of_first), self.side)
        assert other is not None
        of_other = broadcast_object(own, self.side, other)
        found = (other, of_other) if _sent(own) == _sent(of_first) else (0, of_first)
        return self._between(*found, self.number)


def _sent(entry: Entry) -> bytes:
    return entry.body(0, 0, zlib.crc32(entry.text.encode()))


# -- errors


def _steps_differ(difference: Difference, kind: str, stepped: str) -> AgreementError | None:
    """stepped: which optimizer stepped last."""
    (i, j), (a, b) = difference
    if not a.numbers or not b.numbers or a.numbers[0] == b.numbers[0]:
        return None
    return AgreementError(
        f"call {a.step}: {kind} ranks have not made the same optimizer steps, so that their parameters have diverged: "
        f"{a.numbers[0]} on rank {i}, {b.numbers[0]} on rank {j} (each group of parameters counts){stepped}",
        fix="call optimizer.step() on every rank, outside of `if rank == 0:` and of conditions that ranks decide alone, and go "
        "on from a checkpoint",
    )


def calls_differ(difference: Difference, labels: Sequence[str], stepped: str = "") -> AgreementError:
    """The error of tensor-parallel ranks. labels: what the entries' numbers after the first are, in calls with equal texts.
    stepped: which optimizer stepped last."""
    (i, j), (a, b) = difference
    if (a.phase, a.step) != (b.phase, b.step):
        where = [f"the {('forward', 'backward')[e.phase]} of call {e.step}" for e in (a, b)]
        return AgreementError(
            f"tensor-parallel ranks make different calls: rank {i} is at {where[0]}, rank {j} at {where[1]}",
            fix="make the same calls on every rank: none may leave out a batch or a backward, or call the model alone "
            "(evaluation or generation under `if rank == 0:`)",
        )
    start = f"call {a.step}: tensor-parallel ranks"
    if a.text != b.text:
        pairs = zip(a.text.splitlines(), b.text.splitlines(), strict=False)
        x, y = next(((x, y) for x, y in pairs if x != y), ("a call", "another one"))
        which = f"{x[:200]} on rank {i}, {y[:200]} on rank {j}"
        if x.startswith(WANTED):
            return AgreementError(f"{start} {_wanted(x, y, i, j)}", fix="set requires_grad alike on every rank")
        if x.startswith(AUTOCAST):
            found = f"{start} are in different contexts of torch.autocast: {which}"
            return AgreementError(found, fix="enter torch.autocast on every rank, or on none")
        if x.startswith((GRADIENTS, TRAINING)):
            found = (
                f"{start} are in different modes, as after model.eval() or torch.no_grad() on one rank alone: {which}"
            )
            return AgreementError(found, fix="evaluate on every rank of the group, outside of `if rank == 0:`")
        if x.startswith(STATE) and y.startswith(STATE):
            found = f"{start} hold other values in attributes, globals or containers that forward reads"
            return AgreementError(found, fix="set them on every rank alike, before the same call")
        return AgreementError(f"{start} make different calls: {which}", fix="make the same call on every rank")
    if (error := _steps_differ(difference, "tensor-parallel", stepped)) is not None:
        return error
    k = next((k for k, (x, y) in enumerate(zip(a.numbers, b.numbers, strict=False)) if x != y), 0)
    what = labels[k - 1] if 0 < k <= len(labels) else "an input"
    return AgreementError(
        f"{start} {OTHER_BATCHES}: {what} is {a.numbers[k]} on rank {i}, {b.numbers[k]} on rank {j}", fix=SAME_BATCH
    )


def _wanted(x: str, y: str, i: int, j: int) -> str:
    """How two ranks' lines on requires_grad differ."""
    kind = "an input" if x.startswith(f"{WANTED}the inputs") else "a parameter"
    names = [set(filter(None, line.partition(": ")[2].split(", "))) for line in (x, y)]
    if not (apart := sorted(names[0] ^ names[1])):
        return f"differ in requires_grad of parameters: {x[:200]} on rank {i}, {y[:200]} on rank {j}"
    has = (apart[0] in names[0]) == (kind == "an input")
    more = f" and of {len(apart) - 1} more" if len(apart) > 1 else ""
    return f"differ in requires_grad of {kind}, '{apart[0]}'{more}: {has} on rank {i}, {not has} on rank {j}"


def replicas_differ(difference: Difference, stepped: str = "") -> AgreementError:
    """The error of data-parallel ranks. stepped: which optimizer stepped last."""
    (i, j), (a, b) = difference
    if a.text == b.text and a.numbers != b.numbers:
        if (error := _steps_differ(difference, "data-parallel", stepped)) is not None:
            return error
        sizes = f"{[*a.numbers[1:]]} and {[*b.numbers[1:]]}"
        return AgreementError(
            f"data-parallel ranks {i} and {j} differ in the shapes of their batches: sizes {sizes}",
            fix="give each the same number of rows and pad them to the same length: this model averages over its batch, or "
            "drops out by place in it; or use Config(data_parallel_loss='average')",
        )
    if a.text == b.text:
        found, _, fix = str(calls_differ(difference, ())).partition("\n  fix: ")
        return AgreementError(found.replace("tensor-parallel", "data-parallel"), fix=fix)
    lines = [e.text.splitlines() for e in (a, b)]
    names = [{name for line in part for name in line.partition(": ")[2].split(", ") if name} for part in lines]
    module, which = None, "another order of gradients, or other collectives"
    for rank, mine, theirs in ((i, names[0], names[1]), (j, names[1], names[0])):
        if alone := sorted(mine - theirs):
            module = alone[0].rpartition(".")[0]
            which = f"'{alone[0]}' is used on data-parallel rank {rank}, and not on rank {i + j - rank}"
            break
    else:
        pairs = ((x, y) for x, y in zip(*lines, strict=False) if x != y)
        which = next((f"'{x[:200]}' on rank {i}, '{y[:200]}' on rank {j}" for x, y in pairs), which)
    return AgreementError(
        f"data-parallel ranks run different graphs, whose gradients cannot be summed: {which}",
        module=module,
        fix="take the same branch on all of them in a step, and no_sync on all or none; or compute both branches and choose "
        "with torch.where(flag, a, b), where flag is a tensor that is passed to the model",
    )
