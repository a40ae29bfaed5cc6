"""Covers: kernels/attention/masked_softmax.py, kernels/attention/masked_softmax_launch.py,
kernels/attention/masked_softmax_triton.py.

The oracle is eager torch, step by step.
"""

import itertools
import math

import pytest
import torch
from kernel_checks import run_as_script

import megafx.kernels.attention.masked_softmax  # noqa: F401  registers the ops
from megafx.ops import axes
from megafx.placements.types import Layout

ops = torch.ops.megafx
SEED = torch.tensor(-987654321012345)
TIGHT = {"rtol": 1e-12, "atol": 1e-13}
INF = math.inf


def softmax(x, mask=None, scale=1.0, causal=False, window=0, fill=-INF, p=0.0, op_id=3, shard=(-1, [])):
    return ops.scale_mask_softmax(x, mask, scale, causal, window, fill, SEED, p, op_id, *shard, "tp")


def eager(x, mask, scale, causal, window, fill, p):
    """As users write it; the dropout is megafx's."""
    s, t = x.shape[-2:]
    z = x * scale
    if mask is not None:
        z = z.masked_fill(mask, fill) if mask.dtype == torch.bool else z + mask
    if causal:
        z = z.masked_fill(torch.ones(s, t, dtype=torch.bool).triu(t - s + 1), fill)
    if window:
        z = z.masked_fill(torch.ones(s, t, dtype=torch.bool).tril(t - s - window), fill)
    return ops.dropout(torch.softmax(z, -1), SEED, p, 3, -1, [], "tp")


