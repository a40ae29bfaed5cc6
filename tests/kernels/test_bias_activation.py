"""Covers: kernels/common/op.py, kernels/activation/activation.py, kernels/activation/activation_triton.py, tiles and
activations in Triton."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, EAGER, error, rand, run_as_script, same
from torch.fx.experimental.proxy_tensor import make_fx

import megafx.kernels.common.op as module
from megafx.ir.facts import real
from megafx.kernels.activation.activation import ACTIVATIONS

bias_act = torch.ops.megafx.bias_act


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_fp64_is_exact_with_every_gradient(act):
    x, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), (5,)))
    assert torch.allclose(bias_act(x, b, act), EAGER[act](x + b), rtol=1e-14, atol=1e-15)
    assert torch.allclose(bias_act(x, None, act), EAGER[act](x), rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradcheck(lambda a, c: bias_act(a, c, act), (x, b))
    assert torch.autograd.gradcheck(lambda a: bias_act(a, None, act), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_error_is_below_eagers(act, dtype):
    """Against fp64, output and gradients: at most eager's error in the same dtype (rounding once beats rounding twice)."""
    torch.manual_seed(0)
    x, b, g = (torch.randn(s).to(dtype) for s in ((64, 50), (50,), (64, 50)))

    def run(function, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[2])]

    exact = run(lambda a, c: EAGER[act](a + c), x.double(), b.double(), g.double())
    ours = run(lambda a, c: bias_act(a, c, act), x, b, g)
    eager = run(lambda a, c: EAGER[act](a + c), x, b, g)
    for found, plain, right in zip(ours, eager, exact, strict=True):
        assert found.dtype == dtype and error(found, right) <= 1.05 * error(plain, right) + 1e-7


def test_shapes_strides_and_other_dtypes_of_the_bias():
    b = torch.randn(6)
    for x in (
        torch.randn(0, 6),
        torch.randn(6),
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 12)[..., ::2],
        b.expand(3, 6),
    ):
        x = x.detach().requires_grad_()
        y = bias_act(x, b, "silu")
        assert y.is_contiguous() and torch.allclose(y, F.silu(x + b))
        (dx,) = torch.autograd.grad(y, x, torch.ones(()).expand(y.shape))
        assert dx.shape == x.shape
    x, b = torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(6, requires_grad=True)
    y = bias_act(x, b, "relu")
    assert y.dtype == torch.bfloat16 and torch.autograd.grad(y.sum(), b)[0].dtype == torch.float32


def test_what_is_refused():
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match="unknown activation 'mish'"):
        bias_act(x, None, "mish")
    with pytest.raises(ValueError, match=r"bias \(5,\) does not fit the last dim of x \(4, 6\)"):
        bias_act(x, torch.randn(5), "gelu")
    with pytest.raises(TypeError, match="floating-point"):
        bias_act(torch.arange(4), None, "gelu")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(bias_act(x, None, "gelu").sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward through fused ops"):
        dx.sum().backward()


@pytest.mark.parametrize("act", ["gelu", "relu2"])
def test_traces_exports_and_compiles(act):
    x, b, g = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True), torch.randn(4, 6)

    def step(x, b, g):
        y = bias_act(x, b, act)
        return y, *torch.autograd.grad(y, (x, b), g)

    gm = make_fx(step, tracing_mode="symbolic")(x, b, g)
    names = [str(n.target) for n in gm.graph.nodes if "megafx" in str(n.target)]
    assert names == ["megafx.bias_act.default", "megafx.bias_act_backward.default"]
    big = [torch.randn(s, requires_grad=True) for s in ((9, 10), (10,))]
    for found, right in zip(gm(*big, torch.ones(9, 10)), step(*big, torch.ones(9, 10)), strict=True):
        assert torch.equal(found, right)
    torch.library.opcheck(bias_act.default, (x, b, act))
    torch.library.opcheck(bias_act.default, (x.detach().t(), None, act))
    backward = torch.ops.megafx.bias_act_backward.default
    torch.library.opcheck(backward, (g, x.detach(), b.detach(), act, True))
    torch.library.opcheck(backward, (g, x.detach(), None, act, False))
    compiled = torch.compile(lambda x, b: bias_act(x * 2, b, act) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, b), bias_act(x * 2, b, act) + 1)


