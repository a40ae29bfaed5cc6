"""One optimizer step of a tensor-parallel GPT against plain eager: clipping norm and every parameter after AdamW and SGD.

    torchrun --standalone --nproc-per-node 2 benchmarks/step_check.py     # GPUs where there are any, else CPU

What it prints is the largest relative difference; it is the quickest check of an installation (torch version, device).
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megafx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from models.gpt import GPT, GPTConfig


def main() -> None:
    rank, cuda = int(os.environ["RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    eager = GPT(GPTConfig(dropout=0.0, n_layer=2)).to(device, torch.float64)
    ids = torch.randint(0, 256, (2, 32), device=device)
    parallel = megafx.parallelize(copy.deepcopy(eager), example_inputs=(ids, ids))
    makers = {
        "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    for name, make in makers.items():
        norms = []
        for model in (eager, parallel):
            optimizer = make(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(ids, ids)[1].backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
        whole = megafx.full_state_dict(parallel)
        off = max(float((whole[n] - p).norm() / p.norm().clamp(min=1e-9)) for n, p in eager.state_dict().items())
        if rank == 0:
            print(f"{name}: norms {norms}, parameters differ by {off:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
