"""Covers: patterns/cross_entropy.py. Golden text, numbers, what is left alone and why, models that have it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megafx
from megafx.capture import capture_call
from megafx.hf import synthesize_inputs
from megafx.passes.canonicalize import canonicalize
from megafx.patterns.cross_entropy import CrossEntropyOfCast, LinearCrossEntropy
from megafx.testing import assert_same, expect
from megafx.testing_patterns import fuse_with

FAMILY = [CrossEntropyOfCast, LinearCrossEntropy]
LOGITS = {"x": "bf16[b s v=16]", "y": "i64[b s]"}
HEAD = {"x": "f32[b s k=8]", "w": "param f32[v=16 k=8]", "y": "i64[b s]"}


def test_golden_cast():
    fused = fuse_with(FAMILY, lambda x, y: F.cross_entropy(x.float().view(-1, 16), y.view(-1)), **LOGITS)
    assert fused.counts == {"cross_entropy_of_cast": 1} and "to.dtype" not in fused.ops
    assert "cross_entropy(" in fused.text and "f32[b*s 16]" not in fused.text


def test_golden_linear():
    def loss(x, w, y):
        return F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), reduction="sum")

    fused = fuse_with(FAMILY, loss, **HEAD)
    expect(
        fused.program,
        """\
        %0 = x                                                  # f32[b s 8]
        %1 = w                                                  # f32[16 8] param
        %2 = y                                                  # i64[b s]
        %3 = sym_size.int(%0, 0)                                # int b
        %4 = sym_size.int(%0, 1)                                # int s
        %5 = operator.mul(%3, %4)                               # int b*s
        %6 = reshape(%2, [%5])                                  # i64[b*s]
        %7 = reshape(%0, [%5, 8])                               # f32[b*s 8]
        %8 = linear_cross_entropy(%7, %1, None, %6, -100, 0.0)  # f32[]
        return %8""",
    )
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize(
    "loss, values",
    [
        (lambda x, w, y: F.cross_entropy(F.linear(x, w), y), {"x": "f32[t 8]", "w": "param f32[16 8]", "y": "i64[t]"}),
        (lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), label_smoothing=0.1), HEAD),
        (lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), ignore_index=3), HEAD),
        (
            lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b).view(-1, 16), y.view(-1)),
            {**{k: HEAD[k] for k in ("x", "w")}, "b": "param f32[v=16]", "y": "i64[b s]"},
        ),
    ],
)
def test_linear_forms(loss, values):
    fused = fuse_with(FAMILY, loss, **values)
    assert fused.counts == {"linear_cross_entropy": 1} and not {"linear", "cross_entropy"} & set(fused.ops)
    assert_same(fused.before, fused.program)


def test_both():
    def loss(x, w, y):
        return F.cross_entropy(F.linear(x, w).float().view(-1, 16), y.view(-1))

    fused = fuse_with(FAMILY, loss, **{**HEAD, "x": "bf16[b s k=8]", "w": "param bf16[v=16 k=8]"})
    assert fused.counts == {"cross_entropy_of_cast": 1, "linear_cross_entropy": 1}


def test_logits_that_others_use_stay():
    def loss(x, w, y):
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, 16), y.view(-1)), logits

    fused = fuse_with(FAMILY, loss, **HEAD)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text
    assert fused.near_misses == ["linear (%linear) inside of it is also used by the output"]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), reduction="none"),
        lambda x, w, y: F.linear(x, w).logsumexp(-1).sum() + y.sum(),
    ],
)
def test_others_are_left_alone(loss):
    fused = fuse_with(FAMILY, loss, **HEAD)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX"])
def test_hugging_face_models(name):
    """Their models make an fp32 copy of the logits for the loss; the logits are also an output."""
    import transformers

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 67}
    config = getattr(transformers, f"{name}Config")(**sizes, intermediate_size=48)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    program = capture_call(model, *synthesize_inputs(model))
    canonicalize(program)
    assert fuse_with(FAMILY, program).counts == {"cross_entropy_of_cast": 1}


class Head(nn.Module):
    """Hidden states to loss, as trainers that need no logits write it."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(12, 24), nn.Linear(24, 37, bias=False)

    def forward(self, x, y):
        return F.cross_entropy(self.head(torch.tanh(self.up(x))).view(-1, 37), y.view(-1))


@pytest.mark.parametrize("t", [1, 2, 3])
def test_compiled_forward_and_backward(t):
    """On one rank in chunks; a sharded vocabulary has its own loss. Both are eager's numbers."""
    torch.manual_seed(0)
    batch = (torch.randn(2, 5, 12, dtype=torch.float64), torch.randint(0, 37, (2, 5)))
    assert megafx.verify(Head().double(), megafx.Config(tensor_model_parallel_size=t), example_inputs=batch)
