"""The memory of one rank over a step, predicted: what graphs allocate, in their order, and what is held throughout.

    memory(program, ...) -> Memory      of a LOWERED program, at the workload; nothing is executed

A graph's values live from their node to their last use, as generated code has them; views show their operand's memory. What a
collective sends lives until it is waited for: the process group holds it (torch's c10d, `stashed_for_allocator_safety_`). An
allocation is rounded up as the CUDA allocator does it. What a kernel takes while it runs is `OpFacts.workspace`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.analysis.communication import COLLECTIVES, is_wait
from megafx.analysis.prices import copies
from megafx.ir.facts import facts_of
from megafx.ir.nodes import aten_ops, op_name, shows_operand, writes
from megafx.ir.program import VAL, Partition, Program, Saved, fqn_of, tensors_of
from megafx.ops.offload import is_on_host
from megafx.placements.types import ALL_REDUCE
from megafx.units import mib_text

BLOCK = 512  # bytes to which the CUDA caching allocator rounds (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
# Of the device's memory, what is left to the CUDA context, NCCL's buffers and blocks that do not fit together.
MARGIN = 0.06
# What cuBLAS holds on a stream: 4096 KiB x 8 on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp, 32 MiB).
CUBLAS_WORKSPACE = 32 * 2**20
# Copies of the parameters' elements that an optimizer holds, and that its step makes in addition (foreach forms, torch 2.13).
OPTIMIZERS = {
    "adamw": (2, 1),
    "adam": (2, 1),
    "fused adamw": (2, 0),
    "sgd": (0, 0),
    "sgd with momentum": (1, 0),
    "lion": (1, 1),
    "adagrad": (1, 1),
}
OPTIMIZERS |= {"rmsprop": (1, 1), "none": (0, 0)}
_RESHAPES = aten_ops("reshape")


@dataclass(frozen=True)
class Alive:
    """Memory that is held at some time. what: the value, by the op that made it, or what it is."""

    module: str
    what: str
    bytes: int


class Point(NamedTuple):
    """bytes: held while a node of this module runs. given: those of what the graph was given; results: of what it returns."""

    node: str
    module: str
    bytes: int
    given: int
    results: int


@dataclass(frozen=True)
class Timeline:
    """One graph."""

    points: tuple[Point, ...]  # its nodes in order
    alive: tuple[Alive, ...]  # what is held at the highest point, largest first
    start: int  # start, end: bytes held before and afterwards
    end: int

    @property
    def peak(self) -> int:
        return max((point.bytes for point in self.points), default=self.start)


@dataclass(frozen=True)
class Memory:
    """One rank's memory in bytes, at the workload. print(memory) is a table.

    parameters, gradients, optimizer: held throughout; gathered: parameters of other data-parallel ranks that are kept whole;
    casts: of weights to FP8, kept between micro-batches, until the optimizer's step; inputs: of the call; saved: kept from
    forward to backward; workspace: of cuBLAS. forward, backward: what the graphs allocate, as time goes; step: what the
    optimizer's step makes in addition.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    inputs: int
    saved: int
    workspace: int
    step: int
    forward: Timeline
    backward: Timeline | None
    workload: Mapping[str, int] = field(default_factory=dict)
    casts: int = 0

    @property
    def standing(self) -> int:
        """Held at all times of a step."""
        return self.parameters + self.optimizer + self.gathered + self.inputs + self.workspace

    @property
    def peaks(self) -> dict[str, int]:
        """Highest memory in each part of a step. Gradients are made in backward, and freed by zero_grad()."""
        found = {"forward": self.standing + self.casts + self.forward.peak}
        if self.backward is not None:
            found["backward"] = self.standing + self.casts + self.backward.peak
            found["optimizer step"] = self.standing + self.gradients + self.step
        return found

    @property
    def peak(self) -> int:
        """The highest of a step, as torch.cuda.max_memory_allocated() gives it."""
        return max(self.peaks.values())

    def at_peak(self) -> list[Alive]:
        """What the graphs hold at the highest point of forward and backward, by module and op, largest first."""
        graph = self.forward
        if self.backward is not None and self.backward.peak > graph.peak:
            graph = self.backward
        return list(graph.alive)

    def __str__(self) -> str:
        lines = [f"one rank at {', '.join(f'{k}={v}' for k, v in self.workload.items()) or 'fixed sizes'}"]
        for name in ("parameters", "gradients", "optimizer", "gathered", "casts", "inputs", "saved", "workspace"):
            if getattr(self, name):
                lines.append(f"  {name:<16}{mib_text(getattr(self, name)):>16}")
        lines += [f"  peak of {part:<16}{mib_text(size):>16}" for part, size in self.peaks.items()]
        lines.append("at the peak of the graphs:")
        alive = self.at_peak()
        lines += [f"  {mib_text(a.bytes):>16}  {a.module or '<root>'}  {a.what}" for a in alive[:20]]
        if len(alive) > 20:
            lines.append(f"  {mib_text(sum(a.bytes for a in alive[20:])):>16}  in {len(alive) - 20} more")
        return "\n".join(lines)


