"""One name for each op, and nothing that computes nothing.

Before:  %y = multiply(%a, %b); %z = clone(%y); %o = ones_like(%z)
After:   %y = mul(%a, %b); %o = full([batch, 8], 1, dtype=..., device=...)
Legal because: torch defines the one by the other, with the same arguments; in a functional graph a copy, or a view of the same
elements, is the same value. New tensors get size and dtype as arguments: the example of another value may be sharded later, and
the process's default dtype is no part of the model. Grouped matmuls, torch's and transformers' stand-in, are megafx.grouped_mm.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import ASSERTS, COPIES, MASKS, NUMBERS, argument, aten_ops, replace
from megafx.ir.program import VAL
from megafx.kernels.experts import grouped_mm as _defines_the_op  # noqa: F401
from megafx.passes.canonicalize.editor import Editor, is_tensor, on, respell

aten = torch.ops.aten
# They look at how operands lie in memory.
_READ_STRIDES = aten_ops("view_as_complex view_as_real view.dtype as_strided as_strided_copy as_strided_scatter")
_OWN_MEMORY = aten_ops("clone")  # their result is never their operand
_NUMBERS = NUMBERS | aten_ops("sym_storage_offset")


def erase_asserts(editor: Editor) -> int:
    """Checks of metadata hold by construction once the graph is typed; sizes are checked when a call is bound to a graph.

    With them go Python numbers that nothing else uses: values that were read for a check (capture/messages.py).
    """
    read: set[fx.Node] = set()  # numbers read from tensors, and those that are computed of such alone
    for node in editor.graph.nodes:
        if node.op == "call_function":
            operands = node.all_input_nodes
            if node.target in _NUMBERS or (operands and read.issuperset(operands)):
                read.add(node)
    count = 0
    for node in reversed(list(editor.graph.nodes)):
        if node.op == "call_function" and not node.users and (node.target in ASSERTS or node in read):
            editor.graph.erase_node(node)
            count += 1
    return count


@on("to.dtype to.dtype_layout to.device to.other _to_copy type_as")
def one_spelling_of_casts(editor: Editor, node: fx.Node) -> bool:
    """to.*, type_as, _to_copy -> aten.to.dtype(x, dtype): within one device a cast is all that they do."""
    if not is_tensor(node.args[0]):
        return False
    source, value = node.args[0].meta[VAL], node.meta[VAL]
    return source.device == value.device and respell(node, aten.to.dtype, (node.args[0], value.dtype))


@on("scalar_tensor")
def scalar_of_a_scalar(editor: Editor, node: fx.Node) -> bool:
    """A number that was read from a tensor becomes one again: `torch.tensor(loss.item())`."""
    number = node.args[0]
    if not isinstance(number, fx.Node) or getattr(number.target, "overloadpacket", None) != aten.item:
        return False
    (x,) = number.args
    flat = editor.at(node)(aten.reshape.default, editor.at(node)(aten.detach.default, x), [])
    return respell(node, aten._to_copy.default, (flat,), {"dtype": node.meta[VAL].dtype})


@on("lerp.Scalar")
def weighted_by_a_size(editor: Editor, node: fx.Node) -> bool:
    """lerp(a, b, w) -> a + w * (b - a) where the number w is computed of sizes: the gradient of lerp would take it for that of
    the trace."""
    a, b, weight = node.args
    if not isinstance(weight, fx.Node):
        return False
    emit = editor.at(node)
    return respell(node, aten.add.Tensor, (a, emit(aten.mul.Tensor, emit(aten.sub.Tensor, b, a), weight)))


@on("_upsample_bicubic2d_aa.vec")
def bicubic_by_products(editor: Editor, node: fx.Node) -> bool:
    """_upsample_bicubic2d_aa(x) -> A @ x @ B.T, for A and B what it makes of unit matrices along one dim: torch's gradient of
    it takes no sizes that vary (of rows)."""
    x, corners, factors = node.args[0], node.args[2], argument(node, "scale_factors")
    value, out, emit = x.meta[VAL], node.meta[VAL], editor.at(node)
    dtype = value.dtype if value.dtype == torch.float64 else torch.float32
    found = x if value.dtype == dtype else emit(aten.to.dtype, x, dtype)
    for d in (2, 3):
        n = editor.arg(value.shape[d])
        unit = emit(aten.eye.default, n, dtype=dtype, device=value.device)
        to = [editor.arg(out.shape[d]), n] if factors is None else None
        along = None if factors is None else [factors[d - 2], 1.0]
        weights = emit(node.target, emit(aten.reshape.default, unit, [1, 1, n, n]), to, corners, along)
        flat = emit(aten.reshape.default, weights, [editor.arg(out.shape[d]), n])
        pair = (flat, found) if d == 2 else (found, emit(aten.transpose.int, flat, 0, 1))
        found = emit(aten.matmul.default, *pair)
    return respell(node, aten.to.dtype, (found, value.dtype))


@on("pad")
def one_spelling_of_padding(editor: Editor, node: fx.Node) -> bool:
    """pad(x, sizes, "constant", v) -> constant_pad_nd(x, sizes, v): the same op, which traces with symbolic sizes."""
    if argument(node, "mode", "constant") != "constant":
        return False
    value = argument(node, "value")
    return respell(node, aten.constant_pad_nd.default, (*node.args[:2], 0.0 if value is None else value))


@on("pad_sequence")
def sequences_side_by_side(editor: Editor, node: fx.Node) -> bool:
    """pad_sequence(xs, ...) -> stack of each, padded to the longest: torch's own asks which of varying lengths is that."""
    emit, first, value = editor.at(node), bool(argument(node, "batch_first")), argument(node, "padding_value", 0.0)
    length, left = node.meta[VAL].shape[int(first)], argument(node, "padding_side", "right") == "left"
    rows = []
    for x in node.args[0]:
        more = editor.arg(length - x.meta[VAL].shape[0])
        sizes = [0, 0] * (x.meta[VAL].dim() - 1) + ([more, 0] if left else [0, more])
        rows.append(emit(aten.constant_pad_nd.default, x, sizes, value))
    return respell(node, aten.stack.default, (rows, 0 if first else 1))


