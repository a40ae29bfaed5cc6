"""Say which ops may run on two halves of the batch, so that collectives of one half run beside ops of the other.

Before:  %e = embedding(%w, %ids); %x = transition(%e, P, S0, ..); %y = layer_norm(%x); .. %l = linear(%z, %head); %c = loss(%l)
After:   the same; transition, layer_norm and so on up to %z are marked HALVED, and values with rows of the batch have ROWS
Legal because: nothing changes. A marked op computes each row of the batch by itself (`BatchRows`: by its sharding rule), and
draws what it would draw for the whole batch.

Three stay whole: the embedding lookup, so that its gradient is made once; the last product before the loss and what follows,
since a loss is a mean over rows; and what depends on an op that computes with several rows at a time (batch statistics, a
router that counts): a note names it, if layers follow.

halve_batch (passes/localize) makes the halves, on one rank's shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.analysis.batch_rows import BatchRows, limit_sizes
from megafx.ir.contracts import ends_of
from megafx.ir.facts import MATMUL
from megafx.ir.nodes import op_name
from megafx.ir.program import HALVED, PLACEMENT, ROWS, Phase, Program, active_nodes, ancestors
from megafx.placements.types import LOCAL, collectives
from megafx.planner.context import Planner
from megafx.planner.cost import cost_kind

REQUIRES, ENSURES = Phase.PLACED, Phase.PLACED
TRANSITION = torch.ops.megafx.transition.default


def choose_halves(program: Program, planner: Planner) -> int:
    """Return the number of ops that may run on halves; notes say why there are none, where they are asked for."""
    wanted = planner.config.tp_batch_overlap
    if wanted is False or planner.t == 1 or not planner.training:
        return 0
    if wanted == "auto" and planner.config.tp_comm_overlap is not False:
        return 0  # collectives run beside their own products

    symbol = program.sizes.symbols.get("batch")
    if symbol is None:
        return len(_none(program, planner, "its size is a number in this graph"))
    if program.sizes.of_call.get(symbol) == 1:
        limit_sizes(program, symbol, 1, 1)  # calls of more rows get a graph of their own
        return len(_none(program, planner, "it is one row"))
    rows = BatchRows(program, symbol)
    chosen = _chosen(program, planner, rows)
    for node in chosen:
        node.meta[HALVED] = True
    for node in program.graph.nodes:
        dim = rows.dim(node)
        if dim is not None:
            node.meta[ROWS] = dim
    return len(chosen)


def _none(program: Program, planner: Planner, reason: str, node: fx.Node | None = None) -> list[fx.Node]:
    """No ops, with a note where halves are asked for."""
    if planner.config.tp_batch_overlap is True:
        program.note("halves", f"the batch is not cut into halves: {reason}", node)
    return []


def _chosen(program: Program, planner: Planner, rows: BatchRows) -> list[fx.Node]:
    active, nodes = active_nodes(program), list(program.graph.nodes)
    weights = {n for n in nodes if _source(n) in planner.weights}
    of_weights = [n for n in nodes if any(a in weights for a in n.all_input_nodes)]
    products = {n for n in of_weights if cost_kind(op_name(n)) == MATMUL}
    last = _last_products(rows, products)
    lookups = {n for n in of_weights if op_name(n) == "embedding" and not _cut_by_rows(n, rows)}
    after = {*rows.mixed, *(last if len(last) == 1 else ())}
    chosen: dict[fx.Node, None] = {}
    for node in nodes:
        if any(a in after for a in node.all_input_nodes):
            after.add(node)
        if node.op != "call_function" or node in lookups or node in after or not rows.splits(node):
            continue
        if node in active or node.target is TRANSITION:
            shares = next((a for a in node.all_input_nodes if a not in chosen and _cut_by_rows(a, rows)), None)
            if shares is not None:
                reason = f"they would begin at %{shares.name}, of whose rows ranks hold shares"
                return _none(program, planner, reason, node)
            chosen[node] = None
    for node in chosen:
        end = next((u for u in node.users if u not in chosen and _cut_by_rows(node, rows)), None)
        if end is not None:
            roots = [f", which {why}" for n, why in rows.mixed.items() if why and n in ancestors([end])]
            reason = f"they would end at {end.target}{(*roots, '')[0]}: ranks hold shares of the rows there"
            return _none(program, planner, reason, end)
    behind = ancestors(products & rows.mixed.keys())
    for node, reason in rows.mixed.items():
        if reason and node in behind:
            program.note("halves", f"the batch is whole from {node.target} on, which {reason}", node)
    if not any(_communicates(program, n) for n in chosen):
        return _none(program, planner, "no op that computes row by row communicates")
    return [*chosen]


def _last_products(rows: BatchRows, products: set[fx.Node]) -> set[fx.Node]:
    """The products with weights that are nearest to the ops that mix rows, going back from those."""
    found: set[fx.Node] = set()
    todo = [a for n in rows.mixed for a in n.all_input_nodes if a not in rows.mixed]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in products:
            found.add(node)
        elif rows.splits(node):
            new = [a for a in node.all_input_nodes if a not in seen]
            seen.update(new)
            todo += new
    return found


def _source(node: fx.Node) -> Any:
    while node.target is TRANSITION:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _cut_by_rows(node: fx.Node, rows: BatchRows) -> bool:
    """Whether ranks hold shares of the value's rows."""
    placement = node.meta.get(PLACEMENT)
    return placement is not None and placement.is_shard and placement.dim == rows.dim(node)


def _communicates(program: Program, node: fx.Node) -> bool:
    return node.target is TRANSITION and any(k != LOCAL for k in collectives(*ends_of(program, node))[:2])
