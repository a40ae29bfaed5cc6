"""Covers: checkpoints on real gloo ranks. A run on t ranks goes on on others, in fp64 and with dropout, as if it had not
stopped; a rank that fails while saving stops all, with the older checkpoint in place.

Run as a script, this file is one of three processes; the first t are the ranks of a job on t.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

LOSSES = re.compile(r"^losses (\d): (.*)$", re.MULTILINE)


def losses_of(jobs: str, folder: Path) -> dict[str, list[float]]:
    """Ranks of a job -> its last 5 losses. jobs: numbers of ranks; all but the first load what the first saved."""
    texts = run_ranks(__file__, folder, 3, timeout=240, environment={"JOBS": jobs})
    found = {t: [float(x) for x in losses.split()] for t, losses in LOSSES.findall(texts[0])}
    assert list(found) == jobs.split() and all(len({*losses}) == 5 for losses in found.values())
    return found


@pytest.mark.dist
def test_two_ranks_then_three(tmp_path: Path) -> None:
    found = losses_of("2 3", tmp_path)
    assert found["3"] == pytest.approx(found["2"], rel=1e-10)


@pytest.mark.dist
@pytest.mark.slow
def test_three_ranks_then_one_then_two(tmp_path: Path) -> None:
    found = losses_of("3 1 2", tmp_path)
    assert found["1"] == pytest.approx(found["3"], rel=1e-10)
    assert found["2"] == pytest.approx(found["3"], rel=1e-10)


def new_run(t: int):
    """A parallelized nanoGPT with dropout, its optimizer and scheduler; weights of no meaning."""
    import zoo

    import megafx

    torch.manual_seed(100)
    model, inputs = zoo.ZOO["nanogpt"](dropout=0.1)
    config = megafx.Config(tensor_model_parallel_size=t, hardware="cpu-gloo")
    model = megafx.parallelize(model.double().train(), config, example_inputs=inputs(2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, inputs, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def steps(model, inputs, optimizer, scheduler, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        _, loss = model(**inputs(2, 11))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def first_job(folder: Path, t: int) -> list[float]:
    import megafx

    model, inputs, optimizer, scheduler = new_run(t)
    torch.manual_seed(dist.get_rank())  # apart: rank 0's generator counts
    steps(model, inputs, optimizer, scheduler, 2)
    pending = megafx.save_checkpoint(folder, model, optimizer, step=2, extra={"s": scheduler}, asynchronous=True)
    steps(model, inputs, optimizer, scheduler, 1)  # while the save goes on
    path = megafx.save_checkpoint(
        folder, model, optimizer, step=3, extra={"s": scheduler, "ema": model.state_dict(), "rank": dist.get_rank()}
    )
    assert pending.result().name == "step_00000002" and path.name == "step_00000003"
    files = sorted(os.listdir(path))
    assert files == ["metadata.json", *(f"rank_{rank:05d}.safetensors" for rank in range(t))], files
    losses = steps(model, inputs, optimizer, scheduler, 5)
    failing(folder, model, optimizer)
    return losses


def failing(folder: Path, model, optimizer) -> None:
    """A rank that cannot write, or is called otherwise, stops the save on every rank."""
    import megafx
    from megafx.errors import AgreementError, CheckpointError
    from megafx.weights import files as safetensors_writer

    write = safetensors_writer.write
    if dist.get_rank() == 1:
        safetensors_writer.write = lambda *_: (_ for _ in ()).throw(OSError("no space left"))
    with pytest.raises(CheckpointError, match="step 9 could not be saved in .*: rank 1: OSError: no space left"):
        megafx.save_checkpoint(folder, model, optimizer, step=9)
    safetensors_writer.write = write
    with pytest.raises(AgreementError, match=r"differ in what is to be saved: 'step=\d' on rank 0"):
        megafx.save_checkpoint(folder, model, optimizer, step=dist.get_rank())
    found = megafx.latest_checkpoint(folder)
    assert found is not None and found.name == "step_00000003"


def next_job(folder: Path, t: int) -> list[float]:
    import megafx

    model, inputs, optimizer, scheduler = new_run(t)
    torch.manual_seed(50)
    loaded = megafx.load_checkpoint(folder, model, optimizer, extra={"s": scheduler})
    assert loaded is not None and loaded.step == 3 and loaded.extra["rank"] == 0
    whole = megafx.full_state_dict(model)
    assert all(torch.equal(loaded.extra["ema"][n], v) for n, v in whole.items())
    return steps(model, inputs, optimizer, scheduler, 5)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    first, *others = map(int, os.environ["JOBS"].split())
    for job, t in ((first_job, first), *((next_job, t) for t in others)):
        if rank < t:
            if t > 1:
                store = f"file://{folder}/store{t}"
                dist.init_process_group(
                    "gloo", init_method=store, rank=rank, world_size=t, timeout=timedelta(seconds=100)
                )
            losses = job(folder / "run", t)
            print(f"losses {t}: {' '.join(map(str, losses))}", flush=True)
            if t > 1:
                dist.barrier()
                dist.destroy_process_group()
        elif job is first_job:
            waiting = dist.FileStore(str(folder / "first"), 3)
            waiting.wait(["done"], timedelta(seconds=100))
        if job is first_job and rank == 0:
            dist.FileStore(str(folder / "first"), 3).set("done", "1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
