"""Covers: examples/models (plain models, no megafx in them) and the data of examples/train_gpt.py."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "examples"
IDS = torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(0))
CALLS = {
    ("gpt", "GPT"): (IDS, IDS),
    ("llama", "Llama"): (IDS, IDS),
    ("bert", "Bert"): (IDS, IDS % 2, IDS),
    ("t5", "T5"): (IDS, IDS[:, :9]),
    ("unusual", "Unusual"): (IDS, IDS),
}


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / "models" / f"{name}.py")
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
