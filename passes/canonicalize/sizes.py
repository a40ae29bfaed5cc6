"""Every size is computed from the sizes of graph inputs, once, at the top of the graph.

Before:  %n = sym_size(%embedding, 1); %m = mul(%n, 4); %r = arange(%m)
After:   %s = sym_size(%input_ids, 1); %m = mul(%s, 4); %r = arange(%m)
Legal because: the symbolic value of each size is known, and its symbols are sizes of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from megafx.errors import CaptureError, or_leave_eager
from megafx.ir.program import VAL, fqn_of, source_of
from megafx.passes.canonicalize.editor import Editor

aten = torch.ops.aten


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
    """A Python number read from a tensor stops the device at each call, and a traced backward cannot compute with it."""
    for node in editor.graph.nodes:
        if node.op == "call_function" and node.target in (aten.item.default, aten._local_scalar_dense.default):
            raise CaptureError(
                "a tensor's data becomes a Python number (`.item()`, `.tolist()`, `int(tensor)`)",
                fix=or_leave_eager("keep it a tensor, or pass the number as an argument of the call", fqn_of(node)),
                module=fqn_of(node),
                source=source_of(node),
            )
