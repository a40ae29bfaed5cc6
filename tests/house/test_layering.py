"""Covers: who may import whom. Imports, those for type checkers too, go strictly downward between the packages of LAYERS."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first. A module of a package imports from packages of lower lines, and from its own package.
LAYERS = [
    "errors",
    "units versions meanwhile",
    "config debugging",
    "progress",
    "placements",
    "ir",
    "rules ops rewrite",
    "kernels planner",
    "distributed",
    "analysis weights",
    "patterns",
    "capture passes checkpoint report",
    "checks",
    "compiler",
    "runtime testing named_model measure meter replaying what_if profiling example_call staging",
    "stage_orders",
    "equivalence rehearsal pipelining",
    "rehearsal_of_stages",
    "api integrations",
    "__init__",
    "cli",
]
LAYER = {package: number for number, line in enumerate(LAYERS) for package in line.split()}
TORCH_FREE = [
    "__init__",
    "cli",
    "errors",
    "units",
    "versions",
    "config",
    "debugging",
    "progress",
    "placements.types",
    "placements.views",
    "placements.slices",
    "ir.facts",
    "rules.grammar",
]
TORCH_FREE += ["rules.aten", "planner.solver", "planner.cost", "planner.hardware", "analysis.layers"]


def modules() -> dict[str, Path]:
    """'passes.fuse.fuse' -> its file, for every module of the package."""
    found = {}
    for folder, prefix in (("megafx", ()), ("passes", ("passes",)), ("patterns", ("patterns",))):
        for file in (ROOT / folder).rglob("*.py"):
            parts = (*prefix, *file.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = file
    return found


MODULES = modules()


def imports(file: Path) -> set[str]:
    """Modules of megafx that a file imports, wherever and for whatever reason."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("megafx.") for a in node.names if a.name.startswith("megafx.")}
            found |= {"__init__" for a in node.names if a.name == "megafx"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            if node.module == "megafx" or (node.module or "").startswith("megafx."):
                package = (node.module or "").removeprefix("megafx").lstrip(".")
                inside = {f"{package}.{a.name}".lstrip(".") for a in node.names}
                found |= (inside & set(MODULES)) or {package or "__init__"}
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Name of a module -> modules that it imports."""
    return {name: imports(file) for name, file in MODULES.items()}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_downward(name):
    package = name.split(".")[0]
    above = [o for o in graph()[name] if o.split(".")[0] != package and LAYER[o.split(".")[0]] >= LAYER[package]]
    assert not above, f"megafx.{name} imports {above}"


def test_no_circles():
    TopologicalSorter(graph()).prepare()  # raises CycleError with the circle


def test_passes_do_not_import_passes():
    """They meet in the pipeline's list; a pass imports only its own parts."""
    passes = {n for n, file in MODULES.items() if n.startswith("passes.") and "\nREQUIRES" in file.read_text()}
    assert not {(n, o) for n in passes for o in graph()[n] & passes}


def test_torch_free_modules_do_not_import_torch():
    code = "import sys\nfor name in sys.argv[1:]: __import__(f'megafx.{name}')\nassert 'torch' not in sys.modules\n"
    command = [sys.executable, "-c", code, *TORCH_FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr


def test_sources_are_ascii():
    for file in [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        assert file.read_text().isascii(), f"{file} has characters that are not ASCII"


def test_ignored_types_have_a_code_and_a_reason():
    lines = [
        f"{path}: {line}"
        for path in MODULES.values()
        for line in path.read_text().splitlines()
        if "type: ignore" in line
    ]
    assert not [line for line in lines if not re.search(r"# type: ignore\[[a-z, -]+\]  # .", line)]


def test_folders_and_files_can_be_surveyed():
    """A folder has at most 25 files of Python, and a file at most 700 lines."""
    files = [f for top in ("megafx", "passes", "patterns", "tests", "benchmarks") for f in (ROOT / top).rglob("*.py")]
    count = Counter(file.parent.relative_to(ROOT) for file in files)
    assert not {str(folder): number for folder, number in count.items() if number > 25}
    long = {str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > 700}
    assert not long


WITHOUT_TENSORS = {"kernels.experts.row_units", "runtime.program_cache.fingerprint"}


def calls_itself_from_within(tree: ast.AST) -> list[str]:
    """Functions in functions that call themselves, by name."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inner = {id(n): n for f in functions for n in ast.walk(f) if isinstance(n, ast.FunctionDef) and n is not f}
    methods = {id(n) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for n in c.body}
    reads = lambda f: {n.id for part in f.body for n in ast.walk(part) if isinstance(n, ast.Name)}
    return [f.name for i, f in inner.items() if i not in methods and f.name in reads(f)]


def test_steps_make_no_cycles():
    """A function in a function that calls itself is a cycle with all that it reads: here, a step's tensors."""
    steps = {n: f for n, f in MODULES.items() if n.split(".")[0] in ("runtime", "kernels", "distributed", "ops")}
    found = {name: calls_itself_from_within(ast.parse(file.read_text())) for name, file in steps.items()}
    assert not {n: names for n, names in found.items() if names and n not in WITHOUT_TENSORS}
    assert calls_itself_from_within(ast.parse("def f(x):\n def g(y):\n  return g(x)\n return g")) == ["g"]
