"""`megafx.rehearse`: what every rank of a large run would do, proven in one process without a process group.

The graph of a rank is a function of the program of all ranks and of the rank's places on the axes that `stage rank` reads. So
ranks fall into classes: along each axis that is read, those whose graphs are equal but for rank constants. One rank of each
class, and its last one, get the graphs that they would run (`Compiled.for_rank`), and of these are proven or given:

    the order     all ranks of a group start the same collectives in the same order, and no rank waits for one that waits for it
    the memory    of each class, by the one model (megafx/analysis/memory.py)
    the step      by the clock that `plan` and `search` use

An order is compared for every group of the whole mesh, by the classes of its ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import is_wait
from megafx.analysis.memory import MARGIN
from megafx.checks.simulate import CROSS_RANK, EXCHANGES
from megafx.compiler.all_ranks import CALLED_DIRECTLY
from megafx.compiler.compiled import Compiled
from megafx.errors import ConfigError, PlacementError, SourceLine
from megafx.ir.program import MADE_BY, VAL, Program, fqn_of, source_of, tensors_of
from megafx.ops.axes import AxisContext, Mesh
from megafx.passes.experts.drop_expert_values import NAME as DROPPED
from megafx.passes.lower.bind_mesh import NAME as BOUND
from megafx.placements.data_axis import PIPELINE_AXIS, TENSOR_AXIS
from megafx.planner.context import CompileContext
from megafx.progress import uncollected
from megafx.units import bytes_text, time_text
from megafx.what_if import modelled_step

Edit = Callable[[Program, Mapping[str, AxisContext]], None]
WHOLE = 16  # up to so many ranks of an axis that graphs depend on, each is bound; of more, these from both ends


@dataclass(frozen=True)
class Collective:
    """One that a rank starts."""

    op: str
    axis: str
    shapes: tuple[str, ...]
    options: tuple[str, ...]  # its reduction and sizes
    direction: str
    module: str  # module, source: where it is from
    source: SourceLine | None = None
    node: str = ""  # which of those that are alike, by its name in the graph of all ranks

    def __str__(self) -> str:
        options = "".join(f", {x}" for x in self.options)
        return f"{self.direction} {self.op}({', '.join(self.shapes)}{options}) of '{self.module or '<root>'}'"


@dataclass(frozen=True)
class RankClass:
    """Ranks whose graphs are equal but for rank constants."""

    name: str
    ranks: int  # how many
    first: int  # first, last: of them
    last: int
    collectives: int
    memory_bytes: int
    fits: bool | None  # None where the memory of the device is not known
    alive: int = 0  # in a pipeline, micro-batches whose values a rank keeps at most, each of one stage


@dataclass(frozen=True)
class Rehearsal:
    """True where every class fits. groups: axis -> (number of groups, ranks of each, collectives that each rank starts, of a
    pipeline in all micro-batches of a step, and on its own axis messages; of the rank that starts most);
    parts_us: a modelled step by cause; device_bytes: of the profile, less what the device and its libraries take.
    not_seen: what is not shown, in words."""

    world: int
    mesh: Mapping[str, int]
    classes: tuple[RankClass, ...]
    groups: Mapping[str, tuple[int, int, int]]
    parts_us: Mapping[str, float]
    device_bytes: int | None
    not_seen: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(c.fits is not False for c in self.classes)

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: times in microseconds, sizes in bytes."""
        return asdict(self) | {"mesh": dict(self.mesh), "step_us": self.step_us, "fits": bool(self)}

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1)
        staged = PIPELINE_AXIS in self.mesh
        alive = f"{'alive':>7}" if staged else ""
        lines = [
            f"{self.world} ranks: {sizes or 'one'}",
            "",
            f"{'ranks like':<28}{'ranks':>7}{alive}{'memory':>12}  fits",
        ]
        for c in self.classes:
            fits = {True: "yes", False: "no", None: "not known"}[c.fits]
            alive = f"{c.alive:>7}" if staged else ""
            lines.append(f"{c.name:<28}{c.ranks:>7}{alive}{bytes_text(c.memory_bytes):>12}  {fits}")
        if self.device_bytes is not None:
            lines.append(
                f"of {bytes_text(self.device_bytes)}: the rest is for the device's context and buffers of NCCL"
            )
        lines += ["", f"{'axis':<16}{'groups':>8}{'ranks':>8}{'collectives of a rank':>24}"]
        lines += [f"{axis:<16}{count:>8}{ranks:>8}{calls:>24}" for axis, (count, ranks, calls) in self.groups.items()]
        lines.append(
            "ranks of a group start the same collectives in the same order; none wait for one another in a circle"
        )
        if staged:
            lines.append("both ends of each message between stages agree in order, value, shape and dtype")
        lines += ["", f"a step: {time_text(self.step_us)} by the cost model"]
        lines += [f"  {cause:<30}{time_text(us):>12}" for cause, us in self.parts_us.items() if us]
        return "\n".join([*lines, *(f"not shown: {what}" for what in self.not_seen)])


