"""Covers: pyproject.toml (package-dir mapping), __init__.py of the root, of megafx, passes and patterns; conftest.py."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megafx.report.page import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the working tree gets no build folder."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("megafx", "passes", "patterns"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    done = run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), ".", cwd=copy)
    assert done.returncode == 0, done.stderr
    return next(out.glob("megafx-*.whl"))


def test_wheel_holds_every_module_under_megafx(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("megafx-")}
    files = {f"megafx/{p.relative_to(ROOT / 'megafx')}" for p in (ROOT / "megafx").rglob("*.py")}
    files |= {f"megafx/{p.relative_to(ROOT)}" for top in ("passes", "patterns") for p in (ROOT / top).rglob("*.py")}
    files |= {
        f"megafx/{p.relative_to(ROOT / 'megafx')}" for p in (ROOT / "megafx" / "planner" / "hardware").rglob("*.yaml")
    }
    pages = {f"megafx/report/{name}" for name in ("page.html", "page.css", *SCRIPTS)}
    assert held == files | pages | {"megafx/py.typed"}


def test_installed_copy_imports(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import megafx.passes, megafx.patterns, megafx.passes.plan.insert_transitions as p\n"
        "print(megafx.passes.__file__, p.__name__)"
    )
    done = run("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout.split() == [
        str(tmp_path / "site" / "megafx" / "passes" / "__init__.py"),
        "megafx.passes.plan.insert_transitions",
    ], done.stderr


def test_editable_install_maps_the_top_level_folders(tmp_path):
    done = run("-c", "import megafx.passes as p, megafx.patterns as q; print(p.__file__, q.__file__)", cwd=tmp_path)
    assert done.stdout.split() == [str(ROOT / "passes" / "__init__.py"), str(ROOT / "patterns" / "__init__.py")], (
        done.stderr
    )


@pytest.mark.parametrize("name", ["passes", "patterns"])
def test_the_folders_are_not_importable_by_their_own_name(name):
    done = run("-c", f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    assert f"ImportError: run 'pip install -e .' and import megafx.{name}" in done.stderr


def test_the_command_is_installed():
    done = run("-m", "megafx.cli", "version", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("megafx 0.1.0, torch 2.")


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A second checkout, in a folder named megafx. Another one is installed."""
    root = tmp_path_factory.mktemp("work") / "megafx"
    for name in ("megafx", "passes", "patterns"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "tests/conftest.py", "tests/house/test_layering.py", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


def test_a_clone_named_megafx_does_not_shadow_the_package(clone):
    """Python started beside it: without an __init__.py it would be an empty namespace package."""
    (link := clone.parent / "link").mkdir()
    (link / "megafx").symlink_to(ROOT, target_is_directory=True)  # beside the clone that is installed
    code = "import megafx, megafx.passes.fuse.fuse as p; print(megafx.__file__, megafx.Config().sequence_parallel)"
    done = run("-c", code, cwd=link)
    assert done.stdout.split() == [str(link / "megafx" / "megafx" / "__init__.py"), "auto"], done.stderr
    assert run("-m", "megafx.cli", "version", cwd=link).returncode == 0


@pytest.mark.parametrize("beside", [True, False])
def test_the_package_is_of_one_tree(clone, beside):
    done = run("-c", "import megafx", cwd=clone.parent if beside else clone)
    assert f"ImportError: megafx is imported from {clone / 'megafx'}" in done.stderr
    assert f"but megafx.passes from {ROOT / 'passes'}\n  fix: pip install -e {clone}\n" in done.stderr
    bare = run("-S", "-c", "import megafx", cwd=clone)  # without what is installed
    assert f"but megafx.passes is not installed\n  fix: pip install -e {clone}\n" in bare.stderr


def test_tests_are_of_the_tree_that_the_package_is_of(clone):
    """`pytest`, unlike `python -m pytest`, does not put the working directory on the path."""
    command = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(['tests/house']))"
    done = run("-c", command, cwd=clone)
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"but megafx of {ROOT}" in done.stderr and f"fix: pip install -e {clone}\n" in done.stderr
