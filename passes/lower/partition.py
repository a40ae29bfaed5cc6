"""Cut the joint graph into a forward and a backward graph, and choose what is kept between them.

Before:  %y = f(%x), %v = view(%y), %dx = g(%v, %tangent)        # one graph
After:   forward(%x) -> (%y, saved %y);  backward(%y, %tangent): %v = view(%y), %dx = g(%v, %tangent)
Legal because: backward gets the same values, kept, given again (inputs), or computed again by ops without side effects.
Collectives whose result only other ranks read (`drop_expert_values`) stay: all ranks call the same ones.

What eager mode keeps is kept, except what costs nothing to have again:

    input      parameters, buffers and user inputs are handed over by reference, never as a view; so are joined parameters
               and gathers that are not tagged for repetition, inputs of both graphs after the program's own. So are
               casts of weights that are kept (`keep_casts`): a graph of their own makes them
    size       sizes are kept as integers; arithmetic on them is repeated
    view       views of one storage are repeated from the value they show
    cast       of parameters, as autocast makes them, are repeated: a low-precision copy of the weights is not kept
    recompute  nodes tagged so (ir.RECOMPUTE) are repeated (`choose_kept`)

Lazy outputs (`Output.lazy`) are in neither graph: a third one computes them when somebody reads them. It keeps what it needs
by the same rules, except that it gathers shards again rather than keep them gathered.

A collective that is not tagged is never repeated in backward; dropout's mask is drawn again from the seed. Re-gathering the
inputs of column-parallel linears moves 10 N(t-1)/t bytes (N = 2sbh bytes, one layer, t ranks); keeping them moves 8 N(t-1)/t,
and 4sbh(1 - 1/t) bytes more stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx

from megafx.analysis.communication import is_region_gather, is_start, is_wait, start_earlier
from megafx.analysis.kept import by_reference, is_free, is_gathered, is_given, is_join
from megafx.analysis.lazy import only_for_lazy
from megafx.ir.nodes import in_backward, storage_of
from megafx.ir.program import (
    GIVEN,
    RECOMPUTE,
    VAL,
    Partition,
    Phase,
    Program,
    Saved,
    ancestors,
    copied_node,
    fqn_of,
    graph_module,
    source_of,
)
from megafx.ops.again import AGAIN, in_forward, when_repeated
from megafx.ops.offload import is_on_host
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.BOUND, Phase.PARTITIONED


def partition(program: Program, context: CompileContext) -> int:
    """Fill `program.partition`; return how many values are kept."""
    program.partition = cut(program)
    program.phase = ENSURES
    return len(program.partition.saved)


def cut(program: Program) -> Partition:
    results = [*zip(program.results(), program.outputs, strict=True)]
    outputs = [r for r, o in results if o.kind != "gradient"]
    gradients = [r for r, o in results if o.kind == "gradient"]
    given = [(n, i.kind in ("tangent", "pending")) for n, i in program.input_nodes()]
    inputs = [n for n, of_backward in given if not of_backward]
    tangents = [n for n, of_backward in given if of_backward]
    index = {n: i for i, n in enumerate(inputs)}
    joined = [n for n in program.graph.nodes if is_join(n)]
    joins = tuple(tuple(index[p] for p in n.args[0]) for n in joined)
    gathered = {k: (n.args[1], n.args[2]) for k, n in enumerate(joined) if is_region_gather(n)}
    inputs += joined
    casts = sorted((n for n in program.graph.nodes if GIVEN in n.meta), key=lambda n: n.meta[GIVEN])
    cast_weights = _module(program, _extract(program, inputs, casts, [])) if casts else None
    inputs += casts
    index |= {n: i for i, n in enumerate(inputs)}
    places = {i.name: index[n] for n, i in program.input_nodes() if n in index}
    made_of = tuple(tuple(places[name] for name in n.meta[GIVEN][1]) for n in casts)
    unread = [n for n in program.graph.nodes if is_wait(n) and not n.users]
    ahead = [n for n in unread if not in_backward(n)]
    if not gradients:
        graph = _extract(program, inputs, outputs, ahead)
        module = _module(program, graph)
        return Partition(module, None, (), joins=joins, gathered=gathered, cast_weights=cast_weights, casts=made_of)
    backward = _Backward(program, tangents, in_backward)
    backward.build(gradients, [n for n in unread if in_backward(n)])
    saved = _in_order(program, backward.saved)
    gm = _module(program, backward.finish(saved))
    gm.graph.set_codegen(Boxed())
    gm.recompile()
    lazy_graph, saved_for_lazy, lazy = _lazy_graph(program, outputs)
    present = [None if i in lazy else n for i, n in enumerate(outputs)]
    values = [n for n in (*saved, *saved_for_lazy) if _kind(n) != "input"]
    forward = _module(program, _extract(program, inputs, [*present, *values], ahead))
    shared = {storage_of(n) for n in (*present, *saved_for_lazy) if isinstance(n, fx.Node)}
    described = [tuple(_describe(program, n, index, shared) for n in each) for each in (saved, saved_for_lazy)]
    return Partition(
        forward, gm, described[0], lazy_graph, described[1], lazy, joins, gathered, gm, cast_weights, made_of
    )


def _in_order(program: Program, saved: set[fx.Node]) -> list[fx.Node]:
    """By kind; in graph order within a kind."""
    return sorted((n for n in program.graph.nodes if n in saved), key=lambda n: _KINDS.index(_kind(n)))


def _lazy_graph(program: Program, outputs: list[Any]) -> tuple[fx.GraphModule | None, list[fx.Node], tuple[int, ...]]:
    """(graph of the lazy outputs, what it takes, their places among the outputs)."""
    specs = [o for o in program.outputs if o.kind != "gradient"]
    lazy = tuple(i for i, o in enumerate(specs) if o.lazy and isinstance(outputs[i], fx.Node))
    if not lazy:
        return None, [], ()
    own = set(only_for_lazy(program))
    part = _Backward(program, [], lambda n: n in own or is_gathered(n))
    part.build([outputs[i] for i in lazy], [])
    saved = _in_order(program, part.saved)
    return _module(program, part.finish(saved)), saved, lazy


_KINDS: tuple[Literal["input", "size", "value"], ...] = ("input", "size", "value")


def _kind(node: fx.Node) -> Literal["input", "size", "value"]:
    if is_given(node):
        return "input"
    return "value" if isinstance(node.meta[VAL], torch.Tensor) else "size"


def _describe(program: Program, node: fx.Node, index: dict[fx.Node, int], outputs: set[fx.Node]) -> Saved:
    value, kind, numel, itemsize = node.meta[VAL], _kind(node), 0, 0
    tensor = isinstance(value, torch.Tensor)
    if kind == "value" and not is_on_host(node):
        numel, itemsize = math.prod(program.sizes.shape(value)), value.element_size()
    shared = tensor and (kind == "input" or storage_of(node) in outputs)
    name = program.inputs[index[node]].name if node.op == "placeholder" else node.name
    name = node.meta[GIVEN][1][0] if GIVEN in node.meta else name
    return Saved(kind, index.get(node, -1), name, fqn_of(node), source_of(node), numel, itemsize, shared)


class _Backward:
    """Writes the backward graph: the joint graph's backward nodes in order, repeated nodes just before their first use.

    own: whether a node belongs to this graph (that of lazy outputs is written in the same way).
    Repeated collectives start a product earlier, to overlap with it.
    """

    def __init__(self, program: Program, tangents: list[fx.Node], own: Callable[[fx.Node], bool]) -> None:
        self.program, self.tangents, self.own = program, tangents, own
        self.saved: set[fx.Node] = set()
        self.order: list[fx.Node] = []
        self.placed: set[fx.Node] = set(tangents)
        self.gradients: list[Any] = []
        self.parameters = by_reference(program)

    def build(self, gradients: list[Any], unread: list[fx.Node]) -> None:
        self.gradients = gradients
        needed = ancestors([*gradients, *unread], stop=lambda n: is_given(n) or not self.own(n))
        for node in self.program.graph.nodes:
            if node in needed and self.own(node):
                self._require(node)
        for node in gradients:
            if isinstance(node, fx.Node):
                self._require(node)
        for node in [n for n in self.order if is_start(n) and not (in_backward(n) or is_region_gather(n))]:
            self.order = start_earlier(self.order, node)

    def _require(self, node: fx.Node) -> None:
        """Keep the node's value, or place the node behind its operands. A chain may be as long as the model is deep."""
        todo = [node]
        while todo:
            node = todo[-1]
            missing = []
            if node not in self.placed and node not in self.saved:
                repeated = node.meta.get(RECOMPUTE) or is_free(node, self.parameters)
                if not is_given(node) and (self.own(node) or repeated):
                    missing = [n for n in when_repeated(node) if n not in self.placed and n not in self.saved]
                    if not missing:
                        self.placed.add(node)
                        self.order.append(node)
                else:
                    self.saved.add(node)
            if missing:
                todo += reversed(missing)
            else:
                todo.pop()

    def finish(self, saved: list[fx.Node]) -> fx.Graph:
        graph, new = fx.Graph(), {}
        for node in (*saved, *self.tangents):
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        for node in self.order:
            new[node] = (
                new[when_repeated(node)[0]] if node.target is AGAIN else copied_node(graph, node, new.__getitem__)
            )
        graph.output(tuple(new[g] if isinstance(g, fx.Node) else g for g in self.gradients))
        return graph


def _extract(program: Program, inputs: list[fx.Node], outputs: list[Any], unread: list[fx.Node]) -> fx.Graph:
    """The part of the graph that computes `outputs` and `unread`, with all of `inputs` as placeholders."""
    needed, graph = ancestors([*outputs, *unread], stop={*inputs}.__contains__, operands=in_forward), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = copied_node(graph, node) if node.op == "placeholder" else graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in program.graph.nodes:
        if node in needed and node not in new:
            new[node] = new[in_forward(node)[0]] if node.target is AGAIN else copied_node(graph, node, new.__getitem__)
    graph.output(tuple(new[n] if isinstance(n, fx.Node) else n for n in outputs))
    return graph


def _module(program: Program, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return graph_module(program.gm, graph)


class Boxed(fx.graph.CodeGen):
    """Generated code takes one list and empties it, so that each argument is freed after its last use.

    torch has the same as `fx.graph._BoxedCodeGen`, which is private.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        lines = [f"def forward(self, arguments){maybe_return_annotation}:"]
        lines += [f"    ({', '.join(names)},) = arguments", "    arguments.clear()"] if names else []
        return "\n".join(lines)
