"""Casts to FP8 that are made of parameters alone: the values that a step of several micro-batches needs once."""

from __future__ import annotations

import operator

from torch import fx

from megafx.analysis.communication import is_start, is_wait
from megafx.analysis.kept import is_join, is_replayable
from megafx.ir.nodes import in_backward, op_name
from megafx.ir.program import Program

_CASTS = ("fp8_quantize", "fp8_quantize_both")


def casts_of_weights(program: Program) -> dict[fx.Node, tuple[str, ...]]:
    """Each result of a cast of weights that is read -> the names of the parameters that it is made of.

    program: LOWERED or BOUND. Their order depends on what they are, not on their places in the graph.
    """
    if not any(op_name(n) in _CASTS for n in program.graph.nodes):
        return {}
    made_of: dict[fx.Node, frozenset[str]] = {
        n: frozenset([i.name]) for n, i in program.input_nodes() if i.kind == "param"
    }
    for node in program.graph.nodes:
        operands = node.all_input_nodes
        if node.op != "call_function" or not all(n in made_of for n in operands):
            continue
        if is_join(node) or (operands and _is_made_anywhere(node)):
            made_of[node] = frozenset().union(*(made_of[n] for n in operands))
    found = [n for n in made_of if n.target is operator.getitem and op_name(n.args[0]) in _CASTS and n.users]
    return {n: tuple(sorted(made_of[n])) for n in sorted(found, key=lambda n: _what(n, made_of))}


def _is_made_anywhere(node: fx.Node) -> bool:
    """True if the op gives the same on any call of the same operands, or is the largest over ranks."""
    return (is_start(node) and node.args[1] == "max") or is_wait(node) or is_replayable(node)


def _what(result: fx.Node, made_of: dict[fx.Node, frozenset[str]]) -> tuple[str, ...]:
    cast = result.args[0]
    plain = [str(a) for a in cast.args if not isinstance(a, fx.Node)]
    return str(in_backward(result)), *sorted(made_of[result]), str(cast.args[0]), *plain, str(result.args[1])