@dataclass(frozen=True)
class Proven:
    """Ranks of a mesh whose orders agree."""

    kinds: Sequence[tuple[int, ...]]  # class of each rank, as a number for each axis of `read`
    read: Sequence[str]
    members: Mapping[tuple[int, ...], list[int]]  # the ranks of a class
    orders: Mapping[tuple[int, ...], list[Collective]]  # what they start
    programs: Mapping[tuple[int, ...], Program]  # what the first of them runs
    not_seen: Sequence[str]  # what was not proven

    def name(self, mesh: Mesh, ranks: Sequence[int]) -> str:
        """The places of these ranks on the axes that graphs depend on."""
        return ", ".join(f"{axis} {_range(mesh.ranks[r][axis].rank for r in ranks)}" for axis in self.read)


def proven(
    compiled: Compiled, mesh: Mesh, edit: Edit | None = None, of: str = "", known: Proven | None = None
) -> Proven:
    """Of a LOWERED program. edit(program, places) may change what the rank at these places runs: tests plant faults so. of:
    what the mesh is a part of, for messages; known: of another backward of the same call. Raises PlacementError where ranks of
    a group differ in what they start, or wait for one another."""

    def graphs(rank: int) -> Program:
        program = compiled.for_rank(mesh.ranks[rank])
        if edit is not None:
            edit(program, mesh.ranks[rank])
        return program

    kinds, read, not_seen = _classes(compiled, mesh) if known is None else (known.kinds, known.read, known.not_seen)
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, kind in enumerate(kinds):
        members[kind].append(rank)
    orders: dict[tuple[int, ...], list[Collective]] = {}
    programs: dict[tuple[int, ...], Program] = {}
    for kind, ranks in members.items():
        programs[kind] = graphs(ranks[0])
        orders[kind] = collectives(programs[kind], mesh.ranks[ranks[0]])
        if ranks[-1] != ranks[0]:
            last = graphs(ranks[-1])
            _same(orders[kind], collectives(last, mesh.ranks[ranks[-1]]), ranks[0], ranks[-1], f"one class{of}")
            if _graphs_text(last) != _graphs_text(programs[kind]):
                found = f"ranks {ranks[0]} and {ranks[-1]}{of} run different graphs, which one class should not"
                raise PlacementError(found)
    check_orders(mesh, kinds, orders, of)
    return Proven(kinds, read, members, orders, programs, not_seen)


@uncollected()
def rehearse_compiled(compiled: Compiled, world: int, edit: Edit | None = None) -> Rehearsal:
    """Of a LOWERED program. edit: as `proven` takes it. Raises what that raises; ConfigError where the mesh has another number
    of ranks."""
    context = compiled.context
    sizes = {**(context.data.mesh if context.data is not None else {}), TENSOR_AXIS: compiled.plan.t}
    mesh = mesh_of(sizes, world)
    made = proven(compiled, mesh, edit)
    room = room_of(context)
    classes = []
    for kind, ranks in made.members.items():
        peak = compiled.memory(axes=mesh.ranks[ranks[0]]).peak
        fits = None if room is None else peak <= room
        name = made.name(mesh, ranks) or "all"
        classes.append(RankClass(name, len(ranks), ranks[0], ranks[-1], len(made.orders[kind]), peak, fits))
    first = made.orders[made.kinds[0]]
    groups = {}
    for axis, found in mesh.groups.items():
        if calls := sum(c.axis == axis for c in first):
            groups[axis] = (len(found), len(found[0]), calls)
    report = compiled.plan.report
    assert report is not None
    parts, unpriced = modelled_step(report.costed, report.step, context.config, context.hardware)
    return Rehearsal(world, sizes, tuple(classes), groups, parts, room, (*made.not_seen, *unpriced))


