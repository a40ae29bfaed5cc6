"""Masks of attention that are causal, windows or padding are said, not made: flags and a [b, t] tensor for a [s, t] one.

Before:  %c = le(%keys, %queries); %m = where(%c, 0, finfo.min); %o = megafx.attention(%q, %k, %v, %m, None, ..., False, 0, ...)
After:   %o = megafx.attention(%q, %k, %v, None, None, ..., True, 0, ...)
Legal because: analysis/masks.py reads what the mask is from the ops that make it; what it does not know stays a tensor.

Of attention, scale_mask_softmax and scaled_dot_product_attention. A bias (T5's, ALiBi) that was added to a causal mask is
what is left of it; padding beside it is attention's key_mask. Rows that see no key: softmax makes them uniform where the
mask's fill is finite. Padding alone keeps that, as an additive [b, t]; beside a causal mask they get the mean of v over all
keys, which gives q and k no gradient (in eager they get one, through finfo.min + score). Where the fill is -inf they are zeros,
not nan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from megafx.analysis.masks import Choice, Cond, Index, Leaf, MaskReader, Sum, condition_of, conjuncts, hides
from megafx.ir.nodes import argument, set_arguments
from megafx.ir.program import VAL, Builder, Fusion, Phase, Program, fqn_of, source_of
from megafx.kernels.attention.masked_softmax import mask_floor
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
BY = "describe_masks"
aten, ops = torch.ops.aten, torch.ops.megafx


@dataclass
class Seen:
    """What a mask lets be seen. fill: what hidden scores become, or have added. rest: a tensor that is added."""

    causal: bool = False
    window: int = 0
    padding: list[tuple[Leaf, bool]] = field(default_factory=list)  # (tensor, whether True is visible)
    fill: float = -math.inf
    rest: tuple[Leaf, ...] = ()


_DARK = (
    "queries that see no key (padding on the left of a causal row) get the mean of v, as in eager; their q and k get no "
    "gradient and no attention dropout is drawn for them, in this and in other layers, where eager has both"
)


def describe_masks(program: Program, planner: Planner) -> int:
    """Returns the number of masks that are tensors no more, or smaller ones."""
    reader = MaskReader(program)
    count = 0
    for node in list(program.graph.nodes):
        rewrite = _REWRITES.get(str(node.target)) if node.op == "call_function" else None
        if rewrite is None or not getattr(planner.config, rewrite[0]):
            continue
        if rewrite[1](program, reader, node):
            program.fusions.append(Fusion("mask_by_position", fqn_of(node), source_of(node), BY))
            count += 1
    program.graph.eliminate_dead_code()
    program.assumed |= {name: program.table(name) for name in reader.used}
    return count


def _read(reader: MaskReader, mask: fx.Node, visible: bool, symmetric: bool) -> Seen | None:
    """What the mask shows. visible: what True of a boolean mask means; symmetric: windows reach both ways."""
    value = reader.value_of(mask)
    shown, fill = condition_of(value), -math.inf
    rest: tuple[Leaf, ...] = ()
    if shown is not None and not visible:
        shown = Cond("not", (shown,))
    if isinstance(value, Sum):
        value, rest = value
    if isinstance(value, Choice) and not isinstance(value.on, bool):
        if value.on == 0 and hides(value.off):
            shown, fill = value.where, value.off
        elif value.off == 0 and hides(value.on):
            shown, fill = Cond("not", (value.where,)), value.on
    parts = None if shown is None else conjuncts(shown)
    return None if parts is None else _sorted(parts, float(fill), rest, symmetric)


def _sorted(parts: list[Cond], fill: float, rest: tuple[Leaf, ...], symmetric: bool) -> Seen | None:
    seen = Seen(fill=fill, rest=rest)
    back, ahead = 0, 0  # keys before and after the query that are seen, plus one
    for part in parts:
        if part.kind in ("leaf", "not"):
            leaf = (part if part.kind == "leaf" else part.of[0]).of[0]
            if not isinstance(leaf, Leaf) or any(d not in (None, -1, -4) for d in leaf.dims):
                return None
            seen.padding.append((leaf, part.kind == "leaf"))
            continue
        index: Index = part.of[0]
        if index.terms == ((-2, -1), (-1, 1)):  # key - query + constant <= 0
            if index.constant > 0:
                return None
            if index.constant == 0:
                seen.causal = True
            else:
                ahead = min(ahead or 1 - index.constant, 1 - index.constant)
        elif index.terms == ((-2, 1), (-1, -1)) and index.constant <= 0:  # query - key + constant <= 0
            back = min(back or 1 - index.constant, 1 - index.constant)
        else:
            return None
    if not seen.causal and (back != ahead or (back and not symmetric)):
        return None
    seen.window = back
    return seen


# -- making what is left


def _padding(emit: Builder, seen: Seen) -> fx.Node:
    """bool [b or 1, t], True where a key is visible."""
    found: fx.Node | None = None
    for leaf, positive in seen.padding:
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


def _attention(program: Program, reader: MaskReader, node: fx.Node) -> bool:
    mask = argument(node, "mask")
    if not isinstance(mask, fx.Node) or mask.meta[VAL].dim() != 4:
        return False
    value = reader.value_of(mask)
    if isinstance(value, Choice) and value.on == value.off == 0 and not isinstance(value.on, bool):
        set_arguments(node, mask=argument(node, "key_mask"), key_mask=None)  # T5's cross attention adds a bias of zeros
        return True
    if argument(node, "window") or argument(node, "key_mask") is not None:
        return False
    seen = _read(reader, mask, visible=True, symmetric=True)
    if seen is None:
        return False
    emit = Builder(program, node, node, BY)
    causal = seen.causal or bool(argument(node, "causal"))
    floating = mask.meta[VAL].is_floating_point()
    if causal and not seen.causal and seen.window:
        return False  # a window that reaches both ways, beside the flag
    dark = bool(seen.padding) and floating and not math.isinf(seen.fill)
    by_position = causal or seen.window > 0
    if dark and by_position and seen.fill > mask_floor(mask.meta[VAL].dtype):
        return False  # rows that see nothing still depend on their scores
    new = _rest(emit, seen.rest) if seen.rest else None
    if seen.rest and new is None:
        return False
    keys: fx.Node | None = None
    if seen.padding:
        keys = _padding(emit, seen)
        if dark and not by_position:
            zeros = emit(aten.zeros_like.default, keys, dtype=mask.meta[VAL].dtype)
            keys = emit(aten.masked_fill.Scalar, zeros, emit(aten.logical_not.default, keys), seen.fill)
    if new is None:
        new, keys = keys, None
    if new is not None and not by_position:
        small, large = (math.prod(program.sizes.shape(n.meta[VAL])) for n in (new, mask))
        if small >= large:
            return False
    set_arguments(node, mask=new, key_mask=keys, causal=causal, window=seen.window)
    if dark and by_position:
        _uniform_where_dark(program, node, seen)
    return True


def _uniform_where_dark(program: Program, node: fx.Node, seen: Seen) -> None:
    """Queries that see no key get the mean of v: out = where(seen anything, out, mean over keys of v)."""
    emit = Builder(program, node.next, node, BY)
    count = emit(aten.cumsum.default, _padding(emit, seen), 1, dtype=torch.int64)
    if seen.window:
        count = emit(aten.sub.Tensor, count, emit(aten.constant_pad_nd.default, count, [seen.window, -seen.window], 0))
    some = emit(aten.gt.Scalar, count, 0)
    some = emit(aten.unsqueeze.default, emit(aten.unsqueeze.default, some, 1), 3)  # [b, 1, s, 1]
    v, q = node.args[2], node.args[0]
    heads, kv = q.meta[VAL].shape[1], v.meta[VAL].shape[1]  # type: ignore[union-attr]
    mean = emit(aten.mean.dim, v, [2], True)
    if kv not in (1, heads):
        mean = emit(aten.repeat_interleave.self_int, mean, heads // kv, 1)
    where = emit(aten.where.self, some, node, mean)
    if not any(note.message == _DARK for note in program.notes):
        program.note("attention", _DARK, node)
    node.replace_all_uses_with(where, delete_user_cb=lambda user: user is not where)


def _softmax(program: Program, reader: MaskReader, node: fx.Node) -> bool:
    mask = argument(node, "mask")
    if not isinstance(mask, fx.Node) or argument(node, "causal") or argument(node, "window"):
        return False
    seen = _read(reader, mask, visible=False, symmetric=False)
    if seen is None or not (seen.causal or seen.window) or (seen.window and not seen.causal):
        return False
    sizes, scores = program.sizes, node.args[0].meta[VAL]  # type: ignore[union-attr]
    if sizes.of(scores.shape[-1]) != sizes.of(scores.shape[-2]):
        return False  # the op counts queries from the end
    emit = Builder(program, node, node, BY)
    fill = argument(node, "fill") if mask.meta[VAL].dtype == torch.bool else seen.fill
    if mask.meta[VAL].dtype != torch.bool and fill > mask_floor(mask.meta[VAL].dtype):
        return False
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


def _library(program: Program, reader: MaskReader, node: fx.Node) -> bool:
    q, k, v = node.args[:3]
    mask = argument(node, "attn_mask")
    four = all(x.meta[VAL].dim() == 4 for x in (q, k, v))  # type: ignore[union-attr]
    if not isinstance(mask, fx.Node) or not four or argument(node, "dropout_p"):
        return False
    seen = _read(reader, mask, visible=True, symmetric=True)
    if seen is None or not (seen.causal or seen.window):
        return False
    emit = Builder(program, node, node, BY)
    for _ in range(4 - mask.meta[VAL].dim()):
        mask = emit(aten.unsqueeze.default, mask, 0)
    scale = argument(node, "scale")
    factor = float(scale) if scale is not None else 1.0 / math.sqrt(q.meta[VAL].shape[-1])  # type: ignore[union-attr]
    new = emit(ops.attention.default, q, k, v, mask, None, None, factor, False, 0, 0.0, 0.0, 0, -1, [], "tp")
    if not _attention(program, reader, new):
        program.graph.erase_node(new)
        return False
    node.replace_all_uses_with(new)
    program.graph.erase_node(node)
    return True


_REWRITES = {
    "megafx.attention.default": ("attention_fusion", _attention),
    "megafx.scale_mask_softmax.default": ("masked_softmax_fusion", _softmax),
    "aten.scaled_dot_product_attention.default": ("attention_fusion", _library),
}
