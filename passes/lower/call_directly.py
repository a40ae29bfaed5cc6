"""Calls that take less host time: fused ops without the dispatcher, frequent operators through their Python bindings.

Before:  %y = megafx.glu.default(%gate, %up, "silu");  %z = aten.view.default(%y, [4, 8])
After:   %y = glu(%gate, %up, "silu");                 %z = %y.view([4, 8])
Legal because: the graph runs without autograd and on plain tensors, where `direct` gives the function that the dispatcher would
call (under dispatch modes it calls the op), and a binding calls the same operator (in half the time of an OpOverload).

Numbers that the dispatcher would convert get the schema's type.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import changed_copy
from megafx.ir.program import Phase, Program
from megafx.kernels.common.op import direct
from megafx.ops.collectives import mm_rows, pad_rows
from megafx.placements.moves import TENSORS
from megafx.planner.context import CompileContext

aten = torch.ops.aten

METHODS = {
    aten.permute.default: "permute",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.view.default: "view",
}
FUNCTIONS: dict[Any, Any] = {aten.addmm.default: torch.addmm, aten.bmm.default: torch.bmm, aten.mm.default: torch.mm}
FUNCTIONS |= {torch.ops.megafx.pad_rows.default: pad_rows, torch.ops.megafx.mm_rows.default: mm_rows}
FUNCTIONS |= {
    getattr(torch.ops.megafx, f"{verb}_head_tail").default: getattr(TENSORS, f"{verb}_head_tail")
    for verb in ("split", "join")
}
REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED


def call_directly(program: Program, context: CompileContext) -> int:
    """Return the number of calls changed."""
    if program.partition is None:
        return 0
    changes = {"forward": [call_node_directly], "backward": [call_node_directly, _divide_as_autograd]}
    program.partition, total = program.partition.changed(lambda gm, direction: changed_copy(gm, *changes[direction]))
    return total


def _divide_as_autograd(node: fx.Node) -> bool:
    if node.target is not operator.truediv:
        return False
    node.target = quotient
    return True


def quotient(a: float, b: float) -> float:
    """a / b, as autograd's C++ divides numbers in backward: by 0 too (the gradient of `x.std(0)` for one row)."""
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a)


def call_node_directly(node: fx.Node) -> bool:
    """True if the call was changed."""
    function = direct(node.target) if node.op == "call_function" else None
    args = None if function is None else _arguments(node)
    if function is not None and args is not None:
        node.target, node.args, node.kwargs = function, args, {}
    elif node.target in METHODS:
        node.op, node.target = "call_method", METHODS[node.target]
    elif node.target in FUNCTIONS:
        node.target = FUNCTIONS[node.target]
    else:
        return False
    return True


def _arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """All arguments by position, of the schema's types; None where the graph does not tell."""
    arguments = node.target._schema.arguments
    found = []
    for i, argument in enumerate(arguments):
        if i >= len(node.args) and argument.name not in node.kwargs:
            return None
        value = node.args[i] if i < len(node.args) else node.kwargs[argument.name]
        kind = _NUMBERS.get(str(argument.real_type))
        if kind is not None:
            if isinstance(value, fx.Node) and kind is not int:
                return None
            value = value if isinstance(value, fx.Node) else kind(value)
        found.append(value)
    return tuple(found)


_NUMBERS: dict[str, type] = {"float": float, "int": int, "bool": bool}
