"""Covers: gated units of patterns/activation.py. Golden text, numbers, what is left alone and why, a packed one sharded.
In models: equivalence/test_patterns_in_models.py."""

import harness
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megafx.capture.export import capture_call
from megafx.patterns.activation import (
    FORMS,
    ROUNDED,
    BiasActivation,
    Glu,
    LinearBiasActivation,
    LinearBiasGlu,
    PackedGlu,
    WrittenActivation,
)
from megafx.testing import assert_same, expect, fuse_with

FAMILY = [Glu, PackedGlu, LinearBiasGlu, LinearBiasActivation, BiasActivation, WrittenActivation]
TWO = {"x": "f32[b s k=4]", "g": "param f32[n=6 k=4]", "u": "param f32[n=6 k=4]"}
ONE = {"x": "f32[b s k=4]", "w": "param f32[n=6 k=4]", "b": "param f32[n=6]"}


def test_golden():
    fused = fuse_with(FAMILY, lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), **TWO)
    expect(
        fused.program,
        """\
        %0 = x                    # f32[b s 4]
        %1 = g                    # f32[6 4] param
        %2 = u                    # f32[6 4] param
        %3 = linear(%0, %1)       # f32[b s 6]
        %4 = linear(%0, %2)       # f32[b s 6]
        %5 = glu(%3, %4, 'silu')  # f32[b s 6]
        return %5""",
    )
    assert_same(fused.before, fused.program)


def test_golden_of_halves_with_bias():
    def function(x, w, b):
        gate, up = F.linear(x, w, b).chunk(2, -1)
        return up * F.gelu(gate)

    fused = fuse_with(FAMILY, function, **ONE)
    expect(
        fused.program,
        """\
        %0 = x                           # f32[b s 4]
        %1 = w                           # f32[6 4] param
        %2 = b                           # f32[6] param
        %3 = linear(%0, %1)              # f32[b s 6]
        %4 = glu_packed(%3, %2, 'gelu')  # f32[b s 3]
        return %4""",
    )
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    act = FORMS[form].function
    dtype = "bf16" if form in ROUNDED else "f32"
    biased = {name: text.replace("f32", dtype) for name, text in {**TWO, "b": "param f32[n=6]"}.items()}
    one = {name: text.replace("f32", dtype) for name, text in ONE.items()}
    apart = fuse_with(FAMILY, lambda x, g, u, b: F.linear(x, u) * act(F.linear(x, g, b)), **biased)
    halves = fuse_with(FAMILY, lambda x, w, b: act((y := F.linear(x, w))[..., :3]) * y[..., 3:], **one)
    assert apart.counts == {"glu": 1} and halves.counts == {"glu_packed": 1}
    assert f"'{FORMS[form].act}'" in apart.text and f"'{FORMS[form].act}'" in halves.text
    if form not in ROUNDED:
        assert_same(apart.before, apart.program)
        assert_same(halves.before, halves.program)


def test_up_before_gate_stays_apart():
    """The second half gates: glu reads the halves as they lie."""
    fused = fuse_with(FAMILY, lambda x, w, b: (y := F.linear(x, w))[..., :3] * F.silu(y[..., 3:]), **ONE)
    assert fused.counts == {"glu": 1} and fused.ops == ["linear", "slice", "slice", "glu"]
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g, u: F.silu(F.linear(x, g)) + F.linear(x, u),
        lambda x, g, u: F.linear(x, g) * F.linear(x, u),
        lambda x, g, u: torch.tanh(F.linear(x, g)) * F.linear(x, u),
    ],
)
def test_others_are_left_alone(function):
    fused = fuse_with(FAMILY, function, **TWO)
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


def test_a_second_use_and_a_broadcast_are_near_misses():
    fused = fuse_with(FAMILY, lambda x, g, u: (a := F.silu(F.linear(x, g)), a * F.linear(x, u)), **TWO)
    assert not fused.counts and any("also used by" in reason for reason in fused.near_misses), fused.near_misses
    fused = fuse_with(FAMILY, lambda x, y: F.silu(x) * y, x="f32[b s k=4]", y="f32[b s 1]")
    assert not fused.counts and "has no dim 'h' there" in fused.near_misses[0]


class Packed(nn.Module):
    """A residual block with a fused gate/up linear with bias, widths that divide by nothing."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, 2 * 14), nn.Linear(14, 10)

    def forward(self, x, y):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return F.mse_loss(x + self.down(F.silu(gate) * up), y)


@pytest.mark.parametrize("t", [1, 3])
def test_packed_with_bias_sharded(t):
    torch.manual_seed(0)
    model, shape = Packed().double(), (2, 6, 10)
    inputs = {"x": torch.randn(shape).double(), "y": torch.randn(shape).double()}
    case = harness.Case(model, None, capture_call(model, (), inputs))
    compiled = case.compile(t)
    names = [str(n.target) for n in compiled.program.graph.nodes]
    assert names.count("megafx.glu_packed.default") == names.count("megafx.glu_packed_backward.default") == 1
    assert t == 1 or compiled.plan.params["up.weight"].is_shard, "gate and up were not sharded"
    harness.assert_equal(case.run(compiled, inputs), case.reference(inputs))
