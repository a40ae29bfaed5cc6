"""What the tests of activation kernels share: eager formulas, errors, a run of the Triton half."""

import torch
import torch.nn.functional as F
from triton_process import run_script

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


TRITON = """
import sys, torch
from megafx.kernels.activation import activation as plain, activation_triton as ours

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}  # the interpreter truncates to bf16
def same(found, right, what):
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, right)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous(), what
        tol = TOLERANCE[dtype]
        torch.testing.assert_close(a.float(), b.float(), rtol=tol, atol=tol, msg=lambda m: f"{what}: {m}")

def rand(*shape, dtype):
    return (2 * torch.randn(shape)).to(device, dtype)
"""


def run_triton(tmp_path, body):
    script = tmp_path / "kernel.py"
    script.write_text(TRITON + body)
    run_script(script, "same numbers", 240)
