"""Covers: kernels/dropout/bias_dropout_add.py, kernels/dropout/bias_dropout_add_triton.py."""

import pytest
import torch
from kernel_checks import run_as_script

import megafx.kernels.dropout.bias_dropout_add
import megafx.kernels.dropout.dropout  # noqa: F401  registers the ops
from megafx.ir.nodes import Draw
from megafx.ops import axes
from megafx.placements.types import Layout

ops = torch.ops.megafx
SEED = torch.tensor(-987654321012345)
WHOLE = (-1, [], "tp")
OFF = (None, 0.0, 0, *WHOLE)


def bda(x, bias, residual, p=0.3, op_id=5, where=WHOLE):
    return ops.bias_dropout_add(x, bias, residual, SEED if p else None, p, op_id, *where)


def on_rank(rank, t):
    return axes.on_mesh({"tp": axes.AxisContext(rank, t, "")})


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 8), (16,), (0, 4)])
def test_is_the_ops_that_it_replaces(shape, with_bias, p):
    """Bits, value and every gradient: residual + megafx.dropout(x + bias), exact in fp64."""
    x, residual, bias = randn(*shape), randn(*shape), randn(shape[-1]) if with_bias else None
    inputs = [v for v in (x, residual, bias) if v is not None]
    grad = torch.randn(shape, dtype=torch.float64)
    u = x if bias is None else x + bias
    expected = residual + (ops.dropout(u, SEED, p, 5, *WHOLE) if p else u)
    y = bda(x, bias, residual, p)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_rounds_once(dtype, p):
    x, residual, bias = randn(5, 24, dtype=dtype), randn(5, 24, dtype=dtype), randn(24, dtype=dtype)
    y = bda(x, bias, residual, p)
    exact = bda(*(v.detach().double() for v in (x, bias, residual)), p=p)
    assert y.dtype == dtype
    torch.testing.assert_close(y, exact.float().to(dtype), rtol=1e-5 if dtype == torch.float32 else 0, atol=1e-5)
    grad = torch.randn(5, 24, dtype=dtype)
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), grad)
    assert dresidual.data_ptr() == grad.data_ptr()  # the gradient itself
    exact_dx = ops.dropout(grad.double(), SEED, p, 5, *WHOLE) if p else grad.double()
    torch.testing.assert_close(dx, exact_dx.float().to(dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)
    torch.testing.assert_close(dbias, exact_dx.sum(0).float().to(dtype))


def test_the_output_follows_the_residual():
    x, residual, bias = randn(4, 8, dtype=torch.bfloat16), randn(4, 8, dtype=torch.float32), randn(8)
    bias = bias.detach().bfloat16().requires_grad_()
    y = bda(x, bias, residual)
    assert y.dtype == torch.float32
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), torch.randn(4, 8))
    assert (dx.dtype, dbias.dtype, dresidual.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert bda(residual, None, x).dtype == torch.float32


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize(
    "dim, flat", [(0, (1, 7, 1)), (1, (1, 5, 1)), (2, (1, 3, 8)), (2, (2, 3, 4, 5, 2)), (1, (3, 4, 1))]
)
def test_shards_are_slices_of_the_whole(t, dim, flat):
    layout, shape = Layout.from_flat(flat), [3, 5, 16]
    shape[dim] = layout.size
    x, residual, grad, bias = *(torch.randn(shape) for _ in range(3)), torch.randn(shape[2])
    x.requires_grad_()
    y = bda(x, bias, residual)
    (dx,) = torch.autograd.grad(y, x, grad)
    for rank in range(t):

        def local(v, d, rank=rank):
            out = torch.zeros([*v.shape[:d], layout.local_size(t), *v.shape[d + 1 :]])
            for start, at, length in layout.pieces(rank, t):
                out.narrow(d, at, length).copy_(v.detach().narrow(d, start, length))
            return out

        own = local(x, dim).requires_grad_()
        with on_rank(rank, t):
            out = bda(own, local(bias, 0) if dim == 2 else bias, local(residual, dim), where=(dim, flat, "tp"))
            (d_own,) = torch.autograd.grad(out, own, local(grad, dim))
        for start, at, length in layout.pieces(rank, t):
            assert torch.equal(out.narrow(dim, at, length), y.narrow(dim, start, length))
            assert torch.equal(d_own.narrow(dim, at, length), dx.narrow(dim, start, length))


def test_refusals():
    x = torch.randn(3, 4)
    for call, error, text in [
        (lambda: bda(x, None, x, 1.5), ValueError, "between 0 and 1"),
        (lambda: bda(x, torch.randn(3), x), ValueError, "does not fit the last dim"),
        (lambda: bda(x, None, x[:1]), ValueError, "differ in shape"),
        (lambda: bda(x.long(), None, x), TypeError, "floating-point"),
        (lambda: ops.bias_dropout_add(x, None, x, None, 0.5, 0, *WHOLE), ValueError, "needs a seed"),
    ]:
        with pytest.raises(error, match=text):
            call()


def triton_checks():
    from megafx.kernels.dropout import bias_dropout_add as reference
    from megafx.kernels.dropout import bias_dropout_add_triton as kernels

    seed = torch.tensor(-(7 << 40) + 99)

    def same(name, *arguments):
        ours, theirs = getattr(kernels, name)(*arguments), getattr(reference, name + "_reference")(*arguments)
        ours, theirs = ([v] if isinstance(v, torch.Tensor) else v for v in (ours, theirs))
        for u, v in zip(ours, theirs, strict=True):
            assert u.dtype == v.dtype and u.shape == v.shape, (name, arguments)
            rtol = 2**-6 if u.dtype == torch.bfloat16 else 1e-5  # the interpreter truncates to bf16
            torch.testing.assert_close(u, v, rtol=rtol, atol=1e-5)

    CASES = [
        ((5, 40), -1, []),
        ((3, 37), -1, []),
        ((9,), -1, []),
        ((2, 3, 16), 1, [1, 8, 1]),
        ((3, 24), 1, [1, 6, 8]),
        ((4, 6), 0, [1, 11, 1]),
        ((3, 5, 8), 2, [2, 3, 4, 5, 2]),
        ((3, 4, 8), 1, [2, 3, 1, 5, 1]),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for shape, dim, layout in CASES:
            shape = list(shape)
            if dim >= 0:
                shape[dim] = Layout.from_flat(layout).local_size(3)
            x, r, g, b = *(torch.randn(shape).to(dtype) for _ in range(3)), torch.randn(shape[-1]).to(dtype)
            for p in (0.0, 0.3, 1.0):
                drawing = (seed, p, 5, dim, layout, "tp")
                with axes.on_mesh({"tp": axes.AxisContext(1, 3, "")}):
                    for bias in (None, b):
                        same("bias_dropout_add", x, bias, r, *drawing)
                    same("bias_dropout_add_backward", g, dtype, None, *drawing)
                    same("bias_dropout_add_backward", g, dtype, torch.float32, *drawing)
            same("bias_dropout_add_backward", g, None, dtype, *Draw().args)


def test_triton_kernels_are_the_reference():
    """Launchers on CPU tensors, in Triton's interpreter."""
    run_as_script(__file__, 240, on_gpu=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 1601), (64, 1024), (3, 5, 40)])
def test_cuda_is_the_cpu(dtype, shape):
    x, residual, bias = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    grad = torch.randn(shape).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [v.detach().to(device).requires_grad_() for v in (x, bias, residual)]
        y = bda(*inputs)
        results.append([v.cpu() for v in (y, *torch.autograd.grad(y, inputs, grad.to(device)))])
    eps = torch.finfo(dtype).eps
    # the bias' gradient is a sum over rows, where signs cancel: what rounding can do goes with the sum of the magnitudes
    summed = grad.abs().double().flatten(0, -2).sum(0)
    for name, ours, theirs in zip(("y", "x", "bias", "residual"), *results, strict=True):
        bound = 2 * eps * (summed if name == "bias" else 1 + theirs.abs().double())
        assert ((ours.double() - theirs.double()).abs() <= bound).all(), name


if __name__ == "__main__":
    triton_checks()
