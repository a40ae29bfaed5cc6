"""Covers: patterns/norms.py. Golden text, numbers, what is left alone and why. In models:
equivalence/test_patterns_in_models.py."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megafx.patterns.bias_dropout_add import BiasDropoutAdd, LinearBiasDropoutAdd
from megafx.patterns.norms import (
    SQUARES,
    AddNorm,
    DropoutAddNorm,
    LayerNorm,
    LinearAddNorm,
    RMSNorm,
    StandardDeviationNorm,
    WrittenLayerNorm,
    WrittenRMSNorm,
)  # fmt: skip
from megafx.testing import assert_same, expect, fuse_with

NORMS = [LayerNorm, RMSNorm, WrittenRMSNorm]
ALL = [*NORMS, AddNorm, LinearAddNorm, DropoutAddNorm, BiasDropoutAdd, LinearBiasDropoutAdd]
ROWS = {"x": "f32[b s h=6]", "w": "param f32[h=6]"}


def test_layer_norm():
    fused = fuse_with(NORMS, lambda x, w, c: F.layer_norm(x, (6,), w, c, 1e-3), **ROWS, c="param f32[h=6]")
    expect(
        fused.program,
        """\
        %0 = x                              # f32[b s 6]
        %1 = w                              # f32[6] param
        %2 = c                              # f32[6] param
        %3 = layer_norm(%0, %1, %2, 0.001)  # f32[b s 6]
        return %3""",
    )
    assert "megafx.layer_norm.default" in [str(n.target) for n in fused.program.graph.nodes]
    assert_same(fused.before, fused.program)


def test_layer_norm_without_vectors_and_rms_norm_of_torch():
    for function, found in (
        (lambda x, w: F.layer_norm(x, (6,), w) + w, "layer_norm"),
        (lambda x, w: F.layer_norm(x, (6,)) + w, "layer_norm"),
        (lambda x, w: F.rms_norm(x, (6,), w, 1e-3), "rms_norm"),
    ):
        fused = fuse_with(NORMS, function, **ROWS)
        assert fused.counts == {found: 1}
        assert_same(fused.before, fused.program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torchs_rms_norm_without_eps(dtype):
    """eps is then the dtype's own: seen on rows of small numbers."""
    short = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64"}[dtype]
    fused = fuse_with(NORMS, lambda x: F.rms_norm(x, (6,)), x=f"{short}[n h=6]")
    x = (torch.randn(4, 6) * torch.finfo(dtype).eps ** 0.5).to(dtype)
    with torch.no_grad():
        ours, theirs = fused.program.gm(x)[0], F.rms_norm(x, (6,))
    torch.testing.assert_close(ours, theirs)


def written(square, upcast, scale, root):
    return lambda x, w: (
        WrittenRMSNorm.match(
            x, None if scale == "none" else w, eps=1e-6, square=square, upcast=upcast, scale=scale, root=root
        )
        + (w if scale == "none" else 0 * w)
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "form", [*itertools.product(("pow", "product"), ("all", "statistics"), ("late", "unit", "none"))]
)
def test_written_rms_norms(dtype, form):
    square, upcast, scale = form
    values = {name: text.replace("f32", dtype) for name, text in ROWS.items()}
    for root in ("rsqrt", "sqrt"):
        fused = fuse_with(NORMS, written(square, upcast, scale, root), **values)
        assert fused.counts == {"written_rms_norm": 1}, fused.text
        assert f"1e-06, {float(scale == 'unit')}" in fused.text
        if dtype == "f32":
            assert_same(fused.before, fused.program)


@pytest.mark.parametrize("variance", ["var", "pow", "product", "pow again", "square again"])
def test_written_layer_norms(variance):
    forms = itertools.product(("all", "none"), ("rsqrt", "sqrt"), ("late", "wide", "none"), (True, False))
    for dtype, (upcast, root, affine, biased) in itertools.product(("f32", "bf16"), forms):
        if root == "sqrt" or not biased if dtype == "bf16" else upcast == "all" or affine == "wide":
            continue  # seen in the other dtype

        def written(x, w, c, how=(upcast, root, affine), biased=biased):
            vectors = (None, None) if how[2] == "none" else (w, c if biased else None)
            more = {"variance": variance, "upcast": how[0], "root": how[1], "affine": how[2]}
            return WrittenLayerNorm.match(x, *vectors, eps=1e-5, **more) + 0 * (w + c)

        values = {name: text.replace("f32", dtype) for name, text in {**ROWS, "c": "param f32[h=6]"}.items()}
        fused = fuse_with([WrittenLayerNorm, WrittenRMSNorm], written, **values)
        assert fused.counts == {"written_layer_norm": 1}, (upcast, root, affine, fused.text)
        if dtype == "f32":
            assert_same(fused.before, fused.program)


def test_a_norm_by_the_standard_deviation_stays_and_is_told():
    def annotated(x, w, c):
        return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + c

    fused = fuse_with([*NORMS, WrittenLayerNorm, StandardDeviationNorm], annotated, **ROWS, c="param f32[h=6]")
    assert not fused.counts and any("not LayerNorm's root" in str(note) for note in fused.program.notes)


