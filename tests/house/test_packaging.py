"""Covers: pyproject.toml (package-dir mapping), passes/__init__.py, patterns/__init__.py."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    assert held == files | {"megafx/py.typed", "megafx/report/page.css", "megafx/report/page.js"}


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
