"""Covers: passes/fuse/share_logsumexp.py: z-loss beside a cross entropy, with logits and without, whole and sharded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megafx
from megafx.config import Config
from megafx.ir import dump
from megafx.passes.fuse.share_logsumexp import share_logsumexp
from megafx.testing import assert_same, canonical, expect, make_context, run_pass

LOGITS = {"x": "f32[b s v=16]", "y": "i64[b s]"}


def flat(x, y):
    logits = x.view(-1, 16)
    return F.cross_entropy(logits, y.view(-1)) + 1e-2 * (torch.logsumexp(logits, -1) ** 2).mean()


def whole(x, y):
    """On logits as they are; the mean over tokens that count."""
    z = x.logsumexp(dim=-1).pow(2)
    keep = y != -100
    return F.cross_entropy(x.view(-1, 16), y.view(-1)), 1e-4 * (z * keep).sum() / keep.sum()


def before_the_loss(x, y):
    """The targets are made after the log-sum-exp."""
    z = torch.logsumexp(x, -1, keepdim=True).square().mean()
    y = F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(x.view(-1, 16), y, label_smoothing=0.1) + z


@pytest.mark.parametrize("loss", [flat, whole, before_the_loss])
def test_same(loss):
    before = canonical(loss, **LOGITS)
    after = run_pass(share_logsumexp, before)
    names = [dump.target_text(n.target) for n in after.graph.nodes if n.op == "call_function"]
    assert names.count("cross_entropy") == 1 and "logsumexp" not in names
    assert [f.pattern for f in after.fusions] == ["cross_entropy_with_logsumexp"]
    assert_same(before, after)


def test_golden():
    def loss(x, y):
        return F.cross_entropy(x, y, reduction="none"), x.logsumexp(-1)

    expect(
        run_pass(share_logsumexp, canonical(loss, x="f32[t v=16]", y="i64[t]")),
        """\
        %0 = x                                       # f32[t 16]
        %1 = y                                       # i64[t]
        %2 = cross_entropy(%0, %1, -100, 0.0, True)  # f32[2 t]
        %3 = select.int(%2, 0, 0)                    # f32[t]
        %4 = select.int(%2, 0, 1)                    # f32[t]
        return %3, %4""",
    )


def test_casts_go():
    after = run_pass(share_logsumexp, canonical(lambda x, y: flat(x.float(), y), **{**LOGITS, "x": "bf16[b s v=16]"}))
    assert "to.dtype" not in dump.text(after) and "0.0, True)" in dump.text(after)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x.view(-1, 16), y.view(-1)) + torch.logsumexp(x * 2, -1).mean(),  # of other values
        lambda x, y: F.cross_entropy(x.view(-1, 16), y.view(-1)) + torch.logsumexp(x, 1).mean(),  # over tokens
        lambda x, y: torch.logsumexp(x, -1).mean() + y.sum(),
    ],
)
def test_others_are_left_alone(loss):
    before = canonical(loss, **LOGITS)
    assert dump.text(run_pass(share_logsumexp, before)) == dump.text(before)


def test_off():
    before = canonical(flat, **LOGITS)
    assert dump.text(
        run_pass(share_logsumexp, before, make_context(1, Config(cross_entropy_fusion=False)))
    ) == dump.text(before)


class Model(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.up, self.head, self.scaled = nn.Linear(12, 24), nn.Linear(24, 37, bias=False), scaled

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.up(x)))
        logits = logits * 0.5 if self.scaled else logits  # no linear layer's logits any more
        z = torch.logsumexp(logits, -1) ** 2
        return F.cross_entropy(logits.view(-1, 37), y.view(-1)) + 1e-2 * z.mean()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("t", [1, 2, 3])
def test_compiled(t, scaled):
    torch.manual_seed(0)
    batch = (torch.randn(2, 5, 12, dtype=torch.float64), torch.randint(0, 37, (2, 5)))
    model, config = Model(scaled).double(), Config(tensor_model_parallel_size=t)
    assert megafx.verify(model, config, example_inputs=batch)
    names = {f.pattern for f in megafx.plan(model, config, example_inputs=batch).report.fusions}
    assert "cross_entropy_with_logsumexp" in names
