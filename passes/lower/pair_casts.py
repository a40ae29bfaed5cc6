"""Casts of one value by the scales of its rows and by those of its columns, or by one scale, read it once.

Before:  %a = fp8_amax(%x, 0); %b = fp8_amax(%x, 1)
         %q = fp8_quantize(%x, %a, 0, 'e4m3', ..)[0]; %qt = fp8_quantize(%x, %b, 1, 'e4m3', ..)[1]      # transposed
After:   %ab = fp8_amax_both(%x); %p = fp8_quantize_both(%x, %ab[0], %ab[1], 'e4m3'); %q = %p[0]; %qt = %p[1]
Before:  %q = fp8_quantize(%x, %a, -1, 'e4m3', ..)[0]; %qt = fp8_quantize(%x, %a, -1, 'e4m3', ..)[1]   # one scale
After:   %p = fp8_quantize(%x, %a, -1, 'e4m3', ..); %q = %p[0]; %qt = %p[1]
Legal because: each result is the same function of the same operands. Casts that are far apart stay so: the first would come too
late for those who read it.

Weights whose casts are kept (`keep_casts`) are cast in both orientations at once. With `fp8_recipe="rowwise"` an operand has
a scale for each row in one product, and for each column in the other. It has to run before `overlap_products`, which lets casts
write into memory that ranks share.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from megafx.ir.nodes import change_parts, replace
from megafx.ir.program import VAL, Phase, Program, new_call
from megafx.kernels.fp8.quantize import amax, amax_both, quantize, quantize_both
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "pair_casts"


def pair_casts(program: Program, context: CompileContext) -> int:
    """Return the number of passes over memory saved."""
    return 0 if context.config.fp8 is None else change_parts(program, _pair)


def _pair(node: fx.Node) -> bool:
    return _pair_amax(node) or _pair_cast(node) or _join_cast(node)


def _pair_amax(node: fx.Node) -> bool:
    """node: the first of the two."""
    other = _other(node, amax, 1) if node.target is amax else None
    if other is None:
        return False
    of_rows, of_columns = (node, other) if node.args[1] == 0 else (other, node)
    cut = of_columns.args[2:]
    if of_rows.args[2] != -1 or not all(n < node for n in of_columns.all_input_nodes[1:]):
        return False
    made = _call(node, amax_both, (node.args[0], *cut), (of_rows.meta[VAL], of_columns.meta[VAL]))
    for i, old in enumerate((of_rows, of_columns)):
        old.replace_all_uses_with(_item(node, made, i))
    other.graph.erase_node(other)
    node.graph.erase_node(node)
    return True


def _pair_cast(node: fx.Node) -> bool:
    """node: the second of the two."""
    if node.target is not quantize:
        return False
    other = _other(node, quantize, 2)
    if other is None:
        return False
    rows, columns = (node, other) if node.args[2] == 0 else (other, node)
    if rows.args[3:] != (*columns.args[3:5], True, False) or columns.args[5:] != (False, True):
        return False
    if not all(node < reader for item in other.users for reader in item.users):
        return False
    (q, _, scale), (_, qt, column_scale) = rows.meta[VAL], columns.meta[VAL]
    operands = rows.args[0], rows.args[1], columns.args[1], *rows.args[3:5]
    made = _call(node, quantize_both, operands, (q, qt, scale, column_scale))
    replaced = [
        (item, places[item.args[1]])
        for old, places in ((rows, {0: 0, 1: 1, 2: 2}), (columns, {0: 0, 1: 1, 2: 3}))
        for item in old.users
    ]
    for item, place in replaced:
        if item.users:
            item.replace_all_uses_with(_item(node, made, place))
    for old in (*(item for item, _ in replaced), rows, columns):
        node.graph.erase_node(old)
    return True


def _join_cast(node: fx.Node) -> bool:
    """node: the second of two by one scale."""
    if node.target is not quantize or node.args[2] != -1:
        return False
    x = node.args[0]
    other = next((n for n in x.users if n.target is quantize and n.args[:5] == node.args[:5] and n < node), None)
    if other is None or {other.args[5:], node.args[5:]} != {(True, False), (False, True)}:
        return False
    if not all(node < reader for item in other.users for reader in item.users):
        return False
    plain, turned = (other, node) if other.args[5] else (node, other)
    values = plain.meta[VAL][0], turned.meta[VAL][1], plain.meta[VAL][2]
    made = _call(node, quantize, (*node.args[:5], True, True), values)
    for old in (plain, turned):
        for item in [*old.users]:
            replace(item, _item(node, made, item.args[1]))
        node.graph.erase_node(old)
    return True


def _other(node: fx.Node, target: Any, place: int) -> fx.Node | None:
    """A later amax, or an earlier cast, of the same value along the other dim. place: of the argument that says which dim."""
    x = node.args[0]
    kept = node.args[place]
    wanted = {0: 1, 1: 0}.get(kept)
    found = [n for n in x.users if n.target is target and n.args[0] is x and n.args[place] == wanted]
    after = target is amax
    return next((n for n in found if (n > node) == after), None)


def _call(before: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    return new_call(before, target, args, value, before, NAME)


def _item(before: fx.Node, made: fx.Node, index: int) -> fx.Node:
    return _call(before, operator.getitem, (made, index), made.meta[VAL][index])
