"""Exchanges of tokens start early and are waited for late: what needs nothing of them runs meanwhile, such as a shared expert.

Before:  %u = linear(%x, %w); %t = topk(..); ..; %g = dispatch_rows(%x, ..); %y = grouped_mm(%g, ..)
         %s = combine_rows(%y, ..); %v = linear(%x, %w2); %z = add(%s, %v)
After:   %t = topk(..); ..; %b = begin_dispatch(%x, ..); %u = linear(%x, %w); %g = end_dispatch(%b, ..); %y = grouped_mm(%g, ..)
         %c = begin_combine(%y, ..); %v = linear(%x, %w2); %s = end_combine(%c, ..); %z = add(%s, %v)
Legal because: the order is topological, and no node that moves has side effects. Every rank has the same order, and collectives
keep theirs among themselves: what starts one, waits for one or is called by Python passes nothing.

An exchange starts once its operand is there, views and casts of it included; it is waited for where its result is read. Ops
between the value that travels and its start that the start does not need, and nothing before it, run behind the start.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from megafx.analysis.communication import COLLECTIVES, is_product, is_wait
from megafx.ir.nodes import CASTS, COPIES, is_view, storage_of
from megafx.ir.program import VAL, Phase, Program, copied_graph, graph_module
from megafx.kernels.experts.dispatch_rows import ENDS
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "start_exchanges"
_LIGHT = COPIES | CASTS | {torch.ops.aten.reshape.default, operator.getitem}


def start_exchanges(program: Program, context: CompileContext) -> int:
    """Return the number of exchanges whose start and wait are apart."""
    if program.partition is None:
        return 0
    program.partition, count = program.partition.changed(lambda gm, direction: _changed(gm))
    return count


def _changed(gm: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    if not any(node.target in ENDS for node in gm.graph.nodes):
        return gm, 0
    graph = copied_graph(gm.graph)
    begun = [_split(node) for node in graph.nodes if node.target in ENDS]
    for begin, _ in begun:
        _start_early(begin)
        _let_run_behind(begin)
    ends = {end for _, end in begun}
    for node in [*reversed(graph.nodes)]:  # each once: two that the same node reads would move in turn for ever
        if node in ends or (_is_light(node) and storage_of(node) in ends):
            min(node.users).prepend(node)
    graph.lint()
    return graph_module(gm, graph), len(begun)


def _split(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The op's node becomes its end."""
    begin, end = ENDS[node.target]
    with node.graph.inserting_before(node):
        start = node.graph.call_function(begin, node.args)
    start.meta = dict(node.meta)
    node.target, node.args = end, (start, *node.args[1:])
    return start, node


def _is_light(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_view(node) or node.target in _LIGHT)


def _keeps_its_place(node: fx.Node) -> bool:
    """True of what communicates, writes, or may do anything."""
    if node.op != "call_function" or node.target in COLLECTIVES or is_wait(node):
        return True
    if node.target is operator.getitem:
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable


def _is_of_python(node: fx.Node) -> bool:
    """True of a tensor that no op has made."""
    if not isinstance(node.meta.get(VAL), torch.Tensor):
        return False
    made = storage_of(node)
    while made.target is operator.getitem:
        made = storage_of(made.args[0])
    return made.op == "call_function" and not isinstance(made.target, torch._ops.OpOverload)


def _start_early(begin: fx.Node) -> None:
    """Move it up to the last of its operands, with views of them, but before nothing that keeps its place."""
    moved: dict[fx.Node, None] = {}
    todo = [begin]
    while todo:
        node = todo.pop()
        moved[node] = None
        todo += [a for a in node.all_input_nodes if _is_light(a) and a not in moved]
    needed = {a for node in moved for a in node.all_input_nodes if a not in moved}
    after: fx.Node = begin.prev
    while after not in needed and (after in moved or not _keeps_its_place(after)):
        after = after.prev
    for node in sorted(n for n in moved if n > after):
        after.append(node)
        after = node


def _let_run_behind(begin: fx.Node) -> None:
    """Move behind it what comes after the value that travels and what nothing before it needs, if that is a product."""
    made, window = storage_of(begin.args[0]), list[fx.Node]()
    node = begin.prev
    while node is not made and node.op == "call_function":
        window.append(node)
        node = node.prev
    stay = {begin}
    for node in window:  # the last first
        in_slots = any(map(_is_of_python, node.all_input_nodes))  # of an exchange, whose memory is used again
        if in_slots or _keeps_its_place(node) or any(user in stay for user in node.users):
            stay.add(node)
    free = [node for node in window if node not in stay]
    if any(is_product(node) for node in free):
        for node in free:
            begin.append(node)
