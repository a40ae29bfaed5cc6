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

Starts move up to their operands, waits down to their first user; that alone overlaps what is independent already (parallel
attention and MLP). In backward the products that no collective depends on (gradients of sharded weights) can run late: each
collective that something waits for, the last first, takes the latest such product that was due before it; then, in the same
order, takes more until its time is covered. A product passes MOST_PASSED other collectives at most, because it keeps its
operands alive. Nothing moves in forward otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from megafx.aliasing import shows_operand, storage_of
from megafx.cost import DTYPE_OF_ITEMSIZE, collective_seconds, matmul_seconds
from megafx.hardware import Hardware
from megafx.ir import PHASE, VAL, Phase, Program
from megafx.placements import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

REQUIRES, ENSURES = Phase.LOWERED, Phase.LOWERED
# With sequence parallelism a block has two collectives with only a norm between them (the reduce-scatter of its input's
# gradient and the all-gather of the next block's), and the products of the block serve both.
MOST_PASSED = 1
# An all-reduce does not name its ranks; 8 estimates its time within a factor of 2, and never too low.
RANKS_ASSUMED = 8
aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
COLLECTIVES = {
    "all_reduce": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
}


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective, which a wait_tensor ends."""
    return _c10d_name(node) in COLLECTIVES


def is_wait(node: fx.Node) -> bool:
    return _c10d_name(node) == "wait_tensor"


def _c10d_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
        return target._schema.name.split("::")[1]
    return ""


@dataclass
class _Collective:
    """One start and its wait. due: position after which it can start; fillers: products that run while it does."""

    start: fx.Node
    wait: fx.Node
    due: int
    seconds: float
    fillers: list[fx.Node] = field(default_factory=list)
    covered: float = 0.0


def schedule_collectives(program: Program, hardware: Hardware | None = None) -> int:
    """Return the number of nodes that changed place. hardware: what collectives and products are timed by."""
    hardware = hardware or Hardware.load("h100-nvlink")
    nodes = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    position = {n: i for i, n in enumerate(nodes)}
    collectives = [
        _Collective(n, next(iter(n.users)), _due(n, position), _collective_seconds(program, n, hardware))
        for n in nodes
        if is_start(n) and len(n.users) == 1 and is_wait(next(iter(n.users)))
    ]
    _assign(program, collectives, position, hardware)
    order = _Order(nodes, collectives).run()
    output = program.output_node()
    for node in order:
        output.prepend(node)
    program.graph.lint()
    program.gm.recompile()
    return sum(a is not b for a, b in zip(nodes, order, strict=True))


# -- which products run beside which collective


def _assign(program: Program, collectives: list[_Collective], position: dict[fx.Node, int], hardware: Hardware) -> None:
    wanting = [c for c in collectives if _is_backward(c.start) and _is_waited_for(c.wait)]
    depended_on = _ancestors([c.start for c in collectives])
    free = [n for n in position if n.target in MATMULS and _is_backward(n) and n not in depended_on]
    due = {n: _due(n, position) for n in free}
    free.sort(key=due.__getitem__)
    for until_covered in (False, True):
        for i in range(len(wanting) - 1, -1, -1):
            collective = wanting[i]
            oldest = wanting[i - 1 - MOST_PASSED].due if i > MOST_PASSED else -1
            while collective.covered < collective.seconds if until_covered else not collective.fillers:
                product = next((n for n in reversed(free) if oldest < due[n] <= collective.due), None)
                if product is None:
                    break
                free.remove(product)
                collective.fillers.append(product)
                collective.covered += _product_seconds(program, product, hardware)


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get(PHASE) == "backward"


def _due(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """The position after which the node can run; views of operands cost nothing and count as what they show."""
    return max((position.get(storage_of(a), -1) for a in node.all_input_nodes), default=-1)


def _is_waited_for(wait: fx.Node) -> bool:
    """Whether anything is computed from the result: an output, seen through views alone, is not waited for."""
    todo = list(wait.users)
    while todo:
        node = todo.pop()
        if node.op != "output" and not shows_operand(node):
            return True
        todo += node.users
    return False


def _ancestors(roots: list[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return seen


def _collective_seconds(program: Program, node: fx.Node, hardware: Hardware) -> float:
    kind, args, operand = COLLECTIVES[_c10d_name(node)], node.args, node.all_input_nodes[0]
    t = {ALL_GATHER: lambda: args[1], REDUCE_SCATTER: lambda: args[2], ALL_TO_ALL: lambda: len(args[1])}.get(  # type: ignore[arg-type]
        kind, lambda: RANKS_ASSUMED
    )()
    whole = _numel(program, operand) * (t if kind in (ALL_GATHER, ALL_TO_ALL) else 1)  # type: ignore[operator]
    return collective_seconds(kind, whole, operand.meta[VAL].element_size(), hardware, t)  # type: ignore[arg-type]


def _product_seconds(program: Program, node: fx.Node, hardware: Hardware) -> float:
    """2 m n k FLOPs: the elements of the result times twice the dim summed over."""
    left = next(a for a in node.all_input_nodes if a is (node.args[1] if "add" in str(node.target) else node.args[0]))
    summed = program.sizes.workload(program.sizes.of(left.meta[VAL].shape[-1]))
    dtype = DTYPE_OF_ITEMSIZE.get(left.meta[VAL].element_size(), "float32")
    return matmul_seconds(2.0 * _numel(program, node) * summed, dtype, hardware)


def _numel(program: Program, node: fx.Node) -> int:
    return program.sizes.workload(math.prod(program.sizes.shape(node.meta[VAL])))


# -- the order


class _Order:
    """Nodes in their own order, except: a collective starts once its operands are there, its fillers follow it at once, what
    depends on a filler follows that, and a wait comes when asked for."""

    def __init__(self, nodes: list[fx.Node], collectives: list[_Collective]) -> None:
        self.nodes, self.collectives = nodes, collectives
        self.index = {c.start: i for i, c in enumerate(collectives)}
        self.started = 0
        self.order: list[fx.Node] = []
        self.placed: set[fx.Node] = set()
        self.fillers: set[fx.Node] = {f for c in collectives for f in c.fillers}
        self.late = set(self.fillers)  # they and what depends on them
        for node in nodes:
            if any(a in self.late for a in node.all_input_nodes):
                self.late.add(node)
        self.on_demand = {c.wait for c in collectives} | set(self.index) | self.late

    def run(self) -> list[fx.Node]:
        for node in self.nodes:
            if node not in self.on_demand:
                self._place(node)
        for node in self.nodes:
            self._place(node)
        return self.order

    def _place(self, node: fx.Node) -> None:
        if node in self.placed or node.op == "placeholder":
            return
        for i in range(self.started, self.index.get(node, -1)):
            self._place(self.collectives[i].start)
        for operand in node.all_input_nodes:
            self._place(operand)
        if node in self.placed:
            return
        self.placed.add(node)
        self.order.append(node)
        if node in self.index:
            self.started += 1
            for filler in self.collectives[self.index[node]].fillers:
                self._place(filler)
        for user in list(node.users):
            if user in self.late and user not in self.fillers and self._ready(user):
                self._place(user)
        if self.started < len(self.collectives) and self._ready(self.collectives[self.started].start):
            self._place(self.collectives[self.started].start)

    def _ready(self, node: fx.Node) -> bool:
        return all(a in self.placed or a.op == "placeholder" for a in node.all_input_nodes)
