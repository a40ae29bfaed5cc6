"""Erase what computes nothing: asserts, casts to the same dtype, copies, full slices, dropout that is off."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import ASSERTS, argument
from megafx.ir.program import VAL
from megafx.kernels.experts import grouped_mm as _defines_the_op  # noqa: F401
from megafx.passes.canonicalize.editor import Editor, is_tensor, replace, respell

aten = torch.ops.aten

# Ops whose result is their first operand where it has the same shape, dtype and device: in a functional graph a copy and a
# view of the same elements are the same value.
_IDENTITIES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.view_as.default,
        aten.expand.default,
        aten.expand_as.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.to.dtype,
        aten.positive.default,
        aten.resolve_conj.default,
        aten.resolve_neg.default,
    }
)
# Ops that look at how their operand lies in memory, and the copies that may have been made for them.
_READ_STRIDES = frozenset(
    {aten.view_as_complex.default, aten.view_as_real.default, aten.view.dtype, aten.as_strided.default}
)
_COPIES = frozenset({aten.contiguous.default, aten.clone.default})
_CASTS = frozenset(
    {
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten._to_copy.default,
        aten.type_as.default,
    }
)
_DROPOUTS = frozenset({aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default})


def erase_asserts(editor: Editor) -> int:
    """Checks of metadata hold by construction once the graph is typed; sizes are checked when a call is bound to a graph.

    With them go the numbers that nothing else uses: of values that were read for a check (`capture_checks`).
    """
    count = 0
    read = _numbers_read(editor)
    for node in reversed(list(editor.graph.nodes)):
        if node.op == "call_function" and not node.users and (node.target in ASSERTS or node in read):
            editor.graph.erase_node(node)
            count += 1
    return count


def _numbers_read(editor: Editor) -> set[fx.Node]:
    """Python numbers that are read from tensors, and those that are computed of such alone."""
    found: set[fx.Node] = set()
    for node in editor.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (aten.item.default, aten._local_scalar_dense.default) or (
            node.all_input_nodes and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return found


def one_spelling_of_casts(editor: Editor, node: fx.Node) -> bool:
    """to.*, type_as, _to_copy -> aten.to.dtype(x, dtype): within one device a cast is all that they do."""
    if node.target not in _CASTS or not is_tensor(node.args[0]):
        return False
    source, value = node.args[0].meta[VAL], node.meta[VAL]  # type: ignore[union-attr]
    if source.device != value.device:
        return False
    return respell(node, aten.to.dtype, (node.args[0], value.dtype))


def one_spelling_of_padding(editor: Editor, node: fx.Node) -> bool:
    """pad(x, sizes, "constant", v) -> constant_pad_nd(x, sizes, v): the same op, which traces with symbolic sizes."""
    if node.target is not aten.pad.default or argument(node, "mode", "constant") != "constant":
        return False
    value = argument(node, "value")
    return respell(node, aten.constant_pad_nd.default, (*node.args[:2], 0.0 if value is None else value))


def erase_identity(editor: Editor, node: fx.Node) -> bool:
    """The value is that of the first operand: same elements, shape, dtype and device."""
    if node.target not in _IDENTITIES or not is_tensor(node.args[0]):
        return False
    source, value = node.args[0].meta[VAL], node.meta[VAL]  # type: ignore[union-attr]
    if value.dtype != source.dtype or value.device != source.device or not editor.same_shape(source, value):
        return False
    if node.target is aten.slice.Tensor and argument(node, "step") not in (None, 1):
        return False
    if node.target in _COPIES and any(u.target in _READ_STRIDES for u in node.users):
        return False
    return replace(node, node.args[0])


def expand_of_broadcast(editor: Editor, node: fx.Node) -> bool:
    """broadcast_tensors(x, y)[i] -> expand of the one operand, or the operand where it has that shape."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.target is not aten.broadcast_tensors.default:
        return False
    operands: Any = source.args[0]
    operand, value = operands[node.args[1]], node.meta[VAL]
    if editor.same_shape(operand.meta[VAL], value):
        return replace(node, operand)
    return replace(node, editor.at(node)(aten.expand.default, operand, editor.shape(value)))


def cat_of_what_is_there(editor: Editor, node: fx.Node) -> bool:
    """cat leaves out operands without elements; of one operand that is left it is the operand itself."""
    if node.target is not aten.cat.default:
        return False
    operands, value = list(node.args[0]), node.meta[VAL]  # type: ignore[arg-type]
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


