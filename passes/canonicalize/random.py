"""Random ops draw from a counter and a seed that is an input of the graph; attention with dropout is megafx.attention.

Before:  %y = dropout(%x, 0.1, True)
After:   %y = megafx.dropout(%x, %seed, 0.1, <number of this dropout in the graph>, -1, [], "tp")
Legal because: the distribution is the same; the bits are a function of (seed, op id, element), so that any rank, and a
recomputation, draws the same ones.

Other random tensors are drawn with dropout's bits, to the resolution that torch draws with (24 bits; fp16 11, bf16 8).
Before:  %u = rand([b, 1, 1])
After:   %o = ones([b, 1, 1, 24]); %d = dropout(%o, 0.5, True); %b = ne(%d, 0)
         %u = sum(%b * [1/2, 1/4, 1/8, ...], -1)           # 24 fair bits of a binary fraction
That is 24 draws an element: meant for small tensors such as the masks of stochastic depth. Rows stay first, so that
data-parallel ranks draw those of their own.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

import megafx.kernels.attention.attention
import megafx.kernels.dropout.dropout
import megafx.ops.eager_call  # noqa: F401  registers the ops
from megafx.errors import CaptureError
from megafx.ir.nodes import argument, argument_places, replace, set_arguments
from megafx.ir.program import VAL, Input, located
from megafx.passes.canonicalize.editor import Editor, arguments, is_tensor, on

aten = torch.ops.aten
AXIS = "tp"
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017


@on("scaled_dot_product_attention")
def attention_dropout(editor: Editor, node: fx.Node) -> bool:
    """scaled_dot_product_attention with dropout -> megafx.attention, whose bits depend on (seed, op id, element) alone."""
    if not argument(node, "dropout_p"):
        return False
    emit = editor.at(node)
    q, k, v, mask = arguments(node, "query", "key", "value", "attn_mask")
    p, causal, scale = arguments(node, "dropout_p", "is_causal", "scale")
    rank = q.meta[VAL].dim()
    if rank > 4:
        return _of_many_dims(editor, node)
    q, k, v = (_with_leading_ones(editor, node, x) for x in (q, k, v))
    mask = None if mask is None else _with_leading_ones(editor, node, mask)
    factor = float(scale) if scale is not None else 1.0 / math.sqrt(q.meta[VAL].shape[-1])
    drawn: tuple[Any, ...] = (p, -1, -1, [], AXIS)
    out = emit(
        torch.ops.megafx.attention.default, q, k, v, mask, None, None, None, None, factor, causal, 0, 0.0, 0, *drawn
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
        x = _with_leading_ones(editor, node, x, rank)
        if not all(map(editor.same, x.meta[VAL].shape[:-3], whole_lead)):
            x = emit(aten.expand.default, x, [*lead, *editor.shape(x.meta[VAL])[-3:]])
        return emit(aten.reshape.default, x, [editor.arg(math.prod(whole_lead)), *map(editor.arg, shape[-3:])])

    q, k, v, mask = (flat(x) for x in arguments(node, *names))
    p, causal, scale, grouped = arguments(node, "dropout_p", "is_causal", "scale", "enable_gqa")
    options = {"scale": scale, "enable_gqa": bool(grouped)}
    made = emit(aten.scaled_dot_product_attention.default, q, k, v, mask, p, causal, **options)
    replace(node, emit(aten.reshape.default, made, editor.shape(node.meta[VAL])))
    return attention_dropout(editor, made)


def _with_leading_ones(editor: Editor, node: fx.Node, x: fx.Node, rank: int = 4) -> fx.Node:
    """As many dims: those that lack are a batch, or heads, of one."""
    for _ in range(rank - x.meta[VAL].dim()):
        x = editor.at(node)(aten.unsqueeze.default, x, 0)
    return x


@on("lstm.input gru.input rnn_tanh.input rnn_relu.input")
def dropout_between_layers(editor: Editor, node: fx.Node) -> bool:
    """lstm(x, states, params, layers=n, dropout=p) -> lstm of one layer, dropout, lstm of the next one, ..."""
    x, states, params, biases, layers, p, train, both, batch_first = node.args
    if not p or not train or layers == 1:
        return False
    emit, ways, several = editor.at(node), 2 if both else 1, isinstance(states, (list, tuple))
    each, last = len(params) // layers, list[list[fx.Node]]()
    for i in range(layers):
        part = [emit(aten.slice.Tensor, h, 0, i * ways, (i + 1) * ways) for h in (states if several else [states])]
        own = params[i * each : (i + 1) * each]
        made = emit(node.target, x, part if several else part[0], own, biases, 1, 0.0, False, both, batch_first)
        x, *after = (emit(operator.getitem, made, k) for k in range(len(part) + 1))
        if i + 1 < layers:  # rows come first in what is drawn
            turned = x.meta[VAL].dim() == 3 and not batch_first
            x = emit(aten.transpose.int, x, 0, 1) if turned else x
            x = emit(aten.dropout.default, x, p, True)
            x = emit(aten.transpose.int, x, 0, 1) if turned else x
        last.append(after)
    found = [x, *(emit(aten.cat.default, list(h), 0) for h in zip(*last, strict=True))]
    for user in list(node.users):
        replace(user, found[user.args[1]])
    editor.graph.erase_node(node)
    return True


def number_dropouts(editor: Editor) -> int:
    """dropout -> megafx.dropout, numbered in graph order with the attentions that drop; the seed is one more input."""
    nodes = [n for n in editor.graph.nodes if n.op == "call_function" and _awaits_number(n)]
    if not nodes:
        return 0
    seed = _seed_input(editor)
    for op_id, node in enumerate(nodes):
        if node.target is not aten.dropout.default:
            set_arguments(node, seed=seed, op_id=op_id)
            continue
        drawn: tuple[Any, ...] = (seed, float(argument(node, "p")), op_id, -1, [], AXIS)
        replace(node, editor.at(node)(torch.ops.megafx.dropout.default, node.args[0], *drawn))
    return len(nodes)


def _awaits_number(node: fx.Node) -> bool:
    """Torch's dropout; attention that drops and modules left eager that draw, as long as they have no seed."""
    if node.target is torch.ops.megafx.eager_call.default:
        return argument(node, "op_id") >= 0 and argument(node, "seed") is None
    if node.target is torch.ops.megafx.attention.default:
        return bool(argument(node, "p")) and argument(node, "seed") is None
    return node.target is aten.dropout.default


