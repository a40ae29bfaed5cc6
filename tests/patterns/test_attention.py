"""Covers: patterns/attention.py. Golden text, numbers, what is left alone and why, models that have it, shards."""

import math

import harness
import pytest
import torch
import torch.nn.functional as F

from megafx.analysis.communication import collective_nodes
from megafx.capture.export import capture_call
from megafx.patterns.attention import (
    AttentionChain,
    AttentionOfGroups,
    AttentionOfMatrices,
    AttentionOfScaledQuery,
    LibraryAttentionOfGroups,
)
from megafx.patterns.masked_softmax import BiasOfScores, HiddenScores, ScaleMaskSoftmax, ScaleOfScores, ScaleSoftmax
from megafx.testing import assert_same, expect, fuse_with

SOFTMAX = [ScaleMaskSoftmax, ScaleSoftmax, ScaleOfScores, BiasOfScores, HiddenScores]
GROUPS = [AttentionOfGroups, LibraryAttentionOfGroups]
FAMILY = [AttentionChain, AttentionOfMatrices, AttentionOfScaledQuery, *GROUPS, *SOFTMAX]
HEADS = {name: "f32[b n=2 s e=4]" for name in "qkv"}
CROSS = {"q": "f32[b n=4 s e=4]", "k": "f32[b m=2 t e=4]", "v": "f32[b m=2 t f=6]"}


def repeat_kv(x, g):
    b, n, t, d = x.shape
    return x[:, :, None].expand(b, n, g, t, d).reshape(b, n * g, t, d)


def nanogpt(q, k, v, m, fill=-math.inf):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(m, fill)
    return F.softmax(att, dim=-1) @ v


def hugging_face(q, k, v, m=None, p=0.0):
    """transformers' eager_attention_forward."""
    g = q.shape[1] // k.shape[1]
    k, v = (repeat_kv(x, g) if g > 1 else x for x in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.5
    weights = weights if m is None else weights + m
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=p, training=p > 0)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def test_golden():
    fused = fuse_with(FAMILY, nanogpt, **HEADS, m="bool[s s]")
    expect(
        fused.program,
        """\
        %0 = q                                                                                               # f32[b 2 s 4]
        %1 = k                                                                                               # f32[b 2 s 4]
        %2 = v                                                                                               # f32[b 2 s 4]
        %3 = m                                                                                               # bool[s s]
        %4 = unsqueeze(%3, 0)                                                                                # bool[1 s s]
        %5 = unsqueeze(%4, 1)                                                                                # bool[1 1 s s]
        %6 = logical_not(%5)                                                                                 # bool[1 1 s s]
        %7 = attention(%0, %1, %2, %6, None, None, None, None, 0.5, False, 0, 0.0, 4, 0.0, 0, -1, [], 'tp')  # f32[b 2 s 4]
        return %7""",
    )


def tokens_first(x, q):
    """Llama's own code: heads are repeated in [b, t, n, d]."""
    b, t, n, d = x.shape
    g = q.shape[1] // n
    return x[:, :, :, None, :].expand(b, t, n, g, d).reshape(b, t, n * g, d).transpose(1, 2)


def scores(q, k, c=0.5):
    return q @ k.transpose(-1, -2) * c


def alibi(k):
    return (torch.arange(k.shape[-2], device=k.device).to(k.dtype) * -0.5)[None, None, None]


def by_matrices(q, k, v, bias=None, m=None):
    """Bloom: [b*n, s, e], a bias in baddbmm, the softmax on [b, n, s, t]."""
    b, n, s, e = q.shape
    q, k, v = (x.reshape(b * n, s, e) for x in (q, k, v))
    if bias is None:
        z = torch.bmm(q, k.transpose(1, 2)) * 0.5
    else:
        z = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.5)
    z = z.view(b, n, s, s)
    weights = torch.softmax(z if m is None else z + m, -1)
    return torch.bmm(weights.view(b * n, s, s), v).view(b, n, s, e)


def multihead(q, k, v, m):
    """torch.nn.MultiheadAttention: a scaled query, the mask in baddbmm."""
    return torch.bmm(torch.softmax(torch.baddbmm(m, q * 0.5, k.transpose(-2, -1)), -1), v)


def soft_capped(q, k, v, m):
    z = torch.tanh(scores(q, k) / 30.0) * 30.0
    return F.softmax(z + m, -1) @ v


