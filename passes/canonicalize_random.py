"""Random ops draw from a counter and a seed that is an input of the graph; attention with dropout is megafx.attention.

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

import megafx.eager_modules
import megafx.kernels.attention
import megafx.kernels.dropout  # noqa: F401  registers megafx::dropout
from megafx.errors import CaptureError
from megafx.ir import VAL, Input, fqn_of, source_of
from megafx.passes.canonicalize_common import Editor, argument, arguments, is_tensor, replace

aten = torch.ops.aten
AXIS = "tp"


def attention_dropout(editor: Editor, node: fx.Node) -> bool:
    """scaled_dot_product_attention with dropout -> megafx.attention, whose bits depend on (seed, op id, element) alone."""
    if node.target is not aten.scaled_dot_product_attention.default or not argument(node, "dropout_p"):
        return False
    emit = editor.at(node)
    q, k, v, mask = arguments(node, "query", "key", "value", "attn_mask")
    p, causal, scale = arguments(node, "dropout_p", "is_causal", "scale")
    rank = q.meta[VAL].dim()
    if rank > 4:
        return _of_many_dims(editor, node)
    q, k, v = (_with_leading_ones(editor, node, x) for x in (q, k, v))
    if mask is not None:
        mask = _with_leading_ones(editor, node, mask)
    factor = float(scale) if scale is not None else 1.0 / math.sqrt(q.meta[VAL].shape[-1])
    out = emit(
        torch.ops.megafx.attention.default, q, k, v, mask, None, None, factor, causal, 0, 0.0, p, -1, -1, [], AXIS
    )
    for _ in range(4 - rank):
        out = emit(aten.select.int, out, 0, 0)
    return replace(node, out)


def _of_many_dims(editor: Editor, node: fx.Node) -> bool:
    """Leading dims become one batch: [a, b, n, s, e] -> [a*b, n, s, e], which is looked at once more with four dims."""
    emit = editor.at(node)
    names = ("query", "key", "value", "attn_mask")
    values = [x.meta[VAL] for x in arguments(node, *names) if x is not None]
    rank = max(v.dim() for v in values)
    whole_lead = torch.broadcast_shapes(*(v.shape[: -3 if v.dim() == rank else 0] for v in values))
    lead = [editor.arg(n) for n in whole_lead]

    def flat(x: Any) -> Any:
        if x is None or x.meta[VAL].dim() < 3:
            return x
        shape = x.meta[VAL].shape
        if x.meta[VAL].dim() < rank:
            for _ in range(rank - x.meta[VAL].dim()):
                x = emit(aten.unsqueeze.default, x, 0)
        if not all(map(editor.same, x.meta[VAL].shape[:-3], whole_lead)):
            x = emit(aten.expand.default, x, [*lead, *editor.shape(x.meta[VAL])[-3:]])
        return emit(aten.reshape.default, x, [editor.arg(math.prod(whole_lead)), *map(editor.arg, shape[-3:])])

    q, k, v, mask = (flat(x) for x in arguments(node, *names))
    p, causal, scale, grouped = arguments(node, "dropout_p", "is_causal", "scale", "enable_gqa")
    options = {"scale": scale, "enable_gqa": bool(grouped)}
    made = emit(aten.scaled_dot_product_attention.default, q, k, v, mask, p, causal, **options)
    replace(node, emit(aten.reshape.default, made, editor.shape(node.meta[VAL])))
    return attention_dropout(editor, made)


def _with_leading_ones(editor: Editor, node: fx.Node, x: fx.Node) -> fx.Node:
    """Four dims: what lacks is a batch, or heads, of one."""
    for _ in range(4 - x.meta[VAL].dim()):
        x = editor.at(node)(aten.unsqueeze.default, x, 0)
    return x


def number_dropouts(editor: Editor) -> int:
    """dropout -> megafx.dropout, numbered in graph order with the attentions that drop; the seed is one more input."""
    nodes = [n for n in editor.graph.nodes if n.op == "call_function" and _awaits_number(n)]
    if not nodes:
        return 0
    seed = _seed_input(editor)
    for op_id, node in enumerate(nodes):
        if node.target in (torch.ops.megafx.attention.default, torch.ops.megafx.eager_call.default):
            _number_in_place(node, seed, op_id)
            continue
        x, p = node.args[0], argument(node, "p")
        new = editor.at(node)(torch.ops.megafx.dropout.default, x, seed, float(p), op_id, -1, [], AXIS)
        replace(node, new)
    return len(nodes)


def _awaits_number(node: fx.Node) -> bool:
    """Dropout as torch has it; attention that drops, and modules left eager that draw, which were given no seed."""
    if node.target is torch.ops.megafx.eager_call.default:
        return argument(node, "op_id") >= 0 and argument(node, "seed") is None
    if node.target is torch.ops.megafx.attention.default:
        return bool(argument(node, "p")) and argument(node, "seed") is None
    return node.target is aten.dropout.default


def _number_in_place(node: fx.Node, seed: fx.Node, op_id: int) -> None:
    places = {a.name: i for i, a in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
    node.update_arg(places["seed"], seed)
    node.update_arg(places["op_id"], op_id)


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
