"""Masks of attention that are causal, windows, documents or padding are not made: flags and [b, t] tensors for a [s, t] one.

Before:  %c = le(%keys, %queries); %m = where(%c, 0, finfo.min); %o = megafx.attention(%q, %k, %v, %m, None, ..., False, 0, ...)
After:   %o = megafx.attention(%q, %k, %v, None, None, ..., True, 0, ...)
Legal because: analysis/masks.py reads what the mask is from the ops that make it; what it does not know stays a tensor.

Of attention, scale_mask_softmax and scaled_dot_product_attention. A bias (T5's, ALiBi) that was added to a causal mask is
what is left of it; padding beside it is attention's key_mask, and documents that are packed in a row its segments. Rows that
see no key become what they are in eager mode, with eager's gradient: `hidden` of attention says what that is. A mask for
which flags cannot say it stays a tensor.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from megafx.analysis.masks import Choice, Leaf, MaskReader
from megafx.analysis.visible import Visible, masked_before, may_hide, read_visible
from megafx.ir.nodes import argument, replace, set_arguments
from megafx.ir.program import VAL, Builder, Fusion, Phase, Program, differentiable_nodes, fqn_of, source_of
from megafx.kernels.attention.attention_reference import ADDED, ADDED_NAN, FILLED, FILLED_NAN, ZEROS
from megafx.kernels.attention.masked_softmax import mask_floor
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
BY = "describe_masks"
aten, ops = torch.ops.aten, torch.ops.megafx


_UNDROPPED = (
    "queries that see no key (padding on the left of a causal row) get the mean of v, as in eager, but no attention dropout is "
    "drawn for them"
)


def describe_masks(program: Program, context: CompileContext) -> int:
    """Returns the number of masks that are tensors no more, or smaller ones."""
    reader = MaskReader(program)
    count = 0
    for node in list(program.graph.nodes):
        rewrite = _REWRITES.get(str(node.target)) if node.op == "call_function" else None
        if rewrite is None or not getattr(context.config, rewrite[0]):
            continue
        if rewrite[1](program, context, reader, node):
            program.fusions.append(Fusion("mask_by_position", fqn_of(node), source_of(node), BY))
            count += 1
    program.erase_unused()
    program.assumed |= {name: program.table(name) for name in reader.used}
    return count


# -- making what is left


def _of_keys(emit: Builder, leaf: Leaf) -> fx.Node:
    """A tensor along batch and keys as [b or 1, t or 1]."""
    x, dims = leaf.node, list(leaf.dims)
    for i in reversed(range(len(dims))):
        if dims[i] is None:
            x = emit(aten.select.int, x, i, 0)
            del dims[i]
    if dims == [-1, -4]:
        x, dims = emit(aten.transpose.int, x, 0, 1), [-4, -1]
    if dims == [-1]:
        x = emit(aten.unsqueeze.default, x, 0)
    elif dims == [-4]:
        x = emit(aten.unsqueeze.default, x, 1)
    elif not dims:
        x = emit(aten.unsqueeze.default, emit(aten.unsqueeze.default, x, 0), 0)
    return x


def _padding(emit: Builder, seen: Visible) -> fx.Node:
    """bool [b or 1, t], True where a key is visible."""
    found: fx.Node | None = None
    for leaf, positive in seen.padding:
        x = _of_keys(emit, leaf)
        x = x if positive else emit(aten.logical_not.default, x)
        found = x if found is None else emit(aten.logical_and.default, found, x)
    assert found is not None
    return found


def _rest(emit: Builder, rest: tuple[Leaf, ...], rank: int = 4) -> fx.Node | None:
    """The sum of the biases, with as many dims as the scores; None where their dims are not in their places."""
    total: fx.Node | None = None
    for leaf in rest:
        n = leaf.node.meta[VAL].dim()
        if any(d is not None and d != i - n for i, d in enumerate(leaf.dims)):
            return None
    for leaf in rest:
        total = leaf.node if total is None else emit(aten.add.Tensor, total, leaf.node)
    assert total is not None
    for _ in range(rank - total.meta[VAL].dim()):
        total = emit(aten.unsqueeze.default, total, 0)
    return total


# -- the ops


def _attention(program: Program, context: CompileContext, reader: MaskReader, node: fx.Node) -> bool:
    mask = argument(node, "mask")
    if not isinstance(mask, fx.Node) or mask.meta[VAL].dim() != 4:
        return False
    value = reader.value_of(mask)
    if isinstance(value, Choice) and value.on == value.off == 0 and not isinstance(value.on, bool):
        set_arguments(node, mask=argument(node, "key_mask"), key_mask=None)  # T5's cross attention adds a bias of zeros
        return True
    if argument(node, "window") or argument(node, "key_mask") is not None:
        return False
    seen = read_visible(reader, mask, visible=True, symmetric=True)
    if seen is None:
        return False
    if seen.segments is not None and argument(node, "segments") is not None:
        return False
    emit = Builder(program, node, node, BY)
    causal = seen.causal or bool(argument(node, "causal"))
    if causal and not seen.causal and seen.window:
        return False  # a window that reaches both ways, beside the flag
    by_position = causal or seen.window > 0 or seen.segments is not None
    hidden = _hidden(program, context, node, seen, mask.meta[VAL], by_position)
    if hidden is None or (seen.segments is not None and seen.padding and hidden != ZEROS):
        return False  # which rows see no key: attention_rows does not know documents
    new = _rest(emit, seen.rest) if seen.rest else None
    if seen.rest and new is None:
        return False
    keys: fx.Node | None = None
    if seen.padding:
        keys = _padding(emit, seen)
        if hidden in (ADDED, FILLED) and not by_position and mask.meta[VAL].is_floating_point():
            zeros = emit(aten.zeros_like.default, keys, dtype=mask.meta[VAL].dtype)
            keys = emit(aten.masked_fill.Scalar, zeros, emit(aten.logical_not.default, keys), seen.fill)
    if new is None:
        new, keys = keys, None
    if new is not None and not by_position:
        small, large = (math.prod(program.sizes.shape(n.meta[VAL])) for n in (new, mask))
        if small >= large:
            return False
    hidden = ZEROS if new is None else hidden
    if seen.segments is not None:
        set_arguments(node, segments=_of_keys(emit, seen.segments))
    set_arguments(node, mask=new, key_mask=keys, causal=causal, window=seen.window, hidden=hidden)
    dropped = by_position and seen.padding and hidden in (ADDED, FILLED) and argument(node, "p")
    if dropped and not any(note.message == _UNDROPPED for note in program.notes):
        program.note("attention", _UNDROPPED, node)
    return True


def _hidden(
    program: Program, context: CompileContext, node: fx.Node, seen: Visible, mask: torch.Tensor, by_position: bool
) -> int | None:
    """What hidden scores are once the mask is flags and a [b, t] tensor; None where rows would change that see no key."""
    if argument(node, "sink") is not None:
        return ZEROS  # every row sees the sink
    hidden: int = argument(node, "hidden")
    if seen.window and hidden != ZEROS and not _same_lengths(program, node):
        return None  # queries beyond the keys see none
    if not mask.is_floating_point():
        return hidden
    finite, filled = not math.isinf(seen.fill), hidden == FILLED
    if finite and by_position and may_hide(program, seen.rest):
        return None  # rows may see no key although no padding is known, and then the fill has a weight
    if not seen.padding:
        return hidden
    low = seen.fill <= mask_floor(mask.dtype)
    if not seen.exact or (seen.replaced and not (filled and low)):
        return None
    if not by_position:
        return hidden if hidden != ZEROS else ADDED if finite else ZEROS
    if finite and not low:
        return None  # rows that see nothing still depend on their scores
    if filled:
        return FILLED if finite else FILLED_NAN
    if finite or hidden != ZEROS:
        trained = differentiable_nodes(program, context.wants_grad)
        biased = any(leaf.node in trained for leaf in seen.rest)
        if biased or (argument(node, "softcap") and trained & {*node.args[:2]}):
            return None  # gradients of attention_rows are of the scores
        return ADDED if finite else ADDED_NAN
    return ZEROS


def _same_lengths(program: Program, node: fx.Node) -> bool:
    q, k = (x.meta[VAL] for x in node.args[:2])
    return bool(program.sizes.of(q.shape[-2]) == program.sizes.of(k.shape[-2]))


def _softmax(program: Program, context: CompileContext, reader: MaskReader, node: fx.Node) -> bool:
    mask = argument(node, "mask")
    if not isinstance(mask, fx.Node) or argument(node, "causal") or argument(node, "window"):
        return False
    seen = read_visible(reader, mask, visible=False, symmetric=False)
    if seen is None or not seen.by_position or seen.segments is not None or (seen.window and not seen.causal):
        return False
    scores = node.args[0].meta[VAL]
    if program.sizes.of(scores.shape[-1]) != program.sizes.of(scores.shape[-2]):
        return False  # the op counts queries from the end
    emit = Builder(program, node, node, BY)
    fill = argument(node, "fill")
    if mask.meta[VAL].dtype != torch.bool:
        filled = fill > -math.inf
        if masked_before(program, node.args[0]):
            return False  # rows that see no key: their gradients reach what is added
        if seen.fill > mask_floor(mask.meta[VAL].dtype) or (seen.padding and not (filled and seen.exact)):
            return False  # gradients of rows that see no key, or their scores
        if seen.rest and not math.isinf(seen.fill) and may_hide(program, seen.rest):
            return False
        fill = fill if seen.rest else seen.fill
    new: fx.Node | None = None
    if seen.rest:
        new = _rest(emit, seen.rest, min(4, scores.dim()))
        if new is None or seen.padding:
            return False
    elif seen.padding:
        four = emit(aten.unsqueeze.default, emit(aten.unsqueeze.default, _padding(emit, seen), 1), 2)  # [b, 1, 1, t]
        new = emit(aten.logical_not.default, four)
        if scores.dim() != 4:
            return False
    set_arguments(node, mask=new, causal=True, window=seen.window, fill=fill)
    return True


def _library(program: Program, context: CompileContext, reader: MaskReader, node: fx.Node) -> bool:
    q, k, v = node.args[:3]
    mask = argument(node, "attn_mask")
    four = all(x.meta[VAL].dim() == 4 for x in (q, k, v))
    if not isinstance(mask, fx.Node) or not four or argument(node, "dropout_p"):
        return False
    seen = read_visible(reader, mask, visible=True, symmetric=True)
    if seen is None or not (seen.by_position or seen.segments is not None):
        return False
    emit = Builder(program, node, node, BY)
    for _ in range(4 - mask.meta[VAL].dim()):
        mask = emit(aten.unsqueeze.default, mask, 0)
    scale = argument(node, "scale")
    factor = float(scale) if scale is not None else 1.0 / math.sqrt(q.meta[VAL].shape[-1])
    new = emit(
        ops.attention.default, q, k, v, mask, None, None, None, None, factor, False, 0, 0.0, ZEROS, 0.0, 0, -1, [], "tp"
    )
    if not _attention(program, context, reader, new):
        program.graph.erase_node(new)
        return False
    replace(node, new)
    return True


_REWRITES = {
    "megafx.attention.default": ("attention_fusion", _attention),
    "megafx.scale_mask_softmax.default": ("masked_softmax_fusion", _softmax),
    "aten.scaled_dot_product_attention.default": ("attention_fusion", _library),
}
