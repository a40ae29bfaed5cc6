"""Sums into rows: what an expert adds to rows of the mixture's result, as a value of its own.

    index_add(%out, 0, %rows, %y)                      ->  add(%out, index_add(%zeros, 0, %rows, %y))
    index_put(%out, [%rows], %y, True)                 ->  add(%out, index_put(%zeros, [%rows], %y, True))
    index_put(%out, [%rows], index(%out, [%rows]) + %y) ->  add(%out, index_put(%zeros, [%rows], %y))     # out[rows] += y
    scatter_add(%out, 0, %index, %y)                   ->  add(%out, scatter_add(%zeros, 0, %index, %y))

Legal because: the ops' definitions; in the third form a row that is named twice gets one of its values, before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megafx.fills import is_zero
from megafx.ir import VAL, Builder, Program
from megafx.sizes import SizeEmitter

NAME = "own_experts"
aten = torch.ops.aten
_Make = Callable[[Builder, fx.Node], fx.Node]


def sum_apart(program: Program, node: fx.Node, label: dict[fx.Node, str]) -> fx.Node | None:
    """Write `node` out where it adds one expert's rows to a value that is not that expert's.

    label: node -> key of the expert whose it is. Returns what the expert adds; None where there is nothing to write out.
    """
    found = _rows_added(node)
    if found is None:
        return None
    out, y, make = found
    if y not in label or label.get(out) == label[y] or is_zero(out):
        return None
    emitter, value = SizeEmitter(program.graph, program.sizes), out.meta[VAL]
    sizes = [emitter(program.sizes.of(n)) for n in value.shape]
    build = Builder(program, node, node, NAME)
    own = make(build, build(aten.full.default, sizes, 0, dtype=value.dtype, device=value.device))
    node.replace_all_uses_with(build(aten.add.Tensor, out, own))
    _erase(node)
    return own


def _erase(node: fx.Node) -> None:
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if operand.op == "call_function" and not operand.users:
            _erase(operand)


def _rows_added(node: fx.Node) -> tuple[fx.Node, fx.Node, _Make] | None:
    """(what is added to, the rows that are added, the same op on zeros)."""
    arguments: Any = node.args
    if node.target in (aten.index_add.default, aten.scatter_add.default):
        out, dim, index, y = arguments[:4]
        return out, y, lambda build, zeros: build(node.target, zeros, dim, index, y, *arguments[4:], **node.kwargs)
    if node.target is not aten.index_put.default or node.kwargs:
        return None
    out, indices, values, *accumulate = arguments
    if accumulate and accumulate[0]:
        return out, values, lambda build, zeros: build(aten.index_put.default, zeros, indices, values, True)
    added = _added_to(values, out, indices)
    if added is None:
        return None
    return out, added, lambda build, zeros: build(aten.index_put.default, zeros, indices, added)


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same rows: `out[mask] += y` finds them twice."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)
    if a.target is b.target is torch.ops.megafx.rows.default:
        return a.args[0] is b.args[0]
    return a.target is b.target is aten.select.int and all(map(_same, a.args, b.args))


def _added_to(values: fx.Node, out: fx.Node, indices: Any) -> fx.Node | None:
    """y of `index(out, indices) + y`."""
    if values.target is not aten.add.Tensor or values.kwargs:
        return None
    a, b = values.args[:2]
    for rows, y in ((a, b), (b, a)):
        if (
            isinstance(rows, fx.Node)
            and rows.target is aten.index.Tensor
            and rows.args[0] is out
            and _same(list(rows.args[1]), list(indices))  # type: ignore[arg-type]  # index takes a list
            and isinstance(y, fx.Node)
        ):
            return y
    return None
