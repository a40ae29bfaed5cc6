"""Selecting by data is indexing with `megafx.rows`, whose number of rows is a size like others from here on.

Before:  %n = nonzero(%mask)                              # [u0 1]
         %y = index(%x, [%m])                             # %m a mask: [u1 h]
         %w = where(%m)
After:   %n = rows(%mask, 'u0')                           # [s9 1]
         %r = rows(%m, 'u1'); %c = select(%r, 1, 0); %y = index(%x, [%c])
         %w[i] = select(%r, 1, i)
Legal because: that is how these ops are defined. A write to rows that a mask selects (`y[mask] = rows`) is one to their
indices in the same way; where one number is written it stays as it is, for nothing has the size of the rows.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

import megafx.kernels.nonzero  # noqa: F401  registers the op
from megafx.ir.data_sizes import DataShapeEnv, same_rows
from megafx.ir.nodes import argument
from megafx.ir.program import VAL, recompute_val
from megafx.ir.sizes import RowCount, row_sources
from megafx.passes.canonicalize.editor import Editor, replace, respell

aten = torch.ops.aten
rows = torch.ops.megafx.rows.default
_CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim)  # of several results
_ORDERS = (aten.argmax.default, aten.argsort.default, aten.argsort.stable)
_FAR = 64  # values looked at behind a mask: it is an estimate
_NUMBERS = (aten.item.default, aten._local_scalar_dense.default)  # refused later
_PARTS = (aten.where.default, aten.nonzero_numpy.default)
_WHOLES = (aten.nonzero.default, aten.argwhere.default)
_WRITES = (aten.index_put.default, aten.index_put_.default)


def name_rows_of_data(editor: Editor) -> int:
    """Rewrite every op that selects by data, and give all values that follow their sizes again."""
    env = editor.program.fake_mode.shape_env
    if not isinstance(env, DataShapeEnv):
        return 0
    selecting = _Selecting(editor, env)
    nodes = [n for n in editor.graph.nodes if n.op == "call_function"]
    count = sum(selecting.rewrite(n) for n in nodes if _unbacked(n, env) or n.target in _WRITES)
    if count:
        _refresh(editor, env)
    return count


class _Selecting:
    """found: (mask, name of the size) -> the rows of that mask."""

    def __init__(self, editor: Editor, env: DataShapeEnv) -> None:
        self.editor, self.env, self.same = editor, env, same_rows(env)
        self.found: dict[tuple[fx.Node, str], fx.Node] = {}

    def rewrite(self, node: fx.Node) -> bool:
        if node.target in _WHOLES:
            return replace(node, self._rows(node, node.args[0], node.meta[VAL].shape[0]))
        if node.target in _PARTS:
            return self._parts(node)
        if node.target is aten.masked_select.default:
            return self._masked_select(node)
        if node.target is aten.index.Tensor:
            at, masks = self._masks(node)
            if masks:
                size = node.meta[VAL].shape[at] if self._together(node.args[1]) else node.meta[VAL].shape[0]
                return respell(node, node.target, (node.args[0], self._indices(node, size)))
        if node.target in _WRITES and self._masks(node)[1]:
            size = next((n for n in argument(node, "values").meta[VAL].shape if self._name(n)), None)
            if size is not None:
                return respell(node, node.target, (node.args[0], self._indices(node, size), *node.args[2:]))
        return False

    def _name(self, size: Any) -> str:
        """The name of a size that data decides; '' for other sizes."""
        if not isinstance(size, torch.SymInt):
            return ""
        expr = self.env.replace(size.node.expr)
        expr = self.same.get(expr, expr)
        return str(expr) if expr.is_Symbol and self.env.is_unbacked_symint(expr) else ""

    def _rows(self, where: fx.Node, mask: Any, size: Any) -> fx.Node:
        """The rows of a mask, made once, before `where`. A name that is no single symbol is told of as its size is used."""
        key = (mask, self._name(size) or str(size))
        if mask.meta[VAL].dtype != torch.bool:
            mask = self.editor.at(where)(aten.ne.Scalar, mask, 0)
        if key not in self.found:
            self.found[key] = self.editor.at(where)(rows, mask, key[1])
        return self.found[key]

    def _column(self, where: fx.Node, found: fx.Node, i: int) -> fx.Node:
        return self.editor.at(where)(aten.select.int, found, 1, i)

    def _parts(self, node: fx.Node) -> bool:
        size = node.meta[VAL][0].shape[0]
        found = self._rows(node, node.args[0], size)
        for user in list(node.users):
            if user.target is not operator.getitem:
                return False
            part: Any = user.args[1]
            replace(user, self._column(user, found, part))
        node.graph.erase_node(node)
        return True

    def _masked_select(self, node: fx.Node) -> bool:
        operands: Any = node.args
        x, mask = operands
        emit = self.editor.at(node)
        both: Any = torch.broadcast_shapes(x.meta[VAL].shape, mask.meta[VAL].shape)
        shape = [self.editor.arg(n) for n in both]
        x, mask = (emit(aten.expand.default, v, shape) for v in (x, mask))
        found = self._rows(node, mask, node.meta[VAL].shape[0])
        columns = [self._column(node, found, i) for i in range(len(both))]
        return respell(node, aten.index.Tensor, (x, columns))

    def _masks(self, node: fx.Node) -> tuple[int, bool]:
        """(the first dim of the operand that is indexed, whether some index is a mask)."""
        indices: Any = node.args[1]
        at = next(i for i, a in enumerate(indices) if a is not None)
        return at, any(a is not None and a.meta[VAL].dtype in (torch.bool, torch.uint8) for a in indices)

    def _together(self, indices: Any) -> bool:
        """Whether no dim that is left whole lies between two that are indexed."""
        at = [i for i, a in enumerate(indices) if a is not None]
        return at == list(range(at[0], at[-1] + 1))

    def _indices(self, node: fx.Node, size: Any) -> list[Any]:
        """The indices with a column of rows for each dim of each mask."""
        made: list[Any] = []
        indices: Any = node.args[1]
        for a in indices:
            if a is None or a.meta[VAL].dtype not in (torch.bool, torch.uint8):
                made.append(a)
                continue
            found = self._rows(node, a, size)
            made += [self._column(node, found, i) for i in range(a.meta[VAL].dim())]
        return made


def _unbacked(node: fx.Node, env: DataShapeEnv) -> bool:
    """Whether a size in the node's value is one of data as export has it."""
    value = node.meta.get(VAL)
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    exprs = [n.node.expr for n in sizes if isinstance(n, torch.SymInt)]
    return any(env.is_unbacked_symint(s) for e in exprs for s in e.free_symbols)


