"""Training steps of a Llama on several data-parallel GPUs: megafx's three forms against DDP and fully_shard, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/data_parallel.py
    torchrun --standalone --nproc-per-node 2 benchmarks/data_parallel.py --modes megafx-fsdp,fully_shard --batch 2
    torchrun --standalone --nproc-per-node 2 benchmarks/data_parallel.py --tiny     # on the CPU: does it run, are losses equal

The shape, the batches and the optimizer are those of end_to_end.py, on each rank its own rows. Tokens/s of all ranks from the
median step. 'exposed' is the time of a step's collectives during which no other kernel runs, from one profiled step of rank 0.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from end_to_end import SHAPES, TINY, batch, build
from torch.distributed.fsdp import fully_shard

import megafx

MODES = ("megafx-ddp", "megafx-zero1", "megafx-fsdp", "ddp", "fully_shard")


def start(tiny: bool) -> torch.device:
    """Join the ranks; this one's device: a GPU, or the CPU where models are tiny."""
    device = torch.device("cpu") if tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not tiny:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if tiny else "nccl")
    return device


def prepared(mode: str, model: Any, call: dict[str, torch.Tensor]) -> Any:
    """The model as the mode runs it."""
    if mode.startswith("megafx-"):
        form: Any = mode.removeprefix("megafx-")
        size = {"tensor_model_parallel_size": 1, "data_parallel_size": dist.get_world_size()}
        return megafx.parallelize(model, megafx.Config(data_parallel=form, **size), example_inputs=((), call))
    if mode == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def exposed(collectives: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Of the spans of collectives, what no other span covers. Same unit as the spans."""
    marks = sorted([(x, 0, step) for s in collectives for x, step in zip(s, (1, -1), strict=True)]
                   + [(x, 1, step) for s in others for x, step in zip(s, (1, -1), strict=True)])  # fmt: skip
    open_spans, alone, last = [0, 0], 0.0, 0.0
    for at, kind, step in marks:
        if open_spans[0] and not open_spans[1]:
            alone += at - last
        open_spans[kind] += step
        last = at
    return alone


def collectives_of(step: Any) -> str:
    """Milliseconds of a step's collectives on this rank, and how much of them is exposed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:
            spans["nccl" in event.name].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    total = sum(end - start for start, end in spans[True])
    return f"{len(spans[True])} collectives {total:.1f} ms, exposed {exposed(spans[True], spans[False]):.1f} ms"


def live_at_peak(step: Any, most: int = 20) -> str:
    """What is allocated at the peak of a step, by the Python lines that asked for it, the largest first: MiB, how many."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=10**6, stacks="python")
    step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, Any] = {}
    now = peak = 0
    held: list[Any] = []
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
            if now > peak:
                peak, held = now, [*live.values()]
        elif event["action"] == "free_requested":
            now -= live.pop(event["addr"], {"size": 0})["size"]
    found: dict[str, list[int]] = {}
    for event in held:
        frames = [f for f in event["frames"] if "site-packages" not in f["filename"]][:3]
        lines = " < ".join(f"{os.path.basename(f['filename'])}:{f['line']} {f['name']}" for f in frames)
        found.setdefault(lines, []).append(event["size"])
    rows = sorted(((sum(sizes), len(sizes), lines) for lines, sizes in found.items()), reverse=True)[:most]
    return "\n".join(
        [f"{peak >> 20} MiB at the peak", *(f"{size >> 20:8d} {count:4d} {lines}" for size, count, lines in rows)]
    )


def run(mode: str, shape: dict[str, int], args: argparse.Namespace, device: torch.device) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = build("llama", shape, device)
    forward = prepared(mode, model, batch(shape, "none", device, rank))
    optimizer = torch.optim.AdamW(forward.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = forward(**batch(shape, "none", device, number * ranks + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, times = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(args.warmup + args.steps):
        begin = time.perf_counter()
        loss = step(number)
        dist.all_reduce(loss)  # of each rank's rows where the loss is no whole batch's; waits for every rank
        losses.append(loss.item() / ranks)
        times.append(time.perf_counter() - begin)
    tokens = shape["batch"] * shape["seq"] * ranks
    text = f"{tokens / sorted(times[args.warmup :])[args.steps // 2]:,.0f} tokens/s, loss {losses[0]:.5f} to {losses[-1]:.5f}"
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1e9
        text += f", peak {peak:.1f} GB, {collectives_of(lambda: step(0))}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, default=4, help="rows of each rank")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = start(args.tiny)
    shape = TINY if args.tiny else SHAPES["llama"] | {"batch": args.batch, "layers": args.layers}
    for mode in args.modes.split(","):
        text = run(mode, shape, args, device)
        if dist.get_rank() == 0:
            print(f"{mode:13s} {text}", flush=True)
        gc.collect()
        if not args.tiny:
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