def erase_inactive_detach(editor: Editor, node: fx.Node, active: set[fx.Node]) -> bool:
    """detach of a value that carries no gradient is the value; on others it stops the gradient, and stays."""
    if node.target not in (aten.detach.default, aten.detach_.default) or node.args[0] in active:
        return False
    return replace(node, node.args[0])


def erase_idle_dropout(editor: Editor, node: fx.Node) -> bool:
    """Dropout in eval mode, or with p = 0, returns its input."""
    if node.target not in _DROPOUTS:
        return False
    p, train = argument(node, "p"), argument(node, "train")
    return (not train or p == 0) and replace(node, node.args[0])


def resolve_getitem(editor: Editor, node: fx.Node) -> bool:
    """getitem of a literal tuple (an inlined region's result) is its element."""
    if node.target is not operator.getitem or isinstance(node.args[0], fx.Node):
        return False
    values: Any = node.args[0]
    return replace(node, values[node.args[1]])


# -- canonicalize names
#
# Ops that have several names get one.
#
# Before:  %y = multiply(%a, %b); %z = true_divide(%y, %c)
# After:   %y = mul(%a, %b); %z = div(%y, %c)
# Legal because: torch defines the one by the other, with the same arguments. Grouped matmuls, torch's and the stand-in that
# transformers exports for dtypes without one, are megafx.grouped_mm, which has the same formula in every dtype.


# alias -> name, both operator packets; overloads and arguments are the same
_NAMES: dict[str, str] = {
    "absolute": "abs",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "special_exp2": "exp2",
    "special_log1p": "log1p",
    "subtract": "sub",
    "true_divide": "div",
}


def _table() -> dict[Any, Any]:
    """Overload -> overload, of those that this torch has under both names."""
    table = {}
    for alias, name in _NAMES.items():
        for overload in getattr(aten, alias).overloads():
            if overload in getattr(aten, name).overloads() and "out" not in overload:
                table[getattr(getattr(aten, alias), overload)] = getattr(getattr(aten, name), overload)
    return table


_TABLE = _table()


def one_name(editor: Editor, node: fx.Node) -> bool:
    """multiply -> mul, true_divide -> div, clip -> clamp, ...; grouped matmuls -> megafx.grouped_mm"""
    if node.target in _TABLE:
        return respell(node, _TABLE[node.target], node.args, dict(node.kwargs))
    return str(node.target) in _GROUPED and _grouped(node)


_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def _grouped(node: fx.Node) -> bool:
    """x [S, K] by weight [E, K, N] with ends of groups, without a bias or another dtype."""
    named = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
    x, weight = (a.meta[VAL] for a in node.args[:2] if isinstance(a, fx.Node))
    ends, bias, dtype = (named.get(k) for k in ("offs", "bias", "out_dtype"))
    if (x.dim(), weight.dim()) != (2, 3) or ends is None or bias is not None or dtype not in (None, x.dtype):
        return False
    return respell(node, torch.ops.megafx.grouped_mm.default, (*node.args[:2], ends))


# -- canonicalize fills
#
# New tensors say size and dtype themselves: not by the example of a value that may come to be sharded, nor of the process.
#
# Before:  %o = ones_like(%x); %m = full([], -1e308)
# After:   %o = full([batch, 8], 1, dtype=...); %m = full([], -1e308, dtype=float64)
# Legal because: nothing but shape, dtype and device of %x is read; torch.get_default_dtype() when the graph runs is no part of
# the model.

_FILLS: dict[Any, int] = {aten.zeros_like.default: 0, aten.ones_like.default: 1}


def like_to_full(editor: Editor, node: fx.Node) -> bool:
    """zeros_like, ones_like and full_like -> full."""
    if node.target not in _FILLS and node.target is not aten.full_like.default:
        return False
    value = node.meta[VAL]
    if value.layout != torch.strided:
        return False
    number = argument(node, "fill_value") if node.target is aten.full_like.default else _FILLS[node.target]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return respell(node, aten.full.default, (editor.shape(value), number), options)


_MADE = frozenset({aten.full, aten.zeros, aten.ones, aten.arange, aten.linspace, aten.scalar_tensor, aten.eye})


def dtype_of_the_capture(editor: Editor, node: fx.Node) -> bool:
    """full, zeros, arange, ... of the default dtype name it."""
    if getattr(node.target, "overloadpacket", None) not in _MADE or node.kwargs.get("dtype") is not None:
        return False
    value = node.meta[VAL]
    if not value.is_floating_point():
        return False
    return respell(node, node.target, node.args, {**node.kwargs, "dtype": value.dtype})
