"""Covers: patterns/cross_entropy.py. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import torch.nn.functional as F

from megafx.patterns.cross_entropy import CrossEntropyOfCast
from megafx.testing import assert_same, fuse_with

LOGITS = {"x": "bf16[b s v=16]", "y": "i64[b s]"}


def test_golden_cast():
    fused = fuse_with(CrossEntropyOfCast, lambda x, y: F.cross_entropy(x.float().view(-1, 16), y.view(-1)), **LOGITS)
    assert fused.counts == {"cross_entropy_of_cast": 1} and "to.dtype" not in fused.ops
    assert "cross_entropy(" in fused.text and "f32[b*s 16]" not in fused.text


def test_flat_logits():
    fused = fuse_with(CrossEntropyOfCast, lambda x, y: F.cross_entropy(x.float(), y), x="f16[t v=16]", y="i64[t]")
    assert fused.counts == {"cross_entropy_of_cast": 1} and "to.dtype" not in fused.ops
    assert_same(fused.before, fused.program, tolerance=1e-6)  # the cast itself rounds


def test_a_cast_that_others_read_stays():
    def loss(x, y):
        wide = x.float()
        return F.cross_entropy(wide.view(-1, 16), y.view(-1)), wide

    fused = fuse_with(CrossEntropyOfCast, loss, **LOGITS)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text
    assert fused.near_misses == ["to.dtype (%to) inside of it is also used by the output"]
