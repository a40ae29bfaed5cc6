"""Covers: megafx/distributed/mesh.py. Scripts that make no process group, as README's quick start, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch, megafx
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
model = megafx.parallelize(model, {config}example_inputs=(torch.randn(2, 8),))
print("ranks", model.megafx.t, "of", 1 if model.megafx.everyone is None else model.megafx.everyone.size(), flush=True)
"""


def torchrun(tmp_path: Path, script: str) -> str:
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], env=plain, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.dist
def test_the_quick_start_of_the_readme_trains_one_model(tmp_path: Path) -> None:
    script = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    text = torchrun(tmp_path, script + '\nprint("ranks", model.megafx.t, flush=True)\n')
    assert text.count("ranks 2") == 2
    assert text.count("megafx: made the process group of 2 ranks (gloo)") == 1


@pytest.mark.dist
def test_separate_models_are_a_warning(tmp_path: Path) -> None:
    text = torchrun(tmp_path, MODEL.format(config="megafx.Config(tensor_model_parallel_size=1), "))
    assert text.count("ranks 1 of 1") == 2 and "makes each train a model of its own" in text