def memory(program: Program, optimizer: str = "adamw", held: int | None = None) -> Memory:
    """Of a PARTITIONED program. optimizer: a name of OPTIMIZERS; held: bytes that it is known to hold."""
    parts = program.partition
    assert parts is not None
    params = sum(_rounded(program, n.meta[VAL]) for n, i in program.input_nodes() if i.kind == "param")
    inputs = sum(
        _rounded(program, n.meta[VAL]) for n, i in program.input_nodes() if i.kind in ("user", "buffer", "constant")
    )
    made = {o.name: r for r, o in zip(program.results(), program.outputs, strict=True) if o.kind == "gradient"}
    trained = [(n.meta[VAL], made[i.name]) for n, i in program.input_nodes() if i.kind == "param" and i.name in made]
    stepped = sum(_rounded(program, value) for value, _ in trained)
    gradients = sum(_rounded(program, value, result) for value, result in trained)
    joins = [n for n in parts.forward.graph.find_nodes(op="placeholder")][len(program.inputs) - _late(program) :]
    gathered = sum(_rounded(program, n.meta[VAL]) for k, n in enumerate(joins) if k in parts.gathered)
    casts = sum(_rounded(program, n.meta[VAL]) for n in joins[len(parts.joins) :])
    states, temporary = OPTIMIZERS[optimizer]
    forward = walk(program, parts.forward, {})
    backward = saved = None
    if parts.backward is not None and parts.last_backward is not None:
        taken = {s.name: s for s in parts.saved}
        saved = _given(program, parts, parts.last_backward)
        also = sum(_bytes(program, s) for s in parts.saved_for_lazy if s.kind == "value" and s.name not in taken)
        also += _outputs(program, parts)
        backward = walk(program, parts.last_backward, saved, also=also, pinned=_pinned(parts))
    training = backward is not None
    return Memory(
        params, gradients, (held if held is not None else states * stepped) if training else 0, gathered, inputs,
        sum((saved or {}).values()), CUBLAS_WORKSPACE, temporary * stepped if training else 0, forward, backward,
        {name: program.sizes.workload(program.sizes.of_expr(s)) for name, s in program.sizes.symbols.items()},
        casts,
    )  # fmt: skip


def _late(program: Program) -> int:
    """Inputs that forward does not take."""
    return sum(i.kind in ("tangent", "pending") for i in program.inputs)


def _bytes(program: Program, saved: Saved) -> int:
    return _block(program.sizes.workload(saved.numel) * saved.itemsize)


