"""Covers: distributed/failures.py, faults inside of an exchange, check_finite, and what a step does when a rank is
gone: on real gloo ranks.

Run as a script, this file is one of two ranks.
"""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

TIMEOUT = 5  # seconds, of the process group
FAULT = str(Path(__file__).with_name("exchange_fault.py"))


@pytest.mark.dist
def test_on_two_processes(tmp_path: Path) -> None:
    """Rank 1 is killed between forward and backward at the end: rank 0 ends by itself, and says why."""
    texts = run_ranks(__file__, tmp_path, 2, timeout=300, ends=(1, -9))
    assert "LostRankError: rank 0 stopped in backward: a rank has ended" in texts[0], texts[0]
    assert "--max-restarts" in texts[0]
    assert "checks passed" in texts[0] and "checks passed" in texts[1]


@pytest.mark.dist
@pytest.mark.parametrize("how", ["stalls", "ends"])
def test_a_fault_inside_of_an_exchange(tmp_path: Path, how: str) -> None:
    """Through shared files; test_nccl.py has the same on GPUs."""
    text, _ = run_ranks(FAULT, tmp_path, 2, how, timeout=100, ends=(3, -9 if how == "ends" else 0))
    why = {"stalls": "a rank did not come within the timeout", "ends": "a rank has ended"}[how]
    found = re.search(r"stopped after (\d+) s: LostRankError: rank 0 stopped in the forward of call 3: " + why, text)
    assert found and int(found[1]) <= 12, text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 19), nn.Linear(19, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(x).abs().sqrt())).square().mean()


def new_model(rank: int, **options):
    import megafx

    torch.manual_seed(0)
    config = megafx.Config(overrides={"up": "colwise", "down": "rowwise"}, **options)
    return megafx.parallelize(Net().double(), config, example_inputs=(torch.ones(4, 5, dtype=torch.float64),))


def numbers_that_are_not_finite(rank: int) -> None:
    import megafx
    from megafx.errors import NumericError

    model = new_model(rank, check_for_nan_in_loss_and_grad=True)
    x = torch.ones(4, 5, dtype=torch.float64)
    model(x).backward()
    model.zero_grad()
    with pytest.raises(NumericError, match="call 1: the loss is not finite\n"):
        model(x * float("inf"))
    state = megafx.full_state_dict(model)
    state["up.weight"][18], state["up.bias"][18] = 0, 0  # sqrt at 0, in the shard of rank 1: no derivative
    model.load_state_dict(state)
    loss = model(x)
    assert loss.isfinite()
    with pytest.raises(NumericError, match="call 2: gradients are not finite: up.weight, up.bias"):
        loss.backward()
    assert model.up.weight.grad is None, "the optimizer sees none of it"


def saving_by_rank_0_alone(rank: int, folder: Path) -> None:
    import megafx
    from megafx.errors import LostRankError

    model = new_model(rank)
    x = torch.ones(4, 5, dtype=torch.float64)
    begin = time.monotonic()
    if rank == 0:
        for save in (
            lambda: megafx.full_state_dict(model),
            lambda: megafx.save_checkpoint(folder / "run", model, step=1),
        ):
            with pytest.raises(
                LostRankError, match=r"is a call of ranks \[0, 1\], but rank 1 did not make it within 5 s"
            ):
                save()
        assert time.monotonic() - begin < 4 * TIMEOUT
        (folder / "gave up").touch()
    else:
        until(folder / "gave up")
    model(x).backward()  # nothing is left in the way of the next step, nor of the next save
    megafx.save_checkpoint(folder / "run", model, step=2)
    calls = (lambda: megafx.full_state_dict(model), lambda: megafx.full_gradients(model))
    with pytest.raises(LostRankError, match=r"rank \d calls megafx.full_\w+, rank \d megafx.full_\w+"):
        calls[rank]()


def a_rank_that_goes_its_own_way(rank: int, folder: Path) -> None:
    """Rank 1 does not make the next call in time: rank 0 stops; so does rank 1, when it comes."""
    from megafx.errors import LostRankError

    model = new_model(rank, check_inputs_every=0)
    x = torch.ones(4, 5, dtype=torch.float64)
    for _ in range(4):
        model(x).backward()
    begin = time.monotonic()
    if rank == 1:
        dist.barrier()
        until(folder / "stopped")
    else:
        dist.barrier()
    with pytest.raises(LostRankError, match="a rank did not come within the timeout|a rank has ended"):
        model(x).backward()
    (folder / "stopped").touch()
    assert time.monotonic() - begin < 4 * TIMEOUT


def until(path: Path) -> None:
    """Wait for a file of the other rank; a while after its timeouts at most."""
    for _ in range(50 * TIMEOUT):
        if path.exists():
            return
        time.sleep(0.1)


def group(folder: Path, name: str, rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{name}", 2)
    store.set(f"rank {rank} is here", "")  # one of them may have waited for a timeout longer
    store.wait(["rank 0 is here", "rank 1 is here"], timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    group(folder, "first", rank)
    new_model(rank)  # imports of both are done: the short timeouts count from here
    numbers_that_are_not_finite(rank)
    saving_by_rank_0_alone(rank, folder)
    a_rank_that_goes_its_own_way(rank, folder)
    group(folder, "second", rank)
    print("checks passed", flush=True)
    model = new_model(rank)
    for step in range(6):
        loss = model(torch.ones(4, 5, dtype=torch.float64))
        if rank == 1 and step == 2:
            os.kill(os.getpid(), 9)
        loss.backward()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
