"""Let Inductor compile what no megafx kernel covers: chains of pointwise ops, reductions and copies.

Before:  %a = add(%x, %y); %b = silu(%a); %c = mul(%b, %z); %d = mm(view(%c), %w)
After:   %r = chain(%x, %y, %z); %c = getitem(%r, 0); %d = mm(view(%c), %w)
Legal because: a chain computes what its ops compute, and only other such ops, views and sizes are between them: operands come
before the chain, and readers after it.

Products, attention, collectives, their pieces (overlap_products) and kernels of megafx stay calls of the graph, since Inductor
would call the same ones. Equal chains are one function (kernels/common/chain.py): those of equal layers are compiled once. With
compile='auto' they are made if the cost model predicts that they save enough of the step.

Runs after `reuse_buffers`, which needs to see whose memory is whose.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import COPIES, aten_ops, is_view
from megafx.ir.program import VAL, Phase, Program, copied_graph, copied_node, graph_module, new_call
from megafx.ir.sizes import is_size
from megafx.kernels.common.chain import Chain, Operand, Size, Stride
from megafx.planner.context import CompileContext
from megafx.planner.cost import memory_seconds
from megafx.planner.timeline import LEAST_GAIN

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "compile_chains"
aten = torch.ops.aten
# In addition to ops that torch tags as pointwise.
OTHERS = COPIES | aten_ops(
    "sum sum.dim_IntList mean mean.dim amax amin prod any any.dim all all.dim argmax argmin var.correction var_mean.correction "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm _to_copy to.dtype cat stack "
    "full zeros ones full_like zeros_like ones_like scalar_tensor arange constant_pad_nd slice_backward select_backward "
    "slice_scatter select_scatter embedding gather tril triu where.self masked_fill.Scalar masked_fill.Tensor copy repeat flip "
)
_chains: dict[Any, Chain] = {}


def compile_chains(program: Program, context: CompileContext) -> int:
    """Return the number of chains."""
    parts, wanted = program.partition, context.config.compile
    if not wanted or parts is None:
        return 0
    graphs = [gm for gm in (parts.forward, parts.backward, parts.last_backward) if gm is not None]
    found = {gm: chains_of(gm.graph) for gm in dict.fromkeys(graphs)}
    if wanted == "auto":
        once = [gm for gm in (parts.forward, parts.last_backward) if gm is not None]
        gain = sum(_saved(program, context, chain) for gm in once for chain in found[gm])
        step = 1e-6 * context.solved.step_us
        saved = f"ops beside its kernels and products would take {gain * 1e6:.0f} us less of the modelled {step * 1e6:.0f} us"
        if gain < LEAST_GAIN * step:
            program.note("compile", f"the graphs run without Inductor: {saved}")
            return 0
        program.note("compile", f"Inductor compiles chains of ops: {saved}")
    made = {gm: with_chains(program, gm) for gm, chains in found.items() if chains}
    program.partition, _ = parts.changed(lambda gm, direction: (made.get(gm, gm), 0))
    return sum(map(len, found.values()))


# -- which ops


def is_work(node: fx.Node) -> bool:
    """True if it is an op that Inductor would make part of a kernel."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_work(source)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if target not in OTHERS and (torch.Tag.pointwise not in target.tags or is_view(node)):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and _is_dense(node)


def _is_dense(node: fx.Node) -> bool:
    """True if all tensors that it reads are on its device (a number may be on the host), and none is complex."""
    values = [n.meta.get(VAL) for n in (node, *node.all_input_nodes)]
    tensors = [x for v in values for x in (v if isinstance(v, (tuple, list)) else [v]) if isinstance(x, torch.Tensor)]
    return len({x.device for x in tensors}) == 1 and not any(x.is_complex() for x in tensors)


