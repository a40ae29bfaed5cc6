"""Covers: README.md. Its Python runs as it stands, and what it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

from megafx.debugging import FLAGS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_quick_start_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 25
    script = tmp_path / "quick_start.py"
    script.write_text(code + "\nassert loss.item() > 0\n")
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "column-parallel" in done.stdout
    assert "row-parallel" in done.stdout


def test_debug_table_is_complete():
    named = set(re.findall(r"`(MEGAFX_[A-Z_]+)=", README))
    assert named == {flag.variable for flag in FLAGS}


def test_paths_of_the_layout_table_exist():
    table = README[README.index("## Layout") :]
    for path in re.findall(r"^\| `([a-z_]+/)`", table, re.MULTILINE):
        assert (ROOT / path).is_dir(), path
    for path in re.findall(r"`((?:megafx|examples)/[a-z_/]+\.py)`", README):
        assert (ROOT / path).is_file(), path


def test_make_targets_and_scripts_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
