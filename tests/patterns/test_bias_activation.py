"""Covers: patterns/activation.py, without gated units. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.activation import (
    FORMS,
    LIBRARY,
    ROUNDED,
    WRITTEN,
    BiasActivation,
    LinearBiasActivation,
    WrittenActivation,
)  # fmt: skip
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
    values = {name: text.replace("f32", "bf16" if form in ROUNDED else "f32") for name, text in LINEAR.items()}
    fused = fuse_with(FAMILY, lambda x, w, b: FORMS[form].function(F.linear(x, w, b)), **values)
    assert fused.counts == {"linear_bias_activation": 1} and fused.ops == ["linear", "bias_act"]
    assert f"'{FORMS[form].act}'" in fused.text
    if form not in ROUNDED:
        assert_same(fused.before, fused.program)


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_that_is_added_separately(form):
    fused = fuse_with(FAMILY, lambda x, b: FORMS[form].function(b + x), x="bf16[t n=6]", b="param bf16[n=6]")
    assert fused.counts == {"bias_activation": 1} and fused.ops == ["bias_act"]


@pytest.mark.parametrize("form", WRITTEN)
def test_written_out_without_bias(form):
    fused = fuse_with(FAMILY, lambda x: WRITTEN[form].function(x), x="bf16[b s k=4]")
    assert fused.counts == {"written_activation": 1} and fused.ops == ["bias_act"]


@pytest.mark.parametrize("form", ROUNDED)
def test_rounded_constants_stay_where_they_show(form):
    """In bf16 they do not. The report says why an activation is left."""
    for dtype in (torch.float64, torch.float32):
        short = {torch.float64: "f64", torch.float32: "f32"}[dtype]
        fused = fuse_with(FAMILY, lambda x: WRITTEN[form].function(x), x=f"{short}[b s k=4]")
        assert fused.counts == ({} if dtype in ROUNDED[form] else {"written_activation": 1})
        assert any("it rounds sqrt(2" in str(n) for n in fused.program.notes) == (dtype in ROUNDED[form])
    u = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    exact = LIBRARY["gelu" if "erf" in form else "gelu tanh"].function(u)
    error = (FORMS[form].function(u) - exact).abs().max()
    assert 1e-13 < error < (1e-5 if "erf" in form else 1e-7)


def test_megatrons_own_functions():
    """gelu_impl and erf_gelu, as they stand in its fused_bias_gelu.py and language_model.py."""

    def erf_gelu(x):
        half = torch.erf(x / 1.41421).to(dtype=x.dtype) + torch.ones_like(x).to(dtype=x.dtype)
        return x * 0.5 * half

    def gelu_impl(x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))

    for function, dtype in ((gelu_impl, "f32"), (gelu_impl, "bf16"), (erf_gelu, "bf16")):
        fused = fuse_with(FAMILY, function, x=f"{dtype}[b s k=4]")
        assert fused.counts == {"written_activation": 1}
        if function is gelu_impl:
            assert_same(fused.before, fused.program)


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
