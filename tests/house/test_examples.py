"""Covers: examples/models (plain models, no megafx in them); examples/train_gpt.py, the loop of the user's own; the scripts."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import notebook
import pytest
import torch

import megafx

FOLDER = Path(__file__).resolve().parents[2] / "examples"
IDS = torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(0))
CALLS = {
    ("gpt", "GPT"): (IDS, IDS),
    ("llama", "Llama"): (IDS, IDS),
    ("bert", "Bert"): (IDS, IDS % 2, IDS),
    ("t5", "T5"): (IDS, IDS[:, :9]),
    ("unusual", "Unusual"): (IDS, IDS),
}


def load(name, folder="models"):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "cls"), CALLS)
def test_models_learn(name, cls):
    module = load(name)
    torch.manual_seed(0)
    model = getattr(module, cls)(getattr(module, f"{cls}Config")())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        _, loss = model(*CALLS[name, cls])
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_models_do_not_know_megafx(name):
    assert "megafx" not in (FOLDER / "models" / f"{name}.py").read_text()


# -- scripts, in this process and small


def test_plan_405b(tmp_path, capsys):
    page = tmp_path / "plan.html"
    load("plan_405b", ".").main(
        ["--layers", "1", "--gpus", "2", "--memory", "500GiB", "--stages", "2", "--html", str(page)]
    )
    printed = capsys.readouterr().out
    assert "a step: " in printed and "megafx.Config(" in printed
    assert page.read_text().startswith("<!doctype html>") and page.stat().st_size < 200_000


def test_lora():
    pytest.importorskip("peft")
    losses = load("lora", ".").main(["--steps", "8", "--layers", "1"])
    assert losses[-1] < losses[0] - 0.05


def test_long_context(capsys):
    losses = load("long_context", ".").main(["--seq", "64", "--layers", "1"])
    assert losses["None"] == losses["full"]
    assert "recompute_granularity=full" in capsys.readouterr().out


def test_own_pass():
    module = load("own_pass", ".")
    module.test_neutral_numbers_disappear(), module.test_others_stay()
    x = torch.randn(4, 6, 16)
    plan = megafx.plan(module.Net(), module.main(), example_inputs=x)
    without = megafx.plan(module.Net(), megafx.Config(tensor_model_parallel_size=2), example_inputs=x)
    assert len(plan.ops) == len(without.ops) - 2


@pytest.mark.repeated_calls  # as the notebook's verify makes them
def test_the_notebook_shows_what_it_prints():
    """Numbers aside: prices change with the cost model."""
    written = notebook.read()
    cells = [cell for cell in written["cells"] if cell["cell_type"] == "code"]
    for cell, text in zip(cells, notebook.run(written), strict=True):
        found, shown = notebook.alike(text), notebook.alike(notebook.printed(cell))
        assert found == shown, "run `python tests/house/notebook.py`"


@pytest.mark.dist
@pytest.mark.slow
def test_the_loop_on_two_ranks_goes_on_on_one(tmp_path):
    """The script compares gradients and the curve, with the steps before the checkpoint, to those of one process."""
    shape = "--layers 1 --embd 32 --heads 2 --seq 16 --batch 4 --warmup 2 --dtype float64"
    options = f"{shape} --steps 6 --save {tmp_path}/run --save-every 3"

    def train(launch, *more):
        command = [sys.executable, *launch, str(FOLDER / "train_gpt.py"), *options.split(), *more]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        text = done.stdout[-2000:] + done.stderr[-4000:]
        assert done.returncode == 0 and "the curves differ by at most" in done.stdout, text

    train(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000003", "step_00000006"]
    shutil.rmtree(tmp_path / "run" / "step_00000006")
    train([], "--resume")
    assert (tmp_path / "run" / "step_00000006").exists()