def _given(program: Program, parts: Partition, gm: fx.GraphModule) -> dict[str, int]:
    """Placeholder of a value that forward keeps -> its bytes. Backward takes `saved` first, then tangents."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return {n.name: _bytes(program, s) for n, s in zip(nodes, parts.saved, strict=False) if s.kind == "value"}


def _outputs(program: Program, parts: Partition) -> int:
    """Bytes of what the user gets and backward does not: the loss is there while backward runs."""
    root: dict[fx.Node, fx.Node | None] = {}
    for node in parts.forward.graph.nodes:
        root[node] = _memory(node, root, {})
    results: Any = parts.forward.graph.output_node().args[0]
    count = sum(o.kind != "gradient" for o in program.outputs)
    parts_of = lambda part: {base for n in part if isinstance(n, fx.Node) and (base := root[n]) is not None}
    given = parts_of(results[:count]) - parts_of(results[count:])
    return sum(_rounded(program, v) for n in given for v in tensors_of(n))


def _pinned(parts: Partition) -> set[str]:
    """Names of kept values that live on after their last use: lazy outputs need them, or the user has them."""
    return {s.name for s in parts.saved_for_lazy} | {s.name for s in parts.saved if s.shared}


def walk(
    program: Program, gm: fx.GraphModule, given: Mapping[str, int], *, also: int = 0, pinned: Iterable[str] = ()
) -> Timeline:
    """given: names of placeholders whose memory the graph may free -> bytes. Other placeholders are counted elsewhere.

    also: bytes held in addition; pinned: names of placeholders that somebody else holds too.
    """
    nodes = [n for n in gm.graph.nodes]
    root: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:
        root[node] = _memory(node, root, given)
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for operand in (*node.all_input_nodes, *_sent(node)):
            shown = root.get(operand)
            if shown is not None:
                last[shown] = node
    dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for base, user in last.items():
        dying[user].append(base)
    held = {n: given[n.name] for n in nodes if n.op == "placeholder" and n.name in given}
    results = {returned for n in gm.graph.output_node().all_input_nodes if (returned := root[n]) is not None} - {*held}
    now = start = of_given = sum(held.values()) + also
    of_results = 0
    points, best, alive = [], -1, dict(held)
    pinned = set(pinned)
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            break
        own = root[node] is node
        if own and node not in held:
            value = node.meta[VAL]
            several = isinstance(value, (tuple, list))
            sizes = [_rounded(program, v) for v in (value if several else [value])]  # 0 of what is no tensor
            sizes = [0] * len(sizes) if is_on_host(node) else sizes
            if several:  # each result is freed by itself
                parts = [u for u in node.users if u.target is operator.getitem]
                for part in parts:
                    apart = root[part] is part
                    if apart:
                        held[part], sizes[part.args[1]] = sizes[part.args[1]], 0
                        now += held[part]
                        of_results += held[part] if part in results else 0
            held[node] = sum(sizes)
            now += held[node]
            of_results += held[node] if node in results else 0
        size = now + _workspace(program, node)
        points.append(Point(node.name, fqn_of(node), size, of_given, of_results))
        if size > best:
            best, alive = size, dict(held)
        for base in [*dying[node], *([node] if own and node not in last else [])]:
            if base in held and base.name not in pinned:
                freed = held.pop(base)
                now -= freed
                of_given -= freed if base.op == "placeholder" else 0
    by_op: dict[tuple[str, str], int] = defaultdict(int)
    for base, size in alive.items():
        by_op[fqn_of(base), f"{'kept ' if base.op == 'placeholder' else ''}{_what(base)}"] += size
    found = sorted(
        (Alive(module, what, size) for (module, what), size in by_op.items() if size), key=lambda a: -a.bytes
    )
    return Timeline(tuple(points), tuple(found), start, now)


def _sent(wait: fx.Node) -> list[fx.Node]:
    """What the collective that is waited for holds until then; an all-reduce works on a copy of its own."""
    starts = wait.all_input_nodes if is_wait(wait) else []
    return [x for start in starts if COLLECTIVES.get(start.target) != ALL_REDUCE for x in start.all_input_nodes]


def _what(node: fx.Node) -> str:
    return op_name(node) or node.name.rstrip("_0123456789")


def _memory(node: fx.Node, root: Mapping[fx.Node, fx.Node | None], given: Mapping[str, int]) -> fx.Node | None:
    """The node whose memory this one shows; itself if it has its own, None if it is not the graph's or is none."""
    if node.op == "placeholder":
        return node if node.name in given else None
    if node.op != "call_function" or not tensors_of(node):
        return None
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return node
    if node.target is operator.getitem and not shows_operand(node):
        return node
    if is_wait(node):
        return root[source]
    if writes(node):
        inplace = next((i for i, a in enumerate(node.target._schema.arguments) if a.alias_info is not None), 0)
        return root[node.args[inplace]]
    if shows_operand(node) and not copies(node) and not _reshape_copies(node):
        return root[source]
    return node


def _reshape_copies(node: fx.Node) -> bool:
    return node.target in _RESHAPES and not node.args[0].meta[VAL].is_contiguous()


def _workspace(program: Program, node: fx.Node) -> int:
    taken = facts_of(node.target).workspace if node.op == "call_function" else None
    if taken is None:
        return 0
    work = lambda n: program.sizes.workload(program.sizes.of(n))
    of_value = lambda v: _Shape(map(work, v.shape)) if isinstance(v, torch.Tensor) else work(v)
    shapes = fx.map_arg(node.args, lambda n: of_value(n.meta[VAL]))
    operands = (n.meta[VAL] for n in node.all_input_nodes)
    itemsize = next(v.element_size() for v in operands if isinstance(v, torch.Tensor) and v.is_floating_point())
    return _block(taken(shapes, itemsize))


class _Shape(tuple):
    """A shape among arguments."""


def _rounded(program: Program, value: Any, like: Any = None) -> int:
    """Bytes of a tensor. like: a node of the dtype, where that is another."""
    if not isinstance(value, torch.Tensor):
        return 0
    dtype = (like.meta[VAL] if isinstance(like, fx.Node) else value).dtype
    return _block(program.sizes.numel(value) * dtype.itemsize)


def _block(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