def masks(b, h, s, t):
    padding = (torch.arange(t)[None] >= torch.tensor([t, max(t - 2, 1)])[:b, None])[:, None, None, :]
    return {
        "none": None,
        "padding": padding,
        "each": torch.rand(b, 1, s, t) < 0.3,
        "added": padding.double() * torch.finfo(torch.float64).min,
        "bias": torch.randn(1, h, s, t, dtype=torch.float64),
        "nothing seen": torch.ones(1, 1, s, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("fill", [-INF, torch.finfo(torch.float32).min, -10000.0, -2.0])
@pytest.mark.parametrize("kind", ["none", "padding", "each", "added", "bias", "nothing seen"])
def test_values_and_gradients(kind, fill, p):
    """Every mask, with and without causality and a window, square and not; rows that see nothing come out as in eager."""
    for s, t, causal, window in [(5, 5, False, 0), (5, 5, True, 0), (6, 6, True, 2), (3, 7, True, 0), (1, 9, True, 4)]:
        torch.manual_seed(s * t)
        mask = masks(2, 3, s, t)[kind]
        x = torch.randn(2, 3, s, t, dtype=torch.float64, requires_grad=True)
        if mask is not None and mask.is_floating_point():
            mask.requires_grad_()
        y = softmax(x, mask, 0.7, causal, window, fill, p)
        expected = eager(x, mask, 0.7, causal, window, fill, p)
        torch.testing.assert_close(y, expected, equal_nan=True, **TIGHT)
        g = torch.randn_like(y)
        wanted = [x, mask] if mask is not None and mask.requires_grad else [x]
        found, right = torch.autograd.grad(y, wanted, g), torch.autograd.grad(expected, wanted, g)
        if y.isnan().any():
            continue  # the gradient of a row of nan is nan in eager, 0 here: both follow from what is written
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, **TIGHT)


def test_gradcheck():
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    for p in (0.0, 0.4):
        assert torch.autograd.gradcheck(lambda a, b, p=p: softmax(a, b, 1.3, True, 0, -1e4, p), (x, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_closer_than_eager(dtype):
    """fp32 inside, rounded once: an error no larger than that of eager with its fp32 softmax."""
    torch.manual_seed(0)
    x = (torch.randn(2, 4, 33, 47) * 8).to(dtype)
    exact = eager(x.double(), None, 0.3, True, 0, -INF, 0.0)
    y = softmax(x, None, 0.3, True, 0, -INF)
    theirs = torch.softmax((x * 0.3).masked_fill(torch.ones(33, 47).triu(15).bool(), -INF), -1, torch.float32).to(dtype)
    ours_error, their_error = ((v.double() - exact).norm() for v in (y, theirs))
    assert y.dtype == dtype and ours_error <= 1.05 * their_error


def test_fp16_rows_that_see_nothing():
    """finfo.min of fp16 hides completely, although fp32 arithmetic could tell -65504 + score from -65504."""
    x = torch.randn(1, 1, 2, 8).half()
    mask = torch.full((1, 1, 2, 8), torch.finfo(torch.float16).min, dtype=torch.float16)
    assert torch.equal(softmax(x, mask), torch.full_like(x, 0.125))


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("n", [4, 7])
def test_shards_draw_the_bits_of_one_process(t, dim, n):
    """Cut along batch or heads, divisible or not: bit-equal slices, gradient too."""
    shape, layout = [3, 3, 5, 6], Layout.contiguous(n, t)
    shape[dim] = n
    x, g = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)
    y = softmax(x, None, 0.5, True, 0, -INF, 0.4)
    (dx,) = torch.autograd.grad(y, x, g)
    for rank in range(t):
        shape[dim] = layout.local_size(t)
        local, grad = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        for start, at, length in layout.pieces(rank, t):
            local.narrow(dim, at, length).copy_(x.detach().narrow(dim, start, length))
            grad.narrow(dim, at, length).copy_(g.narrow(dim, start, length))
        with axes.on_mesh({"tp": axes.AxisContext(rank, t, "")}):
            out = softmax(local.requires_grad_(), None, 0.5, True, 0, -INF, 0.4, shard=(dim, list(layout.flat())))
            (found,) = torch.autograd.grad(out, local, grad)
        for start, at, length in layout.pieces(rank, t):
            assert torch.equal(out.narrow(dim, at, length), y.narrow(dim, start, length))
            assert torch.equal(found.narrow(dim, at, length), dx.narrow(dim, start, length))


def test_what_is_saved():
    """y alone without dropout; with it the scores and two numbers a row, never a mask of the dropout."""
    x = torch.randn(2, 2, 8, 16, requires_grad=True)
    for p, expected in ((0.0, [(2, 2, 8, 16)]), (0.1, [(), (2, 2, 8, 2), (2, 2, 8, 16)])):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda s, saved=saved: saved.append(s) or s, lambda s: s):
            softmax(x, p=p)
        assert sorted(tuple(s.shape) for s in saved) == expected
        assert all(s.dtype != torch.bool for s in saved)


def test_edges():
    x = torch.randn(3, 4, 6).transpose(0, 1)
    assert torch.equal(softmax(x), softmax(x.contiguous()))
    assert torch.equal(softmax(x, p=1.0), torch.zeros(4, 3, 6))
    assert softmax(torch.empty(0, 4, 6)).shape == (0, 4, 6) and softmax(torch.empty(2, 4, 0)).shape == (2, 4, 0)
    with pytest.raises(ValueError, match="probability must be between"):
        softmax(x, p=1.5)
    with pytest.raises(ValueError, match="does not fit"):
        softmax(x, torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[..., S, T\]"):
        softmax(x[0, 0])
    with pytest.raises(ValueError, match="leading dims only"):
        softmax(x, p=0.5, shard=(1, [1, 4, 1]))


def triton_checks():
    from megafx.kernels.attention import masked_softmax as plain
    from megafx.kernels.attention import masked_softmax_launch as fast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    INF, MIN = float("inf"), torch.finfo(torch.float32).min
    SEED = torch.tensor(123456789012345)

    def check(shape, mask, causal=False, window=0, fill=-INF, p=0.0, dtype=torch.float32, shard=(-1, []), soft=1e-6):
        x, g = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
        how, tail = (0.7, causal, window, fill), (SEED, p, 5, *shard, "tp")
        eps = torch.finfo(dtype).eps
        there = None if mask is None else mask.to(device)
        with axes.on_mesh({"tp": axes.AxisContext(1, 2, "")}):
            y, stats = plain.forward_reference(x, mask, *how, *tail)
            found, _ = fast.forward(x.to(device), there, *how, *tail)
            close = dict(rtol=max(2 * eps, 2e-5), atol=soft, equal_nan=True)
            torch.testing.assert_close(found.cpu(), y, **close)
            if p and not y.isnan().any():
                assert torch.equal(found.cpu() == 0, y == 0)
            saved, rows = (x, stats) if p else (y, None)
            expected = plain.backward_reference(g, saved, mask, rows, *how, *tail)
            rows = None if rows is None else rows.to(device)
            found = fast.backward(g.to(device), saved.to(device), there, rows, *how, *tail)
            torch.testing.assert_close(found.cpu(), expected, **close | dict(atol=max(10 * eps, 1e-5)))

    torch.manual_seed(0)
    fills = itertools.cycle(((-1e4, 0.0), (-INF, 0.3), (-1.5, 0.3)))  # a mask meets all three, in one form each
    for S, T, causal, window in ((5, 8, True, 0), (3, 17, False, 0), (7, 5, True, 3), (1, 40, True, 0)):
        B, H = 2, 2
        padding = (torch.arange(T)[None] >= torch.tensor([T, max(T // 2, 1)])[:, None])[:, None, None, :]
        left = (torch.arange(T)[None] < torch.tensor([0, T])[:, None])[:, None, None, :]
        added = torch.where(left, MIN, 0.0)
        for mask in (
            None,
            padding,
            left,
            torch.rand(B, 1, S, T) < 0.4,
            added,
            torch.randn(1, H, S, T),
            padding[..., :1],
        ):
            check((B, H, S, T), mask, causal, window, *next(fills))
    for dtype in (torch.bfloat16, torch.float16):
        check((4, 6, 8), torch.rand(4, 6, 8) < 0.3, True, 0, -1e4, 0.3, dtype)
        check((2, 2, 3, 6, 8), torch.rand(2, 1, 3, 6, 8) < 0.3, True, 0, -1e4, 0.0, dtype)
    check((2, 2, 6, 8), None, True, 0, -INF, 0.3, shard=(1, [1, 4, 1]))
    check((2, 2, 6, 7), None, True, 0, -INF, 0.3, shard=(0, [1, 3, 1]))
    rows = torch.rand(1, 1, 3, 600) < 0.5  # of many keys: nothing seen, the first quarter, all but it
    rows[:, :, 0], rows[:, :, 1, 100:], rows[:, :, 2, :100] = True, True, True
    for fill in (-INF, -1e4, 0.0):
        check((1, 2, 3, 600), rows, False, 0, fill, 0.1)
        check((1, 2, 3, 600), rows, True, 0, fill, 0.0)
    if device == "cuda":
        for p in (0.0, 0.1):
            check((2, 3, 1024, 1024), None, True, 0, -INF, p)
            check((1, 2, 700, 700), None, True, 100, -1e4, p, torch.bfloat16)


def test_triton_kernel_is_the_reference():
    run_as_script(__file__, 300)


if __name__ == "__main__":
    triton_checks()
