"""Covers: patterns/masked_softmax.py. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.masked_softmax import ScaleMaskSoftmax, ScaleSoftmax
from megafx.testing import assert_same, expect, fuse_with

FAMILY = [ScaleMaskSoftmax, ScaleSoftmax]
MINUS = float("-inf")
SCORES = {"x": "f32[b 4 s t]"}
ADDED, BOOLEAN = {**SCORES, "m": "f32[b 1 s t]"}, {**SCORES, "m": "bool[b 1 1 t]"}


def test_golden():
    def attend(x, m):
        return F.dropout(torch.softmax(x * 0.25 + m, -1), 0.1, True)

    fused = fuse_with(FAMILY, attend, **ADDED)
    expect(
        fused.program,
        """\
        %0 = x                                                                           # f32[b 4 s t]
        %1 = m                                                                           # f32[b 1 s t]
        %2 = seed                                                                        # i64[] seed
        %3 = scale_mask_softmax(%0, %1, 0.25, False, 0, -inf, %2, 0.1, 0, -1, [], 'tp')  # f32[b 4 s t]
        return %3""",
    )
    assert_same(fused.before, fused.program)


FORMS = {
    "added": (lambda x, m: torch.softmax(x * 0.5 + m, -1), ADDED),
    "added, divided": (lambda x, m: torch.softmax(m + x / 8.0, -1), ADDED),
    "a bias of heads": (lambda x, m: torch.softmax(x + m, -1), {**SCORES, "m": "f32[1 4 s t]"}),
    "filled": (lambda x, m: torch.softmax((x * 0.5).masked_fill(m, -10000.0), -1), BOOLEAN),
    "filled, flat": (lambda x, m: torch.softmax(x.masked_fill(m, MINUS), -1), {**SCORES, "m": "bool[s t]"}),
    "kept": (lambda x, m: torch.softmax(torch.where(m, x * 0.5, -1e9), -1), BOOLEAN),
    "scaled": (lambda x: torch.softmax(x * 0.125, -1), SCORES),
    "dropped": (lambda x: F.dropout(torch.softmax(x, -1), 0.2, True), SCORES),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    function, values = FORMS[form]
    fused = fuse_with(FAMILY, function, **values)
    assert fused.ops.count("scale_mask_softmax") == 1 and "softmax" not in fused.ops, fused.near_misses
    assert not {"mul", "div", "masked_fill", "where", "dropout"} & set(fused.ops)
    if form != "filled, flat":  # random masks hide whole rows: nan in both
        assert_same(fused.before, fused.program)


CASTS = {
    "dtype": lambda x, m: torch.softmax(x * 0.5 + m, -1, dtype=torch.float32).to(x.dtype),
    "same": lambda x, m: torch.softmax(x * 0.5 + m, -1, dtype=x.dtype),
    "late": lambda x, m: torch.softmax((x * 0.5 + m).float(), -1).type_as(x),
    "early": lambda x, m: torch.softmax((x.float() * 0.5).masked_fill(m > 0, -10000.0), -1).to(x.dtype),
    "none": lambda x, m: torch.softmax(x * 0.5 + m, -1),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dropped", [False, True])
def test_casts(cast, dropped):
    def attend(x, m):
        y = CASTS[cast](x, m)
        return F.dropout(y, 0.1, True) if dropped else y

    fused = fuse_with(FAMILY, attend, x="bf16[b 4 s t]", m="bf16[b 1 s t]")
    assert fused.counts == {"scale_mask_softmax": 1}
    assert [op for op in fused.ops if op != "gt.Scalar"] == ["scale_mask_softmax"]


def test_a_buffer_of_ones_below_the_diagonal():
    """nanoGPT's mask."""

    def attend(x, m):
        t = x.shape[2]
        x = (x * 0.25).masked_fill(m[:, :, :t, :t] == 0, MINUS)
        return torch.softmax(x, -1)

    fused = fuse_with(FAMILY, attend, x="f32[b 4 s s]", m="f32[1 1 64 64]")
    assert fused.counts == {"scale_mask_softmax": 1}


@pytest.mark.parametrize(
    "function, values",
    [
        (lambda x, m: torch.softmax(x + m, -2), ADDED),
        (lambda x, m: torch.log_softmax(x + m, -1), ADDED),
        (lambda x: torch.softmax(x, -1), {"x": "f32[t e]"}),  # a router's probabilities
    ],
)
def test_others_are_left_alone(function, values):
    fused = fuse_with(FAMILY, function, **values)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


def test_scores_that_others_use():
    """They stay; what nobody else uses is fused."""
    fused = fuse_with(FAMILY, lambda x, m: (z := x * 0.5, torch.softmax(z + m, -1)), **ADDED)
    assert fused.counts == {"scale_mask_softmax": 1} and fused.ops == ["mul", "scale_mask_softmax"]
    fused = fuse_with(ScaleMaskSoftmax, lambda x, m: (z := x * 0.5 + m, torch.softmax(z, -1)), **ADDED)
    assert any("also used by the output" in m for m in fused.near_misses), fused.near_misses