@on(
    "alias clone contiguous lift_fresh lift_fresh_copy view_as expand expand_as reshape slice.Tensor to.dtype positive "
    "resolve_conj resolve_neg"
)
def erase_identity(editor: Editor, node: fx.Node) -> bool:
    """The value is that of the first operand, where that has the same shape, dtype and device."""
    if not is_tensor(node.args[0]):
        return False
    source, value = node.args[0].meta[VAL], node.meta[VAL]
    if value.dtype != source.dtype or value.device != source.device or not editor.same_shape(source, value):
        return False
    if node.target is aten.slice.Tensor and argument(node, "step") not in (None, 1):
        return False
    if (source.is_conj(), source.is_neg()) != (value.is_conj(), value.is_neg()):
        return False  # conj and neg are marks on a tensor, which these ops carry out
    if node.target in COPIES and any(u.target in _READ_STRIDES for u in node.users):
        return False
    if node.target in _OWN_MEMORY and any(user.op == "output" for user in node.users):
        return False  # the user may write into it
    return replace(node, node.args[0])


@on("", operator.getitem)
def expand_of_broadcast(editor: Editor, node: fx.Node) -> bool:
    """broadcast_tensors(x, y)[i] -> expand of the one operand, or the operand where it has that shape."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.broadcast_tensors.default:
        return False
    operand, value = source.args[0][node.args[1]], node.meta[VAL]
    if editor.same_shape(operand.meta[VAL], value):
        return replace(node, operand)
    return replace(node, editor.at(node)(aten.expand.default, operand, editor.shape(value)))


@on("cat")
def erase_empty_operands(editor: Editor, node: fx.Node) -> bool:
    """cat leaves out operands without elements; where one operand is left, it is that operand."""
    operands, value = list(node.args[0]), node.meta[VAL]
    dim = argument(node, "dim", 0) % max(value.dim(), 1)
    kept = [n for n in operands if not _is_empty(n, dim, value)]
    if len(kept) == len(operands) or not kept:
        return False
    if len(kept) == 1 and kept[0].meta[VAL].dtype == value.dtype and editor.same_shape(kept[0].meta[VAL], value):
        return replace(node, kept[0])
    return respell(node, aten.cat.default, (kept, argument(node, "dim", 0)))


def _is_empty(node: fx.Node, dim: int, result: torch.Tensor) -> bool:
    """Nothing along the dim, of the result's dtype: what it leaves out changes nothing."""
    value = node.meta[VAL]
    if value.dim() == 1:  # cat ignores a 1-d tensor without elements beside any others
        dim = 0
    size = value.shape[dim] if value.dim() in (1, result.dim()) else 1
    return isinstance(size, int) and size == 0 and value.dtype == result.dtype


@on("detach detach_")
def erase_inactive_detach(editor: Editor, node: fx.Node, active: set[fx.Node]) -> bool:
    """detach of a value that carries no gradient is the value; on others it stops the gradient, and stays."""
    return node.args[0] not in active and replace(node, node.args[0])


_DROPOUTS = "dropout feature_dropout alpha_dropout feature_alpha_dropout"


@on(f"{_DROPOUTS} {_DROPOUTS.replace(' ', '_ ')}_")
def erase_idle_dropout(editor: Editor, node: fx.Node) -> bool:
    """Dropout in eval mode, or with p = 0, returns its input, also where it works in place (`nn.Dropout(inplace=True)`)."""
    return (not argument(node, "train") or argument(node, "p") == 0) and replace(node, node.args[0])


