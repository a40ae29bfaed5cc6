"""Covers: checkpoints saved at one degree and loaded at another, all ranks of both in one process.

For every pair of degrees of {1, 2, 3, 4} parameters and optimizer state are bit-equal; and the next 5 steps, with dropout, are
at fp64 those of the run that was never stopped.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch
from simulated_ranks import Job

DEGREES = (1, 2, 3, 4)
MODELS = {
    "gpt2": {"heads": 3},  # 67 tokens and 3 heads: 2 and 4 divide neither, 3 the heads alone
    "llama": {"heads": 4, "kv": 2},  # fewer groups of keys and values than ranks
    "t5": {"heads": 4},
    "nanogpt": {"heads": 4},  # queries, keys and values in one weight
}
FAST = ("nanogpt",)
RTOL = 1e-10


@cache
def job(name: str) -> Job:
    return Job(name, dropout=0.1, **MODELS[name])


def assert_bit_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    kinds = {name.split(".")[0] for name in wanted}
    assert kinds >= {"model", "optimizer"}, kinds
    assert found.keys() == wanted.keys()
    different = [n for n in wanted if not torch.equal(found[n], wanted[n])]
    assert not different, f"{what}: {different}"


@pytest.mark.parametrize("name", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in MODELS])
def test_parameters_and_optimizer_state_of_every_pair_of_degrees(name: str, tmp_path: Path) -> None:
    run = job(name)
    run.restart()
    run.random_steps(2)
    cut = [n for n, p in run.plan(4).params.items() if p.is_shard]
    assert len(cut) > 4, cut
    saved = {t: run.save(tmp_path / str(t), t, 2, {}) for t in DEGREES}
    for t in DEGREES[1:]:
        assert_bit_equal(saved[t], saved[1], f"what {t} ranks save")
    for saved_at, loaded_at in itertools.product(DEGREES, DEGREES):
        found = run.load(tmp_path / str(saved_at), loaded_at, {})
        assert_bit_equal(
            found, saved[1] | {n: v for n, v in found.items() if n.startswith("rng")}, f"{saved_at}->{loaded_at}"
        )


def assert_goes_on(name: str, saved_at: int, degrees: tuple[int, ...], folder: Path) -> None:
    """3 steps, a checkpoint, 5 steps; the same 5 steps after loading it at each of `degrees`."""
    run = job(name)
    run.restart()
    run.train(saved_at, 3)
    before = run.save(folder, saved_at, 3, {})
    wanted = run.train(saved_at, 5)
    after = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    assert len(set(wanted)) == 5
    for t in degrees:
        found = run.load(folder, t, {})
        assert_bit_equal(found, before, f"{saved_at} -> {t}")
        assert run.train(t, 5) == pytest.approx(wanted, rel=RTOL), f"{saved_at} -> {t}"
        for n, p in run.model.named_parameters():
            torch.testing.assert_close(p, after[n], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("saved_at, t", [(2, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_the_next_steps(saved_at: int, t: int, tmp_path: Path) -> None:
    assert_goes_on("nanogpt", saved_at, (t,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("saved_at", DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_the_next_steps_of_every_pair_of_degrees(name: str, saved_at: int, tmp_path: Path) -> None:
    assert_goes_on(name, saved_at, DEGREES, tmp_path)
