"""Order the graph so that collectives run while something else does.

Before:  %dw = mm(%dy.t(), %x)                  # gradient of a column-parallel weight
         %dx = mm(%dy, %w)                      # gradient of its input, P
         %s = all_reduce(%dx); %g = wait_tensor(%s); %h = norm_backward(%g)
After:   %dx = mm(%dy, %w)
         %s = all_reduce(%dx)
         %dw = mm(%dy.t(), %x)                  # meanwhile
         %g = wait_tensor(%s); %h = norm_backward(%g)
Legal because: the order is topological and nothing has side effects. Every rank has the same graph, so the same order, and
collectives keep their order among themselves.

Starts move up to their operands, waits down to their first user. In backward, products that no collective depends on
(gradients of sharded weights) can run late: each collective, the last first, takes the latest such product that was due before
it; then, in the same order, takes more until its time is covered. Those whose result is a gradient and nothing else choose
last, and collectives of few bytes after the others. A product passes MOST_PASSED other collectives at most, because it keeps
its operands alive.

While the largest magnitude of an operand in FP8 is reduced, in forward too, the product's other operand is cast.
Sums of gradients over data-parallel ranks start once their last gradient is there, and are waited for at the end. Where each
rank keeps its rows of a sum, the whole gradients, which the collective holds until it is waited for, are freed before the next
region's are joined: one region's are sent while those of the next are made. (So does FSDP2.)
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from megafx.analysis.communication import is_product, is_region_gather, is_start, is_wait
from megafx.analysis.prices import seconds
from megafx.ir.nodes import in_backward, shows_operand, storage_of
from megafx.ir.program import VAL, Phase, Program, ancestors
from megafx.kernels.fp8.quantize import quantize, transposed
from megafx.placements.data_axis import DATA_AXES
from megafx.planner.context import CompileContext
from megafx.planner.timeline import LEAST_BYTES

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
# With sequence parallelism two collectives have only a norm between them, and the products of the block serve both.
MOST_PASSED = 1
# A start passes this many products on its way up, as many as linears share an input (q, k, v and a gate).
MOST_HOISTED = 4
_CASTS = (quantize, transposed)
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


@dataclass
class _Collective:
    """One start and its wait. due: position after which it can start; fillers: products that run while it does."""

    start: fx.Node
    wait: fx.Node
    due: int
    seconds: float
    fillers: list[fx.Node] = field(default_factory=list)
    covered: float = 0.0
    casts: list[fx.Node] = field(default_factory=list)  # of FP8, that run while a largest magnitude is reduced


def schedule_collectives(program: Program, context: CompileContext) -> int:
    """Return the number of nodes that changed place."""
    hardware = context.hardware
    nodes = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    position = {n: i for i, n in enumerate(nodes)}
    waits = {
        n: next(iter(n.users)) for n in nodes if is_start(n) and len(n.users) == 1 and is_wait(next(iter(n.users)))
    }
    reductions = _reductions(waits)
    apart = {n for reduction in reductions for n in reduction}
    collectives = [
        _Collective(n, wait, _due(n, position), seconds(program, n, hardware, context.t))
        for n, wait in waits.items()
        if wait not in apart
    ]
    _assign(program, collectives, position, context)
    for collective in collectives:
        collective.casts = _casts_meanwhile(collective, nodes, position)
    order = _Order(nodes, collectives, reductions).run()
    output = program.output_node()
    for node in order:
        output.prepend(node)
    program.graph.lint()
    return sum(a is not b for a, b in zip(nodes, order, strict=True))


# -- which products run beside which collective


def _assign(
    program: Program, collectives: list[_Collective], position: dict[fx.Node, int], context: CompileContext
) -> None:
    backward = [c for c in collectives if in_backward(c.start)]
    depended_on = ancestors([c.start for c in collectives])
    free = [n for n in position if is_product(n) and in_backward(n) and n not in depended_on]
    due = {n: _due(n, position) for n in free}
    free.sort(key=due.__getitem__)
    waited_for = [c for c in backward if _is_waited_for(c.wait)]
    large = [c for c in waited_for if program.sizes.bytes(c.start.meta[VAL]) >= LEAST_BYTES]
    small = [c for c in waited_for if c not in large]  # largest magnitudes of FP8, one number each
    counted = large or waited_for
    for group in (large, small, [c for c in backward if c not in waited_for]):
        for until_covered in (False, True):
            for collective in reversed(group):
                passed = [c.due for c in counted if c.due < collective.due]
                oldest = passed[-1 - MOST_PASSED] if len(passed) > MOST_PASSED else -2  # -1 is due at once
                while collective.covered < collective.seconds if until_covered else not collective.fillers:
                    product = next((n for n in reversed(free) if oldest < due[n] <= collective.due), None)
                    if product is None:
                        break
                    free.remove(product)
                    collective.fillers.append(product)
                    collective.covered += seconds(program, product, context.hardware, context.t)


def _casts_meanwhile(collective: _Collective, nodes: list[fx.Node], position: dict[fx.Node, int]) -> list[fx.Node]:
    """Casts that need not wait for this largest magnitude, of other operands of the products that do: a weight, a saved value.
    Of the next two products: of a gradient they are those that make the gradients of the operand and of the weight."""
    if collective.start.target is not _ALL_REDUCE or collective.start.args[1] != "max":
        return []
    after, products, casts = {collective.start, collective.wait}, 0, []
    for node in nodes[position[collective.wait] + 1 :]:
        if products == 2:
            break
        if any(a in after for a in node.all_input_nodes):
            after.add(node)
            if is_product(node):
                products += 1
                casts += [_cast_of(operand) for operand in node.all_input_nodes]
    return [n for n in casts if n.target in _CASTS and n not in after and _due(n, position) <= collective.due]


def _cast_of(operand: fx.Node) -> fx.Node:
    operand = storage_of(operand)
    if operand.target is operator.getitem:
        operand = operand.args[0]
    return operand


def _due(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """The position after which the node can run. Views of operands cost nothing and count as what they show; casts to FP8
    that are for the node alone move with it."""
    found = -1
    for operand in map(storage_of, node.all_input_nodes):
        cast = _cast_of(operand)
        alone = cast.target in _CASTS and {u for n in (cast, *cast.users) for u in n.users} <= {node, *cast.users}
        found = max(found, _due(cast, position) if alone else position.get(operand, -1))
    return found


def _is_waited_for(wait: fx.Node) -> bool:
    """True if anything is computed from the result: an output, seen through views alone, is not waited for."""
    todo = list(wait.users)
    while todo:
        node = todo.pop()
        if node.op != "output" and not shows_operand(node):
            return True
        todo += node.users
    return False


# -- sums over data-parallel ranks


def _reductions(waits: Mapping[fx.Node, fx.Node]) -> list[list[fx.Node]]:
    """Those for which nothing waits, in order: start and wait, and of shards that have copies, those of the sum over these.
    waits: start -> its wait."""
    found: list[list[fx.Node]] = []
    for start, wait in waits.items():
        if start.args[-1] not in DATA_AXES or not in_backward(start) or any(start in chain for chain in found):
            continue
        chain = [start, wait]
        while (
            len(chain[-1].users) == 1 and (then := next(iter(chain[-1].users))) in waits and then.args[-1] in DATA_AXES
        ):
            chain += [then, waits[then]]
        if not _is_waited_for(chain[-1]):
            found.append(chain)
    return found


def _freed_before(reductions: list[list[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
    """What joins a region's gradients -> the end of the reduction before, whose whole gradients are held until then."""
    scattered = [chain for chain in reductions if chain[0].target is _REDUCE_SCATTER]
    found = {}
    for before, (start, *_) in pairwise(scattered):
        joined = storage_of(start.all_input_nodes[0])
        found[joined if joined.target is torch.ops.aten.cat.default else start] = before[1:]
    return found


