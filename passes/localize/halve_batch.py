"""Run a region of the graph on two halves of the batch, so that collectives of one run beside ops of the other.

Before:  %x = transition(%e, P, S0, ..)                  # [ceil(b*s/2) h], marked HALVED; %e has ROWS
         %y = rms_norm(%x, %w); %z = transition(%y, S0, R, ..); .. %l = linear(%z, %head)
After:   %e1, %e2 = split_with_sizes(%e, [(b-b//2)*s, b//2*s])
         %x1 = transition(%e1, P, S0, ..); %x2 = transition(%e2, P, S0, ..); %y1 = rms_norm(%x1, %w); %z1 = transition(%y1, ..)
         %y2 = rms_norm(%x2, %w); .. %z = cat([%z1, %z2]); %l = linear(%z, %head)
Legal because: one rank's graph is right for a batch of any size, so also for each half; and the rows of a marked value are
computed from the same rows of the inputs (`choose_halves`). A draw gets the rows of the batch that it is for.

Gradients of weights come out as sums of the halves', which `accumulate_products` makes in one product.

The order is that of a schedule by modelled times: the first half goes on whenever it can, the second one while the first waits
for a collective. Autograd goes through it backwards, so that backward is interleaved in the same way. tp_batch_overlap="auto"
keeps the halves where this schedule is shorter than the whole batch's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from megafx.analysis.batch_rows import has_tensor, limit_sizes
from megafx.analysis.kept import seconds
from megafx.ir.contracts import ends_of, layout_of
from megafx.ir.facts import MATMUL
from megafx.ir.nodes import draw_of, is_draw, op_name, set_arguments
from megafx.ir.program import HALVED, PLACEMENT, ROWS, VAL, Builder, Phase, Program, is_floating, recompute_val
from megafx.ir.sizes import SizeEmitter
from megafx.placements.types import Layout, Placement, collectives
from megafx.planner.context import Planner
from megafx.planner.cost import collective_seconds, cost_kind

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL
NAME = "halve_batch"
aten, ops = torch.ops.aten, torch.ops.megafx
# A product of half the rows takes more than half the time. Measured: H200, Llama-8B shape, 8192 rows cut in two: 5%.
NARROW = 1.05
# Share of forward and backward that makes gradients of weights, beside which backward's collectives run anyway.
FILLERS = 1 / 3


def halve_batch(program: Program, planner: Planner) -> int:
    """Return the number of ops that run on halves."""
    if not any(HALVED in n.meta for n in program.graph.nodes):
        return 0
    halver = _Halver(program, planner)
    reason = halver.reason()
    if reason:
        if planner.config.tp_batch_overlap is True:
            program.note("halves", f"the batch is not cut into halves: {reason}")
        return 0
    halver.run()
    program.note("halves", f"layers run on two halves of the batch; {halver.price()}")
    limit_sizes(program, halver.batch, 2)
    return len(halver.marked)


Times = tuple[float, float, float]  # seconds of an op; of a collective in forward, in backward


class _Halver:
    def __init__(self, program: Program, planner: Planner) -> None:
        self.program, self.planner = program, planner
        self.inside: dict[
            fx.Node, None
        ] = {}  # what later passes made of marked ops is marked too, joined parameters included
        for node in program.graph.nodes:
            rows = any(a in self.inside or self._varies(a) for a in node.all_input_nodes) or self._varies(node)
            if HALVED in node.meta and has_tensor(node) and rows:
                self.inside[node] = None
        self.marked = [*self.inside]
        batch = program.sizes.symbols["batch"]
        self.parts = [
            {batch: batch - FloorDiv(batch, 2)},
            {batch: FloorDiv(batch, 2)},
        ]  # their sum simplifies to it
        self.batch = batch
        self.emit = SizeEmitter(program.graph, program.sizes)
        self.made: list[dict[fx.Node, fx.Node]] = [{}, {}]  # of each half: node -> its copy, or the half of it
        self.times = {n: self._times(n) for n in self.marked}
        work, forward, backward = (sum(t[k] for t in self.times.values()) for k in range(3))
        self.whole = 3 * work + forward + max(0.0, backward - FILLERS * 3 * work)  # seconds, one op after the other
        self.halves = self._scheduled(1, lambda t: t[1])[1] + self._scheduled(2, lambda t: t[2])[1]

    def reason(self) -> str:
        """Why the halves do not run; '' where they do."""
        for node in self.marked:
            for operand in node.all_input_nodes:
                if (
                    operand not in self.inside
                    and has_tensor(operand)
                    and self._varies(operand)
                    and ROWS not in operand.meta
                ):
                    return f"%{operand.name} has the batch in its shape in a way that cannot be cut"
            if any(u not in self.inside for u in node.users) and ROWS not in node.meta and self._varies(node):
                return f"%{node.name} cannot be put together"
        if self.planner.config.tp_batch_overlap == "auto" and self.halves >= self.whole:
            return self.price()
        return ""

    def price(self) -> str:
        return f"by the cost model {self.halves * 1e3:.1f} ms in halves, {self.whole * 1e3:.1f} ms whole"

    def run(self) -> None:
        graph, output = self.program.graph, self.program.output_node()
        later = set(self.marked)
        rest = []
        for node in graph.nodes:
            if node not in self.inside and node.op == "call_function" and any(a in later for a in node.all_input_nodes):
                later.add(node)
                rest.append(node)
        for node in rest:
            output.prepend(node)
        where = rest[0] if rest else output
        for half, node in self._scheduled(1, lambda t: max(t[1:]))[0]:
            self._copy(half, node, where)
        for node in self.marked:
            users = [u for u in node.users if u not in self.inside]
            if users:
                joined = self._joined(node, where)
                for user in users:
                    user.replace_input_with(node, joined)
        for node in reversed(self.marked):
            if not node.users:
                graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()

    # -- copies

    def _copy(self, half: int, node: fx.Node, where: fx.Node) -> None:
        operands = {a: self._operand(half, a, where) for a in node.all_input_nodes}
        with self.program.graph.inserting_before(where):
            new = self.program.graph.node_copy(node, operands.__getitem__)
        new.meta.pop(HALVED)
        recompute_val(self.program, new)
        placement = node.meta.get(PLACEMENT)
        if placement is not None:
            new.meta[PLACEMENT] = self._placement(half, placement)
        drawn = draw_of(node) if is_draw(node) else None
        if drawn is not None and drawn.p and drawn.seed is not None:
            sizes = self.program.sizes
            first = node.meta[VAL][0] if isinstance(node.meta[VAL], (tuple, list)) else node.meta[VAL]
            cut = Layout.from_flat(layout_of(self.program, drawn.cut)) if drawn.shard_dim == 0 else None
            rows = sizes.of(first.shape[0]) if cut is None else cut.size
            set_arguments(new, layout=draw_of(new).of_rows(self._size(0, rows) if half else 0, self.emit(rows)))
        self.made[half][node] = new

    def _operand(self, half: int, node: fx.Node, where: fx.Node) -> fx.Node:
        if node in self.inside:
            return self.made[half][node]
        if not self._varies(node):
            return node
        if not has_tensor(node):
            return self._size(half, self.program.sizes.of(node.meta[VAL]))  # type: ignore[return-value]
        if node not in self.made[half]:
            dim = node.meta[ROWS]
            build = Builder(self.program, where, node, NAME)
            rows = self.program.sizes.of(node.meta[VAL].shape[dim])
            both = build(aten.split_with_sizes.default, node, [self._size(i, rows) for i in (0, 1)], dim)
            for i in (0, 1):
                self.made[i][node] = build(operator.getitem, both, i)
                if PLACEMENT in node.meta:
                    self.made[i][node].meta[PLACEMENT] = self._placement(i, node.meta[PLACEMENT])
        return self.made[half][node]

    def _joined(self, node: fx.Node, where: fx.Node) -> fx.Node:
        if ROWS not in node.meta:
            return self.made[0][node]  # it is the same for all rows
        build = Builder(self.program, where, node, NAME)
        joined = build(aten.cat.default, [made[node] for made in self.made], node.meta[ROWS])
        joined.meta[VAL] = node.meta[VAL]
        if PLACEMENT in node.meta:
            joined.meta[PLACEMENT] = node.meta[PLACEMENT]
        return joined

    # -- sizes

    def _varies(self, node: fx.Node) -> bool:
        """Whether the batch is in a value's shape, or in a size."""
        value = node.meta.get(VAL)
        sizes = self.program.sizes
        if isinstance(value, (tuple, list)):
            return any(self._mentions(sizes.of(n)) for v in value if isinstance(v, torch.Tensor) for n in v.shape)
        if isinstance(value, torch.Tensor):
            return any(self._mentions(sizes.of(n)) for n in value.shape)
        return isinstance(value, torch.SymInt) and self._mentions(sizes.of(value))

    def _mentions(self, size: int) -> bool:
        return self.program.sizes.mentions(size, "batch")

    def _of(self, half: int, size: int) -> int:
        """A structural size of the whole batch -> that of a half."""
        sizes = self.program.sizes
        return sizes.of_expr(sizes.expr(size).xreplace(self.parts[half])) if self._mentions(size) else size

    def _size(self, half: int, size: int) -> Any:
        return self.emit(self._of(half, size))

    def _placement(self, half: int, placement: Placement) -> Placement:
        if not placement.is_shard or not any(map(self._mentions, placement.flat_layout)):
            return placement
        cut, t = placement.cut, self.planner.t
        blocks = [(self._of(half, count), self._of(half, unit)) for count, unit in cut.blocks]
        return Placement("S", placement.dim, Layout.of(blocks, t, self._of(half, cut.rep)))

    # -- times

    def _times(self, node: fx.Node) -> Times:
        """For the whole batch."""
        planner = self.planner
        if node.target is not ops.transition.default:
            return seconds(self.program, node, planner.hardware, planner.t), 0.0, 0.0
        ends = ends_of(self.program, node)
        kinds, value = collectives(*ends), node.args[0].meta[VAL]  # type: ignore[union-attr]
        numel = self.program.sizes.workload(math.prod(self.program.sizes.shape(value)))
        numel *= planner.t if ends[0].is_shard else 1
        cost = lambda kind: collective_seconds(kind, numel, value.element_size(), planner.hardware, planner.t)  # noqa: E731
        return 0.0, cost(kinds.forward), cost(kinds.backward) if is_floating(node) else 0.0

    def _scheduled(self, passes: int, talk: Callable[[Times], float]) -> tuple[list[tuple[int, fx.Node]], float]:
        """(order of both halves' ops on one GPU and one link, seconds). passes: how often an op's work is done. talk: seconds
        of a collective."""
        ready: list[dict[fx.Node, float]] = [{}, {}]
        order: list[tuple[int, fx.Node]] = []
        place, now, link = [0, 0], 0.0, 0.0
        while len(order) < 2 * len(self.marked):
            at = {
                i: max((ready[i].get(a, 0.0) for a in self.marked[place[i]].all_input_nodes), default=0.0)
                for i in (0, 1)
                if place[i] < len(self.marked)
            }
            half = next((i for i in at if at[i] <= now), min(at, key=at.__getitem__))
            node = self.marked[place[half]]
            narrow = NARROW if cost_kind(op_name(node)) == MATMUL else 1.0
            now = done = max(now, at[half]) + passes * self.times[node][0] / 2 * narrow
            sent = talk(self.times[node])
            if sent:
                done = link = max(link, now) + (sent + self.planner.hardware.alpha_seconds) / 2
            ready[half][node] = done
            order.append((half, node))
            place[half] += 1
        return order, max(now, link)
