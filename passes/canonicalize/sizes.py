"""Sizes: every size is computed from those of graph inputs, at the top; data decides how many rows are selected.

Before:  %n = sym_size(%embedding, 1); %m = mul(%n, 4); %r = arange(%m)
After:   %s = sym_size(%input_ids, 1); %m = mul(%s, 4); %r = arange(%m)
Legal because: the symbolic value of each size is known, and its symbols are sizes of inputs.

Selecting by data becomes indexing with `megafx.rows`, whose number of rows is a size like others from here on.

Before:  %n = nonzero(%mask)                              # [u0 1]
         %y = index(%x, [%m])                             # %m a mask: [u1 h]
         %w = where(%m)
After:   %n = rows(%mask, 'u0')                           # [s9 1]
         %r = rows(%m, 'u1'); %c = select(%r, 1, 0); %y = index(%x, [%c])
         %w[i] = select(%r, 1, i)
Legal because: that is how these ops are defined. A write to rows that a mask selects (`y[mask] = rows`) becomes one to their
indices in the same way. What is written without having the size of the rows is chosen with `where` (names.py).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import megafx.kernels.nonzero  # noqa: F401  registers the op
from megafx.errors import CaptureError, or_leave_eager
from megafx.ir.data_sizes import DataShapeEnv, same_rows
from megafx.ir.nodes import MASKS, argument, aten_ops
from megafx.ir.program import VAL, fqn_of, recompute_val, source_of
from megafx.ir.sizes import RowCount, row_sources
from megafx.passes.canonicalize.editor import Editor, replace, respell

aten = torch.ops.aten
rows = torch.ops.megafx.rows.default
_CHOICES = aten_ops("topk sort sort.stable max.dim")  # of several results
_ORDERS = aten_ops("argmax argsort argsort.stable")
_FAR = 64  # values looked at behind a mask: it is an estimate
_NUMBERS = aten_ops("item _local_scalar_dense")  # refused later
_PARTS = aten_ops("where nonzero_numpy")
_WHOLES = aten_ops("nonzero argwhere")
_WRITES = aten_ops("index_put index_put_")


def name_rows_of_data(editor: Editor) -> int:
    """Rewrite every op that selects by data, and compute the sizes of all values that follow once more."""
    env = editor.program.fake_mode.shape_env
    if not isinstance(env, DataShapeEnv):
        return 0
    selecting = _Selecting(editor, env)
    nodes = [n for n in editor.graph.nodes if n.op == "call_function"]
    count = sum(selecting.rewrite(n) for n in nodes if _unbacked(n, env) or n.target in _WRITES)
    if count:  # values whose sizes were of data are computed again, from operands that have sizes with hints
        for node in editor.graph.nodes:
            if node.op == "call_function" and node.target not in _NUMBERS and _unbacked(node, env):
                recompute_val(editor.program, node)
        editor.know_sizes()
        _price(editor)
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
            if any(user.target is not operator.getitem for user in node.users):
                return False
            parts = self._columns(node, node.args[0], node.meta[VAL][0].shape[0], range(len(node.meta[VAL])))
            for user in list(node.users):
                replace(user, parts[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(node)
            return True
        if node.target is aten.masked_select.default:
            return self._masked_select(node)
        if node.target is aten.index.Tensor:
            at = [i for i, a in enumerate(node.args[1]) if a is not None]  # type: ignore[arg-type]
            if self._has_mask(node):
                together = at == [*range(at[0], at[-1] + 1)]  # else what is selected comes first
                size = node.meta[VAL].shape[at[0] if together else 0]
                return respell(node, node.target, (node.args[0], self._indices(node, size)))
        if node.target in _WRITES and self._has_mask(node):
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
        """The rows of a mask, made once, before `where`. (A name that is no single symbol is refused when its size is used.)"""
        key = (mask, self._name(size) or str(size))
        if mask.meta[VAL].dtype != torch.bool:
            mask = self.editor.at(where)(aten.ne.Scalar, mask, 0)
        if key not in self.found:
            self.found[key] = self.editor.at(where)(rows, mask, key[1])
        return self.found[key]

    def _columns(self, where: fx.Node, mask: Any, size: Any, indices: range) -> list[fx.Node]:
        found = self._rows(where, mask, size)
        return [self.editor.at(where)(aten.select.int, found, 1, i) for i in indices]

    def _masked_select(self, node: fx.Node) -> bool:
        operands: Any = node.args
        x, mask = operands
        emit = self.editor.at(node)
        both: Any = torch.broadcast_shapes(x.meta[VAL].shape, mask.meta[VAL].shape)
        shape = [self.editor.arg(n) for n in both]
        x, mask = (emit(aten.expand.default, v, shape) for v in (x, mask))
        columns = self._columns(node, mask, node.meta[VAL].shape[0], range(len(both)))
        return respell(node, aten.index.Tensor, (x, columns))

    def _has_mask(self, node: fx.Node) -> bool:
        indices: Any = node.args[1]
        return any(a is not None and a.meta[VAL].dtype in MASKS for a in indices)

    def _indices(self, node: fx.Node, size: Any) -> list[Any]:
        """The indices with a column of rows for each dim of each mask."""
        made: list[Any] = []
        indices: Any = node.args[1]
        for a in indices:
            mask = a is not None and a.meta[VAL].dtype in MASKS
            made += self._columns(node, a, size, range(a.meta[VAL].dim())) if mask else [a]
        return made


def _unbacked(node: fx.Node, env: DataShapeEnv) -> bool:
    """Whether a size in the node's value is one of data as export has it."""
    value = node.meta.get(VAL)
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    exprs = [n.node.expr for n in sizes if isinstance(n, torch.SymInt)]
    return any(env.is_unbacked_symint(s) for e in exprs for s in e.free_symbols)


