"""Covers: kernels/loss/vocab_linear_cross_entropy.py, kernels/loss/logits_chunks.py. The oracle is F.cross_entropy of
F.linear, whole."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import megafx.kernels.loss.logits_chunks as chunks
import megafx.kernels.loss.vocab_linear_cross_entropy  # noqa: F401  registers the ops
from megafx.ops.axes import AxisContext, on_mesh
from megafx.placements.types import Layout

ops = torch.ops.megafx
TIGHT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)


def case(tokens, classes, bias=True, dtype=torch.float64):
    torch.manual_seed(tokens + classes)
    x, w, b = torch.randn(tokens, 16), torch.randn(classes, 16) * 0.5, torch.randn(classes)
    y = torch.randint(0, classes, (tokens,))
    y[1:3] = -100
    x, w, b = (v.to(dtype) for v in (x, w, b))
    return (
        x,
        w,
        b if bias else None,
        y,
        torch.rand(tokens).to(torch.float64 if dtype == torch.float64 else torch.float32),
    )


def eager(x, w, b, y, g, smoothing=0.0):
    """Loss of each token and gradients, those of half types by way of fp32 logits, as models compute them."""
    leaves = [v.detach().requires_grad_() for v in (x, w, b) if v is not None]
    logits = F.linear(*leaves)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss, leaves, g)


def sharded(x, w, b, y, g, t, smoothing=0.0):
    """The same on t ranks: their losses, which must be one, and the gradients put together."""
    classes = len(w)
    layout, rows = list(Layout.contiguous(classes, t).flat()), -(-classes // t)
    pad = w.new_zeros(rows * t - classes, w.shape[1])
    weights = torch.cat([w, pad]).split(rows)
    biases = [None] * t if b is None else torch.cat([b, pad[:, 0]]).split(rows)
    ranks = [{"tp": AxisContext(rank, t)} for rank in range(t)]
    stats, losses, found = [], [], []
    for rank in range(t):
        with on_mesh(ranks[rank]):
            stats.append(ops.linear_ce_stats(x, weights[rank], biases[rank], y, layout, t, "tp"))
    for rank in range(t):
        leaves = [None if v is None else v.detach().requires_grad_() for v in (x, weights[rank], biases[rank])]
        with on_mesh(ranks[rank]):
            loss = ops.linear_ce_loss(*leaves, y, torch.stack(stats), -100, smoothing, False, layout, t, "tp")
            losses.append(loss.detach())
            found.append(torch.autograd.grad(loss, [v for v in leaves if v is not None], g))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for _, *own in found[-1:]:
        assert all(not v[len(v) - len(pad) :].any() for v in own)
    dx = torch.stack([f[0].double() for f in found]).sum(0)
    return losses[0], (dx, *(torch.cat(each)[:classes] for each in zip(*(f[1:] for f in found), strict=True)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("t, classes", [(1, 37), (2, 67), (3, 67), (4, 67), (4, 5)])
def test_loss_and_gradients(t, classes, bias):
    """Uneven vocabularies, a rank without any class, several chunks, ignored tokens, a gradient for each token."""
    args = case(300, classes, bias)
    (loss, found), (expected, right) = sharded(*args, t, 0.1), eager(*args, 0.1)
    torch.testing.assert_close(loss, expected, **TIGHT)
    for a, c in zip(found, right, strict=True):
        torch.testing.assert_close(a, c, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-12, 2.0**7])
def test_low_precision(dtype, scale):
    """No more than twice the error of eager; in fp16 also where a loss scale is very large or the mean very small."""
    x, w, b, y, g = case(500, 67, dtype=dtype)
    scale = scale if dtype == torch.float16 else 1.0
    exact = eager(x.double(), w.double(), b.double(), y, g.double())[1]
    theirs = eager(x, w, b, y, g)[1]
    ours = sharded(x, w, b, y, g * scale, 2)[1]
    for a, c, r in zip(ours, theirs, exact, strict=True):
        assert a.isfinite().all()
        assert (a.double() / scale - r).norm() <= 2 * (c.double() - r).norm()


def test_no_gradient_and_no_tokens():
    args = case(6, 7, dtype=torch.float16)
    assert all(not v.any() for v in sharded(*args[:4], torch.zeros(6), 2)[1])
    x, w, b, y, g = case(3, 7)
    loss, found = sharded(x[:0], w, b, y[:0], g[:0], 2)
    assert loss.shape == (0,) and found[0].shape == (0, 16) and all(not v.any() for v in found[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_mean_over_no_label_at_all(dtype):
    """Ignored tokens get no gradient, be that from above infinite."""
    x, w, b, y, g = case(6, 7, dtype=dtype)
    y.fill_(-100)
    assert all(torch.equal(v, torch.zeros_like(v)) for v in sharded(x, w, b, y, g / 0, 2)[1])


def test_joint_graph():
    """Three nodes for every number of tokens; the rank is asked for when the graph runs."""

    def step(x, w, y, everyone, g):
        stats = ops.linear_ce_stats(x.detach(), w.detach(), None, y, [1, 7, 1], 2, "tp")
        loss = ops.linear_ce_loss(x, w, None, y, everyone, -100, 0.1, False, [1, 7, 1], 2, "tp")
        return stats, loss, *torch.autograd.grad(loss, (x, w), g)

    x, w, _, y, g = case(5, 7)
    example = (x.requires_grad_(), w[:4].clone().requires_grad_(), y, torch.zeros(2, 5, 4).double(), g)
    gm = make_fx(step, tracing_mode="symbolic")(*example)
    names = [str(n.target) for n in gm.graph.nodes if "megafx" in str(n.target)]
    assert names == [f"megafx.linear_ce_{n}.default" for n in ("stats", "loss", "loss_backward")]
    x, w, _, y, g = case(9, 7)
    parts = [w[:4], torch.cat([w[4:], torch.zeros(1, 16).double()])]
    everyone = torch.zeros(2, 9, 4, dtype=x.dtype)
    for _ in range(2):  # first the statistics, then what they give
        outs = []
        for rank in range(2):
            with on_mesh({"tp": AxisContext(rank, 2)}):
                outs.append(gm(x, parts[rank], y, everyone, g))
        everyone = torch.stack([o[0] for o in outs])
    loss, (dx, dw) = eager(x, w, None, y, g, 0.1)
    torch.testing.assert_close(outs[1][1], loss, **TIGHT)
    torch.testing.assert_close(outs[0][2] + outs[1][2], dx, **TIGHT)
    torch.testing.assert_close(torch.cat([o[3] for o in outs])[:7], dw, **TIGHT)


def test_never_more_than_a_chunk_of_logits():
    """An eighth of them at most is read or written by any op, and none is kept."""
    x, w, _, y, g = case(2048, 331, dtype=torch.float32)
    saved = []
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile,
        torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s),
    ):
        sharded(x, w, None, y, g, 1)
    shapes = [tuple(s) for e in profile.events() for s in e.input_shapes if s and all(isinstance(n, int) for n in s)]
    assert max(torch.Size(s).numel() for s in shapes if 331 in s) == 256 * 331
    assert all(331 not in s.shape or tuple(s.shape) == (331, 16) for s in saved)


def test_padding_of_the_vocabulary(monkeypatch):
    """What CUDA does for vocabularies that are no multiple of CLASS_ALIGNMENT changes nothing."""
    args = case(300, 67)
    before = sharded(*args, 2, 0.1)
    monkeypatch.setattr(chunks, "class_padding", lambda classes, device: -classes % 64)
    after = sharded(*args, 2, 0.1)
    torch.testing.assert_close(after[0], before[0], **TIGHT)
    for a, b in zip(after[1], before[1], strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
