"""One spelling for views: reshape, slice, select, transpose, permute, unsqueeze, expand, with explicit positive sizes.

as_strided, which reads memory, becomes an index of the values that are in it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megafx.errors import CaptureError
from megafx.ir.nodes import argument, aten_ops, op_name, replace
from megafx.ir.program import VAL, located
from megafx.passes.canonicalize.editor import Editor, is_tensor, on, respell

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
    order = [n - 2 for n in node.target(probe, *node.args[1:], **node.kwargs).shape]
    moved = [d for d in range(rank) if order[d] != d]
    if not moved:
        return replace(node, node.args[0])
    if len(moved) == 2:
        return respell(node, aten.transpose.int, (node.args[0], *moved))
    return respell(node, aten.permute.default, (node.args[0], order))


@on("view_as_complex")
def memory_of_complex(editor: Editor, node: fx.Node) -> bool:
    """view_as_complex(x) -> view_as_complex(clone(x)): it needs evenly strided pairs, and x may become part of a product."""
    pairs = node.args[0]
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
    source = node.args[0].meta[VAL]
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
    size, length = node.args[0].meta[VAL].shape[dim], node.meta[VAL].shape[dim]
    begin = start.meta[VAL] if isinstance(start, fx.Node) else start
    if isinstance(begin, int) and begin < 0:
        begin = size + begin if isinstance(size, torch.SymInt) or begin + size > 0 else 0
    elif isinstance(begin, torch.SymInt) and statically_known_true(begin < 0):  # by the ranges: 16 - s may be either
        begin = size + begin
    return respell(node, aten.slice.Tensor, (node.args[0], dim, editor.arg(begin), editor.arg(begin + length)))


_SPLITS = {"hsplit": 1, "vsplit": 0, "dsplit": 2}  # the dims that they split


@on(
    "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections tensor_split.indices unsafe_split.Tensor "
    "unsafe_split_with_sizes unsafe_chunk unbind.int hsplit.int hsplit.array vsplit.int vsplit.array dsplit.int dsplit.array"
)
def split_to_slices(editor: Editor, node: fx.Node) -> bool:
    """split, chunk, tensor_split, hsplit, unbind and the like with getitem -> one slice or select a used part."""
    if any(u.target is not operator.getitem for u in node.users):
        return False
    source, parts = node.args[0], node.meta[VAL]
    rank = source.meta[VAL].dim()
    dim = _SPLITS.get(op_name(node), argument(node, "dim") or 0) % rank if rank > 1 else 0
    for user in list(node.users):
        index = user.args[1]
        index %= len(parts)
        if node.target is aten.unbind.int:
            respell(user, aten.select.int, (source, dim, index))
            continue
        start = sum(part.shape[dim] for part in parts[:index])
        end = start + parts[index].shape[dim]
        respell(user, aten.slice.Tensor, (source, dim, editor.arg(start), editor.arg(end)))
    editor.graph.erase_node(node)
    return True


# -- memory as values

_IN_MEMORY = aten_ops("slice.Tensor select.int transpose.int permute unsqueeze expand detach alias diagonal unfold")


@on("as_strided as_strided_copy as_strided_scatter")
def memory_as_values(editor: Editor, node: fx.Node) -> bool:
    """as_strided -> the elements of the tensor that fills the memory, by their indices: ranks may lay it out differently."""
    base = node.args[0]
    size, stride = argument(node, "size"), argument(node, "stride")
    offset = argument(node, "storage_offset")
    offset = base.meta[VAL].storage_offset() if offset is None else offset
    order = _memory_order(editor, base)
    while order is None and base.target in _IN_MEMORY:
        base = base.args[0]
        order = _memory_order(editor, base)
    if order is None or (op_name(node) == "as_strided_scatter" and order != [*range(len(order))]):
        raise CaptureError(
            "as_strided reads the memory of a tensor that does not fill it densely from its start",
            fix="index the tensor itself (slices, unfold), or call .contiguous() on it first",
            **located(node),
        )
    if op_name(node) == "as_strided_scatter":
        return False
    emit, device = editor.at(node), node.meta[VAL].device
    memory = emit(aten.permute.default, base, order) if order != sorted(order) else base
    count = math.prod(base.meta[VAL].shape)
    memory = emit(aten.reshape.default, memory, [editor.arg(count)])
    options = {"dtype": torch.int64, "device": device, "pin_memory": False}
    index = emit(aten.full.default, [], offset, **options)
    for n, step in zip(size, stride, strict=True):
        along = emit(aten.mul.Tensor, emit(aten.arange.default, n, **options), step)
        index = emit(aten.add.Tensor, emit(aten.unsqueeze.default, index, -1), along)
    return respell(node, aten.index.Tensor, (memory, [index]))


def _memory_order(editor: Editor, node: Any) -> list[int] | None:
    """The dims of a tensor from the outermost in memory to the innermost; None where it does not fill its memory."""
    order: list[int] = []
    value, step = node.meta[VAL], 1
    if not editor.same(value.storage_offset(), 0):
        return None
    left = list(range(value.dim()))
    while left:
        dim = next((d for d in reversed(left) if editor.same(value.shape[d], 1)), None)
        if dim is None:
            dim = next((d for d in reversed(left) if editor.same(value.stride(d), step)), None)
        if dim is None:
            return None
        left.remove(dim)
        order.insert(0, dim)
        step = step * value.shape[dim]
    return order


@on(
    "view_copy expand_copy permute_copy t_copy transpose_copy.int select_copy.int slice_copy.Tensor squeeze_copy "
    "squeeze_copy.dim squeeze_copy.dims unsqueeze_copy unbind_copy.int split_copy.Tensor split_with_sizes_copy"
)
def copies_of_views(editor: Editor, node: fx.Node) -> bool:
    """A view that is copied: nothing is written any more."""
    name = op_name(node).removesuffix("_copy")
    node.target = getattr(getattr(aten, name), node.target._overloadname)
    spellings = (
        one_spelling_of_reshape, one_spelling_of_expand, one_spelling_of_transpose, one_spelling_of_unsqueeze,
        one_spelling_of_select, one_spelling_of_slice, split_to_slices,
    )  # fmt: skip
    return any(spelling(editor, node) for spelling in spellings) or True


_KEEPS_ORDER = aten_ops("unsqueeze reshape view squeeze transpose.int permute alias detach to.dtype")


@on("index_put _unsafe_index_put")
def put_into_each_row(editor: Editor, node: fx.Node) -> bool:
    """index_put(x [n, m], [arange(n), i [n]], v) -> scatter(x, 1, i[:, None], v): margins of logits are written so."""
    x, indices, values = node.args[:3]
    if x.meta[VAL].dim() != 2 or len(indices) != 2 or not all(is_tensor(i) and i.meta[VAL].dim() == 1 for i in indices):
        return False
    rows, index = indices
    n, m = x.meta[VAL].shape
    if (
        index.meta[VAL].dtype != torch.int64
        or not editor.same(index.meta[VAL].shape[0], n)
        or _counts(editor, rows, n) != 0
    ):
        return False
    emit, size = editor.at(node), [editor.arg(n)]
    index = emit(aten.where.self, emit(aten.lt.Scalar, index, 0), emit(aten.add.Tensor, index, editor.arg(m)), index)
    own = [emit(aten.reshape.default, v, [*size, 1]) for v in (index, emit(aten.expand.default, values, size))]
    put = aten.scatter_add.default if argument(node, "accumulate") else aten.scatter.src
    return respell(node, put, (x, 1, *own))


@on("index.Tensor")
def index_that_counts(editor: Editor, node: fx.Node) -> bool:
    """x[arange(n)[:, None], arange(m)] -> x, of n rows and m columns. With an index i in place of the second: x[:, i], or where
    i has numbers for each row gather(x, 1, i).

    A number of each row would not be that of a data-parallel rank's rows. transformers writes masks and pooling so.
    """
    x, indices = node.args[:2]
    if not indices or not all(is_tensor(i) and i.meta[VAL].dtype == torch.int64 for i in indices):
        return False
    sizes, given = x.meta[VAL].shape, [i.meta[VAL] for i in indices]
    rank, emit = max(i.dim() for i in given), editor.at(node)
    counted = [_counts(editor, i, n) for i, n in zip(indices, sizes, strict=False)]
    dims: list[Any] = [None if d is None else rank - i.dim() + d for d, i in zip(counted, given, strict=True)]
    if None not in dims and len({*dims}) == len(dims):
        order = sorted(range(len(dims)), key=dims.__getitem__)
        permuted = [*order, *range(len(dims), len(sizes))]
        whole = x if order == sorted(order) else emit(aten.permute.default, x, permuted)
        return respell(node, aten.clone.default, (emit(aten.reshape.default, whole, editor.shape(node.meta[VAL])),))
    others = given[1:]
    if dims[0] != 0 or not others:
        return False
    if all(i.dim() < rank or editor.same(i.shape[0], 1) for i in others):
        left = []
        for index, value in zip(indices[1:], others, strict=True):
            shape = editor.shape(value)[1 if value.dim() == rank else 0 :]
            shape = [*[1] * (rank - 1 - len(shape)), *shape]
            left.append(index if len(shape) == value.dim() else emit(aten.reshape.default, index, shape))
        return respell(node, aten.index.Tensor, (x, [None, *left]))
    if len(others) > 1 or others[0].dim() < rank:
        return False
    index, rest = indices[1], editor.shape(node.meta[VAL])[rank:]
    count = math.prod(others[0].shape[1:])
    below = emit(aten.lt.Scalar, index, 0)
    index = emit(aten.where.self, below, emit(aten.add.Tensor, index, editor.arg(sizes[1])), index)
    index = emit(aten.reshape.default, index, [editor.arg(sizes[0]), editor.arg(count), *[1] * len(rest)])
    index = emit(aten.expand.default, index, [editor.arg(sizes[0]), editor.arg(count), *rest])
    found = emit(aten.gather.default, x, 1, index)
    return respell(node, aten.reshape.default, (found, editor.shape(node.meta[VAL])))


def _counts(editor: Editor, index: fx.Node, size: int | torch.SymInt) -> int | None:
    """The dim along which an index is 0, 1, ... size - 1, where all its others are of one element."""
    shape = index.meta[VAL].shape
    long = [d for d, n in enumerate(shape) if not editor.same(n, 1)]
    if len(long) != 1 or not editor.same(shape[long[0]], size):
        return None
    source: Any = index
    while source.target in _KEEPS_ORDER or (source.target is aten.add.Tensor and source.args[1:] == (0,)):
        source = source.args[0]
        if source.meta[VAL].dtype not in (torch.int64, torch.int32):  # a cast from others may change the numbers
            return None
    counts = op_name(source) == "arange" and argument(source, "start", 0) == 0 and argument(source, "step", 1) == 1
    return long[0] if counts else None
