"""Covers: patterns/bias_activation.py. Golden text, numbers, what is left alone and why, and models that have it."""

import harness
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megafx.analysis.communication import collective_nodes
from megafx.capture.export import capture_call
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.patterns.bias_activation import FORMS, WRITTEN, BiasActivation, LinearBiasActivation, WrittenActivation
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


def counts(model, **inputs):
    program = capture_call(model.train(), (), inputs)
    canonicalize_program(program)
    return fuse_with(FAMILY, program).counts


def small(name, **options):
    import transformers

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "vocab_size": 67,
        "intermediate_size": 50,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config)


IDS = torch.zeros(2, 16, dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("Phi", {"num_attention_heads": 2}, {"linear_bias_activation": 2}),  # gelu_new
        ("Falcon", {"bias": True}, {"linear_bias_activation": 2}),
        ("GPTNeoX", {"hidden_act": "gelu_fast"}, {"linear_bias_activation": 2}),
        ("GPTNeoX", {"hidden_act": "quick_gelu", "num_hidden_layers": 1}, {"linear_bias_activation": 1}),
        ("GPTNeoX", {"hidden_act": "relu2", "num_hidden_layers": 1}, {"linear_bias_activation": 1}),
    ],
)
def test_hugging_face_models(name, options, found):
    assert counts(small(name, **options), input_ids=IDS) == found


@pytest.mark.parametrize(("name", "found"), [("gpt2", 1), ("bert", 2), ("nanogpt", 1)])
def test_models_of_the_zoo_forward_backward_and_sharded(name, found):
    case = harness.Case.of(name)
    inputs = case.inputs(2, 13)
    wanted = case.reference(inputs)
    whole = case.compile(1)
    names = [str(n.target) for n in whole.program.graph.nodes]
    gradients = [n for n in names if n.startswith("megafx.bias_act_backward")]  # some make the output again
    assert names.count("megafx.bias_act.default") == len(gradients) == found
    harness.assert_equal(case.run(whole, inputs), wanted)
    sharded = case.compile(3, sequence_parallel=True)
    assert "megafx.bias_act.default" in [str(n.target) for n in sharded.program.graph.nodes]
    harness.assert_equal(case.run(sharded, inputs), wanted)


def test_collectives_are_those_of_the_unfused_graph():
    case = harness.Case.of("nanogpt")
    fused, plain = (case.compile(2, bias_activation_fusion=on) for on in (True, False))

    def collectives(compiled):
        return sorted(str(n.target) for n in collective_nodes(compiled.program.graph))

    assert collectives(fused) == collectives(plain) != []
    assert not any("bias_act" in str(n.target) for n in plain.program.graph.nodes)


def test_hand_written_code_of_a_module():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

        def forward(self, x):
            u = self.up(x)
            return self.down(0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0)))))

    program = capture_call(Mlp(), (torch.randn(2, 5, 6),), {})
    canonicalize_program(program)
    assert fuse_with(FAMILY, program).counts == {"linear_bias_activation": 1}
