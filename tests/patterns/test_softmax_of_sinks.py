"""Covers: patterns/softmax_of_sinks.py and sinks in patterns/attention.py. Golden text, numbers, what is left alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.attention import AttentionOfGroups, AttentionOfSink
from megafx.patterns.masked_softmax import BiasOfScores, ScaleOfScores, ScaleSoftmax
from megafx.patterns.softmax_of_sinks import FillOfScores, OffByOne, ShiftOfScores, SinkAsFactor, SinkOfScores
from megafx.testing import assert_same, expect, fuse_with

SOFTMAX = [ScaleSoftmax, ShiftOfScores, SinkOfScores, OffByOne, SinkAsFactor, FillOfScores, BiasOfScores, ScaleOfScores]
FAMILY = [AttentionOfSink, AttentionOfGroups, *SOFTMAX]
HEADS = {"q": "D[b n=4 s e=4]", "k": "D[b m=2 t e=4]", "v": "D[b m=2 t f=6]", "sink": "f32[n=4]"}


def values(dtype, **more):
    return {name: text.replace("D", dtype) for name, text in HEADS.items()} | more


def repeated(x):
    b, n, t, d = x.shape
    return x[:, :, None].expand(b, n, 2, t, d).reshape(b, n * 2, t, d)


def scores(q, k):
    return q @ repeated(k).transpose(-1, -2) * 0.5


def gpt_oss(q, k, v, sink, m=None, p=0.0, dtype=None):
    """transformers' eager_attention_forward; its softmax has the dtype of the scores, or is fp32."""
    z = scores(q, k) if m is None else scores(q, k) + m
    z = torch.cat([z, sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], dim=-1)
    z = z - z.max(dim=-1, keepdim=True).values
    weights = F.softmax(z, dim=-1, dtype=dtype or z.dtype)[..., :-1]
    return F.dropout(weights, p, p > 0).to(v.dtype) @ repeated(v)


def test_golden():
    fused = fuse_with(FAMILY, gpt_oss, **values("f32", m="f32[b 1 s t]"))
    expect(
        fused.program,
        """\
        %0 = q                                                                                             # f32[b 4 s 4]
        %1 = k                                                                                             # f32[b 2 t 4]
        %2 = v                                                                                             # f32[b 2 t 6]
        %3 = sink                                                                                          # f32[4]
        %4 = m                                                                                             # f32[b 1 s t]
        %5 = reshape(%3, [1, 4, 1, 1])                                                                     # f32[1 4 1 1]
        %6 = reshape(%5, [4])                                                                              # f32[4]
        %7 = attention(%0, %1, %2, %4, None, None, %6, None, 0.5, False, 0, 0.0, 0, 0.0, 0, -1, [], 'tp')  # f32[b 4 s 6]
        return %7""",
    )
    assert_same(fused.before, fused.program)


def three_dims(q, k, v, sink):
    z = torch.cat((scores(q, k), sink[:, None, None].expand(q.shape[0], 4, q.shape[2], 1)), -1)
    return z.softmax(-1)[..., :-1] @ repeated(v)


def zeros(q, k, v, sink):
    z = scores(q + sink[:, None, None], k)
    return torch.cat((z, z.new_zeros(*z.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ repeated(v)


def padded(q, k, v, sink):
    return F.pad(scores(q + sink[:, None, None], k), (0, 1)).softmax(-1)[..., :-1] @ repeated(v)


def by_hand(q, k, v, sink):
    powers = torch.exp(scores(q + sink[:, None, None], k))
    return powers / (1 + powers.sum(-1, keepdim=True)) @ repeated(v)


def by_hand_shifted(q, k, v, sink, m):
    z = scores(q + sink[:, None, None], k).masked_fill(m, -math.inf)
    high = z.amax(-1, keepdim=True)
    powers = torch.exp(z - high)
    return powers / (torch.exp(-high) + powers.sum(dim=-1, keepdim=True)) @ repeated(v)


def by_factor(q, k, v, sink):
    z = scores(q, k)
    out = torch.softmax(z, -1) @ repeated(v)
    return out * torch.sigmoid(z.logsumexp(-1, keepdim=True) - sink[:, None, None])


FORMS = (three_dims, zeros, padded, by_hand, by_hand_shifted, by_factor)


@pytest.mark.parametrize("form", FORMS)
def test_spellings_are_attention(form):
    mask = {"m": "bool[s t]"} if form is by_hand_shifted else {}
    fused = fuse_with(FAMILY, form, **values("f32", **mask))
    (node,) = fused.program.graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)
    assert node.args[6] is not None and fused.counts["attention_groups"] == 1
    sizes = [n.meta["val"].dim() for n in fused.program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert sizes.count(4) <= (5 if "sink" in fused.text else 4) + 3
    if form is not by_hand_shifted:  # a random mask leaves rows that see nothing, which are NaN by hand
        assert_same(fused.before, fused.program)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
def test_half_precision_with_sinks_of_either_dtype(wide, dtype):
    """fp32 sinks beside bf16 scores make fp32 weights, which are cast before the product, with dropout before the cast."""
    given = values("bf16", m="bf16[b 1 s t]") | {"sink": "f32[n=4]" if wide else "bf16[n=4]"}
    fused = fuse_with(FAMILY, lambda q, k, v, sink, m: gpt_oss(q, k, v, sink, m, 0.1, dtype), **given)
    (node,) = fused.program.graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)
    assert fused.counts["attention_of_sink"] == fused.counts["attention_groups"] == 1
    assert node.args[6].meta["val"].dtype == (torch.float32 if wide else torch.bfloat16)


def of_each_token(q, k, v, sink, column):
    return torch.cat((scores(q, k) + sink[:, None, None], column), -1).softmax(-1)[..., :-1] @ repeated(v)


def of_the_shifted(q, k, v, sink):
    """A popular mistake: one more than the powers of shifted scores is a sink as high as the largest score."""
    z = scores(q + sink[:, None, None], k)
    powers = (z - z.max(-1, keepdim=True).values).exp()
    return powers / (1 + powers.sum(-1, keepdim=True)) @ repeated(v)


def of_no_scores(q, k, v, sink):
    powers = (q.tanh() + sink[:, None, None]).exp()
    return powers / (1 + powers.sum(-1, keepdim=True))


@pytest.mark.parametrize("form", [of_each_token, of_the_shifted, of_no_scores])
def test_what_is_no_sink_of_a_head_is_left(form):
    more = {"column": "f32[b n=4 s 1]"} if form is of_each_token else {}
    fused = fuse_with(FAMILY, form, **values("f32", **more))
    assert "sink_softmax" not in fused.text and "attention" not in fused.text
    assert_same(fused.before, fused.program)


def test_weights_that_are_returned_stay_a_softmax():
    """sink_softmax where it is not attention: as it is written, masks and dropout included."""

    def function(q, k, v, sink, m):
        z = torch.cat(
            (scores(q, k).masked_fill(m, -1e9), sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)), -1
        )
        weights = z.softmax(-1)[..., :-1]
        return weights @ repeated(v), weights

    fused = fuse_with(FAMILY, function, **values("f32", m="bool[s t]"))
    assert fused.counts["fill_of_scores"] == 1 and "attention_of_sink" not in fused.counts
    assert_same(fused.before, fused.program)
