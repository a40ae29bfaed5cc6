"""Covers: glu and glu_packed of kernels/activation/."""

import importlib.util

import pytest
import torch
from kernel_checks import EAGER, error, rand, run_as_script, same
from torch.fx.experimental.proxy_tensor import make_fx

from megafx.kernels.activation.activation import ACTIVATIONS

glu, glu_packed = torch.ops.megafx.glu, torch.ops.megafx.glu_packed


def eager(gate, up, act):
    return EAGER[act](gate) * up


def eager_packed(x, bias, act):
    return eager(*(x if bias is None else x + bias).chunk(2, -1), act)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_fp64_is_exact_with_every_gradient(act):
    gate, up, x, b = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), (3, 4, 5), (4, 6), (6,))
    )
    assert torch.allclose(glu(gate, up, act), eager(gate, up, act), rtol=1e-14, atol=1e-15)
    assert torch.allclose(glu_packed(x, b, act), eager_packed(x, b, act), rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradcheck(lambda a, c: glu(a, c, act), (gate, up))
    assert torch.autograd.gradcheck(lambda a, c: glu_packed(a, c, act), (x, b))
    assert torch.autograd.gradcheck(lambda a: glu_packed(a, None, act), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_error_is_below_eagers(act, dtype):
    torch.manual_seed(0)
    x, b, g = (torch.randn(s).to(dtype) for s in ((64, 50), (50,), (64, 25)))

    def run(function, x, b, g):
        leaves = [x.detach().requires_grad_(), b.detach().requires_grad_()]
        out = function(*leaves, act)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    exact = run(eager_packed, x.double(), b.double(), g.double())
    for found, plain, right in zip(run(glu_packed, x, b, g), run(eager_packed, x, b, g), exact, strict=True):
        assert found.dtype == dtype and error(found, right) <= 1.05 * error(plain, right) + 1e-7


def test_shapes_strides_and_halves():
    for x in (torch.randn(0, 8), torch.randn(8), torch.randn(8, 3).t(), torch.randn(2, 3, 16)[..., ::2]):
        x = x.detach().requires_grad_()
        y = glu_packed(x, None, "silu")
        assert y.shape == (*x.shape[:-1], 4) and torch.allclose(y, eager_packed(x, None, "silu"))
        gate, up = x.chunk(2, -1)
        z = glu(gate, up, "silu")
        assert torch.equal(z, y) and z.is_contiguous()
        assert torch.allclose(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(y.sum(), x)[0])


def test_what_is_refused():
    with pytest.raises(
        ValueError, match=r"one shape and floating dtype, got torch.float32 \(4, 6\) and torch.float32 \(6,\)"
    ):
        glu(torch.randn(4, 6), torch.randn(6), "silu")
    with pytest.raises(ValueError, match="one shape and floating dtype"):
        glu(torch.randn(4, 6), torch.randn(4, 6).half(), "silu")
    with pytest.raises(ValueError, match=r"x \[..., 2h\], got torch.float32 \(4, 5\)"):
        glu_packed(torch.randn(4, 5), None, "silu")
    with pytest.raises(ValueError, match=r"bias \(3,\) does not fit"):
        glu_packed(torch.randn(4, 6), torch.randn(3), "silu")
    with pytest.raises(ValueError, match="unknown activation"):
        glu(torch.randn(4, 6), torch.randn(4, 6), "tanh")


def test_packed_gradients_are_one_output_to_inductor(monkeypatch):
    """One tensor behind two output pointers would be two tensors there, each half written."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize

    import megafx.kernels.common.tiles_triton as tiles

    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    with FakeTensorMode(), torch.no_grad():
        x, g, b = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((64, 256), (64, 128), (256,)))

        def step(x, g, b):
            backward = torch.ops.megafx.glu_packed_backward
            return *backward(g, x, None, "silu", False), *backward(g, x, b, "silu", False)

        graph = make_fx(dispatch_functionalize(step))(x, g, b).graph
    kernels = [n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    assert len(kernels) == 3
    for kernel in kernels[:2]:
        outputs = [kernel.kwargs["kwargs"][name] for name in ("dgate", "dup")]
        assert outputs[0] is not outputs[1]


def triton_checks():
    from megafx.kernels.activation import activation as plain
    from megafx.kernels.activation import activation_triton as ours

    for dtype in (torch.float32, torch.bfloat16):
        for act in ("silu", "gelu", "relu") if dtype == torch.float32 else ("silu",):
            for shape in ((3, 37), (0, 5), (5,), (2, 5, 260)):
                x, g = rand(*shape[:-1], 2 * shape[-1], dtype=dtype), rand(*shape, dtype=dtype)
                b, what = rand(2 * shape[-1], dtype=dtype), (act, shape)
                for gate, up in (x.chunk(2, -1), (g, g + 1)):
                    same(ours.glu(gate, up, act), plain.glu_reference(gate, up, act), what)
                    found = ours.glu_backward(g, gate, up, act, False)
                    same(found, plain.glu_backward_reference(g, gate, up, act, False), what)
                    *again, y = ours.glu_backward(g, gate, up, act, True)  # bit for bit
                    assert all(map(torch.equal, found, again)) and torch.equal(y, ours.glu(gate, up, act)), what
                for bias in (None, b):
                    same(ours.glu_packed(x, bias, act), plain.x_reference(True, x, bias, act), what)
                    found = ours.glu_packed_backward(g, x, bias, act, False)
                    same(found, plain.x_backward_reference(True, g, x, bias, act, False), what)
                    *again, y = ours.glu_packed_backward(g, x, bias, act, True)
                    assert all(map(torch.equal, found, again)) and torch.equal(y, ours.glu_packed(x, bias, act)), what
        x, g = rand(4, 3, 80, dtype=dtype)[..., :66], rand(33, dtype=dtype).expand(4, 3, 33)
        same(ours.glu_packed(x, None, "silu"), plain.x_reference(True, x, None, "silu"), "rows with a stride")
        args = g, x, None, "silu", False
        same(ours.glu_packed_backward(*args), plain.x_backward_reference(True, *args), "expanded")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_are_the_reference():
    run_as_script(__file__, 240)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [768, 1600, 4096, 14336])
def test_cuda_at_real_sizes(width):
    torch.manual_seed(0)
    x, g = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((300, 2 * width), (300, width)))
    b = torch.randn(2 * width, device="cuda", dtype=torch.bfloat16)

    def run(function, x, b, g):
        leaves = [x.detach().requires_grad_(), b.detach().requires_grad_()]
        out = function(*leaves, "silu")
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    ours, plain = run(glu_packed, x, b, g), run(eager_packed, x, b, g)
    exact = run(eager_packed, x.double(), b.double(), g.double())
    assert all(error(a, e) <= 1.05 * error(p, e) for a, p, e in zip(ours, plain, exact, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(ours, run(glu_packed, x, b, g), strict=True))


if __name__ == "__main__":
    triton_checks()
