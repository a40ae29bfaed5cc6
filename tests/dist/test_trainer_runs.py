"""Trainers of transformers, trl and accelerate on two tensor-parallel gloo ranks, with their defaults and with LoRA: ten steps
as one process has them with the plain model (trainer_runs.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import forks
import pytest

SCRIPT = str(Path(__file__).resolve().parent / "trainer_runs.py")
QUICK = ("trainer_with_lora", "accelerate_in_one_call")
SLOW = ("seq2seq_with_generation",)
TRL = ("sft", "sft_with_lora", "dpo", "dpo_with_lora", "grpo")
pytestmark = pytest.mark.dist


def run(folder: Path, ranks: int, *arguments: str) -> dict[str, Any]:
    """Name -> curves, as trainer_runs.py prints them. Ranks have the variables that torchrun sets."""
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    plain |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    plain["NOGC"] = "1"  # without gradient checkpointing, which is trl's default
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free.getsockname()[1])
    orders = []
    for rank in range(ranks):
        own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        log = str(folder / f"rank{rank}of{ranks}.log")
        orders.append(forks.Order(SCRIPT, [str(folder), *arguments], plain | own, log))
    codes = forks.run(orders, 900, ("megafx.api", "transformers.trainer", "peft"), plain)
    texts = [Path(order.log).read_text() for order in orders]
    assert not any(codes), "\n".join(text[-5000:] for text in texts)
    return json.loads(next(line for line in texts[0].splitlines() if line.startswith("log "))[4:])


def compare(names: tuple[str, ...], folder: Path, rtol: float, of_weights: float) -> None:
    wanted, found = run(folder, 1, "--eager", *names), run(folder, 2, *names)
    for name in names:
        assert isinstance(wanted[name], dict), wanted[name]
        assert len(wanted[name]["losses"]) >= 10 and found[name].keys() == wanted[name].keys()
        for what, curve in wanted[name].items():
            bound = pytest.approx(curve, rel=of_weights if what == "weights" else rtol, abs=1e-6)
            assert found[name][what] == bound, f"{what} of {name}"


def test_the_trainer_with_lora_and_accelerate(tmp_path: Path) -> None:
    compare(QUICK, tmp_path, 1e-6, 1e-4)


@pytest.mark.slow
def test_the_trainer_with_own_modules(tmp_path: Path) -> None:
    compare(("trainer_of_own_module",), tmp_path, 1e-6, 1e-4)


@pytest.mark.slow
def test_generation_inside_of_training(tmp_path: Path) -> None:
    compare(SLOW, tmp_path, 1e-10, 1e-8)


# Losses are computed in fp32, and AdamW makes whole steps of rounding where a gradient is zero.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
@pytest.mark.parametrize("name", TRL)
def test_trl(name: str, tmp_path: Path) -> None:
    compare((name,), tmp_path, 1e-3, 1e-2)
