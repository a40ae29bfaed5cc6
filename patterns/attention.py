"""The attention chain, as Hugging Face's eager attention and nanoGPT write it, to megafx.attention.

    dropout(softmax(mask(scale * q k^T))) v          k and v repeated for groups of query heads, or not

Found in two steps: masked_softmax.py makes the middle one op (scale_mask_softmax, in any of its spellings), which this
pattern takes with the products around it. So it needs `masked_softmax_fusion` too. The weights must have no other user: a
model that returns them keeps its chain. Legal because: softmax, mask and scale are those of the op; where a fill is finite,
rows that are masked throughout stay uniform (the mask becomes an additive one with finfo.min), where it is -inf, they are
zeros in place of nan. Dropout draws other bits than the chain would: by (batch, head, query, key).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import megafx.kernels.attention
import megafx.kernels.masked_softmax  # noqa: F401  registers the ops
from megafx.pattern import Pattern, register


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """[b, n, t, d] -> [b, n * g, t, d]: each head for the g query heads that share it."""
    b, n, t, d = x.shape
    g = q.shape[1] // n
    return x[:, :, None].expand(b, n, g, t, d).reshape(b, n * g, t, d)


@register
class AttentionChain(Pattern):
    """softmax(mask(scale q k^T)) v -> attention(q, k, v): nothing of [s, t] is kept, and KV heads are not repeated."""

    name = "attention"
    knob = "attention_fusion"
    redraws = True
    variants = {"mask_is": ("added", "flat", "bool", "flat bool", "none"), "grouped": (False, True)}
    scalars = {"scale": float, "fill": float}
    needs = ("scale_mask_softmax", "matmul")

    def tensors(mask_is, grouped):
        heads = "n*g" if grouped else "n"
        found = {"q": f"D[b {heads} s e]", "k": "D[b n t e]", "v": "D[b n t f]"}
        if mask_is != "none":
            dtype = "bool" if "bool" in mask_is else "M"
            found["mask"] = dtype + ("[s t]" if "flat" in mask_is else f"[1|b 1|{heads} 1|s t]")
        return found

    def match(q, k, v, drop, mask=None, *, grouped, scale, fill):
        if grouped:
            k, v = _repeated(k, q), _repeated(v, q)
        scores = torch.matmul(q, k.transpose(2, 3))
        weights = torch.ops.megafx.scale_mask_softmax(scores, mask, scale, False, 0, fill, *drop.args)
        return torch.matmul(weights, v)

    def make(q, k, v, drop, mask=None, *, scale, fill):
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else mask
            if mask.dtype == torch.bool and fill == -math.inf:
                mask = mask.logical_not()
            elif mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, torch.finfo(q.dtype).min)
        where = (drop.op_id, drop.shard_dim, list(drop.layout), drop.axis)
        return torch.ops.megafx.attention(q, k, v, mask, drop.seed, scale, False, 0, 0.0, drop.p, *where)
