"""Random tensors other than dropout, drawn with dropout's bits: so they too depend on (seed, op id, element) alone.

Before:  %u = rand([b, 1, 1])
After:   %o = ones([24, b, 1, 1]); %d = dropout(%o, 0.5, True); %b = ne(%d, 0)
         %u = sum(%b * [1/2, 1/4, 1/8, ...], 0)            # 24 fair bits of a binary fraction
Legal because: the distribution is the one asked for, to the resolution that torch draws with (24 bits; fp16 11, bf16 8).
Costs 24 draws an element: meant for small tensors such as the masks of stochastic depth.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from megafx.ir import VAL
from megafx.passes.canonicalize_common import Editor, argument, replace

aten = torch.ops.aten

_BITS = {torch.float16: 11, torch.bfloat16: 8}
_UNIFORM = frozenset({aten.rand.default, aten.rand_like.default, aten.uniform.default})
_NORMAL = frozenset({aten.randn.default, aten.randn_like.default, aten.normal_functional.default})
_BERNOULLI = frozenset({aten.bernoulli.default, aten.bernoulli.p})


def uniform_from_bits(editor: Editor, node: fx.Node) -> bool:
    """rand, rand_like, uniform_ -> a binary fraction of fair bits, scaled to the range."""
    if node.target not in _UNIFORM:
        return False
    value = _uniform(editor, node)
    if node.target is aten.uniform.default:
        low, high = argument(node, "from"), argument(node, "to")
        value = _affine(editor, node, value, high - low, low)
    return replace(node, value)


def normal_from_bits(editor: Editor, node: fx.Node) -> bool:
    """randn, randn_like, normal_ -> Box and Muller's transform of two uniform values."""
    if node.target not in _NORMAL:
        return False
    emit = editor.at(node)
    radius = emit(aten.rsub.Scalar, _uniform(editor, node), 1.0)  # in (0, 1]: its logarithm is finite
    radius = emit(aten.sqrt.default, emit(aten.mul.Tensor, emit(aten.log.default, radius), -2.0))
    angle = emit(aten.mul.Tensor, _uniform(editor, node), 2.0 * math.pi)
    value = emit(aten.mul.Tensor, radius, emit(aten.cos.default, angle))
    if node.target is aten.normal_functional.default:
        value = _affine(editor, node, value, argument(node, "std"), argument(node, "mean"))
    return replace(node, value)


def bernoulli_from_bits(editor: Editor, node: fx.Node) -> bool:
    """bernoulli -> whether a uniform value is below the probability."""
    if node.target not in _BERNOULLI:
        return False
    emit = editor.at(node)
    value = _uniform(editor, node)
    if node.target is aten.bernoulli.p:
        hit = emit(aten.lt.Scalar, value, argument(node, "p"))
    else:
        hit = emit(aten.lt.Tensor, value, node.args[0])
    return replace(node, emit(aten.to.dtype, hit, node.meta[VAL].dtype))


def channel_dropout(editor: Editor, node: fx.Node) -> bool:
    """feature_dropout (Dropout2d) -> a product with the dropout of a one for each channel."""
    if node.target is not aten.feature_dropout.default or not argument(node, "train"):
        return False
    emit = editor.at(node)
    x: Any = node.args[0]
    value = x.meta[VAL]
    shape = [editor.arg(n) for n in value.shape[:2]] + [1] * (value.dim() - 2)
    ones = emit(aten.ones.default, shape, dtype=value.dtype, device=value.device)
    return replace(node, emit(aten.mul.Tensor, x, emit(aten.dropout.default, ones, argument(node, "p"), True)))


def _uniform(editor: Editor, node: fx.Node) -> fx.Node:
    """A tensor like the node's value, uniform in [0, 1)."""
    emit = editor.at(node)
    value = node.meta[VAL]
    bits = _BITS.get(value.dtype, 24)
    shape = [bits, *editor.shape(value)]
    ones = emit(aten.ones.default, shape, dtype=value.dtype, device=value.device)
    bit = emit(aten.ne.Scalar, emit(aten.dropout.default, ones, 0.5, True), 0)
    place = emit(aten.arange.start, 1, bits + 1, dtype=value.dtype, device=value.device)
    weight = emit(aten.reshape.default, emit(aten.pow.Scalar, 0.5, place), [bits, *[1] * value.dim()])
    return emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, bit, weight), [0])


def _affine(editor: Editor, node: fx.Node, value: fx.Node, scale: Any, shift: Any) -> fx.Node:
    emit = editor.at(node)
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, value, scale), shift)
