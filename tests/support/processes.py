"""Ranks for tests on real gloo process groups: a test file that, run as a script, is one of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_ranks(
    script: str, folder: Path, ranks: int, *, timeout: float, environment: Mapping[str, str] | None = None
) -> list[str]:
    """What each of `python <script> <folder> <rank>` printed; fails with all of it if any of them fails.

    The usual variables RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set beside `environment`.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})}
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(folder), str(rank)],
            env={**base, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [p.communicate(timeout=timeout)[0].decode() for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * ranks, "\n".join(texts)
    return texts
