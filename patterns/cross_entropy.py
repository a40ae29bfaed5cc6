"""Cross entropy without copies of the logits: not in fp32, and, behind a linear layer that nobody else reads, not at all.

cross_entropy(logits.float())                    Hugging Face's causal models: 4 bytes an element for bf16 logits
sum(cross_entropy(linear(x, w)))                 a loss from hidden states: logits in chunks only, gradients with the loss
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import megafx.kernels.linear_cross_entropy  # noqa: F401  registers the ops
from megafx.pattern import Pattern, register


@register
class CrossEntropyOfCast(Pattern):
    """cross_entropy(logits.float()) -> cross_entropy(logits): its arithmetic is fp32 whatever the logits are."""

    name = "cross_entropy_of_cast"
    knob = "cross_entropy_fusion"
    needs = ("cross_entropy", "to")
    variants = {"low": ("bf16", "f16"), "flat": (False, True)}
    scalars = {"ignore": int, "smoothing": float}

    def tensors(low, flat):
        return {"logits": f"{low}[t v]" if flat else f"{low}[b s v]", "target": "i64[t]" if flat else "i64[b*s]"}

    def match(logits, target, *, flat, ignore, smoothing):
        wide = logits.float()
        wide = wide if flat else wide.reshape(-1, wide.shape[-1])
        return torch.ops.megafx.cross_entropy(wide, target, ignore, smoothing)

    def make(logits, target, *, ignore, smoothing):
        logits = logits.reshape(-1, logits.shape[-1])
        return torch.ops.megafx.cross_entropy(logits, target, ignore, smoothing)


@register
class LinearCrossEntropy(Pattern):
    """sum(cross_entropy(linear(x, w, b))) -> linear_cross_entropy(x, w, b), where the vocabulary and the tokens are whole."""

    name = "linear_cross_entropy"
    knob = "cross_entropy_fusion"
    local = True
    needs = ("cross_entropy", "linear", "sum")
    variants = {"flat": (False, True)}
    scalars = {"ignore": int, "smoothing": float}

    def tensors(flat):
        found = {"x": "D[t k]", "target": "i64[t]"} if flat else {"x": "D[b s k]", "target": "i64[b*s]"}
        return {**found, "weight": "param D[v k]", "bias": "param D[v]?"}

    def match(x, weight, bias, target, *, flat, ignore, smoothing):
        logits = F.linear(x, weight, bias)
        logits = logits if flat else logits.reshape(-1, logits.shape[-1])
        return torch.ops.megafx.cross_entropy(logits, target, ignore, smoothing).sum()

    def make(x, weight, bias, target, *, ignore, smoothing):
        x = x.reshape(-1, x.shape[-1])
        return torch.ops.megafx.linear_cross_entropy(x, weight, bias, target, ignore, smoothing)

    def where(m):
        placed = [(name, m.node(name).meta.get("placement")) for name in ("x", "weight", "target")]
        cut = [name for name, p in placed if p is not None and p.is_shard]
        return f"{cut[0]} is sharded" if cut else None