def test_squares_are_squares():
    x = torch.randn(7)
    assert all(torch.equal(square(x), x * x) for square in SQUARES.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)),
        lambda x, w: F.layer_norm(x, (x.shape[-2], 6)) * w if x.shape[-2] == 3 else x * w,
    ],
)
def test_others_are_left_alone(function):
    fused = fuse_with(NORMS, function, x="f32[b s=3 h=6]", w="param f32[h=6]")
    assert not fused.counts and fused.text == fuse_with([], fused.before).text


def test_a_second_use_is_a_near_miss():
    def function(x, w):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y, w * y

    fused = fuse_with([WrittenRMSNorm], function, **ROWS)
    assert fused.counts == {"written_rms_norm": 1} and "rms_norm(%0, None" in fused.text  # what is inside is one itself

    def inner(x, w):
        mean = x.pow(2).mean(-1, keepdim=True)
        return mean, w * (x * torch.rsqrt(mean + 1e-6))

    fused = fuse_with([WrittenRMSNorm], inner, **ROWS)
    assert not fused.counts and any("also used by" in r for r in fused.near_misses), fused.near_misses


SUM = {
    "x": "f32[b s k=4]",
    "m": "param f32[h=6 k=4]",
    "b": "param f32[h=6]",
    "r": "f32[b s h=6]",
    "w": "param f32[h=6]",
}


def test_golden_sum_and_norm():
    def function(x, m, b, r, w):
        h = r + F.dropout(F.linear(x, m, b), 0.1, True)
        return h, F.layer_norm(h, (6,), w, b, 1e-3)

    fused = fuse_with(ALL, function, **SUM)
    expect(
        fused.program,
        """\
        %0 = x                                                                                 # f32[b s 4]
        %1 = m                                                                                 # f32[6 4] param
        %2 = b                                                                                 # f32[6] param
        %3 = r                                                                                 # f32[b s 6]
        %4 = w                                                                                 # f32[6] param
        %5 = seed                                                                              # i64[] seed
        %6 = linear(%0, %1)                                                                    # f32[b s 6]
        %7 = bias_dropout_add_layer_norm(%6, %2, %3, %4, %2, 0.001, %5, 0.1, 0, -1, [], 'tp')  # (f32[b s 6], f32[b s 6], f32[b s], f32[b s])
        %8 = operator.getitem(%7, 0)                                                           # f32[b s 6]
        %9 = operator.getitem(%7, 1)                                                           # f32[b s 6]
        return %8, %9""",  # noqa: E501
    )
    assert_same(fused.before, fused.program)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms", "centred"])
@pytest.mark.parametrize("sum_of", ["linear", "plain", "dropout"])
def test_sums_and_norms(sum_of, kind, stream):
    """The sum used further on (a residual stream) or by the norm alone."""

    def function(x, m, b, r, w):
        y = F.linear(x, m, b if sum_of == "linear" else None)
        h = (F.dropout(y, 0.1, True) if sum_of == "dropout" else y) + r
        if kind == "layer":
            out = F.layer_norm(h, (6,), w, None, 1e-3)
        else:
            n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            out = n * (1.0 + w) if kind == "centred" else w * n
        return (h, out, b) if stream else (out, b)

    fused = fuse_with(ALL, function, **SUM)
    found = {"linear": "linear_add_norm", "plain": "add_norm", "dropout": "dropout_add_norm"}[sum_of]
    assert fused.counts.get(found) == 1, fused.text
    assert "bias_dropout_add_layer_norm" in fused.text if kind == "layer" else "bias_dropout_add_rms_norm" in fused.text
    assert_same(fused.before, fused.program)


def written_once(x, w, late):
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * y.to(x.dtype) if late else (w.float() * y).to(x.dtype)


@pytest.mark.parametrize(("rows", "weights"), [("bf16", "f32"), ("f32", "bf16")])
@pytest.mark.parametrize("form", ["layer_norm", "late", "wide"])
def test_weights_of_another_dtype(rows, weights, form):
    """fp32 vectors in a bf16 model, and the reverse: the dtype of the result is eager's, its value as near to fp64."""
    function = {
        "layer_norm": lambda x, w: F.layer_norm(x, (6,), w),
        "late": lambda x, w: written_once(x, w, True),
        "wide": lambda x, w: written_once(x, w, False),
    }[form]
    fused = fuse_with(ALL, function, x=f"{rows}[b s h=6]", w=f"param {weights}[h=6]")
    assert sum(fused.counts.values()) == 1, fused.near_misses
    if (rows, form) == ("f32", "layer_norm"):
        return  # torch itself computes no such call
    dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}
    x, w = torch.randn(2, 3, 6).to(dtypes[rows]), torch.randn(6).to(dtypes[weights])
    ours, eager, exact = fused.program.gm(x, w)[0], function(x, w), function(x.double(), w.double()).double()
    assert ours.dtype == eager.dtype
    assert (ours.double() - exact).abs().max() <= 2 * (eager.double() - exact).abs().max() + 1e-6


def test_a_sum_and_a_norm_with_fp32_vectors():
    def function(x, r, w):
        h = x + r
        return h, F.layer_norm(h, (6,), w)

    fused = fuse_with(ALL, function, x="bf16[b s h=6]", r="bf16[b s h=6]", w="param f32[h=6]")
    assert fused.counts == {"layer_norm": 1, "add_norm": 1}
    x, r, w = torch.randn(2, 3, 6).bfloat16(), torch.randn(2, 3, 6).bfloat16(), torch.randn(6)
    for ours, eager in zip(fused.program.gm(x, r, w), function(x, r, w), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
