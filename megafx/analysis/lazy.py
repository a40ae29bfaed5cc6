"""Outputs that are computed when somebody first reads them: logits that only a fused loss and the user's output want.

Before:  %y = linear(%h, %w); %l = loss(%y); return %l, %y
After:   %y = linear(%h, %w); %l = loss(%y); %y2 = linear(%h, %w); return %l, %y2      # %y2 is a lazy output
Legal because: the copy computes the same value from the same operands.

The loss can then be computed without the logits. In every pass a lazy output is like any other. `postpone_lazy_outputs` puts
what only lazy outputs need at the end of the joint graph, so that their operands count as used until then; `partition` makes a
graph of it, which runs when the output is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import megafx.ops.collectives  # noqa: F401  registers megafx::transition
from megafx.config import Config
from megafx.ir.dump import op_text
from megafx.ir.nodes import RESHAPES
from megafx.ir.program import MADE_BY, Program, ancestors, is_floating

NAME = "lazy_outputs"


def why_not_lazy(program: Program, config: Config, t: int) -> str | None:
    """Why outputs of this program are computed with the loss, or None where they may wait until they are read."""
    if not any(o.loss for o in program.outputs):
        return "there is no loss beside it"
    if config.differentiable_outputs:
        return "differentiable_outputs is on"
    if not config.lazy_outputs:
        return "lazy_outputs is off"
    if t > 1 and not config.gather_outputs:
        return "gather_outputs is off"
    return None


def with_views_out(chain: Sequence[fx.Node]) -> list[fx.Node]:
    """The chain, and what nothing but the output reads of its values in another shape or placement, in graph order."""
    moves = (*RESHAPES, torch.ops.megafx.transition.default)
    views = {user for node in chain for user in node.users if user.target in moves}
    return sorted({*chain, *(v for v in views if all(user.op == "output" for user in v.users))})


def outside_user(program: Program, chain: Sequence[fx.Node], inside: set[fx.Node]) -> fx.Node | None:
    """A node that reads the chain and is neither inside nor a user output that could be lazy."""
    outputs: dict[Any, bool] = {}  # value -> whether it leaves only as floating user outputs that are no loss
    for value, spec in zip(program.results(), program.outputs, strict=True):
        if isinstance(value, fx.Node):
            fits = spec.kind == "user" and not (spec.loss or spec.written) and is_floating(value)
            outputs[value] = outputs.get(value, True) and fits
    outside = ((node, user) for node in chain for user in node.users if user not in inside and user not in chain)
    return next((user for node, user in outside if user.op != "output" or not outputs.get(node)), None)


def read_outside(chain: Sequence[fx.Node], inside: set[fx.Node]) -> bool:
    """True if anything but the nodes inside reads a value of the chain."""
    return any(user not in inside and user not in chain for node in chain for user in node.users)


def copy_for_outputs(program: Program, chain: Sequence[fx.Node]) -> int:
    """Copy the chain, in graph order, as far as user outputs read it, and make these outputs lazy; return how many.

    The copy is placed before the output: everything that the chain reads comes before the chain.
    """
    graph, output = program.graph, program.output_node()
    results = list(program.results())
    wanted = [i for i, value in enumerate(results) if isinstance(value, fx.Node) and value in chain]
    if not wanted:
        return 0
    last = max(list(chain).index(results[i]) for i in wanted)
    copies: dict[fx.Node, fx.Node] = {}
    for node in chain[: last + 1]:
        with graph.inserting_before(output):
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        copies[node].meta[MADE_BY] = (*node.meta.get(MADE_BY, ()), NAME)
    for i in wanted:
        results[i] = copies[results[i]]
        program.outputs[i] = replace(program.outputs[i], lazy=True)
    output.args = (tuple(results),)
    return len(wanted)


def only_for_lazy(program: Program) -> list[fx.Node]:
    """Nodes that nothing but lazy outputs depends on, in graph order."""
    pairs = list(zip(program.results(), program.outputs, strict=True))
    eager = ancestors([v for v, o in pairs if isinstance(v, fx.Node) and not o.lazy])
    lazy = ancestors([v for v, o in pairs if isinstance(v, fx.Node) and o.lazy])
    return [n for n in program.graph.nodes if n in lazy and n not in eager and n.op != "placeholder"]


def describe(user: fx.Node) -> str:
    """A user of a value, in words."""
    return "the output" if user.op == "output" else op_text(user)
