"""The training example on two and four GPUs (NCCL), tensor and data parallel: gradients of a step and the loss curve of some
more are those of one process, with dropout. What gloo's ranks show on CPUs; here with the library's collectives and
kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
EXPERTS = Path(__file__).parent / "on_ranks" / "experts.py"
SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")


@pytest.mark.parametrize(
    "options",
    [
        "--dtype float64",
        "--dtype float64 --sequence-parallel on --seq 127",
        "--dtype float64 --dp 2",
        "--dtype float64 --dp 2 --data-parallel zero1",
        "--dtype float64 --dp 2 --data-parallel fsdp",
        "--dtype bfloat16 --dp 2 --data-parallel fsdp",
        "--compile --sequence-parallel on",
        "--compile --dp 2 --data-parallel fsdp",
    ],
)
def test_two_gpus_train_as_one(options: str) -> None:
    assert "the curves differ by at most" in run(EXAMPLE, "--steps", "12", "--layers", "2", *options.split())


@four_gpus
@pytest.mark.parametrize(
    "options",
    [
        "--dtype float32",
        "--dtype float32 --heads 6 --embd 192 --seq 127 --sequence-parallel on",
        "--dtype float64 --heads 6 --embd 192 --seq 127 --sequence-parallel on",
        "--dtype float32 --dp 2 --data-parallel fsdp",
        "--dtype float64 --dp 2 --data-parallel zero1 --sequence-parallel on --seq 127",
        "--dtype float64 --dp 4 --data-parallel fsdp",
    ],
)
def test_four_gpus_train_as_one(options: str) -> None:
    assert "the curves differ by at most" in run(EXAMPLE, "--steps", "12", "--layers", "2", *options.split(), ranks=4)


@four_gpus
def test_a_checkpoint_of_four_gpus_goes_on_with_two(tmp_path: Path) -> None:
    options = f"--dtype float64 --layers 2 --seq 127 --sequence-parallel on --save {tmp_path} --save-every 6".split()
    run(EXAMPLE, "--steps", "6", *options, ranks=4)
    assert "the curves differ by at most" in run(EXAMPLE, "--steps", "12", "--resume", *options)


def test_experts_over_two_gpus() -> None:
    """Each expert split; experts shared out, in fp32 and bf16, kernel by kernel and replayed."""
    seen = run(EXPERTS)
    assert seen.count("2 x cuda") == 4 and seen.count("replayed") == 1


@pytest.mark.parametrize("how", ["stalls", "ends"])
def test_a_fault_inside_of_an_exchange(tmp_path: Path, how: str) -> None:
    """One GPU's rank stalls or dies between two copies: a time-out ends the other, by an error or NCCL's watchdog."""
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}
    begin = time.monotonic()
    script = str(Path(__file__).with_name("exchange_fault.py"))
    (text, _) = run_ranks(
        script, tmp_path, 2, how, timeout=150, environment=visible, ends=((3, 1, -6), -9 if how == "ends" else 0)
    )
    assert "was not stopped" not in text and time.monotonic() - begin < 140, text


def run(script: Path, *options: str, ranks: int = 2) -> str:
    """What it prints on so many ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, str(script), *options]
    folders = (SUPPORT, f"{SUPPORT}/small_models", os.environ.get("PYTHONPATH"))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
