"""Covers: patterns/activation.py, without gated units. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.activation import FORMS, WRITTEN, BiasActivation, LinearBiasActivation, WrittenActivation
from megafx.testing import assert_same, expect, fuse_with

FAMILY = [LinearBiasActivation, BiasActivation, WrittenActivation]
LINEAR = {"x": "f32[b s k=4]", "w": "param f32[n=8 k=4]", "b": "param f32[n=8]"}


def test_golden():
    fused = fuse_with(FAMILY, lambda x, w, b: F.gelu(F.linear(x, w, b)), **LINEAR)
    expect(
        fused.program,
        """\
        %0 = x                         # f32[b s 4]
        %1 = w                         # f32[8 4] param
        %2 = b                         # f32[8] param
        %3 = linear(%0, %1)            # f32[b s 8]
        %4 = bias_act(%3, %2, 'gelu')  # f32[b s 8]
        return %4""",
    )
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_linear(form):
    fused = fuse_with(FAMILY, lambda x, w, b: FORMS[form].function(F.linear(x, w, b)), **LINEAR)
    assert fused.counts == {"linear_bias_activation": 1} and fused.ops == ["linear", "bias_act"]
    assert f"'{FORMS[form].act}'" in fused.text
    if form not in ("fast", "megatron"):  # rounded constants: not the same function in fp64
        assert_same(fused.before, fused.program)


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_that_is_added_separately(form):
    fused = fuse_with(FAMILY, lambda x, b: FORMS[form].function(b + x), x="bf16[t n=6]", b="param bf16[n=6]")
    assert fused.counts == {"bias_activation": 1} and fused.ops == ["bias_act"]


@pytest.mark.parametrize("form", WRITTEN)
def test_written_out_without_bias(form):
    fused = fuse_with(FAMILY, lambda x: WRITTEN[form].function(x), x="f32[b s k=4]")
    assert fused.counts == {"written_activation": 1} and fused.ops == ["bias_act"]


@pytest.mark.parametrize("form", ["fast", "megatron"])
def test_rounded_constants_stay_in_fp64(form):
    fused = fuse_with(FAMILY, lambda x: WRITTEN[form].function(x), x="f64[b s k=4]")
    assert not fused.counts


def test_rounded_constants_are_the_same_function_to_seven_digits():
    u = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    exact = F.gelu(u, approximate="tanh")
    for form in ("fast", "megatron"):
        assert (FORMS[form].function(u) - exact).abs().max() < 1e-7


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.gelu(F.linear(x, w)) + b,  # a library activation without bias is one kernel already
        lambda x, w, b: F.leaky_relu(F.linear(x, w, b)),
        lambda x, w, b: torch.tanh(F.linear(x, w, b)),
        lambda x, w, b: 0.5 * b * (1.0 + torch.tanh(0.8 * (b + 0.044715 * b**3))) + F.linear(x, w),  # another constant
    ],
)
def test_others_are_left_alone(function):
    fused = fuse_with(FAMILY, function, **LINEAR)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


def test_a_second_use_is_a_near_miss():
    fused = fuse_with(FAMILY, lambda x, w, b: (y := F.linear(x, w, b), F.gelu(y)), **LINEAR)
    assert not fused.counts and fused.ops == ["linear", "gelu"]
    assert any("also used by" in reason for reason in fused.near_misses), fused.near_misses


def test_a_bias_that_is_no_vector_is_a_near_miss():
    fused = fuse_with(FAMILY, lambda x, y: F.gelu(x + y), x="f32[b s k=4]", y="f32[b s k=4]")
    assert not fused.counts and fused.near_misses == ["'bias' has 3 dims, not 1"]


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "quick_gelu", "relu2", "silu", "gelu_pytorch_tanh"])
def test_transformers_activations(name):
    from transformers.activations import ACT2FN

    fused = fuse_with(FAMILY, lambda x, w, b: ACT2FN[name](F.linear(x, w, b)), **LINEAR)
    assert fused.counts == {"linear_bias_activation": 1} and fused.ops == ["linear", "bias_act"]


def test_hand_written_code_with_powers():
    def function(x, w, b):
        u = F.linear(x, w, b)
        return 0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0))))

    assert fuse_with(FAMILY, function, **LINEAR).counts == {"linear_bias_activation": 1}
