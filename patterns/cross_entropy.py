"""Cross entropy without an fp32 copy of the logits, which Hugging Face's causal models make: 4 bytes an element.

Behind a linear layer there are no logits at all: passes/fuse/fuse_linear_loss.py.
"""

from __future__ import annotations

import torch

import megafx.kernels.loss.cross_entropy  # noqa: F401  registers the op
from megafx.rewrite.pattern import Pattern, register


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
        return torch.ops.megafx.cross_entropy(wide, target, ignore, smoothing, False)

    def make(logits, target, *, ignore, smoothing):
        logits = logits.reshape(-1, logits.shape[-1])
        return torch.ops.megafx.cross_entropy(logits, target, ignore, smoothing, False)
