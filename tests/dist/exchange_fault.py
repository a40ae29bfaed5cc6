"""One of two ranks: rank 1 stalls, or is killed, in the middle of an overlapped exchange. Rank 0 says how long it took to stop.

Run by tests: `exchange_fault.py FOLDER RANK stalls|ends`. On GPUs where there are two (NCCL and memory of the other one), else
on CPUs (gloo and shared files).
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TIMEOUT = 6  # seconds, of the process group and so of the exchange's barrier
STOPPED = 3  # what rank 0 ends with


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(self.norm(x)).relu())).square().mean()


def main(folder: Path, rank: int, how: str) -> None:
    import megafx
    from megafx.distributed.exchange import Exchange

    cuda = torch.cuda.device_count() > 1
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/{how}", 2), timedelta(seconds=TIMEOUT)
    store.set(f"rank {rank} is here", "")  # imports are done: the short timeout counts from here
    store.wait(["rank 0 is here", "rank 1 is here"], timedelta(seconds=120))
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=2, timeout=limit)
    config = megafx.Config(sequence_parallel=True, tp_comm_overlap=True, check_inputs_every=0)
    x = torch.ones(2, 6, 16, device=device)
    model = megafx.parallelize(Net().to(device), config, example_inputs=(x,))
    sent: list[int] = []
    send = Exchange.send

    def faulty(self: Exchange, *args: Any) -> None:
        sent.append(self.count)
        if rank == 1 and len(sent) > good:
            if how == "ends":
                os.kill(os.getpid(), 9)
            for _ in range(40 * TIMEOUT):
                if stopped.exists():
                    break
                time.sleep(0.1)
            os._exit(0)
        send(self, *args)

    stopped = folder / f"{how}.stopped"
    Exchange.send, good = faulty, 10**6  # type: ignore[method-assign]
    for _ in range(3):
        model(x).backward()
    if cuda:
        torch.cuda.synchronize()
    assert sent, "the exchange is used"
    good, begin = len(sent), time.monotonic()
    try:
        for _ in range(2):
            model(x).backward()
        if cuda:
            torch.cuda.synchronize()
    except Exception as error:
        stopped.touch()
        print(f"stopped after {time.monotonic() - begin:.0f} s: {type(error).__name__}: {error}", flush=True)
        os._exit(STOPPED)  # what is left of the job cannot be ended in order
    print("was not stopped", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
