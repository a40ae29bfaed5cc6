"""Covers: benchmarks/kernels.py and what its families hand to it, as far as that needs no GPU."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import megafx.kernels.activation.activation  # noqa: F401  registers the op

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    """The script as a module, its folder importable."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("kernels")


def tiny(**changes):
    from kernel_cases.case import Case

    def inputs():
        return torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)

    fields = {
        "name": "tiny",
        "inputs": inputs,
        "ours": lambda x, b: torch.ops.megafx.bias_act(x, b, "gelu"),
        "eager": lambda x, b: F.gelu(x + b),
        "forward_bytes": 10**6,
        "backward_bytes": 2 * 10**6,
    }
    return Case(**{**fields, **changes})


def test_every_family_is_well_formed(bench):
    assert {"bias_activation", "glu"} <= {*bench.FAMILIES}
    for family in bench.FAMILIES:
        cases = importlib.import_module(f"kernel_cases.{family}").cases()
        names = [c.name for c in cases]
        assert len({*names}) == len(names) and any(c.headline for c in cases), family
        assert all(c.forward_bytes > 0 and c.backward_bytes >= 0 for c in cases), family


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_gpu_it_says_so():
    run = subprocess.run([sys.executable, FOLDER / "kernels.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "needs a CUDA device" in run.stderr and not run.stdout


def test_an_unknown_family_is_an_error():
    command = [sys.executable, FOLDER / "kernels.py", "--only", "nonsense"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "no family nonsense; there are attention, bias_activation" in run.stderr


def test_peers_that_are_chosen(bench):
    def names(case, peers):
        return [name for name, _ in bench.implementations(case, peers)]

    peer = {"liger": lambda: None}
    assert names(tiny(headline=True, peers=peer), None) == ["megafx", "eager", "torch.compile", "liger"]
    assert names(tiny(peers=peer), None) == ["megafx", "eager"]
    assert names(tiny(peers=peer), ["liger"]) == ["megafx", "liger"] and names(tiny(), []) == ["megafx"]


def test_what_is_missing_or_fails_is_a_row(bench):
    from kernel_cases.output import line

    def missing():
        raise ImportError("no such package")

    row = bench.measure(tiny(), "liger", missing, {"copy": 1e9, "matmul": 1e12})
    assert line(row).split() == ["tiny", "liger", "not", "installed"]
    row = bench.measure(tiny(), "eager", lambda: lambda x, b: x[10], {"copy": 1e9, "matmul": 1e12})
    assert "failed: IndexError" in line(row)


def test_a_row(bench, monkeypatch, tmp_path):
    """Fractions of the floor from times that are given; errors and saved bytes measured."""
    from kernel_cases.measure import Runner, Times
    from kernel_cases.output import line, plot, write_json

    monkeypatch.setattr(Runner, "times", lambda self: Times(2.0, 4.0, "graph"))
    monkeypatch.setattr(Runner, "host", lambda self: (10.0, 20.0))
    case, rates = tiny(headline=True), {"copy": 1e9, "matmul": 1e12}
    ours = bench.measure(case, "megafx", lambda: case.ours, rates)
    assert (ours["forward_fraction"], ours["both_fraction"]) == (0.5, 0.75)
    assert ours["saved_mb"] == 0 and ours["error"] < 1e-6 and ours["gradient_error"] < 1e-6
    assert bench.measure(case, "eager", lambda: case.eager, rates)["saved_mb"] == pytest.approx(96e-6)  # x + b
    wrong = bench.measure(case, "wrong", lambda: lambda x, b: 1.1 * F.gelu(x + b), rates)
    assert wrong["error"] == pytest.approx(0.1, rel=1e-3) and wrong["gradient_error"] == pytest.approx(0.1, rel=1e-3)
    assert line(ours).split()[:6] == ["tiny", "megafx", "2.0000", "0.50", "4.0000", "0.75"]
    meta = {"device": "none", "copy_gb_s": 1.0}
    write_json(tmp_path / "out.json", meta, [ours])
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["both_ms"] == 4.0
    said = plot(tmp_path / "out.png", meta, [ours])
    assert "matplotlib is not installed" in said or (tmp_path / "out.png").exists()
    compute = bench.measure(tiny(forward_flops=4 * 10**9), "megafx", lambda: case.ours, rates)
    assert compute["forward_floor_ms"] == 4.0  # operations, not bytes, are the floor
