"""Covers: torchrun's elastic restarts with checkpoints. dist/restarts.py is the run; its ranks are killed at random moments."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "dist" / "restarts.py"


def undisturbed(steps: int) -> list[float]:
    """The script's losses in this process, with no kills."""
    spec = importlib.util.spec_from_file_location("restarts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.undisturbed(steps)


def run(folder: Path, kills: int, when: str, timeout: float) -> tuple[list[float], str]:
    """(losses of the steps, what was seen) of a run with so many kills."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
    command = [sys.executable, *launch, str(SCRIPT), str(folder), "--kills", str(kills), "--when", when]
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # else a start finds addresses of the one before in torchrun's store: https://github.com/pytorch/pytorch/issues/135712
    environment = plain | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    losses = re.search(r"^losses (.*)$", done.stdout, re.MULTILINE)
    seen = re.search(r"^killed .*$", done.stdout, re.MULTILINE)
    assert losses is not None and seen is not None
    return [float(x) for x in losses[1].split()], seen[0]


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_is_killed_within_a_step(tmp_path: Path) -> None:
    losses, seen = run(tmp_path / "killed", 1, "step", 200)
    assert re.match(r"killed 1 times .*, started 2 times", seen), seen
    assert losses == pytest.approx(undisturbed(6), rel=1e-10) and len(set(losses)) == 6


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("when", ["step", "save"])
def test_twenty_kills(when: str, tmp_path: Path) -> None:
    """Every time the run stops soon, goes on, and ends with the losses of a run that nothing happened to."""
    losses, seen = run(tmp_path / "killed", 20, when, 1500)
    assert re.match(r"killed 20 times .*, started 21 times", seen), seen
    assert float(re.search(r"([\d.]+) s at most", seen)[1]) < 60
    assert losses == pytest.approx(undisturbed(44), rel=1e-10)
