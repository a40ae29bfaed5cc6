"""Covers: patterns/embedding.py. Golden text, numbers, what is left alone. In models:
equivalence/test_patterns_in_models.py."""

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.embedding import EmbeddingSum
from megafx.testing import assert_same, expect, fuse_with

WORDS = {"w": "param f32[v=7 h=4]", "p": "param f32[m=9 h=4]", "i": "i64[b s]"}


def positions(i):
    return torch.arange(i.shape[1])


def test_golden():
    def function(w, p, i):
        return F.dropout(F.embedding(i, w, padding_idx=1) + F.embedding(positions(i)[None], p), 0.1, True)

    fused = fuse_with(EmbeddingSum, function, **WORDS)
    expect(
        fused.program,
        """\
        %0 = w                                                                                 # f32[7 4] param
        %1 = p                                                                                 # f32[9 4] param
        %2 = i                                                                                 # i64[b s]
        %3 = seed                                                                              # i64[] seed
        %4 = sym_size.int(%2, 1)                                                               # int s
        %5 = arange(%4, device=cpu, pin_memory=False)                                          # i64[s]
        %6 = unsqueeze(%5, 0)                                                                  # i64[1 s]
        %7 = embedding_sum(%0, %2, %1, %6, None, None, [1, -1, -1], %3, 0.1, 0, -1, [], 'tp')  # f32[b s 4]
        return %7""",
    )


FORMS = {
    "nanoGPT": (lambda w, p, i: F.dropout(F.embedding(i, w) + F.embedding(positions(i), p), 0.1, True), {}),
    "no dropout": (lambda w, p, i: F.embedding(i, w) + F.embedding(positions(i), p), {}),
    "the other order": (lambda w, p, i: F.dropout(F.embedding(positions(i), p) + F.embedding(i, w), 0.1, True), {}),
    "types": (
        lambda w, p, i, c, j: F.embedding(i, w) + F.embedding(j, c) + F.embedding(positions(i)[None], p),
        {"c": "param f32[k=2 h=4]", "j": "i64[b s]"},
    ),
    "a table as it is": (
        lambda w, p, i, x: F.dropout(F.embedding(i, w) + x, 0.1, True),
        {"x": "param f32[1 s h=4]"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    function, more = FORMS[form]
    given = {k: v for k, v in WORDS.items() if k != "p" or form != "a table as it is"}
    if form == "a table as it is":
        fused = fuse_with(EmbeddingSum, lambda w, i, x: function(w, None, i, x), **given, **more)
    else:
        fused = fuse_with(EmbeddingSum, function, **given, **more)
    assert fused.counts == {"embedding_sum": 1}, fused.near_misses
    assert not {"embedding", "dropout"} & set(fused.ops)


def test_positions_of_pictures():
    fused = fuse_with(EmbeddingSum, lambda x, p: F.dropout(x + p, 0.1, True), x="f32[b s h=4]", p="param f32[1 s h=4]")
    assert fused.ops == ["embedding_sum"]


def test_numbers_without_dropout():
    sizes = {"w": "param f32[v=99 h=4]", "p": "param f32[m=98 h=4]", "c": "param f32[k=97 h=4]", "j": "i64[b s]"}
    fused = fuse_with(EmbeddingSum, FORMS["types"][0], **WORDS | sizes)
    assert_same(fused.before, fused.program)


OTHERS = {
    "one lookup": (lambda w, p, i: F.embedding(i, w) * 2.0 + p[0], WORDS),
    "the residual stream": (lambda x, y: F.dropout(x + y, 0.1, True), {"x": "f32[b s h=4]", "y": "f32[b s h=4]"}),
    "sums without a table": (lambda x, p: x + p, {"x": "f32[b s h=4]", "p": "param f32[1 s h=4]"}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_left_alone(case):
    function, values = OTHERS[case]
    fused = fuse_with(EmbeddingSum, function, **values)
    assert not fused.counts and "embedding_sum" not in fused.ops


def test_a_second_use_leaves_the_lookup():
    def function(w, p, i):
        words = F.embedding(i, w)
        return words, F.dropout(words + F.embedding(positions(i), p), 0.1, True)

    fused = fuse_with(EmbeddingSum, function, **WORDS)
    assert fused.ops.count("embedding") == 1 and fused.ops.count("embedding_sum") == 1

    def between(w, p, i):
        total = F.embedding(i, w) + F.embedding(positions(i), p)
        return total, F.dropout(total, 0.1, True)

    fused = fuse_with(EmbeddingSum, between, **WORDS)
    assert fused.ops.count("embedding_sum") == 1 and fused.ops.count("dropout") == 1
    assert any("also used by the output" in reason for reason in fused.near_misses)