@on("", operator.getitem)
def resolve_getitem(editor: Editor, node: fx.Node) -> bool:
    """getitem of a literal tuple (the result of an inlined body) is its element."""
    values = node.args[0]
    return not isinstance(values, fx.Node) and replace(node, values[node.args[1]])


# -- names

# alias:name, both operator packets whose overloads and arguments are the same
_ALIASES = (
    "__and__:bitwise_and __or__:bitwise_or __xor__:bitwise_xor "
    "absolute:abs arccos:acos arcsin:asin arctan:atan clip:clamp concat:cat concatenate:cat divide:div greater:gt "
    "greater_equal:ge less:lt less_equal:le multiply:mul negative:neg not_equal:ne special_expit:sigmoid special_erf:erf "
    "special_exp2:exp2 special_log1p:log1p subtract:sub true_divide:div"
)
_TABLE = {  # overload -> overload, of those that this torch has under both names
    getattr(getattr(aten, alias), overload): getattr(getattr(aten, name), overload)
    for alias, name in (pair.split(":") for pair in _ALIASES.split())
    for overload in getattr(aten, alias).overloads()
    if overload in getattr(aten, name).overloads() and "out" not in overload
}
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def one_name(editor: Editor, node: fx.Node) -> bool:
    """multiply -> mul, true_divide -> div, clip -> clamp, ...; grouped matmuls -> megafx.grouped_mm"""
    if node.target in _TABLE:
        return respell(node, _TABLE[node.target], node.args, dict(node.kwargs))
    if str(node.target) not in _GROUPED:
        return False
    # x [S, K] by weight [E, K, N] with ends of groups, without a bias or another dtype
    named = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
    x, weight = (a.meta[VAL] for a in node.args[:2] if isinstance(a, fx.Node))
    ends, bias, dtype = (named.get(k) for k in ("offs", "bias", "out_dtype"))
    if (x.dim(), weight.dim()) != (2, 3) or ends is None or bias is not None or dtype not in (None, x.dtype):
        return False
    return respell(node, torch.ops.megafx.grouped_mm.default, (*node.args[:2], ends))


# -- new tensors


@on("zeros_like ones_like full_like empty_like empty.memory_format new_empty")
def like_to_full(editor: Editor, node: fx.Node) -> bool:
    """zeros_like, ones_like, full_like -> full. What is empty may hold anything: zeros, the same on every rank."""
    value = node.meta[VAL]
    if value.layout != torch.strided:
        return False
    number = argument(node, "fill_value", int(node.target is aten.ones_like.default))
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return respell(node, aten.full.default, (editor.shape(value), number), options)


@on("index_put _unsafe_index_put")
def put_where_a_mask_says(editor: Editor, node: fx.Node) -> bool:
    """`x[mask] = v`, where v has no size of the rows that the mask selects -> where(mask, v, x)."""
    x, indices, values, accumulate = (argument(node, n) for n in ("self", "indices", "values", "accumulate"))
    at = [i for i, a in enumerate(indices) if a is not None]
    mask: Any = indices[at[0]] if at else None
    if len(at) != 1 or mask.meta[VAL].dtype not in MASKS:
        return False
    rest = x.meta[VAL].dim() - at[0] - mask.meta[VAL].dim()
    emit, sizes = editor.at(node), values.meta[VAL].shape
    if len(sizes) > rest:
        if len(sizes) != rest + 1 or not editor.same(sizes[0], 1):
            return False
        values = emit(aten.select.int, values, 0, 0)
    if mask.meta[VAL].dtype != torch.bool:
        mask = emit(aten.ne.Scalar, mask, 0)
    for _ in range(rest):
        mask = emit(aten.unsqueeze.default, mask, -1)
    if not accumulate:
        return respell(node, aten.where.self, (mask, values, x))
    zero = emit(
        aten.full.default, [], 0, dtype=values.meta[VAL].dtype, device=values.meta[VAL].device, pin_memory=False
    )
    return respell(node, aten.add.Tensor, (x, emit(aten.where.self, mask, values, zero)))


_MADE = frozenset({aten.full, aten.zeros, aten.ones, aten.arange, aten.linspace, aten.scalar_tensor, aten.eye})


def dtype_of_the_capture(editor: Editor, node: fx.Node) -> bool:
    """full, zeros, arange, ... of the default dtype name it."""
    if getattr(node.target, "overloadpacket", None) not in _MADE or node.kwargs.get("dtype") is not None:
        return False
    dtype = node.meta[VAL].dtype
    return dtype.is_floating_point and respell(node, node.target, node.args, {**node.kwargs, "dtype": dtype})