def _seed_input(editor: Editor) -> fx.Node:
    placeholders = editor.program.placeholders()
    with editor.graph.inserting_after(placeholders[-1]):
        seed = editor.graph.placeholder("seed")
    device = next((n.meta[VAL].device for n in placeholders if is_tensor(n)), torch.device("cpu"))
    with editor.program.fake_mode:
        seed.meta[VAL] = torch.empty((), dtype=torch.int64, device=device)
    editor.program.inputs.append(Input("seed", "seed"))
    return seed


def refuse_other_randomness(editor: Editor) -> None:
    """An op that draws from torch's generator would draw different bits on each rank, and other bits when recomputed."""
    for node in editor.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags and _draws(node):
            raise CaptureError(
                f"{node.target} draws random numbers that depend on the process",
                fix="use torch.nn.functional.dropout, or draw the numbers outside of the model and pass them as an input",
                **located(node),
            )


def _draws(node: fx.Node) -> bool:
    """True if the op is random in this graph: not where it is dropout that is off."""
    if node.target is torch.ops.megafx.dropout.default:
        return False
    for name in ("train", "training"):
        if name in argument_places(node.target):
            p = argument(node, "p", argument(node, "dropout"))  # a recurrent layer drops between layers
            return argument(node, name) is not False and p != 0  # native_dropout takes None for True
    if "dropout_p" in argument_places(node.target):
        return bool(argument(node, "dropout_p"))
    return True


@on("native_dropout")
def native_dropout_to_dropout(editor: Editor, node: fx.Node) -> bool:
    """native_dropout whose mask nobody reads -> dropout; a copy of its input where it is off."""
    if any(u.args[1] != 0 and u.users for u in node.users):  # export takes both results, read or not
        return False
    emit = editor.at(node)
    x, p, _ = arguments(node, "input", "p", "train")
    new = emit(aten.dropout.default, x, p, True) if _draws(node) else emit(aten.clone.default, x)
    for user in list(node.users):
        replace(user, new)
    editor.graph.erase_node(node)
    return True


# -- random tensors of other kinds


@on("rand rand_like uniform")
def uniform_from_bits(editor: Editor, node: fx.Node) -> bool:
    """rand, rand_like, uniform_ -> a binary fraction of fair bits, scaled to the range."""
    value = _uniform(editor, node)
    if node.target is aten.uniform.default:
        low, high = arguments(node, "from", "to")
        value = _affine(editor, node, value, high - low, low)
    return replace(node, value)


@on("randn randn_like normal_functional")
def normal_from_bits(editor: Editor, node: fx.Node) -> bool:
    """randn, randn_like, normal_ -> Box and Muller's transform of two uniform values."""
    emit = editor.at(node)
    radius = emit(aten.rsub.Scalar, _uniform(editor, node), 1.0)  # in (0, 1]: its logarithm is finite
    radius = emit(aten.sqrt.default, emit(aten.mul.Tensor, emit(aten.log.default, radius), -2.0))
    angle = emit(aten.mul.Tensor, _uniform(editor, node), 2.0 * math.pi)
    value = emit(aten.mul.Tensor, radius, emit(aten.cos.default, angle))
    if node.target is aten.normal_functional.default:
        value = _affine(editor, node, value, argument(node, "std"), argument(node, "mean"))
    return replace(node, value)


@on("rrelu")
def slopes_from_bits(editor: Editor, node: fx.Node) -> bool:
    """rrelu -> slopes that are drawn where values are not above 0; in evaluation leaky_relu, whose slope is their mean."""
    x, lower, upper, training = arguments(node, "self", "lower", "upper", "training")
    emit = editor.at(node)
    if not training:
        return replace(node, emit(aten.leaky_relu.default, x, (lower + upper) / 2))
    slope = _affine(editor, node, _uniform(editor, node), upper - lower, lower)
    below = emit(aten.mul.Tensor, x, slope)
    return replace(node, emit(aten.where.self, emit(aten.gt.Scalar, x, 0), x, below))


