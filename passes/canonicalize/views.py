"""One spelling for views: reshape, slice, select, transpose, permute, unsqueeze, expand, with explicit positive sizes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megafx.ir.nodes import argument
from megafx.ir.program import VAL
from megafx.passes.canonicalize.editor import Editor, is_tensor, on, replace, respell

aten = torch.ops.aten


@on(
    "view reshape _unsafe_view flatten.using_ints unflatten.int view_as reshape_as squeeze squeeze.dim squeeze.dims "
    "_reshape_alias ravel atleast_1d atleast_2d atleast_3d"
)
def one_spelling_of_reshape(editor: Editor, node: fx.Node) -> bool:
    """view, flatten, squeeze, ... -> aten.reshape(x, sizes): row-major order is kept by all of them."""
    if not is_tensor(node.args[0]) or not is_tensor(node):
        return False
    return respell(node, aten.reshape.default, (node.args[0], editor.shape(node.meta[VAL])))


@on("expand expand_as broadcast_to")
def one_spelling_of_expand(editor: Editor, node: fx.Node) -> bool:
    """expand, expand_as, broadcast_to -> aten.expand(x, sizes) without -1."""
    return respell(node, aten.expand.default, (node.args[0], editor.shape(node.meta[VAL])))


@on(
    "t numpy_T mT mH adjoint matrix_H transpose.int swapaxes swapdims permute movedim.int movedim.intlist moveaxis.int "
    "moveaxis.intlist"
)
def one_spelling_of_transpose(editor: Editor, node: fx.Node) -> bool:
    """t, numpy_T, mT, movedim, permute of two dims -> aten.transpose.int; other orders -> aten.permute. Dims count from 0."""
    if not is_tensor(node.args[0]) or node.meta[VAL].is_complex():
        return False
    rank = node.meta[VAL].dim()
    probe: Any = torch.empty([d + 2 for d in range(rank)], device="meta")  # its sizes tell its dims
    order = [n - 2 for n in node.target(probe, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]
    moved = [d for d in range(rank) if order[d] != d]
    if not moved:
        return replace(node, node.args[0])
    if len(moved) == 2:
        return respell(node, aten.transpose.int, (node.args[0], *moved))
    return respell(node, aten.permute.default, (node.args[0], order))


@on("view_as_complex")
def memory_of_complex(editor: Editor, node: fx.Node) -> bool:
    """view_as_complex(x) -> view_as_complex(clone(x)): it wants pairs that lie evenly; x may come to be part of a product."""
    pairs: Any = node.args[0]
    if pairs.target is aten.clone.default:
        return False
    own = editor.at(node)(aten.clone.default, pairs, memory_format=torch.contiguous_format)
    return respell(node, node.target, (own,))


@on("unsqueeze")
def one_spelling_of_unsqueeze(editor: Editor, node: fx.Node) -> bool:
    """unsqueeze with a dim counted from the front."""
    return respell(node, aten.unsqueeze.default, (node.args[0], argument(node, "dim") % node.meta[VAL].dim()))


@on("select.int")
def one_spelling_of_select(editor: Editor, node: fx.Node) -> bool:
    """select with dim and index counted from the front (an index from the end of a symbolic dim stays negative)."""
    source = node.args[0].meta[VAL]  # type: ignore[union-attr]
    dim, index = argument(node, "dim") % source.dim(), argument(node, "index")
    if isinstance(index, int) and index < 0 and isinstance(source.shape[dim], int):
        index += source.shape[dim]
    return respell(node, aten.select.int, (node.args[0], dim, index))


@on("slice.Tensor narrow")
def one_spelling_of_slice(editor: Editor, node: fx.Node) -> bool:
    """slice with dim, start and end counted from the front; end is where it really ends."""
    if argument(node, "step") not in (None, 1):
        return False
    dim, start = argument(node, "dim") % node.meta[VAL].dim(), argument(node, "start") or 0
    size, length = node.args[0].meta[VAL].shape[dim], node.meta[VAL].shape[dim]  # type: ignore[union-attr]
    begin = start.meta[VAL] if isinstance(start, fx.Node) else start
    if isinstance(begin, int) and begin < 0:
        begin = size + begin if isinstance(size, torch.SymInt) or begin + size > 0 else 0
    elif isinstance(begin, torch.SymInt) and statically_known_true(begin < 0):  # by the ranges: 16 - s may be either
        begin = size + begin
    return respell(node, aten.slice.Tensor, (node.args[0], dim, editor.arg(begin), editor.arg(begin + length)))


@on(
    "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections tensor_split.indices unsafe_split.Tensor "
    "unsafe_split_with_sizes unsafe_chunk unbind.int"
)
def split_to_slices(editor: Editor, node: fx.Node) -> bool:
    """split, chunk, split_with_sizes, tensor_split, unbind with getitem -> one slice or select a used part."""
    if any(u.target is not operator.getitem for u in node.users):
        return False
    source, parts = node.args[0], node.meta[VAL]
    dim = (argument(node, "dim") or 0) % source.meta[VAL].dim()  # type: ignore[union-attr]
    for user in list(node.users):
        index: Any = user.args[1]
        index %= len(parts)
        if node.target is aten.unbind.int:
            respell(user, aten.select.int, (source, dim, index))
            continue
        start = sum(part.shape[dim] for part in parts[:index])
        end = start + parts[index].shape[dim]
        respell(user, aten.slice.Tensor, (source, dim, editor.arg(start), editor.arg(end)))
    editor.graph.erase_node(node)
    return True
