"""`megafx.profile_hardware`: measure what the planner prices a machine by, and write it as a profile.

Large matmuls by dtype, a copy in device memory, one to the host and, on two ranks or more, all-reduces of a large and of a tiny
tensor.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from megafx.errors import UsageError
from megafx.placements.types import ALL_REDUCE, payload
from megafx.planner.hardware import Hardware

DTYPES = ("bfloat16", "float16", "float32", "float64")
MATMUL, COPY_BYTES, REDUCE_BYTES = (
    {"cuda": 8192, "cpu": 768},
    {"cuda": 2**31, "cpu": 2**27},
    {"cuda": 2**28, "cpu": 2**24},
)
REPEATS = 7  # of which the median counts


def profile_hardware(
    path: str | Path | None = None, *, link: str | None = None, name: str = "", dtypes: Iterable[str] = DTYPES
) -> Hardware:
    """Rates of this machine, measured; written to `path` as YAML, which `Config(hardware=path)` takes.

    Under torchrun collective over all ranks: they measure the link together, and rank 0 writes. link: in one process, the
    profile whose link is taken over. name: of the profile; default: that of the file. Raises UsageError in one process
    without `link`.
    """
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    started = ranks > 1 and not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if started:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 1 and link is None:
            raise UsageError(
                "one process cannot measure the link between ranks",
                fix="start with `torchrun --nproc-per-node 2 -m megafx.cli profile-hardware FILE`, or name a profile with link",
            )
        flops = {dtype: _matmul_flops(getattr(torch, dtype), device) for dtype in dtypes}
        memory, host = _copy_rate(device), _host_rate(device)
        rate, alpha = _link(device, ranks) if ranks > 1 else _link_of(link)
    finally:
        if started:
            dist.destroy_process_group()
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    told = f"measured on {ranks}x {what}, {datetime.date.today()}, torch {torch.__version__}"
    told += "" if ranks > 1 else f"; the link is that of {link}"
    found = Hardware(
        name or (Path(path).stem if path else what), flops, memory, rate, alpha, told, host_bytes_per_second=host
    )
    if path is not None and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(yaml.safe_dump(asdict(found), sort_keys=False))
    return found


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of some runs, after one to warm up; of several ranks, the slowest."""
    found = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    seconds = torch.tensor(sorted(found[1:])[REPEATS // 2], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    n = MATMUL[device.type]
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * n**3 / _seconds(lambda: a @ b, device)


def _copy_rate(device: torch.device) -> float:
    """Bytes read plus written in a second."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _host_rate(device: torch.device) -> float:
    """Bytes copied to (pinned) memory of the host in a second."""
    source = torch.ones(COPY_BYTES[device.type] // 4, dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
    return source.numel() / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _link(device: torch.device, ranks: int) -> tuple[float, float]:
    """(bytes that a rank sends in a second inside of a large all-reduce, seconds of a tiny one)."""
    large = torch.zeros(REDUCE_BYTES[device.type], dtype=torch.uint8, device=device)
    tiny = torch.zeros(2, dtype=torch.float32, device=device)
    alpha = _seconds(lambda: dist.all_reduce(tiny), device)
    seconds = _seconds(lambda: dist.all_reduce(large), device)
    return payload(ALL_REDUCE, large.numel(), ranks) / max(seconds - alpha, 1e-9), alpha


def _link_of(profile: str | None) -> tuple[float, float]:
    assert profile is not None
    known = Hardware.load(profile)
    return known.link_bytes_per_second, known.alpha_seconds