@on("bernoulli bernoulli.p")
def bernoulli_from_bits(editor: Editor, node: fx.Node) -> bool:
    """bernoulli -> whether a uniform value is below the probability."""
    emit = editor.at(node)
    value = _uniform(editor, node)
    p: Any = argument(node, "p") if node.target is aten.bernoulli.p else node.args[0]
    hit = emit(aten.lt.Scalar if node.target is aten.bernoulli.p else aten.lt.Tensor, value, p)
    return replace(node, emit(aten.to.dtype, hit, node.meta[VAL].dtype))


@on("exponential")
def exponential_from_bits(editor: Editor, node: fx.Node) -> bool:
    """exponential_, of which Gumbel noise is made -> -log(1 - u) / rate, never 0, since its logarithm is taken."""
    emit = editor.at(node)
    value = emit(aten.neg.default, emit(aten.log1p.default, emit(aten.neg.default, _uniform(editor, node))))
    value = emit(aten.clamp_min.default, value, 0.5 ** (_bits(node) + 1))
    return replace(node, emit(aten.div.Scalar, value, argument(node, "lambd")))


@on("randint randint.low randint_like randint_like.low_dtype")
def integers_from_bits(editor: Editor, node: fx.Node) -> bool:
    """randint, randint_like -> a uniform value of 24 bits, scaled and rounded down; for ranges of at most 2**20 integers."""
    low = argument(node, "low") if "low" in argument_places(node.target) else 0
    high, dtype = argument(node, "high"), node.meta[VAL].dtype
    count = high if low == 0 else high - low if isinstance(low, int) and isinstance(high, int) else None
    if count is None or (isinstance(count, int) and count > _INTEGERS):
        return False
    emit = editor.at(node)
    scaled = emit(aten.mul.Tensor, _uniform(editor, node, torch.float32), count)
    return replace(node, emit(aten.to.dtype, emit(aten.add.Tensor, emit(aten.floor.default, scaled), low), dtype))


_INTEGERS = 2**20  # each of them is 2**4 of the 2**24 values or one more: as likely as the others within 6%


@on("randperm")
def permutation_from_bits(editor: Editor, node: fx.Node) -> bool:
    """randperm -> the order of uniform values."""
    order = editor.at(node)(aten.argsort.stable, _uniform(editor, node, torch.float32), stable=True)
    return replace(node, editor.at(node)(aten.to.dtype, order, node.meta[VAL].dtype))


@on("feature_dropout alpha_dropout feature_alpha_dropout")
def dropout_of_other_kinds(editor: Editor, node: fx.Node) -> bool:
    """feature_dropout (Dropout1d to 3d) and alpha_dropout -> arithmetic with the dropout of ones, one a channel or element.

    alpha_dropout sets elements to the least value of selu, and scales and shifts so that mean and variance stay.
    """
    x, p, train = arguments(node, "input", "p", "train")
    if not train or p == 0:
        return replace(node, x)
    emit, value, name = editor.at(node), x.meta[VAL], str(node.target)
    shape = editor.shape(value)
    if "feature" in name:
        shape = shape[:2] + [1] * (value.dim() - 2)
    kept = emit(aten.dropout.default, emit(aten.ones.default, shape, dtype=value.dtype, device=value.device), p, True)
    if "alpha" not in name or p == 1:
        return replace(node, emit(aten.mul.Tensor, x, kept))
    least = SELU_SCALE * SELU_ALPHA
    factor = ((least**2 * p + 1) * (1 - p)) ** -0.5
    moved = _affine(editor, node, kept, (1 - p) * least * factor, least * factor * (p - 1))
    scaled = emit(aten.mul.Tensor, x, emit(aten.mul.Tensor, kept, (1 - p) * factor))
    return replace(node, emit(aten.add.Tensor, scaled, moved))


def _bits(node: fx.Node) -> int:
    """To which torch draws."""
    return {torch.float16: 11, torch.bfloat16: 8}.get(node.meta[VAL].dtype, 24)


def _uniform(editor: Editor, node: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """A tensor of the node's shape, and of its dtype or another, uniform in [0, 1)."""
    emit = editor.at(node)
    value, bits = node.meta[VAL], _bits(node)
    dtype = dtype or value.dtype
    shape = [*editor.shape(value), bits]
    ones = emit(aten.ones.default, shape, dtype=dtype, device=value.device)
    bit = emit(aten.ne.Scalar, emit(aten.dropout.default, ones, 0.5, True), 0)
    place = emit(aten.arange.start, 1, bits + 1, dtype=dtype, device=value.device)
    weight = emit(aten.pow.Scalar, 0.5, place)
    return emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, bit, weight), [-1])


def _affine(editor: Editor, node: fx.Node, value: fx.Node, scale: Any, shift: Any) -> fx.Node:
    emit = editor.at(node)
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, value, scale), shift)