def _shows(node: fx.Node) -> bool:
    """True if it is a view, or a part of one. Of torch's own: Inductor functionalizes no others (`pad_rows`)."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _shows(node.args[0])
    return is_view(node) and not is_work(node) and getattr(node.target, "namespace", "") == "aten"


@dataclass
class ConnectedOps:
    """A chain. nodes: connected ops, in order; inside: those of them that the function computes. The others are views."""

    nodes: list[fx.Node]
    inside: set[fx.Node]

    def working(self) -> list[fx.Node]:
        return [n for n in self.nodes if is_work(n)]


def chains_of(graph: fx.Graph) -> list[ConnectedOps]:
    """Connected ops of uninterrupted runs, at least two of them `is_work`. Sizes computed from values before the run do not
    interrupt it."""
    found: list[ConnectedOps] = []
    run: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (is_work(node) or _shows(node)):
            run[node] = None
        elif not is_size(node) or any(a in run for a in node.all_input_nodes):
            found += _connected(run)
            run = {}
    return [*found, *_connected(run)]


def _connected(run: dict[fx.Node, None]) -> list[ConnectedOps]:
    """The parts of a run that share values or operands, each in order."""
    root: dict[fx.Node, fx.Node] = {}

    def top(node: fx.Node) -> fx.Node:
        while root.setdefault(node, node) is not node:
            node = root[node]
        return node

    for node in run:
        for operand in node.all_input_nodes:
            if operand in run or operand.op != "call_function" or not is_size(operand):
                root[top(node)] = top(operand)
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in run:
        parts.setdefault(top(node), []).append(node)
    found = []
    for part in parts.values():
        inside: set[fx.Node] = set()  # ops that compute, and views that they read
        read: set[fx.Node] = set()
        for node in reversed(part):
            if is_work(node) or node in read:
                inside.add(node)
                read.update(node.all_input_nodes)
        several = [n for n in inside if isinstance(n.meta[VAL], (tuple, list))]
        given = {x for n in inside for x in n.all_input_nodes} - inside
        whole = all(u in inside for n in several for u in n.users)
        known = all(isinstance(x.meta.get(VAL), (torch.Tensor, torch.SymInt)) for x in given)
        if whole and known and sum(is_work(n) and n.target is not operator.getitem for n in inside) > 1:
            found.append(ConnectedOps(part, inside))
    return found


# -- what they save


def _saved(program: Program, context: CompileContext, chain: ConnectedOps) -> float:
    """Seconds that one kernel saves over the ops one by one."""
    working, inside = chain.working(), chain.inside
    apart = sum(program.sizes.bytes(x.meta.get(VAL)) for n in working for x in (n, *n.all_input_nodes))
    given = {x for n in inside for x in n.all_input_nodes} - inside
    results = [n for n in working if any(u not in inside for u in n.users)]
    launches = (len(working) - 1) * context.hardware.launch_seconds
    joined = sum(program.sizes.bytes(x.meta.get(VAL)) for x in (*given, *results))
    return memory_seconds(max(apart - joined, 0.0), context.hardware) + launches


# -- rewriting


def with_chains(program: Program, gm: fx.GraphModule) -> fx.GraphModule:
    """The same code with its chains as calls."""
    graph = copied_graph(gm.graph)
    for chain in chains_of(graph):
        _replace(program, graph, chain)
    graph.lint()
    return graph_module(gm, graph)


def _replace(program: Program, graph: fx.Graph, chain: ConnectedOps) -> None:
    inside, end = chain.inside, chain.nodes[-1]
    staying: dict[fx.Node, None] = {}  # views that are read outside: a call returns none
    for node in reversed(chain.nodes):
        outside = node not in inside or any(u not in inside or u in staying for u in node.users)
        if outside and not is_work(node):
            staying[node] = None
    outer = lambda user: user not in inside or user in staying
    working = [n for n in chain.working() if isinstance(n.meta[VAL], torch.Tensor)]
    results = [n for n in working if any(map(outer, n.users))]
    nodes = [n for n in chain.nodes if n in inside]
    given = [*dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside)]
    try:
        function = _chain(program, nodes, given, results)
    except _Strided:
        return
    call = new_call(end.next, function, tuple(given), tuple(n.meta[VAL] for n in results), end, NAME)
    last, moved = call, {call}
    for place, node in enumerate(results):
        last = new_call(last.next, operator.getitem, (call, place), node.meta[VAL], node, NAME)
        moved.add(last)
        node.replace_all_uses_with(last, delete_user_cb=outer)
    for node in chain.nodes:
        if node in staying and any(a in moved for a in node.all_input_nodes):
            last.append(node)
            moved.add(node)
            last = node
    for node in reversed(chain.nodes):
        if not node.users:
            graph.erase_node(node)


def _chain(program: Program, nodes: list[fx.Node], given: list[fx.Node], results: list[fx.Node]) -> Chain:
    """The function of a chain; equal chains share one."""
    named = _Names(program)
    operands = [named.operand(n.meta[VAL]) for n in given]
    index = {n: i for i, n in enumerate((*given, *nodes))}
    places: Callable[[fx.Node], Any] = lambda n: fx.node.map_arg((n.args, n.kwargs), lambda x: _Place(index[x]))
    key = (*operands, *((n.target, repr(places(n))) for n in nodes), *(index[n] for n in results))
    if key not in _chains:
        graph, new = fx.Graph(), {}
        for i, node in enumerate(given):
            new[node] = graph.placeholder(f"x{i}")
        for node in nodes:
            new[node] = copied_node(graph, node, new.__getitem__)
            new[node].meta = {}
        graph.output(tuple(new[n] for n in results))
        _chains[key] = Chain(fx.GraphModule({}, graph), operands, named.hints)
    return _chains[key]


class _Place(int):
    """Represents a value in the text of an op's arguments."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class _Names:
    """Names of symbolic sizes, the same in equal chains: products of symbols that are numbered in order of use.

    hints: their values at the call that was captured, with 2 for a size of 1.
    """

    def __init__(self, program: Program) -> None:
        self.sizes = program.sizes
        self.letters: dict[Any, str] = {}
        self.hints: dict[str, int] = {}
        self.values = {s: max(2, n) for s, n in (self.sizes.workload_of | self.sizes.of_call).items()}

    def size(self, n: int | torch.SymInt) -> Size:
        structural = self.sizes.of(n)
        number, powers = self.sizes.factors(structural)
        if not powers:
            return number
        letters = [f"{self.letters.setdefault(a, f's{len(self.letters)}')}**{p}" for a, p in powers.items()]
        name = "*".join((str(number), *letters))
        known = all(a.free_symbols <= self.values.keys() for a in powers)
        self.hints[name] = (
            int(self.sizes.expr(structural).xreplace(self.values)) if known else self.sizes.workload(structural)
        )
        return name

    def operand(self, value: torch.Tensor | torch.SymInt) -> Operand | str:
        if isinstance(value, torch.Tensor):
            sizes = tuple(self.size(n) for n in value.shape)
            return Operand(sizes, self._strides(value, sizes), value.dtype, value.device)
        size = self.size(value)
        if isinstance(size, int):
            raise _Strided
        return size

    def _strides(self, value: torch.Tensor, names: tuple[Size, ...]) -> tuple[Stride, ...]:
        """Each a number, or the size of a dim times that dim's stride."""
        sizes, numbers = ([self.sizes.of(n) for n in found] for found in (value.shape, value.stride()))
        made: dict[int, Stride] = {}
        for dim in sorted(range(len(sizes)), key=lambda d: numbers[d]):
            inner = [d for d in made if sizes[d] > 1 and sizes[d] * numbers[d] == numbers[dim]]
            if self.sizes.is_static(numbers[dim]):
                made[dim] = numbers[dim]
            elif inner:
                made[dim] = _times(made[inner[0]], names[inner[0]])
            else:
                raise _Strided
        return tuple(made[d] for d in range(len(sizes)))


class _Strided(Exception):
    """The strides of a value are not products of its sizes."""


def _times(stride: Stride, size: Size) -> Stride:
    number, names = (stride, ()) if isinstance(stride, int) else stride
    return (number * size, names) if isinstance(size, int) else (number, (*names, size))
