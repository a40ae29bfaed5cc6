"""One spelling for views: reshape, slice, select, transpose, permute, unsqueeze, expand, with explicit positive sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import argument
from megafx.ir.program import VAL
from megafx.passes.canonicalize.editor import Editor, is_tensor, replace, respell

aten = torch.ops.aten

_RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten._reshape_alias.default,
        aten.ravel.default,
        aten.atleast_1d.default,
        aten.atleast_2d.default,
        aten.atleast_3d.default,
    }
)
_TRANSPOSES = frozenset(
    {
        aten.t.default,
        aten.numpy_T.default,
        aten.mT.default,
        aten.mH.default,
        aten.adjoint.default,
        aten.matrix_H.default,
        aten.transpose.int,
        aten.swapaxes.default,
        aten.swapdims.default,
        aten.permute.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.moveaxis.int,
        aten.moveaxis.intlist,
    }
)


def one_spelling_of_reshape(editor: Editor, node: fx.Node) -> bool:
    """view, flatten, squeeze, ... -> aten.reshape(x, sizes): row-major order is kept by all of them."""
    if node.target not in _RESHAPES or not is_tensor(node.args[0]):
        return False
    if not isinstance(node.meta[VAL], torch.Tensor):
        return False
    return respell(node, aten.reshape.default, (node.args[0], editor.shape(node.meta[VAL])))


def one_spelling_of_expand(editor: Editor, node: fx.Node) -> bool:
    """expand, expand_as, broadcast_to -> aten.expand(x, sizes) without -1."""
    if node.target not in (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default):
        return False
    return respell(node, aten.expand.default, (node.args[0], editor.shape(node.meta[VAL])))


def one_spelling_of_transpose(editor: Editor, node: fx.Node) -> bool:
    """t, numpy_T, mT, movedim, permute of two dims -> aten.transpose.int; other orders -> aten.permute. Dims count from 0."""
    if node.target not in _TRANSPOSES or not is_tensor(node.args[0]):
        return False
    rank = node.meta[VAL].dim()
    if node.meta[VAL].is_complex():
        return False
    order = _order(node, rank)
    moved = [d for d in range(rank) if order[d] != d]
    if not moved:
        return replace(node, node.args[0])
    if len(moved) == 2:
        return respell(node, aten.transpose.int, (node.args[0], *moved))
    return respell(node, aten.permute.default, (node.args[0], order))


def memory_of_complex(editor: Editor, node: fx.Node) -> bool:
    """view_as_complex(x) -> view_as_complex(clone(x)): it wants pairs that lie evenly; x may come to be part of a product."""
    if node.target is not aten.view_as_complex.default:
        return False
    pairs: Any = node.args[0]
    if pairs.target is aten.clone.default:
        return False
    own = editor.at(node)(aten.clone.default, pairs, memory_format=torch.contiguous_format)
    return respell(node, node.target, (own,))


def _order(node: fx.Node, rank: int) -> list[int]:
    """order[d]: the operand's dim that becomes dim d. Found by applying the op to a tensor whose sizes tell its dims."""
    probe = torch.empty([d + 2 for d in range(rank)], device="meta")
    result = node.target(probe, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return [n - 2 for n in result.shape]


def one_spelling_of_unsqueeze(editor: Editor, node: fx.Node) -> bool:
    """unsqueeze with a dim counted from the front."""
    if node.target is not aten.unsqueeze.default:
        return False
    dim = argument(node, "dim")
    return respell(node, aten.unsqueeze.default, (node.args[0], dim % node.meta[VAL].dim()))


def one_spelling_of_select(editor: Editor, node: fx.Node) -> bool:
    """select with dim and index counted from the front (an index from the end of a symbolic dim stays negative)."""
    if node.target is not aten.select.int:
        return False
    source = node.args[0].meta[VAL]  # type: ignore[union-attr]
    dim, index = argument(node, "dim") % source.dim(), argument(node, "index")
    if isinstance(index, int) and index < 0 and isinstance(source.shape[dim], int):
        index += source.shape[dim]
    return respell(node, aten.select.int, (node.args[0], dim, index))


def one_spelling_of_slice(editor: Editor, node: fx.Node) -> bool:
    """slice with dim, start and end counted from the front; end is where it really ends."""
    if node.target is aten.narrow.default:
        dim, start = argument(node, "dim") % node.meta[VAL].dim(), argument(node, "start")
        return respell(node, aten.slice.Tensor, _slice_args(editor, node, dim, start, node.meta[VAL].shape[dim]))
    if node.target is not aten.slice.Tensor:
        return False
    dim, start, step = argument(node, "dim") % node.meta[VAL].dim(), argument(node, "start"), argument(node, "step")
    if step not in (None, 1):
        return False
    return respell(node, aten.slice.Tensor, _slice_args(editor, node, dim, start or 0, node.meta[VAL].shape[dim]))


def _slice_args(editor: Editor, node: fx.Node, dim: int, start: Any, length: Any) -> tuple[Any, ...]:
    size = node.args[0].meta[VAL].shape[dim]  # type: ignore[union-attr]
    begin = start.meta[VAL] if isinstance(start, fx.Node) else start
    if isinstance(begin, int) and begin < 0:
        begin = size + begin if isinstance(size, torch.SymInt) or begin + size > 0 else 0
    elif isinstance(begin, torch.SymInt) and begin.node.expr.could_extract_minus_sign():
        begin = size + begin
    return (node.args[0], dim, editor.arg(begin), editor.arg(begin + length))


# -- ops that return several views


def split_to_slices(editor: Editor, node: fx.Node) -> bool:
    """split, chunk, split_with_sizes, tensor_split, unbind with getitem -> one slice or select a used part."""
    if node.target not in _PARTS or any(u.target is not operator.getitem for u in node.users):
        return False
    source, dim = node.args[0], (argument(node, "dim") or 0)
    rank = source.meta[VAL].dim()  # type: ignore[union-attr]
    dim %= rank
    starts = _starts(node.meta[VAL], dim, rank)
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        index %= len(starts)
        if node.target is aten.unbind.int:
            respell(user, aten.select.int, (source, dim, index))
        else:
            start = starts[index]
            end = start + node.meta[VAL][index].shape[dim]
            respell(user, aten.slice.Tensor, (source, dim, editor.arg(start), editor.arg(end)))
    editor.graph.erase_node(node)
    return True


def _starts(parts: Any, dim: int, rank: int) -> list[Any]:
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at = at + (part.shape[dim] if part.dim() == rank else 1)
    return starts


_PARTS: frozenset[Callable[..., Any]] = frozenset(
    {
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unsafe_chunk.default,
        aten.unbind.int,
    }
)
