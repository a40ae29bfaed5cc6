"""Covers: examples/hf_trainer.py and accelerate_loop.py, hf_trainer.py: the Hugging Face Trainer and accelerate on two
tensor-parallel gloo ranks log what they log for the eager model, save, and go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def run(script: str, ranks: int, *arguments: str) -> Any:
    """What the example logs, on so many ranks (1: without a process group)."""
    pytest.importorskip("accelerate")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(EXAMPLES / script), *arguments]
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = plain | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("log "))[4:])


def column(log: list[dict[str, float]], name: str) -> dict[float, float]:
    """Step -> value."""
    return {entry["step"]: entry[name] for entry in log if name in entry}


# The bounds are those of examples/train_gpt.py: rounding in bf16 grows with the steps of AdamW.
@pytest.mark.parametrize("precision, rtol", [((), 1e-5), (("--bf16",), 5e-2)], ids=["fp32", "bf16"])
def test_trainer_logs_what_it_logs_for_the_eager_model(precision: tuple[str, ...], rtol: float, tmp_path: Path) -> None:
    """Losses, gradient norms (all above the clip), the evaluation's loss over an uneven last batch; and the saved model."""
    options = ("--steps", "6", "--save-steps", "3", *precision)
    eager = run("hf_trainer.py", 1, "--eager", "--output", str(tmp_path / "eager"), *options)
    found = run("hf_trainer.py", 2, "--output", str(tmp_path / "two"), *options)
    for name, count in (("loss", 6), ("grad_norm", 6), ("eval_loss", 2)):
        wanted = column(eager, name)
        assert len(wanted) == count and column(found, name) == pytest.approx(wanted, rel=rtol), name
    assert min(column(eager, "grad_norm").values()) > 0.5, "nothing was clipped"
    saved = {which: weights(tmp_path / which) for which in ("eager", "two")}
    if not precision:
        for name, value in saved["eager"].items():
            torch.testing.assert_close(saved["two"][name], value, rtol=1e-3, atol=1e-4)
        return
    # AdamW goes either way where a gradient is rounding, so that bf16 runs part from each other as they do from fp32
    run("hf_trainer.py", 1, "--eager", "--output", str(tmp_path / "exact"), *options[:4])
    exact = torch.cat([x.flatten() for x in weights(tmp_path / "exact").values()])
    error = {which: (torch.cat([x.flatten() for x in w.values()]) - exact).norm() for which, w in saved.items()}
    assert 0 < error["two"] < 2 * error["eager"], error


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Of the model that the example saved at its end."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(output / "final", dtype=torch.float32).state_dict()


def test_trainer_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    """With dropout: on two ranks, and on one, as the run that did not stop."""
    options = ("--steps", "6", "--save-steps", "3", "--dropout", "0.1")
    whole = column(run("hf_trainer.py", 2, "--output", str(tmp_path / "0"), *options), "loss")
    for ranks in (2, 1):
        folder = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "0", folder)
        shutil.rmtree(folder / "checkpoint-6")
        losses = column(run("hf_trainer.py", ranks, "--output", str(folder), "--resume", *options), "loss")
        assert losses == pytest.approx(whole, rel=1e-5), f"{ranks} ranks"
    shutil.rmtree(tmp_path / "1" / "checkpoint-6")
    shutil.rmtree(tmp_path / "1" / "checkpoint-3" / "megafx")
    with pytest.raises(AssertionError, match="the Trainer resumes at step 3 without the optimizer"):
        run("hf_trainer.py", 1, "--output", str(tmp_path / "1"), "--resume", *options)


def test_accelerate(tmp_path: Path) -> None:
    """Accumulation, clipping, a scheduler, evaluation; a run that goes on is bit-equal to one that did not stop."""
    options = ("--save-steps", "3")
    eager = run("accelerate_loop.py", 1, "--eager", "--output", str(tmp_path / "eager"), "--steps", "6", *options)
    found = run("accelerate_loop.py", 2, "--output", str(tmp_path / "two"), "--steps", "6", *options)
    assert len(eager["losses"]) == 12 and found["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(eager["eval_loss"], rel=1e-5) and found["samples"] == 10
    again = run("accelerate_loop.py", 2, "--output", str(tmp_path / "two"), "--steps", "8", "--resume", *options)
    whole = run("accelerate_loop.py", 2, "--output", str(tmp_path / "whole"), "--steps", "8", *options)
    assert whole["losses"] == [*found["losses"], *again["losses"]] and len(again["losses"]) == 4
    assert again["eval_loss"] == whole["eval_loss"]  # of the parameters after the last step