THREE = {name: "f32[m s e=4]" for name in "qkv"}
FORMS = {
    "one head for all": (lambda q, k, v: hugging_face(q, k[:, :1], v[:, :1]), HEADS),
    "scaled twice": (lambda q, k, v: torch.softmax(scores(q, k) / 3.0, -1) @ v, HEADS),
    "bias and mask": (
        lambda q, k, v, a, m: torch.softmax(scores(q, k) + a + m, -1) @ v,
        HEADS | {"a": "f32[1 n=2 s s]", "m": "f32[b 1 s s]"},
    ),
    "alibi, then filled": (
        lambda q, k, v, m: torch.softmax((scores(q, k) + alibi(k)).masked_fill(m, -1e38), -1) @ v,
        HEADS | {"m": "bool[1 1 s s]"},
    ),
    "alibi, then scaled": (
        lambda q, k, v, a: torch.softmax((q @ k.transpose(-1, -2) + a) * 0.5, -1) @ v,
        HEADS | {"a": "f32[1 n=2 1 s]"},
    ),
    "a scaled query": (lambda q, k, v: hugging_face(q * 0.25, k, v), HEADS),
    "a scaled query, heads not yet apart": (
        lambda x, k, v: hugging_face((x / 3.0).view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2), k, v),
        {"x": "f32[b s h=8]", "k": "f32[b n=2 t e=4]", "v": "f32[b n=2 t e=4]"},
    ),
    "soft-capped": (soft_capped, HEADS | {"m": "f32[b 1 s s]"}),
    "soft-capped, one product": (lambda q, k, v: torch.softmax(torch.tanh(scores(q, k, 0.01)) * 30.0, -1) @ v, HEADS),
    "matrices": (by_matrices, HEADS),
    "matrices, alibi, mask": (
        lambda q, k, v, a, m: by_matrices(q, k, v, a.repeat(q.shape[0], 1, 1), m),
        HEADS | {"a": "f32[n=2 1 s]", "m": "f32[b 1 s s]"},
    ),
    "multi-head": (multihead, THREE | {"m": "f32[1 s s]"}),
    "interleaved groups": (
        lambda q, k, v: hugging_face(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)),
        CROSS,
    ),
    "groups before the transpose": (
        lambda q, k, v: hugging_face(q, *(tokens_first(x, q) for x in (k, v))),
        {"q": "f32[b n=4 s e=4]", "k": "f32[b s m=2 e=4]", "v": "f32[b s m=2 e=4]"},
    ),
    "by hand": (lambda q, k, v, m: nanogpt(q, k, v, m, -1e9), HEADS | {"m": "bool[1 1 s s]"}),
    "grouped": (hugging_face, CROSS | {"m": "f32[b 1 s t]"}),
    "grouped, no mask": (hugging_face, CROSS),
    "a bias of heads": (hugging_face, HEADS | {"m": "f32[1 n=2 s s]"}),
    "padding": (hugging_face, CROSS | {"m": "f32[b 1 1 t]"}),
    "plain": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v, HEADS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    function, values = FORMS[form]
    fused = fuse_with(FAMILY, function, **values)
    assert fused.ops.count("attention") == 1, fused.near_misses
    gone = {"matmul", "bmm", "baddbmm", "scale_mask_softmax", "softmax", "tanh", "repeat_interleave"}
    assert not gone & set(fused.ops)
    assert "expand" not in fused.ops or "matrices" in form
    assert "scaled query" not in form or not {"mul", "div"} & set(fused.ops)
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("where", ["operands", "scores"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_scores_in_fp32(where, p):
    """GPT-J casts q and k, others the scores; the dropout may come after the cast back."""

    def function(q, k, v):
        z = q.float() @ k.float().transpose(-1, -2) if where == "operands" else (q @ k.transpose(-1, -2)).float()
        return F.dropout(torch.softmax(z / 2.0, -1).to(v.dtype), p, True) @ v

    fused = fuse_with(FAMILY, function, **{n: t.replace("f32", "bf16") for n, t in HEADS.items()})
    assert fused.ops == ["attention"], fused.near_misses
    assert f"0.5, False, 0, 0.0, 0, {p}, 0," in fused.text


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_of_the_library(masked):
    """scaled_dot_product_attention shares heads itself. A mask leaves dropout and causality at their defaults."""

    def function(q, k, v, m=None):
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        return F.scaled_dot_product_attention(q, k, v, m, is_causal=m is None, scale=0.5)

    mask = {"m": "f32[b 1 s t]"} if masked else {}
    fused = fuse_with(FAMILY, function, **CROSS | {"v": "f32[b m=2 t e=4]"} | mask)
    assert fused.counts["sdpa_groups"] == 1 and fused.ops == ["scaled_dot_product_attention"]
    assert_same(fused.before, fused.program)


NOT_FUSED = {
    "a fill that does not hide": (lambda q, k, v, m: nanogpt(q, k, v, m, -10.0), {"m": "bool[1 1 s s]"}, "fill"),
    "a cap that is none": (
        lambda q, k, v: torch.softmax(torch.tanh(scores(q, k) / 20.0) * 30.0, -1) @ v,
        {},
        "soft cap",
    ),
    "a bias under a weak fill": (
        lambda q, k, v, a, m: torch.softmax((scores(q, k) + a).masked_fill(m, -10000.0), -1) @ v,
        {"a": "f32[1 n=2 s s]", "m": "bool[1 1 s s]"},
        "fill",
    ),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_what_is_refused_and_why(case):
    function, more, word = NOT_FUSED[case]
    fused = fuse_with(FAMILY, function, **HEADS | more)
    assert "attention" not in fused.ops
    assert any(word in reason for reason in fused.near_misses), fused.near_misses


def test_dropout_keeps_its_number():
    def two(q, k, v):
        return hugging_face(F.dropout(q, 0.2, True), k, v, p=0.1)

    fused = fuse_with(FAMILY, two, **CROSS)
    assert (
        "attention(%4, %1, %2, None, None, None, None, %3, 0.5, False, 0, 0.0, 0, 0.1, 1, -1, [], 'tp')" in fused.text
    )


def test_weights_that_are_returned_stay():
    def both(q, k, v):
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return weights @ v, weights

    fused = fuse_with(FAMILY, both, **HEADS)
    assert fused.counts.get("attention", 0) == 0 and fused.ops.count("matmul") == 2
    assert any("also used by the output" in reason for reason in fused.near_misses)


def test_other_products_stay():
    fused = fuse_with(FAMILY, lambda q, k, v: torch.relu(q @ k.transpose(-1, -2)) @ v, **HEADS)
    assert fused.counts == {} or not any(fused.counts.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert"])
def test_models_are_autograds(name):
    """Eager attention of Hugging Face, in every layer."""
    case = harness.Case.of(name, attn="eager", layers=2)
    whole = case.compile(1)
    targets = [str(n.target) for n in whole.program.graph.nodes]
    assert sum("attention" in t for t in targets) >= 4  # two layers, forward and backward
    assert not any("scale_mask_softmax" in t or t.startswith("aten._softmax") for t in targets)
    inputs = case.inputs(3, 13)
    harness.assert_equal(case.run(whole, inputs), case.reference(inputs))


@pytest.mark.parametrize(("name", "t"), [("gpt2", 2), ("llama", 3)])
def test_sharded(name, t):
    """With dropout: the numbers of one rank, and the collectives of the unfused graph."""
    case = harness.Case.of(name, attn="eager", dropout=0.1)
    inputs = case.inputs(3, 13)
    sharded, unfused = (case.compile(t, sequence_parallel=True, attention_fusion=on) for on in (True, False))
    assert any("attention_forward" in str(n.target) for n in sharded.program.graph.nodes)
    harness.assert_equal(case.run(sharded, inputs), case.run(case.compile(1), inputs))
    found = [sorted(str(n.target) for n in collective_nodes(c.program.graph)) for c in (sharded, unfused)]
    assert found[0] == found[1]


def test_nanogpt_by_hand():
    """A block with a causal buffer, as in nanoGPT without flash attention."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = torch.nn.Linear(24, 72), torch.nn.Linear(24, 24)
            self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

        def forward(self, x):
            b, t, c = x.size()
            q, k, v = (y.view(b, t, 4, 6).transpose(1, 2) for y in self.qkv(x).split(24, dim=2))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(6))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            att = F.dropout(F.softmax(att, dim=-1), 0.1, self.training)
            return self.proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))

    from megafx.passes.canonicalize.canonicalize import canonicalize_program

    program = capture_call(Block(), (torch.randn(2, 16, 24),))
    canonicalize_program(program)
    fused = fuse_with(FAMILY, program)
    assert fused.counts["attention"] == 1, fused.near_misses


MANY = {
    "windows of pictures": {name: "f32[a b n=2 s e=4]" for name in "qkv"},
    "a mask for all": {name: "f32[a b n=2 s e=4]" for name in "qkv"} | {"m": "bool[s s]"},
    "a mask for some": {name: "f32[a b n=2 s e=4]" for name in "qkv"} | {"m": "f32[b 1 s s]"},
}


@pytest.mark.parametrize("form", MANY)
def test_dropout_on_more_than_four_dims(form):
    """Leading dims are one batch to the op; without dropout to compare with, by its keep rate and its scale."""

    def function(q, k, v, m=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m, dropout_p=0.25)

    fused = fuse_with(FAMILY, function, **MANY[form])
    assert fused.ops.count("attention") == 1 and "scaled_dot_product_attention" not in fused.ops
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, 5, 4), torch.randn(2, 3, 2, 5, 4)
    v = torch.ones(2, 3, 2, 5, 4)
    mask = {"a mask for all": [torch.ones(5, 5).tril().bool()], "a mask for some": [torch.randn(3, 1, 5, 5)]}
    out = torch.stack([fused.program.gm(q, k, v, *mask.get(form, []), torch.tensor(seed))[0] for seed in range(300)])
    assert out.shape == (300, 2, 3, 2, 5, 4)
    torch.testing.assert_close(out.mean(0), torch.ones(2, 3, 2, 5, 4), rtol=0, atol=0.2)
    assert out[0, 0, 0].std() > 0 and not torch.equal(out[0, 0], out[0, 1])  # each of the batch has its own bits