def test_inductor_sees_the_kernels_and_export_does_not(monkeypatch):
    """As on a CUDA device: functionalizing traces the launcher; make_fx alone keeps the op."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize

    import megafx.kernels.common.tiles_triton as tiles

    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    with FakeTensorMode(), torch.no_grad():
        x, b = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((64, 4096), (4096,)))

        def step(x, b):
            return bias_act(x, b, "gelu"), *torch.ops.megafx.bias_act_backward(x, x, b, "gelu", False)

        whole = make_fx(step)(x, b)
        opened = make_fx(dispatch_functionalize(step))(x, b)
    assert [str(n.target) for n in whole.graph.nodes].count("megafx.bias_act.default") == 1
    kernels = [n for n in opened.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    assert len(kernels) == 3 and not any("megafx" in str(n.target) for n in opened.graph.nodes)


def test_the_cache_of_compiled_graphs_knows_the_kernels():
    pytest.importorskip("triton")
    from torch._library.triton import get_triton_kernels_for_op

    names = {k.fn.__name__ for k in get_triton_kernels_for_op("megafx::bias_act_backward")}
    assert {"_forward", "_backward"} <= names


def test_ops_are_defined_in_one_place():
    def fake(x):
        return module.new_like(x)

    same = {"rule": "lin: ... -> ...", "samples": [(real(4, 6),)]}  # other tests of this process see the ops too
    module.define_op("_test_twice(Tensor x) -> Tensor", reference=lambda x: 2 * x, fake=fake, **same)
    module.define_gradient("_test_twice", lambda ctx, g: 2 * g, lambda ctx, inputs, output: None)
    module.define_composite(
        "_test_four(Tensor x) -> Tensor",
        body=lambda x: torch.ops.megafx._test_twice(torch.ops.megafx._test_twice(x)),
        **same,
    )
    x = torch.randn(3, requires_grad=True)
    y = torch.ops.megafx._test_four(x)
    assert torch.equal(y, 4 * x) and torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 4.0))


def triton_checks():
    from megafx.kernels.activation import activation as plain
    from megafx.kernels.activation import activation_triton as ours

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for act in plain.ACTIVATIONS if dtype == torch.float32 else ("gelu",):
            for shape in ((3, 37), (0, 5), (5,), (2, 5, 260)):
                x, g, b = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[-1], dtype=torch.float32)
                same(ours.bias_act(x, b, act), plain.x_reference(False, x, b, act), (act, shape))
                same(ours.bias_act(x, None, act), plain.x_reference(False, x, None, act), (act, shape))
                for bias in (None, b):
                    args = g, x, bias, act
                    found = ours.bias_act_backward(*args, False)
                    same(found, plain.x_backward_reference(False, *args, False), (act, shape))
                    *again, y = ours.bias_act_backward(*args, True)
                    assert all(map(torch.equal, found, again)) and torch.equal(y, ours.bias_act(x, bias, act))
        x, b = rand(6, 40, 3, dtype=dtype).transpose(1, 2)[:, :, :33], rand(33, dtype=dtype)
        same(ours.bias_act(x, b, "silu"), plain.x_reference(False, x, b, "silu"), "strided")
        x = rand(4, 3, 66, dtype=dtype)[..., :33]  # rows with a stride: read as they lie
        g = rand(33, dtype=dtype).expand(4, 3, 33)
        for args, what in (((x, x, b, "silu", True), "halves"), ((g, x, b, "relu", False), "expanded")):
            same(ours.bias_act_backward(*args), plain.x_backward_reference(False, *args), what)
    u = torch.tensor([3e38, -3e38, 1e20, -1e20, 60.0, -60.0, 0.0, float("nan")], device=DEVICE)
    for act in ("gelu", "gelu_tanh", "gelu_quick", "silu"):
        y, dx = ours.bias_act(u, None, act), ours.bias_act_backward(torch.ones_like(u), u, None, act, False)[0]
        limits = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], device=DEVICE)
        torch.testing.assert_close(dx[:6], limits)
        torch.testing.assert_close(y[:6], torch.where(limits > 0, u[:6], 0.0))
        assert y[7].isnan() and dx[7].isnan()
    tail = torch.linspace(-5, -2, 500, device=DEVICE).half()  # where 1 + erf cancels
    u = tail.double()
    exact_tanh = plain.x_reference(False, u, None, "gelu_tanh")
    for act, exact in (("gelu", u * torch.special.log_ndtr(u).exp()), ("gelu_tanh", exact_tanh)):
        torch.testing.assert_close(ours.bias_act(tail, None, act).double(), exact, rtol=1e-3, atol=1e-7)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_are_the_reference():
    run_as_script(__file__, 240)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden", [768, 1600, 4096, 5120, 16384])
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
def test_cuda_at_real_sizes(act, hidden):
    """Error against fp64 no more than eager's, and the same bits in every run."""
    torch.manual_seed(0)
    x, g = (torch.randn(300, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    b = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)

    def run(function, x, b, g):
        leaves = [x.detach().requires_grad_(), b.detach().requires_grad_()]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    ours = run(lambda a, c: bias_act(a, c, act), x, b, g)
    eager = run(lambda a, c: EAGER[act](a + c), x, b, g)
    exact = run(lambda a, c: EAGER[act](a + c), x.double(), b.double(), g.double())
    for found, plain, right in zip(ours, eager, exact, strict=True):
        assert error(found, right) <= 1.05 * error(plain, right)
    assert all(torch.equal(p, q) for p, q in zip(ours, run(lambda a, c: bias_act(a, c, act), x, b, g), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_under_inductor():
    def step(x, b):
        return bias_act(x * 1.0, b, "gelu")

    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    for rows in (64, 96, 200):
        x, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((rows, 512), (512,)))
        torch.testing.assert_close(compiled(x, b), step(x, b))


if __name__ == "__main__":
    triton_checks()
