"""Covers: docs/new_op.md. Its Python blocks run in order, as a reader would follow them, in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "new_op.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guide_runs(tmp_path: Path) -> None:
    assert len(BLOCKS) == 5
    script = tmp_path / "guide.py"
    script.write_text("\n".join(BLOCKS) + "\nprint('followed to the end')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "followed to the end" in done.stdout, done.stdout + done.stderr
    assert "wrong     my_ops.recur.default" in done.stdout


def test_the_command_of_the_guide(tmp_path: Path) -> None:
    """--import makes the package's ops and rules; a wrong rule is found, and the exit status says so."""
    (command,) = re.findall(r"`megafx (check-rules --import \S+ \S+)`", GUIDE)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def run(rule: str) -> "subprocess.CompletedProcess[str]":
        lines = [
            BLOCKS[0].split("class Mixer")[0],
            "import megafx",
            f'megafx.register_rule("my_ops.recur.default", "{rule}")',
        ]
        (package / "ops.py").write_text("\n".join(lines))
        words = [sys.executable, "-m", "megafx.cli", *command.split()]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    right, wrong = run("nl[0]: b s! h, h -> b s! h"), run("lin: b s h, h -> b s h")
    assert right.returncode == 0 and "0 wrong, 0 missing" in right.stdout, right.stdout + right.stderr
    assert wrong.returncode == 1 and "S1 R -> S1" in wrong.stdout, wrong.stdout + wrong.stderr
