"""Covers: kernels/norm/add_norm.py, kernels/norm/add_norm_triton.py."""

import pytest
import torch
from kernel_checks import run_as_script

import megafx.kernels.norm.add_norm  # noqa: F401  registers the ops
from megafx.ops import axes
from megafx.placements.types import Layout

ops = torch.ops.megafx
SEED = torch.tensor(-987654321012345)
WHOLE = (-1, [], "tp")
DRAWN, OFF = (SEED, 0.3, 5, *WHOLE), (None, 0.0, 0, *WHOLE)
EPS = 1e-5


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def fused(kind, x, bias, residual, weight, norm_bias, drawing):
    if kind == "layer":
        return ops.bias_dropout_add_layer_norm(x, bias, residual, weight, norm_bias, EPS, *drawing)[:2]
    return ops.bias_dropout_add_rms_norm(x, bias, residual, weight, EPS, 1.0, *drawing)[:2]


def separate(kind, x, bias, residual, weight, norm_bias, drawing):
    h = ops.bias_dropout_add(x, bias, residual, *drawing)
    return h, ops.layer_norm(h, weight, norm_bias, EPS) if kind == "layer" else ops.rms_norm(h, weight, EPS, 1.0)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("drawing", [DRAWN, OFF], ids=["dropout", "off"])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("used", ["both", "sum", "norm"])
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 8), (16,), (0, 4)])
def test_is_the_two_ops(kind, drawing, vectors, used, shape):
    """Results and every gradient; h's gradient from elsewhere too, or alone, or not at all."""
    x, residual = randn(*shape), randn(*shape)
    bias, weight, norm_bias = (randn(shape[-1]) if vectors else None for _ in range(3))
    arguments = (x, bias, residual, weight, norm_bias)
    inputs = [v for v in arguments if v is not None]
    grads = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    results = []
    for function in (fused, separate):
        outputs = function(kind, *arguments, drawing)
        part = {"both": slice(0, 2), "sum": slice(0, 1), "norm": slice(1, 2)}[used]
        gradients = torch.autograd.grad(outputs[part], inputs, grads[part], allow_unused=True)
        results.append([*outputs, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_fp32_residual_with_a_bf16_branch():
    x, residual = randn(4, 8, dtype=torch.bfloat16), randn(4, 8, dtype=torch.float32)
    bias, weight, norm_bias = randn(8, dtype=torch.bfloat16), *(randn(8, dtype=torch.float32) for _ in range(2))
    for drawing in (DRAWN, OFF):
        h, y = fused("layer", x, bias, residual, weight, norm_bias, drawing)
        assert h.dtype == y.dtype == torch.float32
        inputs = (x, bias, residual, weight, norm_bias)
        for v, d in zip(inputs, torch.autograd.grad((h + y).sum(), inputs), strict=True):
            assert d.dtype == v.dtype


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("flat", [(1, 5, 1), (2, 2, 1, 3, 1)])
def test_shards_of_rows_are_slices_of_the_whole(t, flat):
    layout = Layout.from_flat(flat)
    x, residual = (torch.randn(2, layout.size, 8) for _ in range(2))
    weight = torch.randn(8)
    whole = fused("rms", x, None, residual, weight, None, DRAWN)
    for rank in range(t):
        local = [torch.zeros(2, layout.local_size(t), 8) for _ in range(2)]
        for v, own in zip((x, residual), local, strict=True):
            for start, at, length in layout.pieces(rank, t):
                own.narrow(1, at, length).copy_(v.narrow(1, start, length))
        with axes.on_mesh({"tp": axes.AxisContext(rank, t, "")}):
            part = fused("rms", local[0], None, local[1], weight, None, (*DRAWN[:3], 1, flat, "tp"))
        for start, at, length in layout.pieces(rank, t):
            for ours, theirs in zip(part, whole, strict=True):
                torch.testing.assert_close(ours.narrow(1, at, length), theirs.narrow(1, start, length))


def triton_checks():
    from megafx.kernels.norm import add_norm as reference
    from megafx.kernels.norm import add_norm_triton as kernels
    from megafx.kernels.norm import norms_launch

    seed = torch.tensor(-(7 << 40) + 99)

    def same(name, *arguments):
        ours = getattr(kernels, "bias_dropout_add_" + name)(*arguments)
        call, run = reference.call_forward, reference.add_norm_reference
        if name.endswith("backward"):
            call, run = reference.call_backward, reference.add_norm_backward_reference
        theirs = call(name.startswith("rms"), run, *arguments)
        for i, (u, v) in enumerate(zip(ours, theirs, strict=True)):
            assert u.dtype == v.dtype and u.shape == v.shape, (name, i)
            rtol = 2**-6 if u.dtype == torch.bfloat16 else 3e-5  # the interpreter truncates to bf16
            torch.testing.assert_close(u, v, rtol=rtol, atol=rtol, msg=lambda m, i=i: f"{name} {i}: {m}")
        return theirs

    def check(shape, p, dim=-1, layout=(), dtype=torch.float32, branch=None, full=True):
        H = shape[-1]
        x, r, g, gh = (torch.randn(shape).to(dtype) for _ in range(4))
        b, w, nb = (torch.randn(H).to(dtype) for _ in range(3))
        x = x.to(branch or dtype)
        if not full:
            b = w = nb = gh = None
        drawing = (seed, p, 5, dim, list(layout), "tp")
        h, _, *stats = same("layer_norm", x, b, r, w, nb, 1e-5, *drawing)
        bias_dtype = None if b is None else b.dtype
        same("layer_norm_backward", h, g, gh, w, *stats, full, full, x.dtype, bias_dtype, *drawing)
        h, _, *stats = same("rms_norm", x, b, r, w, 1e-5, 1.0, *drawing)
        same("rms_norm_backward", h, g, gh, w, *stats, 1.0, full, x.dtype, bias_dtype, *drawing)

    check((3, 37), 0.3)
    check((2, 3, 16), 0.0, full=False)
    check((4, 24), 0.3, branch=torch.bfloat16)
    with axes.on_mesh({"tp": axes.AxisContext(1, 3, "")}):
        for layout in ((1, 8, 1), (1, 3, 1, 5, 1)):  # one run of rows, several
            check((2, Layout.from_flat(layout).local_size(3), 16), 0.3, 1, layout)
    Shape = norms_launch.Shape
    norms_launch.forward_shape = lambda *_: Shape(1, 4, 16, 1, reload=True)
    norms_launch.backward_shape = lambda *_: Shape(1, 2, 16, 1, split=2, programs=4)
    check((5, 56), 0.3)


def test_triton_kernels_are_the_reference():
    """Launchers on CPU tensors, in Triton's interpreter."""
    run_as_script(__file__, 240, on_gpu=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [100, 768, 1601, 7168, 12288, 16384])
def test_cuda_is_deterministic_and_near_fp64(dtype, width):
    arguments = [randn(77, width), randn(width), randn(77, width), randn(width), randn(width)]
    arguments = [v.detach().cuda().to(dtype) for v in arguments]
    grads = [torch.randn(77, width, device="cuda").to(dtype) for _ in range(2)]

    def run(kind, dtype):
        inputs = [v.to(dtype, copy=True).requires_grad_() for v in arguments]
        outputs = fused(kind, *inputs, (SEED.cuda(), *DRAWN[1:]))
        wanted = inputs if kind == "layer" else inputs[:4]
        return [*outputs, *torch.autograd.grad(outputs, wanted, [g.to(dtype) for g in grads])]

    for kind in ("layer", "rms"):
        for ours, again, exact in zip(run(kind, dtype), run(kind, dtype), run(kind, torch.float64), strict=True):
            assert torch.equal(ours, again)
            assert (ours.double() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()


if __name__ == "__main__":
    triton_checks()
