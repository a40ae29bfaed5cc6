"""What the tests of activation kernels share: eager formulas, errors, a comparison of Triton results."""

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EAGER = {
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "gelu_quick": lambda u: u * torch.sigmoid(1.702 * u),
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda u: F.relu(u) ** 2,
}


def error(value, exact):
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def same(found, right, what):
    """Equal but for rounding, one tensor or several, contiguous."""
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, right)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous(), what
        tol = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}[a.dtype]  # the interpreter truncates
        torch.testing.assert_close(a.float(), b.float(), rtol=tol, atol=tol, msg=lambda m: f"{what}: {m}")


def rand(*shape, dtype):
    return (2 * torch.randn(shape)).to(DEVICE, dtype)
