"""Covers: examples/hf_trainer.py and accelerate_loop.py, hf_trainer.py: the Hugging Face Trainer and accelerate on two
tensor-parallel gloo ranks log what they log for the eager model, save, and go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OVERFLOW = str(Path(__file__).resolve().parents[1] / "dist" / "trainer_overflow.py")
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def run(script: str, ranks: int, *arguments: str) -> Any:
    """What the example logs, on so many ranks (1: without a process group)."""
    pytest.importorskip("lightning" if script.startswith("lightning") else "accelerate")
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


# The bounds are those of examples/train_gpt.py: rounding in bf16 grows with the steps of AdamW. fp16 has three bits more.
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
    if not precision:
        saved = weights(tmp_path / "two")
        for name, value in weights(tmp_path / "eager").items():
            torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)
        return
    # AdamW goes either way where a gradient is rounding, so that bf16 runs part from each other as they do from fp32
    run("hf_trainer.py", 1, "--eager", "--output", str(tmp_path / "exact"), *options[:4])
    error = distances(tmp_path, "exact")
    assert 0 < error["two"] < 2 * error["eager"], error


def test_trainer_skips_the_steps_that_the_eager_model_skips(tmp_path: Path) -> None:
    """fp16 with a GradScaler: overflows of themselves, one on one rank alone (step 6), growth; a run that goes on."""
    options = ("--fp16", "--steps", "8", "--save-steps", "4", "--output")
    eager = run(OVERFLOW, 1, "--at", "6", "--eager", *options, str(tmp_path / "eager"))
    found = run(OVERFLOW, 2, "--at", "6", *options, str(tmp_path / "two"))
    skipped, scale = column(eager, "skipped"), column(eager, "scale")
    assert [step for step, value in skipped.items() if value] == [1, 2, 3, 4, 6]
    assert [scale[step] for step in (1, 4, 5, 6, 7, 8)] == [2.0**23, 2.0**20, 2.0**20, 2.0**19, 2.0**19, 2.0**20]
    for name in ("skipped", "scale", "learning_rate"):
        assert column(found, name) == column(eager, name), name
    for name, count in (("loss", 8), ("grad_norm", 8), ("eval_loss", 2)):
        wanted = column(eager, name)  # of the norms, five are infinite or none at all
        assert len(wanted) == count and column(found, name) == pytest.approx(wanted, rel=5e-2 / 8, nan_ok=True), name
    # the same steps in fp32: two ranks part from it no further than rounding has the eager model do
    run(OVERFLOW, 1, "--at", "1", "2", "3", "4", "6", "--exact", "--eager", *options, str(tmp_path / "exact"))
    error = distances(tmp_path, "exact")
    assert 0 < error["two"] < 2 * error["eager"], error

    shutil.rmtree(tmp_path / "two" / "checkpoint-8")
    again = run(OVERFLOW, 2, "--at", "6", "--resume", *options, str(tmp_path / "two"))
    for name in ("skipped", "scale", "loss"):  # with a new scaler step 5 would be skipped
        values = column(found, name)
        went_on = {step: value for step, value in column(again, name).items() if step > 4}
        assert went_on == pytest.approx({step: values[step] for step in (5, 6, 7, 8)}, rel=1e-5), name


def distances(output: Path, exact: str) -> dict[str, float]:
    """How far the final weights of "eager" and "two" are from those of `exact`."""
    flat = {w: torch.cat([x.flatten() for x in weights(output / w).values()]) for w in ("eager", "two", exact)}
    return {which: float((flat[which] - flat[exact]).norm()) for which in ("eager", "two")}


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Of the model that the example saved at its end."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(output / "final", dtype=torch.float32).state_dict()


@pytest.mark.parametrize(("ranks", "form"), [(4, "ddp"), (4, "fsdp"), (2, "zero1")])
def test_trainer_with_data_parallel_ranks(ranks: int, form: str, tmp_path: Path) -> None:
    """Two replicas of 4 rows, of two tensor-parallel ranks or of one, are the eager model on 8 rows; and go on after a stop."""
    options = ("--steps", "6", "--save-steps", "3", "--eval-rows", "12")
    eager = run("hf_trainer.py", 1, "--eager", "--batch", "8", "--output", str(tmp_path / "eager"), *options)
    options += ("--dp", "2", "--data-parallel", form, "--output", str(tmp_path / "two"))
    found = run("hf_trainer.py", ranks, *options)
    for name, count in (("loss", 6), ("grad_norm", 6), ("eval_loss", 2)):
        wanted = column(eager, name)
        assert len(wanted) == count and column(found, name) == pytest.approx(wanted, rel=1e-5), name
    assert min(column(eager, "grad_norm").values()) > 0.5, "nothing was clipped"
    for name, value in weights(tmp_path / "eager").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], value, rtol=1e-3, atol=1e-4)
    shutil.rmtree(tmp_path / "two" / "checkpoint-6")
    again = run("hf_trainer.py", ranks, "--resume", *options)
    assert column(again, "loss") == pytest.approx(column(found, "loss"), rel=1e-5)


def test_trainer_with_ranks_that_cut_sequences(tmp_path: Path) -> None:
    options = ("--steps", "4", "--eval-rows", "12")
    eager = run("hf_trainer.py", 1, "--eager", "--output", str(tmp_path / "eager"), *options)
    found = run("hf_trainer.py", 2, "--cp", "2", "--data-parallel", "fsdp", "--output", str(tmp_path / "two"), *options)
    for name in ("loss", "grad_norm"):
        assert len(column(found, name)) == 4 and column(found, name) == pytest.approx(column(eager, name), rel=1e-5), (
            name
        )


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


def test_accelerate_with_a_scaler(tmp_path: Path) -> None:
    """fp16: the first steps overflow, on two ranks as in the eager model; a run that goes on has the scale it had."""
    options = ("--fp16", "--save-steps", "6")
    eager = run("accelerate_loop.py", 1, "--eager", "--output", str(tmp_path / "eager"), "--steps", "8", *options)
    found = run("accelerate_loop.py", 2, "--output", str(tmp_path / "two"), "--steps", "6", *options)
    again = run("accelerate_loop.py", 2, "--output", str(tmp_path / "two"), "--steps", "8", "--resume", *options)
    assert eager["scales"][0] == 2.0**23, "the first step was not skipped"
    assert any(later > earlier for earlier, later in pairwise(eager["scales"])), "the scale never grew"
    assert found["scales"] + again["scales"] == eager["scales"] and len(again["scales"]) == 2
    assert found["losses"] == pytest.approx(eager["losses"][:12], rel=5e-2 / 8)


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


def test_lightning_logs_what_it_logs_for_the_eager_model_and_goes_on(tmp_path: Path) -> None:
    """Losses of training and validation; a run of two parts is that of one."""
    script, steps = "lightning_trainer.py", ("--steps", "12")
    eager = run(script, 1, "--eager", "--output", str(tmp_path / "eager"), *steps)
    whole = run(script, 2, "--output", str(tmp_path / "whole"), *steps)
    run(script, 2, "--output", str(tmp_path / "parts"), "--steps", "6")
    rest = run(script, 2, "--output", str(tmp_path / "parts"), "--resume", *steps)
    assert len(eager["losses"]) == 24 and whole["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert whole["val_losses"] == pytest.approx(eager["val_losses"], rel=1e-5)
    assert rest["losses"] == whole["losses"][12:] and rest["step"] == 12
