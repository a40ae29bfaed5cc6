"""Products with a weight become aten.linear. Leading dims that were flattened come back.

Before:  %f = reshape(%x, [b*s, c]); %a = addmm(%bias, %f, %w); %y = reshape(%a, [b, s, n])        # GPT-2's Conv1D
After:   %t = transpose(%w, 0, 1); %y = linear(%x, %t, %bias)
Before:  %f = reshape(%x, [b*s, h]); %n = layer_norm(%f, ...); %z = add(%f, %y)              # OPT, mixtures of experts
After:   %n = layer_norm(%x, ...); users see reshape(%n, [b*s, h]), and %z likewise where %y was flattened the same way
Legal because: these ops treat each row for itself (dropout by the element's linear index, which a reshape keeps). So what works
on rows sees the shapes of the residual stream.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import argument, aten_ops, replace
from megafx.ir.program import VAL
from megafx.passes.canonicalize.editor import Editor, is_tensor, on, respell

aten = torch.ops.aten

_UNARY = aten_ops("to.dtype transpose.int detach alias")  # of a weight, they give a weight
_NORMS = aten_ops("layer_norm rms_norm")  # of one tensor, and vectors of the last dim


@on("mm matmul addmm")
def product_to_linear(editor: Editor, node: fx.Node, weights: set[fx.Node]) -> bool:
    """mm, matmul, addmm with a 2-D weight on the right -> linear(x, weight transposed, bias)."""
    if node.target is aten.addmm.default:
        bias, x, weight = node.args[:3]
        if argument(node, "alpha") != 1 or argument(node, "beta") != 1 or not _is_vector(bias):
            return False
        if not editor.same(bias.meta[VAL].shape[0], node.meta[VAL].shape[-1]):
            return False
    else:
        (x, weight), bias = node.args, None
    if weight not in weights or weight.meta[VAL].dim() != 2 or not is_tensor(x) or x.meta[VAL].dim() < 2:
        return False
    turned: Any = weight  # linear wants [out, in]; a transpose of a transpose is left out
    back = turned.target is aten.transpose.int
    turned = turned.args[0] if back else editor.at(node)(aten.transpose.int, turned, 0, 1)
    return respell(node, aten.linear.default, (x, turned) if bias is None else (x, turned, bias))


@on("add.Tensor")
def add_bias_to_linear(editor: Editor, node: fx.Node, weights: set[fx.Node]) -> bool:
    """linear without bias, plus a 1-D parameter -> linear with bias."""
    if argument(node, "alpha") != 1:
        return False
    for product, bias in (node.args[:2], node.args[1::-1]):
        if not (is_tensor(product) and product.target is aten.linear.default and len(product.users) == 1):
            continue
        if argument(product, "bias") is not None or bias not in weights or not _is_vector(bias):
            continue
        if product.meta[VAL].dtype != node.meta[VAL].dtype or bias.meta[VAL].dtype != node.meta[VAL].dtype:
            continue
        if editor.same(bias.meta[VAL].shape[0], node.meta[VAL].shape[-1]):
            return respell(node, aten.linear.default, (*product.args[:2], bias))
    return False


@on("linear")
def unflatten_linear(editor: Editor, node: fx.Node) -> bool:
    """linear of a reshape that flattened leading dims -> linear of the operand; its users see the flat form by a reshape.

    The reshape may have joined heads as well: [b, s, n, d] -> [b*s, n*d] leaves [b, s, n*d].
    """
    flat = node.args[0]
    if not (is_tensor(flat) and flat.target is aten.reshape.default):
        return False
    source = flat.args[0]
    before, after = source.meta[VAL], flat.meta[VAL]
    if before.dim() <= after.dim() or after.dim() != 2:
        return False
    emit = editor.at(node)
    if not editor.same(before.shape[-1], after.shape[-1]):
        lead = _lead_of(editor, before, after)
        if lead is None:
            return False
        sizes = [editor.arg(n) for n in (*before.shape[:lead], after.shape[-1])]
        source = emit(aten.reshape.default, source, sizes)
    new = emit(aten.linear.default, source, *node.args[1:])
    return replace(node, emit(aten.reshape.default, new, editor.shape(node.meta[VAL])))


def _lead_of(editor: Editor, before: torch.Tensor, after: torch.Tensor) -> int | None:
    """How many leading dims of `before` are the rows of `after`; the others are its columns: [b, s, n, d] -> [b*s, n*d]."""
    shape = editor.program.sizes.shape(before)
    rows, columns = editor.program.sizes.shape(after)
    leads = range(2, len(shape) - 1)
    return next((d for d in leads if math.prod(shape[:d]) == rows and math.prod(shape[d:]) == columns), None)


@on("reshape")
def merge_reshapes(editor: Editor, node: fx.Node) -> bool:
    """reshape of a reshape -> one reshape; back to the first shape -> nothing."""
    inner = node.args[0]
    if not is_tensor(inner) or inner.target is not aten.reshape.default:
        return False
    if editor.same_shape(inner.args[0].meta[VAL], node.meta[VAL]):
        return replace(node, inner.args[0])
    return respell(node, aten.reshape.default, (inner.args[0], node.args[1]))


def weight_nodes(editor: Editor) -> set[fx.Node]:
    """Parameters, and their casts and transposes."""
    weights = {node for node, spec in editor.program.input_nodes() if spec.kind == "param"}
    for node in editor.graph.nodes:
        if node.op == "call_function" and node.target in _UNARY and node.args[0] in weights:
            weights.add(node)
    return weights


def _is_vector(node: Any) -> bool:
    return is_tensor(node) and node.meta[VAL].dim() == 1


@on("layer_norm rms_norm add.Tensor mul.Tensor relu gelu silu sigmoid tanh dropout")
def unflatten_rows(editor: Editor, node: fx.Node) -> bool:
    """op(reshape(x), vectors) -> reshape(op(x, vectors))."""
    flat = node.meta[VAL]
    if not isinstance(flat, torch.Tensor) or flat.dim() != 2:
        return False
    if node.target in _NORMS and len(node.args[1]) != 1:
        return False
    sources: dict[fx.Node, fx.Node] = {}
    for operand in node.all_input_nodes:
        if not is_tensor(operand) or operand.meta[VAL].dim() < 2:
            continue
        source = _source(editor, operand)
        if source is None or operand.meta[VAL].dim() != 2:
            return False
        sources[operand] = source
    shapes = [s.meta[VAL] for s in sources.values()]
    if not shapes or not all(editor.same_shape(shapes[0], s) for s in shapes):
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: sources.get(n, n))
    new = editor.at(node)(node.target, *args, **kwargs)
    return replace(node, editor.at(node)(aten.reshape.default, new, editor.shape(flat)))


def _source(editor: Editor, operand: fx.Node) -> Any:
    """What the rows of a reshape were before their leading dims became one; None for anything else."""
    if operand.target is not aten.reshape.default:
        return None
    source = operand.args[0]
    before, after = source.meta[VAL], operand.meta[VAL]
    if before.dim() <= after.dim() or not editor.same(before.shape[-1], after.shape[-1]):
        return None
    return source
