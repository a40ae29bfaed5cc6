"""Runs a script of Triton kernels in a process of its own: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run_as_script(file: str | Path, timeout_s: int, on_gpu: bool = True) -> None:
    """Run a file, which compares kernels with their reference; it must end well. Skips without Triton.

    on_gpu: whether it runs there if it can; else it gives the kernels tensors on the CPU.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    on_gpu = on_gpu and torch.cuda.is_available()
    if not on_gpu and not _interpreter_runs_loops():
        pytest.skip("this Triton's interpreter and this numpy do not go together")
    interpret = {} if on_gpu else {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | interpret | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def _interpreter_runs_loops() -> bool:
    """Triton 3.6's makes a Python int of an array of one element, which numpy 2.4 forbids."""
    import numpy
    import triton

    old = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
    return not (old and tuple(int(n) for n in numpy.__version__.split(".")[:2]) >= (2, 4))