def _price(editor: Editor) -> None:
    """Note for each number of rows what it is an equal share of: masks made of the same choice share its elements."""
    sizes, sources = editor.program.sizes, row_sources(editor.graph)
    choices = {symbol: _choice(node.args[0]) for symbol, (node, _) in sources.items()}  # type: ignore[arg-type]
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


# -- sizes of inputs


def root_sizes(editor: Editor) -> int:
    """Replace each use of a size by an int or by the node that the inputs' sizes give. SymFloats are computed from those."""
    count = 0
    rooted: dict[fx.Node, Any] = {}

    def root(size: fx.Node) -> Any:
        if not isinstance(size.meta.get(VAL), (torch.SymInt, int)) or isinstance(size.meta[VAL], bool):
            return size
        if size not in rooted:
            value = size.meta[VAL]
            constant = isinstance(value, torch.SymInt) and value.node.expr.is_Integer
            rooted[size] = editor.arg(int(value.node.expr) if constant else value)
        return rooted[size]

    for node in list(editor.graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        if node.op == "call_function" and isinstance(node.meta.get(VAL), (torch.SymInt, int)):
            continue  # left without users
        if any(not isinstance(n.meta.get(VAL), torch.Tensor) for n in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), root)
            if pytree.tree_leaves((node.args, dict(node.kwargs))) != pytree.tree_leaves((args, dict(kwargs))):
                node.args, node.kwargs = args, kwargs
                count += 1
    return count


def refuse_numbers_from_data(editor: Editor) -> None:
    """A Python number read from a tensor stops the device at each call, and a traced backward cannot compute with it.

    What selects by data and is no `rows` by now has a size that something fixed: it would be right for these data alone.
    """
    for node in editor.graph.nodes:
        if node.op == "call_function" and (node.target in _WHOLES or node.target is aten.masked_select.default):
            raise CaptureError(
                f"{node.target} selects by data, and what follows needs a fixed number of rows",
                fix=or_leave_eager("compute with masks (torch.where) instead of selecting by data", fqn_of(node)),
                module=fqn_of(node),
                source=source_of(node),
            )
        if node.op == "call_function" and node.target in _NUMBERS:
            raise CaptureError(
                "a tensor's data becomes a Python number (`.item()`, `.tolist()`, `int(tensor)`)",
                fix=or_leave_eager("keep it a tensor, or pass the number as an argument of the call", fqn_of(node)),
                module=fqn_of(node),
                source=source_of(node),
            )