def mesh_of(sizes: Mapping[str, int], world: int) -> Mesh:
    mesh = Mesh(sizes)
    if len(mesh.ranks) != world:
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"the mesh {text} has {len(mesh.ranks)} ranks, not {world}", fix="make the sizes' product the world"
        )
    return mesh


def room_of(context: CompileContext) -> int | None:
    """Bytes of a rank's device that graphs may have."""
    return None if context.device_bytes is None else int((1 - MARGIN) * context.device_bytes)


# -- classes


class _Watched(AxisContext):
    """Writes down that a graph depends on the rank of an axis."""

    def watch(self, axis: str, read: set[str]) -> _Watched:
        object.__setattr__(self, "_seen", lambda: read.add(axis))
        return self

    def __getattribute__(self, name: str) -> Any:
        if name == "rank":
            object.__getattribute__(self, "_seen")()
        return object.__getattribute__(self, name)


def _classes(compiled: Compiled, mesh: Mesh) -> tuple[list[tuple[int, ...]], list[str], list[str]]:
    """(class of each rank, as a number for each axis that graphs depend on; these axes; what was not proven)."""
    seen: set[str] = set()
    at = {a: _Watched(c.rank, c.size, c.group_name).watch(a, seen) for a, c in mesh.ranks[0].items()}
    compiled.bound(at)
    read = [axis for axis in mesh.groups if axis in seen and len(mesh.groups[axis][0]) > 1]
    along: dict[str, list[int]] = {}
    not_seen = []
    for axis in read:
        group = mesh.groups[axis][0]
        texts: dict[Any, int] = {}
        middle = range(WHOLE // 2, len(group) - WHOLE // 2)
        along[axis] = []
        for i, rank in enumerate(group):
            if i in middle and len(group) > WHOLE:
                along[axis].append(along[axis][-1])
                continue
            text = _graph_text(compiled.bound(mesh.ranks[rank]).graph)
            along[axis].append(texts.setdefault(text, len(texts)))
        if len(group) > WHOLE:
            not_seen.append(
                f"that ranks {middle.start} to {middle.stop - 1} of '{axis}' are like rank {middle.start - 1}"
            )
    return [tuple(along[axis][places[axis].rank] for axis in read) for places in mesh.ranks], read, not_seen


def _graphs_text(program: Program) -> int:
    parts = program.partition
    assert parts is not None
    graphs = (parts.forward, parts.backward, parts.last_backward, parts.lazy_graph, parts.cast_weights)
    return hash(tuple(_graph_text(gm.graph) for gm in graphs if gm is not None))


def _graph_text(graph: fx.Graph) -> int:
    """The same for graphs that are equal but for rank constants: operands of what was made of a rank's place."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        number[node] = len(number)
        value = tuple((_sizes(v), v.dtype) for v in tensors_of(node)) if VAL in node.meta else ()
        own = {BOUND, DROPPED} & {*node.meta.get(MADE_BY, ())} or node.target in CROSS_RANK
        args = "" if own else str(fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}"))
        lines.append((str(node.target) if node.op == "call_function" else node.op, value, args))
    return hash(tuple(lines))


def _sizes(value: torch.Tensor) -> tuple[Any, ...]:
    """Expressions where sizes vary, which compare as fast as numbers; their text takes long."""
    return tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in value.shape)


def _range(numbers: Iterator[int]) -> str:
    found = sorted({*numbers})
    whole = found == [*range(found[0], found[-1] + 1)]
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}" if whole else ",".join(map(str, found))


# -- orders


def collectives(program: Program, places: Mapping[str, AxisContext]) -> list[Collective]:
    """What a PARTITIONED program starts, in its order. Gathers that are kept between calls come first, as they run."""
    parts = program.partition
    assert parts is not None
    axes = {c.group_name: axis for axis, c in places.items()} | {axis: axis for axis in places}
    inputs = program.input_nodes()
    found = []
    for k, (ranks, axis) in parts.gathered.items():
        joined = [inputs[i] for i in parts.joins[k]]
        names = ", ".join(spec.name for _, spec in joined)
        shapes = tuple(_shape(node.meta[VAL]) for node, _ in joined)
        found.append(Collective("gather_region", axis, shapes, (str(ranks),), "before forward", names))
    graphs = (("forward", parts.forward), ("backward", parts.last_backward), ("lazy outputs", parts.lazy_graph))
    for direction, gm in graphs:
        for node in () if gm is None else gm.graph.nodes:
            called: Any = node.target if node.op == "call_function" else None
            target = CALLED_DIRECTLY.get(called, called)
            if target not in {*CROSS_RANK, *EXCHANGES} or is_wait(node):
                continue
            named = next((a for a in node.args[1:] if isinstance(a, str) and a in axes), None)
            if named is None:
                raise PlacementError(
                    f"{node.target} names no group of the mesh", module=fqn_of(node), source=source_of(node)
                )
            options = tuple(str(a) for a in node.args[1:] if a is not named and not isinstance(a, fx.Node))
            shapes = tuple(_shape(x.meta[VAL]) for x in node.all_input_nodes)
            op = target._schema.name.rpartition("::")[2]
            found.append(
                Collective(op, axes[named], shapes, options, direction, fqn_of(node), source_of(node), node.name)
            )
    return found


def _shape(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}[{' '.join(map(_text, _sizes(value)))}]"


@functools.lru_cache(maxsize=1024)
def _text(size: Any) -> str:
    return str(size)


def _same(a: Sequence[Collective], b: Sequence[Collective], rank: int, other: int, group: str) -> None:
    """Raise PlacementError unless both ranks start the same."""
    for i, (x, y) in enumerate(itertools.zip_longest(a, b)):
        if x != y:
            one, two = (f"{c or 'nothing'} on rank {r}" for c, r in ((x, rank), (y, other)))
            at = x or y
            assert at is not None
            raise PlacementError(
                f"rank {rank} and rank {other} of {group} differ at collective {i}: {one}, {two}",
                module=at.module, source=at.source,
            )  # fmt: skip


def check_orders(mesh: Mesh, kind_of: Sequence[Any], orders: Mapping[Any, Sequence[Collective]], of: str = "") -> None:
    """kind_of: class of each rank; orders: what a rank of the class starts; of: for messages. Raises PlacementError where ranks
    of a group start different collectives, or where ranks wait for one another in a circle."""
    by_axis = {k: {axis: [c for c in o if c.axis == axis] for axis in mesh.groups} for k, o in orders.items()}
    alike: set[tuple[str, Any, Any]] = set()
    for axis, groups in mesh.groups.items():
        for group in groups:
            for rank in group[1:]:
                pair = (axis, kind_of[group[0]], kind_of[rank])
                if pair not in alike and pair[1] != pair[2]:
                    one, two = (by_axis[k][axis] for k in pair[1:])
                    _same(one, two, group[0], rank, f"group '{mesh.ranks[rank][axis].group_name}'{of}")
                alike.add(pair)
    # with one order for all ranks, the first that is open can run
    if len({tuple(order) for order in orders.values()}) > 1:
        _run(mesh, kind_of, orders)


def _run(mesh: Mesh, kind_of: Sequence[Any], orders: Mapping[Any, Sequence[Collective]]) -> None:
    """Every rank goes on once all of its group have come."""
    at, waiting = [0] * len(kind_of), defaultdict[str, list[int]](list)
    todo = [*range(len(kind_of))]
    while todo:
        rank = todo.pop()
        order = orders[kind_of[rank]]
        if at[rank] == len(order):
            continue
        name = mesh.ranks[rank][order[at[rank]].axis].group_name
        waiting[name].append(rank)
        if len(waiting[name]) == len(mesh.named[name]):
            for other in waiting.pop(name):
                at[other] += 1
                todo.append(other)
    for name, came in waiting.items():
        other = next(r for r in mesh.named[name] if r not in came)
        here, there = (orders[kind_of[r]][at[r]] if at[r] < len(orders[kind_of[r]]) else None for r in (came[0], other))
        assert here is not None
        found = f"rank {came[0]} waits at collective {at[came[0]]}, {here}, for rank {other}, which waits at {there}"
        raise PlacementError(f"{found}: ranks wait for one another in a circle", module=here.module, source=here.source)
