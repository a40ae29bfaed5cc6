"""Covers: kernels/loss/linear_cross_entropy.py. The oracle is F.cross_entropy of F.linear."""

import pytest
import torch
import torch.nn.functional as F

import megafx.kernels.loss.linear_cross_entropy  # noqa: F401  registers the ops
import megafx.kernels.loss.logits_chunks as module

ops = torch.ops.megafx
TIGHT = {"rtol": 1e-11, "atol": 1e-12}


def case(tokens, classes, width=16, bias=True, dtype=torch.float64):
    torch.manual_seed(tokens + classes)
    x, w, b = torch.randn(tokens, width), torch.randn(classes, width) * 0.5, torch.randn(classes)
    y = torch.randint(0, classes, (tokens,))
    y[1:3] = -100
    made = [v.to(dtype).requires_grad_() for v in (x, w, b)]
    return made[0], made[1], made[2] if bias else None, y


def eager(x, w, b, y, ignore=-100, smoothing=0.0):
    return F.cross_entropy(F.linear(x, w, b), y, reduction="sum", ignore_index=ignore, label_smoothing=smoothing)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 127, 128, 300, 1500])
def test_loss_and_gradients(small_chunks, tokens, bias, smoothing):
    """One chunk, several, and the most there are (8); an upstream gradient that is not 1."""
    x, w, b, y = case(tokens, 37, bias=bias)
    wanted = [v for v in (x, w, b) if v is not None]
    loss, expected = ops.linear_cross_entropy(x, w, b, y, -100, smoothing), eager(x, w, b, y, -100, smoothing)
    torch.testing.assert_close(loss, expected, **TIGHT)
    found, right = (torch.autograd.grad(v * 3 / tokens, wanted) for v in (loss, expected))
    for a, c in zip(found, right, strict=True):
        torch.testing.assert_close(a, c, **TIGHT)


def test_a_mean_over_no_label_at_all():
    """NaN, with gradients of zero: eager writes none to ignored tokens, whatever comes from above."""
    x, w, b, y = case(6, 37)
    y.fill_(-100)
    loss, expected = ops.linear_cross_entropy(x, w, b, y, -100, 0.0), eager(x, w, b, y)
    found, right = (torch.autograd.grad(v / (y != -100).sum(), [x, w, b]) for v in (loss, expected))
    for a, c in zip(found, right, strict=True):
        assert torch.equal(a, c) and not a.any()


def test_chunks():
    """At most 8, of about the same size, in multiples of 128; as few as fit into CHUNK_BYTES."""
    assert module.chunk_rows(8192, 128256, 2) == 4096
    assert module.chunk_rows(65536, 128256, 2) == 8192
    assert module.chunk_rows(100, 128256, 2) == 128
    assert module.chunk_rows(4000, 50257, 2) == 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(small_chunks, dtype):
    """No more than twice the error of eager, which rounds the weight's gradient once and not for each of 8 chunks."""
    x, w, b, y = case(1100, 513, dtype=dtype)
    scale = 2.0**14 / 1100 if dtype == torch.float16 else 1 / 1100  # fp16 trains under loss scaling
    exact = [v.detach().double().requires_grad_() for v in (x, w, b)]
    right = torch.autograd.grad(eager(*exact, y) * scale, exact)
    ours = torch.autograd.grad(ops.linear_cross_entropy(x, w, b, y, -100, 0.0) * scale, (x, w, b))
    theirs = torch.autograd.grad(F.cross_entropy(F.linear(x, w, b).float(), y, reduction="sum") * scale, (x, w, b))
    for a, c, r in zip(ours, theirs, right, strict=True):
        assert a.dtype == dtype and a.isfinite().all()
        assert (a.double() - r).norm() <= 2 * (c.double() - r).norm()


def test_never_more_than_a_chunk_of_logits(small_chunks):
    """No tensor of forward or backward is as large as the logits, nor is one saved."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(v.numel() for v in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(v))
            return out

    x, w, b, y = case(1024, 512)
    saved = []
    with Sizes(), torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        ops.linear_cross_entropy(x, w, b, y, -100, 0.0).backward()
    assert max(sizes) <= 128 * 512 and {tuple(s.shape) for s in saved} == {(1024, 16), (512, 16), (512,)}


def test_evaluation_makes_no_gradients():
    x, w, b, y = case(20, 7)
    with torch.no_grad():
        loss = ops.linear_cross_entropy(x, w, b, y, -100, 0.1)
    torch.testing.assert_close(loss, eager(x, w, b, y, -100, 0.1).detach(), **TIGHT)
    made = ops.linear_cross_entropy_forward(x.detach(), w.detach(), b.detach(), y, -100, 0.0, False)
    assert [v.numel() for v in made[1:]] == [0, 0, 0]


def test_edges():
    x, w, b, y = case(0, 5)
    loss = ops.linear_cross_entropy(x, w, b, y, -100, 0.0)
    assert loss == 0 and all(not g.any() for g in torch.autograd.grad(loss, (x, w, b)))
    x, w, b, y = case(4, 5)
    with pytest.raises(ValueError, match=r"x \[T, K\], weight \[V, K\]"):
        ops.linear_cross_entropy(x, w[:, :3], b, y, -100, 0.0)
    with pytest.raises(ValueError, match="bias"):
        ops.linear_cross_entropy(x, w, b[:2], y, -100, 0.0)
    with pytest.raises(IndexError, match="out of bounds"):
        ops.linear_cross_entropy(x, w, b, y + 5, -100, 0.0)
