"""A training run whose ranks are killed (SIGKILL) at random moments; torchrun starts it again, and it goes on.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a start finds addresses of the one before (pytorch issue 135712)
torchrun --standalone --nproc-per-node 2 --max-restarts 20 tests/dist/restarts.py FOLDER --kills 20 --when step
torchrun --standalone --nproc-per-node 2 --max-restarts 20 tests/dist/restarts.py FOLDER --kills 20 --when save

Each start but the last kills one rank, drawn with its moment: within a training step, or within a save. With `--when
outside` nothing is killed from here, and steps are slow enough for whoever kills an agent with its ranks. A start checks
that the newest checkpoint is valid and not older than the last save that was reported. Rank 0 appends to FOLDER/events what
happens, with the time; at the end it prints `losses ...` of all steps, as they were computed first, and what was seen.
Where FOLDER/until is, it has the number of steps; a start takes as many ranks as there are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megafx

SEED = 7  # of the dropout masks
OUTSIDE = 0.2  # seconds before each step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(19, 19) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return x.square().mean()


def note(folder: Path, what: str, **details: Any) -> None:
    """Append one event, at once on the disk: the next line may be the end of this process."""
    with open(folder / "events", "a") as file:
        file.write(json.dumps({"time": time.time(), "what": what, **details}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_after(seconds: float, folder: Path, step: int) -> None:
    """End this process in a thread of its own, wherever the others are then."""

    def end() -> None:
        note(folder, "killed", step=step, rank=dist.get_rank())
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def new_run(ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    overrides = {f"layers.{i}": "colwise" if i % 2 else "rowwise" for i in range(4)} if ranks > 1 else {}
    config = megafx.Config(tensor_model_parallel_size=ranks, overrides=overrides)
    example = (torch.ones(4, 19, dtype=torch.float64),)
    model = megafx.parallelize(Net().double().train(), config, example_inputs=example)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    x = torch.randn(6, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    loss = model(x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def undisturbed(steps: int) -> list[float]:
    """Losses of the run in this process alone, which nothing happens to."""
    model, optimizer = new_run(1)
    torch.manual_seed(SEED)
    return [training_step(model, optimizer, step) for step in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--when", choices=("step", "save", "outside"), default="step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    args.folder.mkdir(exist_ok=True)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, draw = dist.get_rank(), random.Random(args.seed * 1000 + attempt)
    victim, offset, share = draw.randrange(2), draw.randrange(1, 3), draw.random()
    steps, until = 2 * (args.kills + 2), args.folder / "until"

    model, optimizer = new_run(dist.get_world_size())
    loaded = megafx.load_checkpoint(args.folder / "run", model, optimizer, missing_ok=True)
    first = loaded.step if loaded is not None else 0
    saved = [e["step"] for e in events(args.folder) if e["what"] == "saved"]
    assert first >= max(saved, default=0), f"step {max(saved)} was saved, step {first} is what there is"
    assert loaded is None or not loaded.skipped, loaded.skipped
    note(args.folder, "here", rank=rank, pid=os.getpid(), agent=os.getppid())
    if rank == 0:
        note(args.folder, "started", attempt=attempt, step=first, ranks=dist.get_world_size())
    else:
        torch.manual_seed(99)  # rank 0's generator counts
    if loaded is None and rank == 0:
        torch.manual_seed(SEED)

    took = {"step": 0.05, "save": 0.05}  # seconds
    for step in itertools.count(first):
        steps = int(until.read_text()) if until.exists() else steps
        if step >= steps:
            break
        armed = args.when != "outside" and attempt < args.kills and rank == victim and step == first + offset
        if args.when == "outside":
            time.sleep(OUTSIDE)
        begin = time.perf_counter()
        if armed and args.when == "step":
            kill_after(share * took["step"], args.folder, step)
        loss = training_step(model, optimizer, step)
        took["step"] = time.perf_counter() - begin
        if rank == 0:
            note(args.folder, "step", step=step, loss=loss)
        begin = time.perf_counter()
        if armed and args.when == "save":
            kill_after(share * took["save"], args.folder, step)
        megafx.save_checkpoint(args.folder / "run", model, optimizer, step=step + 1, keep=2)
        took["save"] = time.perf_counter() - begin
        if rank == 0:
            note(args.folder, "saved", step=step + 1)
        if armed:
            time.sleep(60)  # the end comes
    if rank == 0:
        report(args.folder, steps)
    dist.destroy_process_group()


def report(folder: Path, steps: int) -> None:
    found = events(folder)
    losses: dict[int, float] = {}
    for event in found:
        if event["what"] == "step":
            before = losses.setdefault(event["step"], event["loss"])
            assert abs(before - event["loss"]) <= 1e-10 * abs(before), (
                f"step {event['step']} was another the second time"
            )
    killed = [e for e in found if e["what"] == "killed"]
    started = [e for e in found if e["what"] == "started"]
    pauses = [min(s["time"] for s in started if s["time"] > k["time"]) - k["time"] for k in killed]
    print("losses", " ".join(repr(losses[step]) for step in range(steps)))
    print(
        f"killed {len(killed)} times (rank 0: {sum(e['rank'] == 0 for e in killed)}), started {len(started)} times; "
        f"from a kill until the run goes on: {max(pauses, default=0):.1f} s at most"
    )


if __name__ == "__main__":
    main()
