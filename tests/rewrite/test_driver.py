"""Covers: rewrite/driver.py, match.py, replace.py. What is found and replaced, what is not and why.

Each rewrite is golden and computes the same.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from toys import AddNorm, BiasGelu, DropAdd, Rms, TurnBoth, half_turn, toy

from megafx import Pattern
from megafx.ir.program import MADE_BY, fqn_of
from megafx.rewrite.pattern import PatternError
from megafx.testing import assert_same, canonical, expect, fuse_with

LINEAR = {"x": "f32[b s k=4]", "w": "param f32[n=8 k=4]", "b": "param f32[n=8]"}
ROWS = {"x": "f32[b s h=4]", "w": "param f32[h=4]"}


def gelu_mlp(x, w, b):
    return F.gelu(F.linear(x, w, b))


def test_replaces_a_match():
    fused = fuse_with(BiasGelu, gelu_mlp, **LINEAR)
    expect(
        fused.program,
        """\
        %0 = x                # f32[b s 4]
        %1 = w                # f32[8 4] param
        %2 = b                # f32[8] param
        %3 = linear(%0, %1)   # f32[b s 8]
        %4 = toy.act(%3, %2)  # f32[b s 8]
        return %4""",
    )
    assert fused.counts == {"bias_gelu": 1} and fused.near_misses == []
    assert_same(fused.before, fused.program)


def test_leaves_what_does_not_match():
    fused = fuse_with(BiasGelu, lambda x, w, b: F.silu(F.linear(x, w, b)), **LINEAR)
    assert (fused.counts, fused.near_misses, fused.text) == ({}, [], fused.text)
    assert fused.ops == ["linear", "silu"]


def test_an_optional_operand():
    fused = fuse_with(BiasGelu, lambda x, w: F.gelu(F.linear(x, w)), x=LINEAR["x"], w=LINEAR["w"])
    assert fused.ops == ["linear", "toy.act"]
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize(
    "sizes", ["f32[b=2 s=3 k=4]", "f32[b s k=4]", "f32[s k=4]", "f32[a b s k=4]", "f32[k=4]"], ids=str
)
def test_any_leading_dims_static_or_dynamic(sizes):
    fused = fuse_with(BiasGelu, gelu_mlp, **(LINEAR | {"x": sizes}))
    assert fused.counts == {"bias_gelu": 1}
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_any_floating_dtype(dtype):
    fused = fuse_with(BiasGelu, gelu_mlp, **{name: text.replace("f32", dtype) for name, text in LINEAR.items()})
    assert fused.counts == {"bias_gelu": 1}


def test_letters_of_dtypes_are_the_same_dtype():
    fused = fuse_with(
        Rms, lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)), x="bf16[b h=4]", w="f32[h=4]"
    )
    assert fused.counts == {}


def norm(order):
    def call(x, w):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = x * root if order[0] else root * x
        return w * normed if order[1] else normed * w

    return call


@pytest.mark.parametrize("order", [(a, b) for a in (0, 1) for b in (0, 1)])
def test_operands_commute(order):
    fused = fuse_with(Rms, norm(order), **ROWS)
    expect(
        fused.program,
        """\
        %0 = x                            # f32[b s 4]
        %1 = w                            # f32[4] param
        %2 = toy.rms_norm(%0, %1, 1e-06)  # f32[b s 4]
        return %2""",
    )
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("eps", [1e-5, 0.25, 1])
def test_numbers_are_captured(eps):
    fused = fuse_with(Rms, lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)), **ROWS)
    assert fused.program.graph.find_nodes(op="call_function", target=toy.rms_norm.default)[0].args[2] == eps


def test_dims_count_from_either_end():
    fused = fuse_with(Rms, lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 0.1)), **ROWS)
    assert fused.counts == {"rms": 1}
    other = fuse_with(Rms, lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 0.1)), **ROWS)
    assert other.counts == {}


def test_an_outside_user_refuses():
    fused = fuse_with(BiasGelu, lambda x, w, b: (y := F.linear(x, w, b), F.gelu(y)), **LINEAR)
    assert fused.counts == {}
    assert fused.near_misses == ["linear (%linear) inside of it is also used by the output"]
    assert [str(n) for n in fused.program.notes] == [
        "fuse: bias_gelu does not match: linear (%linear) inside of it is also used by the output"
    ]


def test_a_result_may_be_used_often():
    fused = fuse_with(BiasGelu, lambda x, w, b: (y := F.gelu(F.linear(x, w, b)), y * 2), **LINEAR)
    assert fused.counts == {"bias_gelu": 1}
    assert_same(fused.before, fused.program)


def test_masks_may_be_used_elsewhere():
    class Masked(Pattern):
        name = "masked"
        tensors = {"x": "D[b s t]"}

        def match(x):
            keys = torch.arange(x.shape[2], device=x.device)
            queries = torch.arange(x.shape[1], device=x.device)
            return x.masked_fill(keys[None, :] > queries[:, None], 0.0)

        def make(x):
            return torch.tril(x)

    def layers(x, y):
        keys, queries = torch.arange(x.shape[2]), torch.arange(x.shape[1])
        mask = keys[None, :] > queries[:, None]
        return x.masked_fill(mask, 0.0), y.masked_fill(mask, 0.0)

    fused = fuse_with(Masked, layers, x="f32[b s t]", y="f32[b s t]")
    assert fused.counts == {"masked": 2}
    assert fused.ops == ["tril", "tril"]
    assert_same(fused.before, fused.program)


def test_where_refuses_with_its_reason():
    fused = fuse_with(DropAdd, lambda x, r: r + x, x="f32[b h=4]", r="f32[b h=4]")
    assert (fused.counts, fused.near_misses) == ({}, ["a plain sum needs no kernel"])


def test_a_result_of_another_dtype_refuses():
    class Wide(Pattern):
        name = "wide"
        tensors = {"x": "D[... h]"}

        def match(x):
            return torch.relu(x)

        def make(x):
            return torch.relu(x.float())

    fused = fuse_with(Wide, lambda x: torch.relu(x), x="bf16[b h=4]")
    assert fused.near_misses == ["it would make f32[s0, 4] of bf16[s0, 4]".replace("s0", str(_symbol(fused)))]


def _symbol(fused):
    return fused.before.placeholders()[0].meta["val"].shape[0]


def test_dropout_keeps_its_number_and_probability():
    def block(x, r):
        for p in (0.1, 0.25):
            r = r + F.dropout(x, p, True)
        return r

    fused = fuse_with(DropAdd, block, x="f32[b s h=4]", r="f32[b s h=4]")
    expect(
        fused.program,
        """\
        %0 = x                                                      # f32[b s 4]
        %1 = r                                                      # f32[b s 4]
        %2 = seed                                                   # i64[] seed
        %3 = toy.drop_add(%0, None, %1, %2, 0.1, 0, -1, [], 'tp')   # f32[b s 4]
        %4 = toy.drop_add(%0, None, %3, %2, 0.25, 1, -1, [], 'tp')  # f32[b s 4]
        return %4""",
    )
    assert_same(fused.before, fused.program)


def test_dropout_that_is_off():
    fused = fuse_with(DropAdd, lambda x, b, r: x + b + r, x="f32[b s h=4]", b="param f32[h=4]", r="f32[b s h=4]")
    assert fused.counts == {"drop_add": 1}
    node = fused.program.graph.find_nodes(op="call_function", target=toy.drop_add.default)[0]
    assert node.args[3:] == (None, 0.0, 0, -1, [], "tp")
    assert_same(fused.before, fused.program)


ROPE = {"q": "f32[b n=4 s d=6]", "k": "f32[b n=2 s d=6]", "c": "f32[b o=1 s d=6]", "z": "f32[b o=1 s d=6]"}


def rope(q, k, c, z):
    return q * c + half_turn(q) * z, k * c + half_turn(k) * z


def test_several_results():
    fused = fuse_with(TurnBoth, rope, **ROPE)
    expect(
        fused.program,
        """\
        %0 = q                              # f32[b 4 s 6]
        %1 = k                              # f32[b 2 s 6]
        %2 = c                              # f32[b 1 s 6]
        %3 = z                              # f32[b 1 s 6]
        %4 = toy.turn_both(%0, %1, %2, %3)  # (f32[b 4 s 6], f32[b 2 s 6])
        %5 = operator.getitem(%4, 0)        # f32[b 4 s 6]
        %6 = operator.getitem(%4, 1)        # f32[b 2 s 6]
        return %5, %6""",
    )
    assert_same(fused.before, fused.program)


def test_several_results_pair_with_the_nearest():
    def layers(q, k, c, z):
        a, b = rope(q, k, c, z)
        d, e = rope(q * 2, k * 3, c, z)
        return a, b, d, e

    fused = fuse_with(TurnBoth, layers, **ROPE)
    assert fused.counts == {"turn_both": 2}
    assert_same(fused.before, fused.program)


def test_users_of_a_result_move_behind_a_late_operand():
    def late(q, k, c, z):
        a = (q * c + half_turn(q) * z).transpose(1, 2).relu()
        k = k * 3
        return a, k * c + half_turn(k) * z

    fused = fuse_with(TurnBoth, late, **ROPE)
    assert fused.ops == ["mul", "toy.turn_both", "operator.getitem", "operator.getitem", "transpose.int", "relu"]
    assert_same(fused.before, fused.program)


def test_an_operand_made_of_a_result_refuses():
    def circle(q, k, c, z):
        a = q * c + half_turn(q) * z
        k = k + a.mean()
        return a, k * c + half_turn(k) * z

    fused = fuse_with(TurnBoth, circle, **ROPE)
    assert fused.counts == {}
    assert "its results are used before all of its operands are there" in fused.near_misses


def test_a_result_inside_of_the_match():
    fused = fuse_with(
        [Rms, AddNorm],
        lambda x, y, w: (h := x + y, h + norm((1, 1))(h, w)),
        x="f32[b s h=4]",
        y="f32[b s h=4]",
        w="param f32[h=4]",
    )
    assert fused.counts == {"rms": 1, "add_norm": 1}
    assert fused.ops == ["toy.add_norm", "operator.getitem", "operator.getitem", "add"]
    assert_same(fused.before, fused.program)


def test_larger_patterns_come_first():
    class Gelu(Pattern):
        name = "a_gelu"
        tensors = {"x": "D[... h]"}

        def match(x):
            return F.gelu(x)

        def make(x):
            return toy.act(x, None)

    assert fuse_with([Gelu, BiasGelu], gelu_mlp, **LINEAR).counts == {"bias_gelu": 1}
    assert fuse_with([Gelu, BiasGelu], lambda x: F.gelu(x), x="f32[b h=4]").counts == {"a_gelu": 1}


def test_what_a_pattern_makes_is_part_of_another():
    class Twice(Pattern):
        name = "a_twice"
        tensors = {"x": "D[... h]", "weight": "D[h]"}
        scalars = {"eps": float}

        def match(x, weight, *, eps):
            return toy.rms_norm(toy.rms_norm(x, weight, eps), weight, eps)

        def make(x, weight, *, eps):
            return toy.rms_norm(x, weight, eps + 1)

    fused = fuse_with([Twice, Rms], lambda x, w: norm((1, 1))(norm((1, 1))(x, w), w), **ROWS)
    assert fused.counts == {"rms": 2, "a_twice": 1}


def test_a_pattern_does_not_match_what_it_made():
    class Again(Pattern):
        name = "again"
        tensors = {"x": "D[... h]"}

        def match(x):
            return torch.relu(x)

        def make(x):
            return torch.relu(x)

    assert fuse_with(Again, lambda x: torch.relu(torch.relu(x)), x="f32[b h=4]").counts == {"again": 2}


def test_sizes_are_expressions():
    class Heads(Pattern):
        name = "heads"
        tensors = {"x": "D[b s n*d]"}
        scalars = {"n": int}

        def match(x, *, n):
            return x.view(x.shape[0], x.shape[1], n, x.shape[2] // n).transpose(1, 2)

        def make(x, *, n, d):
            return toy.scaled(x, 1.0).reshape(x.shape[0], -1, n, d).permute(0, 2, 1, 3)

    for shape in ("f32[b s h=24]", "f32[b=2 s=3 h=24]"):
        fused = fuse_with(Heads, lambda x: x.view(x.shape[0], x.shape[1], 6, 4).transpose(1, 2), x=shape)
        assert fused.counts == {"heads": 1} and fused.ops[-3:] == ["toy.scaled", "reshape", "transpose.int"]
        assert_same(fused.before, fused.program)
    other = fuse_with(Heads, lambda x: x.view(x.shape[1], x.shape[0], 6, 4).transpose(1, 2), x="f32[b s h=24]")
    assert (other.counts, other.near_misses) == ({}, ["its sizes are not those of the pattern"])


def test_new_nodes_know_where_they_come_from():
    program = canonical(gelu_mlp, **LINEAR)
    linear, gelu = (n for n in program.graph.nodes if n.op == "call_function")
    linear.meta["fqn"], gelu.meta["fqn"] = "mlp.up", "mlp"
    fused = fuse_with(BiasGelu, program)
    made = [n for n in fused.program.graph.nodes if n.op == "call_function"]
    assert [fqn_of(n) for n in made] == ["mlp.up", "mlp"]
    assert all(n.meta[MADE_BY][-1] == "fuse" for n in made)
    assert [(f.pattern, f.fqn) for f in fused.program.fusions] == [("bias_gelu", "mlp")]


def test_the_same_twice():
    texts = {fuse_with([BiasGelu, Rms, DropAdd], gelu_mlp, **LINEAR).text for _ in range(3)}
    assert len(texts) == 1


def test_nothing_left_to_do_the_second_time():
    once = fuse_with([BiasGelu, Rms], gelu_mlp, **LINEAR)
    twice = fuse_with([BiasGelu, Rms], once.program)
    assert twice.counts == {} and twice.text == once.text


def test_partial_matches_say_what_is_different():
    fused = fuse_with(Rms, lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 0.1)), **ROWS)
    assert fused.near_misses == ["3 is where the pattern has 2"]
    assert fused.program.notes == []


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: F.dropout(x, 0.5, True), "draws random numbers by aten.dropout.default"),
        (lambda x: x.add_(1), "writes in place"),
        (lambda x: x.no_such_method(), "make cannot be traced: AttributeError"),
        (lambda x: (x, x), "match has 1 results, make 2"),
    ],
    ids=["draws", "in place", "error", "results"],
)
def test_a_wrong_make_is_an_error(make, message):
    class Wrong(Pattern):
        name = "wrong"
        tensors = {"x": "D[... h]"}

        def match(x):
            return torch.relu(x)

    Wrong.make = staticmethod(make)
    with pytest.raises(PatternError, match=message):
        fuse_with(Wrong, lambda x: torch.relu(x), x="f32[b h=4]")


def test_where_may_refuse_without_a_word():
    class Silent(DropAdd):
        name = "silent"

        def where(m):
            return ""

    fused = fuse_with(Silent, lambda x, r: r + x, x="f32[b h=4]", r="f32[b h=4]")
    assert (fused.counts, fused.near_misses) == ({}, [])
