"""Covers: kernels/norm/norms.py, kernels/norm/norms_launch.py, kernels/norm/norms_triton.py."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import run_as_script

import megafx.kernels.norm.norms  # noqa: F401  registers the ops

ops = torch.ops.megafx
EPS = 1e-5


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def plain_rms(x, weight, offset, dtype=None):
    """As Hugging Face's models write it: fp32 inside, rounded before the product with the weight."""
    wide = x.to(dtype or x.dtype)
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y if weight is None else y * (weight + offset)


def compare(ours, theirs, inputs, grad, **tolerance):
    torch.testing.assert_close(ours, theirs, **tolerance)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 8), (16,), (5, 1), (0, 4)])
def test_layer_norm_is_torchs(shape, given):
    x, weight, bias = randn(*shape), *(randn(shape[-1]) if there else None for there in given)
    inputs = [v for v in (x, weight, bias) if v is not None]
    grad = torch.randn(shape, dtype=torch.float64)
    expected = F.layer_norm(x, shape[-1:], weight, bias, EPS)
    compare(ops.layer_norm(x, weight, bias, EPS), expected, inputs, grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("offset", [0.0, 1.0, None])
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 8), (16,), (5, 1), (0, 4)])
def test_rms_norm_is_the_formula(shape, offset):
    x, weight = randn(*shape), None if offset is None else randn(shape[-1])
    grad = torch.randn(shape, dtype=torch.float64)
    inputs = [x] if weight is None else [x, weight]
    expected = plain_rms(x, weight, offset or 0.0)
    compare(ops.rms_norm(x, weight, EPS, offset or 0.0), expected, inputs, grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_error_is_at_most_twice_eagers(dtype, kind):
    """Against fp64, result and every gradient; also rows with a large common offset."""
    x, weight, bias = randn(64, 96, dtype=dtype), randn(96, dtype=dtype), randn(96, dtype=dtype)
    with torch.no_grad():
        x[::4] += 30
    grad = torch.randn(64, 96).to(dtype)

    def run(function, wide=None):
        inputs = [v.detach().to(wide or v.dtype).requires_grad_() for v in (x, weight, bias)]
        y = function(*inputs)
        return [y, *torch.autograd.grad(y, inputs[: 3 if kind == "layer" else 2], grad.to(y.dtype))]

    def eager(x, w, b):
        return F.layer_norm(x, (96,), w, b, EPS) if kind == "layer" else plain_rms(x, w, 0.0, torch.float32)

    def exact(x, w, b):
        return F.layer_norm(x, (96,), w, b, EPS) if kind == "layer" else plain_rms(x, w, 0.0)

    def ours(x, w, b):
        return ops.layer_norm(x, w, b, EPS) if kind == "layer" else ops.rms_norm(x, w, EPS, 0.0)

    for a, b, c in zip(run(ours), run(eager), run(exact, torch.float64), strict=True):
        assert a.dtype == dtype
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm() + 1e-6 * c.norm()


def test_gradcheck_and_frozen_weights():
    x, weight, bias = randn(3, 10), randn(10), randn(10)
    assert torch.autograd.gradcheck(lambda *v: ops.layer_norm(*v, EPS), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *v: ops.rms_norm(*v, EPS, 1.0), (x, weight))
    assert torch.autograd.gradcheck(lambda v: ops.layer_norm(v, weight.detach(), bias, EPS), x)
    assert torch.autograd.gradcheck(lambda v: ops.rms_norm(v, weight.detach(), EPS, 0.0), x)


def test_refusals():
    x = torch.randn(3, 4)
    for call, error, text in [
        (lambda: ops.layer_norm(x, torch.randn(3), None, EPS), ValueError, "does not fit the last dim"),
        (lambda: ops.rms_norm(x, torch.randn(4, 1), EPS, 0.0), ValueError, "does not fit the last dim"),
        (lambda: ops.rms_norm(x.long(), None, EPS, 0.0), TypeError, "floating-point"),
        (lambda: ops.layer_norm(x.sum(), None, None, EPS), ValueError, "last dim"),
    ]:
        with pytest.raises(error, match=text):
            call()


def triton_checks():
    from megafx.kernels.norm import norms as reference
    from megafx.kernels.norm import norms_launch as kernels

    def close(ours, theirs, what):
        for u, v in zip(ours, theirs, strict=True):
            assert u.dtype == v.dtype and u.shape == v.shape, what
            # the interpreter truncates to bf16 where hardware rounds
            rtol = 2**-6 if u.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(u, v, rtol=rtol, atol=rtol, msg=lambda m: f"{what}: {m}")

    def check(H, dtype=torch.float32):
        x, g, w, b = torch.randn(5, H) * 2 + 3, torch.randn(5, H), torch.randn(H), torch.randn(H)
        x, g, w, b = (v.to(dtype) for v in (x, g, w, b))
        for weight, bias in ((w, b), (None, None)) if H == 37 else ((w, b),):
            stats = reference.layer_norm_reference(x, weight, bias, 1e-5)
            close(kernels.layer_norm_forward(x, weight, bias, 1e-5), stats, ("layer", H, dtype))
            arguments = (g, x, weight, *stats[1:], weight is not None, bias is not None)
            close(
                kernels.layer_norm_backward(*arguments),
                reference.layer_norm_backward_reference(*arguments),
                ("dlayer", H),
            )
            stats = reference.rms_norm_reference(x, weight, 1e-5, 1.0)
            close(kernels.rms_norm_forward(x, weight, 1e-5, 1.0), stats, ("rms", H, dtype))
            arguments = (g, x, weight, stats[1], 1.0, weight is not None)
            close(kernels.rms_norm_backward(*arguments), reference.rms_norm_backward_reference(*arguments), ("drms", H))

    for H in (1, 37, 300):
        check(H)
    check(24, torch.bfloat16)
    Shape = (
        kernels.Shape
    )  # every way to cut a row, on rows that a test can afford: exact, with a rest, read twice, shared
    forward = [Shape(1, 4, 16, 1), Shape(2, 4, 16, 1), Shape(1, 4, 16, 1, reload=True)]
    backward = [
        Shape(2, 4, 16, 1, programs=2),
        Shape(1, 2, 16, 1, split=2, programs=4),
        Shape(2, 1, 32, 1, split=2, programs=2),
    ]
    for H, first, second in zip((64, 56, 56), forward, backward, strict=True):
        kernels.forward_shape, kernels.backward_shape = lambda *_, first=first: first, lambda *_, second=second: second
        check(H)


def test_triton_kernels_are_the_reference():
    """Launchers on CPU tensors, in Triton's interpreter."""
    run_as_script(__file__, 240, on_gpu=False)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("width", [1, 100, 768, 1600, 2560, 5120, 7168, 9000, 12288, 16384, 20000, 65536])
def test_shapes_cover_a_row(width):
    from megafx.kernels.norm.norms_launch import backward_shape, forward_shape

    for flags in range(8):
        rms, add, drop = bool(flags & 1), bool(flags & 2), bool(flags & 4)
        shape = forward_shape(width, rms, add, drop)
        assert shape.K * shape.C >= width > (shape.K - 1) * shape.C
        shape = backward_shape(width, rms, add)
        assert shape.K * shape.C * shape.split >= width and shape.programs % shape.split == 0
        assert shape.R * shape.K * shape.C <= 12288


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [100, 768, 1601, 5120, 12288, 16384, 20000])
def test_cuda_is_deterministic_and_near_fp64(dtype, width):
    x, weight, bias = (v.detach().cuda() for v in (randn(301, width), randn(width), randn(width)))
    grad = torch.randn(301, width, device="cuda")

    def run(kind, dtype):
        inputs = [v.to(dtype).requires_grad_() for v in (x, weight, bias)]
        if kind == "layer":
            y = ops.layer_norm(*inputs, EPS)
            return [y, *torch.autograd.grad(y, inputs, grad.to(dtype))]
        y = ops.rms_norm(*inputs[:2], EPS, 1.0)
        return [y, *torch.autograd.grad(y, inputs[:2], grad.to(dtype))]

    def eager(kind):
        inputs = [v.to(dtype).requires_grad_() for v in (x, weight, bias)]
        if kind == "layer":
            y = F.layer_norm(inputs[0], (width,), *inputs[1:], EPS)
            return [y, *torch.autograd.grad(y, inputs, grad.to(dtype))]
        y = F.rms_norm(inputs[0], (width,), inputs[1] + 1, EPS)
        return [y, *torch.autograd.grad(y, inputs[:2], grad.to(dtype))]

    x, weight, bias, grad = (v.to(dtype).double() for v in (x, weight, bias, grad))
    for kind in ("layer", "rms"):
        found = zip(run(kind, dtype), run(kind, dtype), run(kind, torch.float64), eager(kind), strict=True)
        for ours, again, exact, theirs in found:
            assert torch.equal(ours, again)
            rounding = torch.finfo(dtype).eps * exact.norm()
            assert (ours.double() - exact).norm() <= max(rounding, 2 * (theirs.double() - exact).norm())


if __name__ == "__main__":
    triton_checks()
