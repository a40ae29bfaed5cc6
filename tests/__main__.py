"""The checks of the project; further arguments are pytest's.

python -m tests --quick    while you work: lint, layers, golden graphs, rules, tiny models, one check on gloo ranks
python -m tests            what CI runs (`make test`): lint, format, types, every test that is not marked slow
python -m tests --slow     what CI leaves out (`make test-slow`): more ranks, options and models of what the others check once
                           (most random plans and cells, the Hugging Face Trainer on ranks, killed runs)
python -m tests --all      both

The aim on two cores: 3 minutes for --quick, 20 without an option. CI took 26 (1,574 s) on 2026-11-29; since then a sixth of the
CPU time of its tests is gone, which makes about 22. A sixth of it is tests/loop, a seventh gloo ranks. What is left out has a
relative that is not: `like` of a situation, ONE_IN (conftest.py), `slow` of a check on ranks. Tests marked gpu or dist need a
CUDA device, or start processes; they skip where they cannot run.
`make test-models` computes the whole table of models.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK = {  # folder -> its test files, or all
    "house": ["layering", "config"],
    "ir": [],
    "rewrite": [],
    "placements": [],
    "rules": ["grammar"],
    "planner": ["cost", "solver"],
    "passes/backward": ["build_joint_graph"],
    "passes/canonicalize": ["canonicalize"],
    "passes/communicate": ["expand_transitions"],
    "passes/lower": ["partition"],
    "passes/plan": ["insert_transitions"],
    "patterns": ["glu", "rope"],
    "runtime": ["runtime"],
}
ALONE = [  # and these tests
    "checks/test_rules.py::test_mm_has_its_six_rows",
    "equivalence/test_equivalence.py::test_sharded_equals_one_process[nanogpt-3-True]",
    "equivalence/test_equivalence.py::test_sharded_equals_one_process[llama-2-False]",
    "dist/test_on_ranks.py::test_on_ranks[2-nanogpt_sequence_parallel]",
]
PATHS = [f"{folder}/test_{file}.py" for folder, files in QUICK.items() for file in files]
PATHS += [folder for folder, files in QUICK.items() if not files]
WHICH = {
    "--quick": ["-m", "not slow", *(f"tests/{path}" for path in [*PATHS, *ALONE])],
    "--slow": ["-m", "slow"],
    "--all": [],
}


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
    mode = next((a for a in sys.argv[1:] if a in WHICH), "")
    which = [*WHICH.get(mode, ["-m", "not slow"]), *(a for a in sys.argv[1:] if a != mode)]
    checks = [
        ("lint", [*tools, "ruff", "check", *folders]),
        ("format", [*tools, "ruff", "format", "--check", *folders]),
        ("tests", [*tools, "pytest", "-n", "2", "--dist", "loadfile", *which]),
    ]
    # Without torch's cache of ops on fake tensors small models compile in four fifths of the time: it pays where layers repeat.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0", **os.environ}
    failed = []

    def ended(name: str, status: int, seconds: float) -> None:
        print(f"== {name}: {'ok' if status == 0 else 'FAILED'} after {seconds:.0f} s", flush=True)
        failed.extend([name] if status else [])

    begin, types = time.perf_counter(), None
    if not mode:  # beside the others: it uses one core
        command = [*tools, "mypy", str(installed_layout())]
        types = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for name, command in checks:
        status = subprocess.run(command, env=environment, check=False).returncode
        ended(name, status, time.perf_counter() - begin)
    if types is not None:
        print(types.communicate()[0], end="")
        ended("types", types.returncode, time.perf_counter() - begin)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
