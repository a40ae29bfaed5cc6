"""Covers the real path: gloo processes train nanoGPT, GPT-2 and Llama as one eager process does, and are called in every form.

Two ranks and three; train_models.py, call_forms.py and call_structures.py of dist/ are what runs on each, and say there what a
check does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "dist"
TWO_RANKS = {
    "train_models": (
        "nanogpt_made_at_the_first_call",
        "nanogpt_sequence_parallel",
        "gpt2_whole_sequence",
        "gpt2_sequence_parallel",
        "llama_whole_sequence",
        "llama_sequence_parallel",
        "llama_as_written",
        "dropout_of_nanogpt_sequence_parallel",
        "dropout_of_gpt2",
    ),
    "call_forms": (
        "logits_beside_the_loss_are_lazy",
        "logits_are_made_from_the_weights_of_their_step",
        "weights_that_change_before_backward_are_noticed",
        "the_loss_of_the_users_loop",
        "frozen_parameters",
        "other_inputs_on_one_rank_are_refused",
        "misuse_is_refused",
        "direct_calls_of_submodules",
        "nested_inputs_and_mutated_buffers",
        "gradients_of_inputs",
        "a_loss_outside_of_the_model",
        "differentiable_outputs_beside_the_loss",
        "outputs_left_sharded",
        "gradients_accumulate_into_kept_memory",
        "autocast_has_a_graph_of_its_own",
        "a_run_is_saved_and_resumed",
    ),
    "call_structures": (
        "forms_of_one_object",
        "without_gradients",
        "encoder_outputs_with_gradients",
        "an_encoder_called_by_itself",
        "adapters_train_on_shards",
        "a_module_left_eager",
        "experts_that_take_their_tokens_by_index",
    ),
}
THREE_RANKS = ("nanogpt_sequence_parallel", "dropout_of_nanogpt_sequence_parallel")


@cache
def results(script: str, ranks: int) -> dict[str, tuple[str, str]]:
    """Check -> (PASS or FAIL, text), as rank 0 printed them."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), f"{SCRIPTS / script}.py"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MEGAFX_", "RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = re.findall(r"^(PASS|FAIL) (\w+): (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return {name: (verdict, text) for verdict, name, text in lines}


def on_two_ranks() -> Iterator[Any]:
    """(script, check); one script is run with the slow tests alone."""
    for script, names in TWO_RANKS.items():
        for name in names:
            yield pytest.param(script, name, marks=pytest.mark.slow if script == "call_structures" else [])


@pytest.mark.dist
@pytest.mark.parametrize(("script", "name"), list(on_two_ranks()))
def test_on_two_ranks(script: str, name: str) -> None:
    verdict, text = results(script, 2)[name]
    assert verdict == "PASS", text


@pytest.mark.dist
@pytest.mark.parametrize("name", THREE_RANKS)
def test_on_three_ranks(name: str) -> None:
    verdict, text = results("train_models", 3)[name]
    assert verdict == "PASS", text


def test_every_check_is_asserted() -> None:
    for script, names in TWO_RANKS.items():
        defined = re.findall(r"^@check\(2[^)]*\)\ndef (\w+)", (SCRIPTS / f"{script}.py").read_text(), re.MULTILINE)
        assert defined == list(names), script
