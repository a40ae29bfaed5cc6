"""Covers: patterns/rope.py. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import pytest
import torch

from megafx.patterns.rope import Rope, RopeOfBoth, RopeOfPairs, RopeOfPart
from megafx.testing import assert_same, expect, fuse_with

FAMILY = [Rope, RopeOfPart, RopeOfPairs, RopeOfBoth]
TENSORS = {"q": "f32[b 4 s d=8]", "k": "f32[b 2 s d=8]", "cos": "f32[1 1 s d=8]", "sin": "f32[1 1 s d=8]"}
ONE = {"x": "f32[b 4 s d=8]", "cos": "f32[1 1 s d=8]", "sin": "f32[1 1 s d=8]"}
PAIRS = {"x": "f32[b s 4 d=8]", "cos": "f32[s 1 h=4]", "sin": "f32[s 1 h=4]"}


def halves(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def test_golden_q_and_k():
    """Both in one kernel on a rank; the planner sees one op for each."""

    def rotate(q, k, cos, sin):
        return q * cos + halves(q) * sin, k * cos + halves(k) * sin

    fused = fuse_with(FAMILY, rotate, **TENSORS)
    expect(
        fused.program,
        """\
        %0 = q                                      # f32[b 4 s 8]
        %1 = k                                      # f32[b 2 s 8]
        %2 = cos                                    # f32[1 1 s 8]
        %3 = sin                                    # f32[1 1 s 8]
        %4 = rope_qk(%0, %1, %2, %3, False, False)  # (f32[b 4 s 8], f32[b 2 s 8])
        %5 = operator.getitem(%4, 0)                # f32[b 4 s 8]
        %6 = operator.getitem(%4, 1)                # f32[b 2 s 8]
        return %5, %6""",
    )
    assert fused.counts == {"rope": 2, "rope_qk": 1}
    assert_same(fused.before, fused.program)


def partly(x, cos, sin):
    part = x[..., :6]
    return torch.cat((part * cos[..., :6] + halves(part) * sin[..., :6], x[..., 6:]), -1)


def every_two(x, cos, sin):
    return x * cos + torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), -1).flatten(-2) * sin


@pytest.mark.parametrize("function, counts", [(partly, {"rope": 1, "rope_partial": 1}), (every_two, {"rope": 1})])
def test_partial_and_interleaved(function, counts):
    fused = fuse_with(FAMILY, function, **ONE)
    assert fused.counts == counts and fused.ops.count("rope") == 1 and not {"cat", "neg"} & set(fused.ops)
    assert_same(fused.before, fused.program)


def of_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def of_slices(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def of_reshaped(x, cos, sin):
    a, b = x.reshape(*x.shape[:-1], 4, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(3)


def backwards(x, cos, sin):
    a, b = x[..., :4], x[..., 4:]
    return torch.cat((a * cos + b * sin, -a * sin + b * cos), -1)


@pytest.mark.parametrize("function", [of_halves, of_slices, of_reshaped, backwards])
def test_pairs_by_hand(function):
    fused = fuse_with(FAMILY, function, **PAIRS)
    assert fused.counts == {"rope_pairs": 1} and "rope" in fused.ops, fused.near_misses
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("cast", ["back", "both"])
def test_casts(cast):
    """Tables in fp32 and the result cast back; x cast to fp32 first."""

    def rotate(x, cos, sin):
        wide = x.float() if cast == "both" else x
        return (wide * cos + halves(wide) * sin).to(x.dtype)

    fused = fuse_with(FAMILY, rotate, **{**ONE, "x": "bf16[b 4 s d=8]"})
    assert fused.counts == {"rope": 1} and fused.ops == ["rope"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, cos, sin: x * cos - halves(x) * sin,
        lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin,
        lambda x, cos, sin: x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin,
    ],
)
def test_others_are_left_alone(function):
    fused = fuse_with(FAMILY, function, **ONE)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


def test_a_second_use_is_a_near_miss():
    fused = fuse_with(FAMILY, lambda x, cos, sin: (t := halves(x), x * cos + t * sin), **ONE)
    assert not fused.counts and any("also used by the output" in m for m in fused.near_misses), fused.near_misses
