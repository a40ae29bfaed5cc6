"""Where this process is on each axis of the mesh. No torch.distributed: kernels and the simulator ask here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from megafx.errors import UsageError
from megafx.placements.data_axis import BATCH_AXIS, JOINED


@dataclass(frozen=True)
class AxisContext:
    """This process on one mesh axis. group_name: of the c10d process group; '' where no collective may run."""

    rank: int
    size: int
    group_name: str = ""


class Mesh:
    """All ranks of a mesh, in row-major order: the last axis varies fastest. An axis that joins others is made of these.

    ranks: each one's place. groups: axis -> the ranks that move values together. named: name of a group -> its ranks.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        places = [dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))]
        joined = {
            axis: parts for axis, parts in JOINED.items() if axis not in sizes and len(sizes.keys() & {*parts}) > 1
        }
        self.ranks: list[dict[str, AxisContext]] = [{} for _ in places]
        self.groups: dict[str, list[list[int]]] = {}
        for axis, parts in {**{name: (name,) for name in sizes}, **joined}.items():
            members: dict[Any, list[int]] = {}
            for rank, place in enumerate(places):
                members.setdefault(tuple(at for name, at in place.items() if name not in parts), []).append(rank)
            self.groups[axis] = [*members.values()]
        self.named: dict[str, list[int]] = {}
        for axis, groups in self.groups.items():
            for i, group in enumerate(groups):
                name = axis if len(groups) == 1 else f"{axis}.{i}"
                self.named[name] = group
                for at, rank in enumerate(group):
                    self.ranks[rank][axis] = AxisContext(at, len(group), name)


# Plain module state, not thread-local: autograd runs backward on threads of its own, and the caller enters `on_mesh` there.
_entered: list[Mapping[str, AxisContext]] = []


@contextmanager
def on_mesh(axes: Mapping[str, AxisContext]) -> Iterator[None]:
    """Run megafx ops as the given rank of each axis."""
    _entered.append(axes)
    try:
        yield
    finally:
        _entered.pop()


@contextmanager
def off_mesh() -> Iterator[None]:
    """Leave what this thread has entered, for another thread's turn."""
    entered = [*_entered]
    _entered.clear()
    try:
        yield
    finally:
        _entered[:] = entered


def axis_context(axis: str) -> AxisContext:
    if not _entered or axis not in _entered[-1]:
        raise UsageError(
            f"a graph for mesh axis '{axis}' runs outside of the mesh",
            fix="run it in `with megafx.ops.axes.on_mesh({axis: AxisContext(rank, size, group_name)}):`",
        )
    return _entered[-1][axis]


@contextmanager
def microbatch(index: int, count: int) -> Iterator[None]:
    """Draw for the rows of one of `count` parts, which follow each other, of what this rank has of the batch."""
    _microbatch.append((index, count))
    try:
        yield
    finally:
        _microbatch.pop()


_microbatch: list[tuple[int, int]] = []


class DrawAxis(NamedTuple):
    """The ranks that draw parts of one mask. An op's argument is the text: 'tp', or 'dp+tp' for rows of the batch."""

    axis: str
    of_batch: bool = False  # the rows that are drawn are one part of the batch

    @classmethod
    def parse(cls, text: str) -> DrawAxis:
        batch, _, axis = text.rpartition("+")
        return cls(axis, batch == BATCH_AXIS)

    def __str__(self) -> str:
        return f"{BATCH_AXIS}+{self.axis}" if self.of_batch else self.axis


def batch_rank(axis: str) -> int:
    """Which part of the batch a draw on this axis is for."""
    if not DrawAxis.parse(axis).of_batch:
        return 0
    if not _microbatch:
        return axis_context(BATCH_AXIS).rank
    index, count = _microbatch[-1]
    outer = _entered[-1].get(BATCH_AXIS) if _entered else None
    return (0 if outer is None else outer.rank) * count + index


def place_on(axis: str) -> tuple[int, ...] | None:
    """(rank, size, part of the batch) on the axis of a draw; None outside of `on_mesh`."""
    context = _entered[-1].get(DrawAxis.parse(axis).axis) if _entered else None
    return None if context is None else (context.rank, context.size, batch_rank(axis))


def axis_rank(axis: str) -> int:
    return axis_context(DrawAxis.parse(axis).axis).rank


def axis_size(axis: str) -> int:
    return axis_context(DrawAxis.parse(axis).axis).size