# -- the order


class _Order:
    """Nodes in their own order, except: a collective starts once its operands are there, its fillers follow it at once, what
    depends on a filler follows that, and a wait comes when asked for."""

    def __init__(self, nodes: list[fx.Node], collectives: list[_Collective], reductions: list[list[fx.Node]]) -> None:
        self.nodes, self.collectives = nodes, collectives
        self.apart = {n for _, *rest in reductions for n in rest}
        self.freed_before = _freed_before(reductions)
        self.index = {c.start: i for i, c in enumerate(collectives)}
        self.earliest = _earliest(nodes, collectives)
        self.started = 0
        self.order: list[fx.Node] = []
        self.placed: set[fx.Node] = set()
        self.fillers: set[fx.Node] = {f for c in collectives for f in c.fillers}
        self.late = set(self.fillers)  # they and what depends on them
        for node in nodes:
            if any(a in self.late for a in node.all_input_nodes):
                self.late.add(node)
        self.on_demand = {c.wait for c in collectives} | set(self.index) | self.late | self.apart

    def run(self) -> list[fx.Node]:
        for now, node in enumerate(self.nodes):
            if node not in self.on_demand:
                self._place(node)
            while self.started < len(self.collectives):
                start = self.collectives[self.started].start
                if self.earliest[self.started] > now or not self._ready(start):
                    break
                self._place(start)
        for node in self.nodes:
            self._place(node)
        return self.order

    def _ready(self, node: fx.Node) -> bool:
        return all(a in self.placed or a.op == "placeholder" for a in node.all_input_nodes)

    def _place(self, node: fx.Node) -> None:
        if node in self.placed or node.op == "placeholder":
            return
        for i in range(self.started, self.index.get(node, -1)):
            self._place(self.collectives[i].start)
        for operand in node.all_input_nodes:
            self._place(operand)
        for end in self.freed_before.get(node, ()):
            self._place(end)
        if node in self.placed:
            return
        self.placed.add(node)
        self.order.append(node)
        if node in self.index:
            self.started += 1
            collective = self.collectives[self.index[node]]
            for meanwhile in (*collective.fillers, *collective.casts):
                self._place(meanwhile)
        for user in list(node.users):
            if user in self.late and user not in self.fillers | self.apart and self._ready(user):
                self._place(user)


def _earliest(nodes: list[fx.Node], collectives: list[_Collective]) -> list[int]:
    """The position in `nodes` before which a start does not come: one product before its own, where its operands were
    ready long before. Its result would take memory for nothing. Gathers of parameters are where they are to start."""
    position = {n: i for i, n in enumerate(nodes)}
    products = [i for i, n in enumerate(nodes) if is_product(n)]
    earliest = []
    for c in collectives:
        end = bisect.bisect(products, position[c.start])
        passed = end - bisect.bisect(products, c.due)
        first = products[end - 1] - 1 if passed > MOST_HOISTED else 0
        earliest.append(position[c.start] if is_region_gather(c.start) else first)
    return earliest
