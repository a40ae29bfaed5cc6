"""Losses and their reductions are two things: megafx.cross_entropy gives each token's loss, and ATen reduces it.

Before:  %l = cross_entropy_loss(%logits, %target, None, mean, -100, 0.0)
After:   %c = cross_entropy(%logits, %target, -100, 0.0, False); %n = sum(ne(%target, -100)); %l = div(sum(%c), %n)

Losses of elements (mse_loss, binary_cross_entropy_with_logits, ...) are taken apart as well: each rank then computes the loss
of its elements, and the sum is partial.

Logits [n, classes, d, ...] become rows [n * d * ..., classes] first.

Class weights w: the token's loss is times w[target], and a mean is over the sum of these. Class probabilities as targets, and
weights with label smoothing, are sums over classes: each rank has its rows, with whole classes.
"""

from __future__ import annotations

import math

import torch
from torch import fx

import megafx.kernels.loss.cross_entropy  # noqa: F401  registers megafx::cross_entropy
from megafx.ir.nodes import argument, replace, set_arguments
from megafx.ir.program import VAL, Builder, recompute_val
from megafx.passes.canonicalize.editor import Editor, arguments, is_tensor, on
from megafx.rules.families_math import LOSSES_OF_ELEMENTS

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


@on("cross_entropy_loss")
def cross_entropy_to_tokens(editor: Editor, node: fx.Node) -> bool:
    """cross_entropy_loss -> a loss per token and its reduction."""
    return _rewrite(editor, node, argument(node, "self"), argument(node, "label_smoothing"))


@on("nll_loss_nd nll_loss")
def nll_of_log_softmax(editor: Editor, node: fx.Node) -> bool:
    """nll_loss(log_softmax(x, last dim)) is the cross entropy of x."""
    logs = argument(node, "self")
    if not (is_tensor(logs) and logs.target is aten.log_softmax.int and logs.meta[VAL].dim() > 1):
        return False
    logits, dim, dtype = arguments(logs, "self", "dim", "dtype")
    if dim not in (1, 1 - logs.meta[VAL].dim()):
        return False
    if dtype is not None and dtype != logits.meta[VAL].dtype:
        logits = editor.at(node)(aten.to.dtype, logits, dtype)
    return _rewrite(editor, node, logits, 0.0)


@on(" ".join([*LOSSES_OF_ELEMENTS, "multi_margin_loss multilabel_margin_loss"]))
def loss_of_elements(editor: Editor, node: fx.Node) -> bool:
    """A loss with a reduction -> the same loss without, and its sum or mean; ATen's kernels do so too."""
    kind = argument(node, "reduction")
    if kind == _NONE:
        return False
    emit = editor.at(node)
    each = emit(node.target, *node.args, **node.kwargs)
    set_arguments(each, reduction=_NONE)
    recompute_val(editor.program, each)
    return replace(node, emit(aten.mean.default if kind == _MEAN else aten.sum.default, each))


def _rewrite(editor: Editor, node: fx.Node, logits: fx.Node, smoothing: float) -> bool:
    target, weight, reduction, ignore = arguments(node, "target", "weight", "reduction", "ignore_index")
    by_row = logits.meta[VAL].dim() > 1
    of_classes = target.meta[VAL].dtype.is_floating_point or (weight is not None and smoothing != 0)
    reasons = {
        "an ignore_index that is a size": not isinstance(ignore, int),
        f"logits of {logits.meta[VAL].dim()} dims": not by_row,
        "classes whose number is a size": by_row and of_classes and not isinstance(logits.meta[VAL].shape[1], int),
    }
    reason = next((reason for reason, present in reasons.items() if present), None)
    if reason is not None:
        what = f"cross entropy with {reason} is left as captured (no vocab sharding)"
        editor.program.note("canonicalize", what, node)
        return False
    emit = editor.at(node)
    dtype = node.meta[VAL].dtype
    counts = None
    several = logits.meta[VAL].dim() > 2
    if several:
        logits = _by_rows(editor, node, logits)
        if target.meta[VAL].dtype.is_floating_point:
            target = _by_rows(editor, node, target)
        else:
            target = emit(aten.reshape.default, target, [editor.arg(math.prod(target.meta[VAL].shape))])
    if target.meta[VAL].dtype.is_floating_point:
        if smoothing:
            classes = logits.meta[VAL].shape[1]
            target = emit(aten.add.Tensor, emit(aten.mul.Tensor, target, 1 - smoothing), smoothing / classes)
        loss = _over_classes(emit, emit(aten.mul.Tensor, emit(aten.log_softmax.int, logits, 1), target), weight)
        if reduction == _MEAN:
            return replace(node, emit(aten.mean.default, loss))
    else:
        smooth = 0.0 if of_classes else float(smoothing)
        loss = emit(torch.ops.megafx.cross_entropy.default, logits, target, ignore, smooth, False)
        counts = emit(aten.ne.Scalar, target, ignore) if weight is not None or reduction == _MEAN else None
    if weight is not None and counts is not None:
        index = emit(aten.mul.Tensor, target, counts)  # a class also where the target is ignored
        counts = emit(aten.mul.Tensor, emit(aten.index_select.default, weight, 0, index), counts)
        loss = emit(aten.mul.Tensor, loss, counts)
        if of_classes:
            every = _over_classes(emit, emit(aten.log_softmax.int, logits, 1), weight)
            every = emit(aten.masked_fill.Scalar, every, emit(aten.eq.Scalar, target, ignore), 0.0)
            every = emit(aten.mul.Tensor, every, smoothing / logits.meta[VAL].shape[1])
            loss = emit(aten.add.Tensor, emit(aten.mul.Tensor, loss, 1 - smoothing), every)
    if reduction != _NONE:
        loss = emit(aten.sum.default, loss)
    elif several:
        loss = emit(aten.reshape.default, loss, editor.shape(node.meta[VAL]))
    if reduction == _MEAN:
        loss = emit(aten.div.Tensor, loss, emit(aten.sum.default, counts))
    if loss.meta[VAL].dtype != dtype:
        loss = emit(aten.to.dtype, loss, dtype)
    return replace(node, loss)


def _by_rows(editor: Editor, node: fx.Node, x: fx.Node) -> fx.Node:
    """[n, classes, d, ...] -> [n * d * ..., classes], of what it was made of where that has its classes last."""
    emit, order = editor.at(node), [0, *range(2, x.meta[VAL].dim()), 1]
    if len(order) == 3 and x.target is aten.transpose.int and {*x.args[1:]} == {1, 2}:
        x = x.args[0]
    elif len(order) == 3:
        x = emit(aten.transpose.int, x, 1, 2)
    else:
        x = emit(aten.permute.default, x, order)
    *rows, classes = x.meta[VAL].shape
    return emit(aten.reshape.default, x, [editor.arg(math.prod(rows)), editor.arg(classes)])


def _over_classes(emit: Builder, logs: fx.Node, weight: fx.Node | None) -> fx.Node:
    """The sum over classes, with their weights, negated."""
    each = logs if weight is None else emit(aten.mul.Tensor, logs, weight)
    return emit(aten.neg.default, emit(aten.sum.dim_IntList, each, [1]))
