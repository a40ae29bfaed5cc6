"""Covers: patterns/bias_dropout_add.py. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.bias_dropout_add import BiasDropoutAdd, LinearBiasDropoutAdd
from megafx.testing import assert_same, expect, fuse_with

FAMILY = [LinearBiasDropoutAdd, BiasDropoutAdd]
LINEAR = {"x": "f32[b s k=4]", "w": "param f32[n=8 k=4]", "b": "param f32[n=8]", "r": "f32[b s n=8]"}


def drop(x, p=0.1):
    return F.dropout(x, p, True)


def test_golden():
    fused = fuse_with(FAMILY, lambda x, w, b, r: r + drop(F.linear(x, w, b)), **LINEAR)
    expect(
        fused.program,
        """\
        %0 = x                                                       # f32[b s 4]
        %1 = w                                                       # f32[8 4] param
        %2 = b                                                       # f32[8] param
        %3 = r                                                       # f32[b s 8]
        %4 = seed                                                    # i64[] seed
        %5 = linear(%0, %1)                                          # f32[b s 8]
        %6 = bias_dropout_add(%5, %2, %3, %4, 0.1, 0, -1, [], 'tp')  # f32[b s 8]
        return %6""",
    )
    assert_same(fused.before, fused.program)
    assert fused.counts == {"linear_bias_dropout_add": 1}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, w, b, r: drop(F.linear(x, w, b), 0.25) + r, "linear_bias_dropout_add"),  # the residual on the right
        (lambda x, w, b, r: r + drop(F.linear(x, w) + b), "linear_bias_dropout_add"),  # the bias on its own
        (lambda x, w, b, r: r + drop(b + r * 2), "bias_dropout_add"),  # no linear
        (lambda x, w, b, r: r + drop(F.linear(x, w)), "bias_dropout_add"),  # no bias
        (lambda x, w, b, r: r + F.dropout(torch.tanh(r)), "bias_dropout_add"),
    ],
)
def test_ways_to_write_it(function, found):
    fused = fuse_with(FAMILY, lambda x, w, b, r: (function(x, w, b, r), x, w, b), **LINEAR)
    assert fused.counts == {found: 1}, fused.text
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("cast", [False, True])
def test_an_fp32_residual_of_a_bf16_branch(cast):
    values = {"x": "bf16[b n=8]", "b": "param bf16[n=8]", "r": "f32[b n=8]"}
    fused = fuse_with(FAMILY, lambda x, b, r: r + (drop(x + b).float() if cast else drop(x + b)), **values)
    assert fused.ops == ["bias_dropout_add"] and "# f32[b 8]" in fused.text


def test_two_in_a_row_keep_their_numbers():
    fused = fuse_with(FAMILY, lambda x, r: drop(r + drop(x), 0.3) + x, x="f32[b n=8]", r="f32[b n=8]")
    assert fused.counts == {"bias_dropout_add": 2}
    assert "0.1, 0, -1" in fused.text and "0.3, 1, -1" in fused.text
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b, r: r + F.linear(x, w, b),  # no dropout: a GEMM adds its bias for nothing
        lambda x, w, b, r: r + F.dropout(F.linear(x, w, b), 0.1, False),
        lambda x, w, b, r: r * drop(F.linear(x, w, b)),
        lambda x, w, b, r: r - drop(F.linear(x, w, b)),
    ],
)
def test_others_are_left_alone(function):
    fused = fuse_with(FAMILY, function, **LINEAR)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


def test_near_misses():
    fused = fuse_with(FAMILY, lambda x, r: (y := drop(x), y + r), x="f32[b n=8]", r="f32[b n=8]")
    assert not fused.counts and any("also used by" in reason for reason in fused.near_misses), fused.near_misses
    fused = fuse_with(FAMILY, lambda x, r: drop(x) + r, x="f32[b n=8]", r="f32[n=8]")  # a residual that is broadcast
    assert not fused.counts
