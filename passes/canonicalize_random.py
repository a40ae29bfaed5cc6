"""Random ops draw from a counter and a seed that is an input of the graph; attention with dropout is written out.

Before:  %y = dropout(%x, 0.1, True)
After:   %y = megafx.dropout(%x, %seed, 0.1, <number of this dropout in the graph>, -1, [], "tp")
Legal because: the distribution is the same; the bits are a function of (seed, op id, element), so that any rank, and a
recomputation, draws the same ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

import megafx.kernels.dropout  # noqa: F401  registers megafx::dropout
from megafx.errors import CaptureError
from megafx.ir import VAL, Input, fqn_of, source_of
from megafx.passes.canonicalize_common import Editor, argument, arguments, is_tensor, replace

aten = torch.ops.aten
AXIS = "tp"
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def write_out_attention_dropout(editor: Editor, node: fx.Node) -> bool:
    """scaled_dot_product_attention with dropout -> matmul, scale, mask, softmax, dropout, matmul: its bits become ours."""
    if node.target is not aten.scaled_dot_product_attention.default or not argument(node, "dropout_p"):
        return False
    emit = editor.at(node)
    q, k, v, mask = arguments(node, "query", "key", "value", "attn_mask")
    p, causal, scale, grouped = arguments(node, "dropout_p", "is_causal", "scale", "enable_gqa")
    if grouped:
        k, v = (_repeat_heads(editor, node, x, q) for x in (k, v))
    rank, width = q.meta[VAL].dim(), q.meta[VAL].shape[-1]
    factor = scale if scale is not None else 1.0 / math.sqrt(width)
    scores = emit(aten.matmul.default, q, emit(aten.transpose.int, k, rank - 2, rank - 1))
    scores = emit(aten.mul.Tensor, scores, factor)
    if causal:
        mask = _causal_mask(editor, node, q, k)
    visible = mask if mask is not None and mask.meta[VAL].dtype == torch.bool else None
    if mask is not None and visible is None:
        scores = emit(aten.add.Tensor, scores, mask)
    dtype = scores.meta[VAL].dtype
    wide = torch.float32 if dtype in _LOW_PRECISION else dtype  # as the flash kernels do
    if visible is not None:
        # A row that sees nothing gives zeros, as in the fused op: the finite fill keeps its softmax and gradient finite.
        hidden = emit(aten.logical_not.default, visible)
        scores = emit(aten.masked_fill.Scalar, scores, hidden, torch.finfo(dtype).min)
    weights = emit(aten.softmax.int, scores, rank - 1, *([wide] if wide != dtype else []))
    if weights.meta[VAL].dtype != v.meta[VAL].dtype:
        weights = emit(aten.to.dtype, weights, v.meta[VAL].dtype)
    if visible is not None:
        weights = emit(aten.masked_fill.Scalar, weights, hidden, 0.0)
    dropped = emit(aten.dropout.default, weights, p, True)
    return replace(node, emit(aten.matmul.default, dropped, v))


def _repeat_heads(editor: Editor, node: fx.Node, x: fx.Node, q: fx.Node) -> fx.Node:
    """[b, n, t, d] -> [b, n*g, t, d]: each key-value head serves g consecutive query heads."""
    emit = editor.at(node)
    batch, heads, length, width = x.meta[VAL].shape
    groups = q.meta[VAL].shape[1] // heads
    if groups == 1:
        return x
    sizes = [editor.arg(n) for n in (batch, heads, groups, length, width)]
    wide = emit(aten.expand.default, emit(aten.unsqueeze.default, x, 2), sizes)
    return emit(aten.reshape.default, wide, [editor.arg(n) for n in (batch, heads * groups, length, width)])


def _causal_mask(editor: Editor, node: fx.Node, q: fx.Node, k: fx.Node) -> fx.Node:
    """bool [queries, keys], True where key <= query (counted from the top left, as the fused op does)."""
    emit = editor.at(node)
    device = q.meta[VAL].device
    rows, columns = (emit(aten.arange.default, editor.arg(x.meta[VAL].shape[-2]), device=device) for x in (q, k))
    return emit(aten.le.Tensor, emit(aten.unsqueeze.default, columns, 0), emit(aten.unsqueeze.default, rows, 1))


def number_dropouts(editor: Editor) -> int:
    """dropout -> megafx.dropout, numbered in graph order; the seed is one more input."""
    nodes = [n for n in editor.graph.nodes if n.op == "call_function" and n.target is aten.dropout.default]
    if not nodes:
        return 0
    seed = _seed_input(editor)
    for op_id, node in enumerate(nodes):
        x, p = node.args[0], argument(node, "p")
        new = editor.at(node)(torch.ops.megafx.dropout.default, x, seed, float(p), op_id, -1, [], AXIS)
        replace(node, new)
    return len(nodes)


def _seed_input(editor: Editor) -> fx.Node:
    program = editor.program
    placeholders = program.placeholders()
    with editor.graph.inserting_after(placeholders[-1]):
        seed = editor.graph.placeholder("seed")
    device = next(
        (v.device for v in (n.meta[VAL] for n in placeholders) if isinstance(v, torch.Tensor)), torch.device("cpu")
    )
    with program.fake_mode:
        seed.meta[VAL] = torch.empty((), dtype=torch.int64, device=device)
    program.inputs.append(Input("seed", "seed"))
    return seed


def refuse_other_randomness(editor: Editor) -> None:
    """An op that draws from torch's generator would draw different bits on each rank, and others again when recomputed."""
    for node in editor.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags and _draws(node):
            raise CaptureError(
                f"{node.target} draws random numbers that depend on the process",
                fix="use torch.nn.functional.dropout, or draw the numbers outside of the model and pass them as an input",
                module=fqn_of(node),
                source=source_of(node),
            )


def _draws(node: fx.Node) -> bool:
    """Whether the op is random in this graph: not where it is dropout that is off."""
    if node.target is torch.ops.megafx.dropout.default:
        return False
    for name in ("train", "training"):
        if any(a.name == name for a in node.target._schema.arguments):  # type: ignore[union-attr]
            return bool(argument(node, name)) and argument(node, "p") != 0
    if any(a.name == "dropout_p" for a in node.target._schema.arguments):  # type: ignore[union-attr]
        return bool(argument(node, "dropout_p"))
    return True


def native_dropout_to_dropout(editor: Editor, node: fx.Node) -> bool:
    """native_dropout whose mask nobody reads -> dropout."""
    if node.target is not aten.native_dropout.default or any(u.args[1] != 0 for u in node.users):
        return False
    x, p, train = (argument(node, k) for k in ("input", "p", "train"))
    new: Any = editor.at(node)(aten.dropout.default, x, p, train is not False) if is_tensor(x) else x
    for user in list(node.users):
        replace(user, new)
    editor.graph.erase_node(node)
    return True
