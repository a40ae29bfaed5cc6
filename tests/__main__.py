"""`python -m tests [--all] [pytest arguments]`: lint, format check, type check, tests. What CI runs.

Tests marked slow (most of the 155 random plans, the Hugging Face Trainer on two ranks) run with --all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def installed_layout() -> Path:
    """The tree that the type checker sees: `passes` and `patterns` inside `megafx`, as they are installed.

    Type checkers do not read setuptools' package-dir mapping.
    """
    tree = ROOT / "build" / "typecheck" / "megafx"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for source in [*(ROOT / "megafx").iterdir(), ROOT / "passes", ROOT / "patterns"]:
        if source.name != "__pycache__":
            (tree / source.name).symlink_to(source, target_is_directory=source.is_dir())
    return tree


def main() -> int:
    os.chdir(ROOT)
    tools = [sys.executable, "-m"]
    folders = ["megafx", "passes", "patterns", "tests", "examples", "benchmarks"]
    arguments = sys.argv[1:]
    which = [a for a in arguments if a != "--all"] if "--all" in arguments else ["-m", "not slow", *arguments]
    checks = [
        ("lint", [*tools, "ruff", "check", *folders]),
        ("format", [*tools, "ruff", "format", "--check", *folders]),
        ("types", [*tools, "mypy", str(installed_layout())]),
        ("tests", [*tools, "pytest", "-n", "2", "--dist", "loadfile", *which]),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    failed = []
    for name, command in checks:
        start = time.perf_counter()
        status = subprocess.run(command, env=environment, check=False).returncode
        print(f"== {name}: {'ok' if status == 0 else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True)
        failed += [name] if status else []
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
