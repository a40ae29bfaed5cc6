"""Comparing kernels with their reference: Triton's in a process of their own, on the GPU where there is one, else in its
interpreter; what the tests of activations share: eager formulas, errors, numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
import torch.nn.functional as F

from megafx.kernels.common import philox


def run_as_script(file: str | Path, timeout_s: int, on_gpu: bool = True, *arguments: str) -> None:
    """Run a file, which compares kernels with their reference; it must end well. Skips without Triton.

    on_gpu: whether it runs there if it can; else it gives the kernels tensors on the CPU.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    on_gpu = on_gpu and torch.cuda.is_available()
    if not on_gpu and not _interpreter_runs_loops():
        pytest.skip("this Triton's interpreter and this numpy do not go together")
    plain = {**os.environ, "OMP_NUM_THREADS": "1", **({} if on_gpu else {"TRITON_INTERPRET": "1"})}
    plain["PYTHONPATH"] = forks.path_of(plain)
    with tempfile.NamedTemporaryFile() as log:
        order = forks.Order(str(file), [*arguments], plain, log.name)
        (code,) = forks.run([order], timeout_s, ("megafx.api", "triton", "kernel_checks"), plain)
        assert code == 0, log.read().decode(errors="replace")[-3000:]


def _interpreter_runs_loops() -> bool:
    """Triton 3.6's makes a Python int of an array of one element, which numpy 2.4 forbids."""
    import numpy
    import triton

    old = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
    return not (old and tuple(int(n) for n in numpy.__version__.split(".")[:2]) >= (2, 4))


def _interpret_quickly() -> None:
    """Triton's interpreter replaces its language once a launch, not at each call of a function too: a third of the time."""
    from triton.runtime import interpreter

    replace, everywhere = (
        interpreter._patch_lang,
        SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core}),
    )
    now: list[Any] = []

    def once(function: Any) -> Any:
        if now:
            return interpreter._LangPatchScope()  # of a function that a kernel calls: nothing to put back
        now.append(replace(everywhere))
        return SimpleNamespace(restore=lambda: now.pop().restore())

    interpreter._patch_lang = once


if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError, AttributeError):  # of another version of Triton
        _interpret_quickly()


# -- activations

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
    """Equal but for the rounding of the coarsest dtype among them; one tensor or several, contiguous."""
    found, right = (t if isinstance(t, tuple) else (t,) for t in (found, right))
    limits = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}  # the interpreter truncates to bf16
    tol = max(limits[a.dtype] for a in found)
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous(), what
        torch.testing.assert_close(a.float(), b.float(), rtol=tol, atol=tol, msg=lambda m: f"{what}: {m}")


def rand(*shape, dtype):
    return (2 * torch.randn(shape)).to(DEVICE, dtype)


def element_draws(index: torch.Tensor, key: tuple[int, int], op_id: int) -> torch.Tensor:
    """Global element indices (int64, any shape) -> 16-bit draws (int64): the definition, one call an element."""
    group, j = index >> 3, index & 7
    words = philox.philox4x32((group & philox.MASK, group >> 32, op_id, 0), key)
    word = torch.stack([torch.as_tensor(w).expand(index.shape) for w in words], -1)
    return (word.gather(-1, (j >> 1).unsqueeze(-1)).squeeze(-1) >> (16 * (j & 1))) & 0xFFFF