def _refresh(editor: Editor, env: DataShapeEnv) -> None:
    """Values whose sizes were of data, computed again from operands that have sizes with hints."""
    for node in editor.graph.nodes:
        if node.op == "call_function" and node.target not in _NUMBERS and _unbacked(node, env):
            recompute_val(editor.program, node)
    editor.know_sizes()
    _price(editor)


def _price(editor: Editor) -> None:
    """Say of each number of rows what it is an equal share of. Masks made of the same choice share its elements."""
    sizes, sources = editor.program.sizes, row_sources(editor.graph)
    masks: dict[Any, Any] = {symbol: node.args[0] for symbol, (node, _) in sources.items()}
    choices = {symbol: _choice(mask) for symbol, mask in masks.items()}
    for symbol, (node, _) in sources.items():
        choice = choices[symbol]
        among = math.prod(sizes.shape(choice.meta[VAL]))
        sizes.row_counts[symbol] = RowCount(str(node.args[1]), among, list(choices.values()).count(choice))


def _choice(mask: fx.Node) -> fx.Node:
    """The indices of a topk, sort or argmax that a mask is made of; the mask itself where it is made of none."""
    seen, todo = {mask}, [mask]
    while todo and len(seen) < _FAR:
        node = todo.pop(0)
        if node.target in _ORDERS:
            return node
        for operand in node.all_input_nodes:
            if operand.target in _CHOICES:
                return node
            if operand not in seen and isinstance(operand.meta.get(VAL), torch.Tensor):
                seen.add(operand)
                todo.append(operand)
    return mask
