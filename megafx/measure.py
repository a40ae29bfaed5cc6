"""`megafx.profile_hardware`: measure what the planner prices a machine by, and write it as a profile.

Large matmuls by dtype, a copy in device memory, one to the host and, on two ranks or more, collectives by kind and number of
ranks. On several hosts these are of the ranks of one host, and the network is measured beside them: collectives of groups with
one rank on each host, all at once. On GPUs also what the timeline needs (planner/timeline.py): products by shape, attention,
launches, overlap.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.nn import functional as F

import megafx.kernels.attention.attention  # noqa: F401  registers the op
from megafx.distributed.exchange import PeerMemory
from megafx.errors import UsageError
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, payload
from megafx.planner.cost import ATTENTION_BACKWARD, ATTENTION_KEYS, LONG_KEYS
from megafx.planner.hardware import Hardware
from megafx.progress import stage

DTYPES = ("bfloat16", "float16", "float32", "float64")
MATMUL, COPY_BYTES, REDUCE_BYTES = (
    {"cuda": 8192, "cpu": 768},
    {"cuda": 2**31, "cpu": 2**27},
    {"cuda": 2**28, "cpu": 2**24},
)
REPEATS = 7  # of which the median counts
# Rows of a step's products on a GPU: tokens, and weights [n, k] of hidden sizes from 1024 on, whole and cut over ranks.
TOKENS, WEIGHTS = (
    (1024, 4096, 16384),
    ((1024, 4096), (4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336), (51200, 4096)),
)
LOOPS = 10  # of a kernel between two events
# Seconds that the device is busy before a kernel is timed, so that its clock falls to what the power limit allows in training.
LOADED = 0.3
ATTENTION, LONG = (4, 32, ATTENTION_KEYS, 128), (1, 32, LONG_KEYS, 128)
REDUCED = 2**26
TRANSFER = 2**28  # so large that half of it takes longer than a slow host's launches


@stage("profile_hardware")
def profile_hardware(
    path: str | Path | None = None, *, link: str | None = None, name: str = "", dtypes: Iterable[str] = DTYPES
) -> Hardware:
    """Rates of this machine, measured; written to `path` as YAML, which `Config(hardware=path)` takes.

    Under torchrun collective over all ranks: they measure the link together, and rank 0 writes. On several hosts they measure
    the network too, and gpus_per_host is torchrun's LOCAL_WORLD_SIZE. link: with one rank on a host, the profile whose link is
    taken over. name: of the profile; default: that of the file. Raises UsageError for one rank on a host without `link`.
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
        local = _local_ranks(ranks)
        if local == 1 and link is None:
            raise UsageError(
                "one process cannot measure the link between ranks",
                fix="start with `torchrun --nproc-per-node 2 -m megafx.cli profile-hardware FILE`, or take the link of a "
                "profile: --link NAME (in Python: link=)",
            )
        flops = {dtype: _matmul_flops(getattr(torch, dtype), device) for dtype in dtypes}
        memory, host = _copy_rate(device), _host_rate(device)
        collectives = _collectives(device, local)
        alpha, rate = collectives[ALL_REDUCE][local] if local > 1 else _link_of(link)
        network = {} if local == ranks else _network(device, local, alpha)
        schedule = _schedule(device, local) if device.type == "cuda" else {}
    finally:
        if started:
            dist.destroy_process_group()
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    hosts = f" of {ranks // local} hosts" if local < ranks else ""
    source = f"measured on {ranks}x {what}{hosts}, {datetime.date.today()}, torch {torch.__version__}"
    source += "" if local > 1 else f"; the link is that of {link}"
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    found = Hardware(
        name or (Path(path).stem if path else what), flops, memory, rate, alpha, source, total, host,
        collectives={kind: {n: list(pair) for n, pair in by.items()} for kind, by in collectives.items()},
        **network, **schedule,
    )  # fmt: skip
    if path is not None and os.environ.get("RANK", "0") == "0":
        written = {k: v for k, v in asdict(found).items() if v not in (None, (), {})}
        Path(path).write_text(yaml.safe_dump(written, sort_keys=False, default_flow_style=None))
    return found


def _local_ranks(ranks: int) -> int:
    """Ranks of a host, as torchrun says; without it, all of them. Raises UsageError where hosts have different numbers."""
    if ranks == 1:
        return 1
    sizes: list[Any] = [None] * ranks
    dist.all_gather_object(sizes, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    if len({*sizes}) > 1 or ranks % sizes[0]:
        raise UsageError(
            f"the {ranks} ranks are not shared evenly by their hosts, which have {', '.join(map(str, dict.fromkeys(sizes)))}",
            fix="start as many ranks on each host (torchrun --nproc-per-node)",
        )
    return int(sizes[0])


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
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))  # equal numbers would take less power
    product = lambda: torch.mm(a, b)
    return 2.0 * n**3 / (_kernel_seconds(product) if device.type == "cuda" else _seconds(product, device))


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


def _collectives(device: torch.device, ranks: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Kind -> number of ranks -> (seconds of a tiny one, bytes that a rank sends per second inside of a large one).

    Of 2, 4, 8, ... of the ranks of a host, and of all of them: the first so many, while the others wait."""
    found: dict[str, dict[int, tuple[float, float]]] = {kind: {} for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)}
    sizes = [2**i for i in range(1, ranks.bit_length()) if 2**i < ranks] + ([ranks] if ranks > 1 else [])
    for n in sizes:
        group = dist.new_group(list(range(n))) if n < dist.get_world_size() else dist.group.WORLD
        for kind, by_ranks in found.items():
            by_ranks[n] = _alpha_and_rate(kind, device, n, group if dist.get_rank() < n else None)
    return {kind: by_ranks for kind, by_ranks in found.items() if by_ranks}


def _network(device: torch.device, local: int, alpha: float) -> dict[str, Any]:
    """The fields of `Hardware` that price what goes from host to host. alpha: seconds of a tiny collective on one host.

    Groups with one rank on each host run at once, as those of data-parallel ranks do, so that all of a host's GPUs send."""
    ranks = dist.get_world_size()
    hosts = ranks // local
    groups = [dist.new_group([*range(i, ranks, local)]) for i in range(local)]
    group = groups[dist.get_rank() % local]
    found = [_alpha_and_rate(kind, device, hosts, group) for kind in (ALL_GATHER, REDUCE_SCATTER)]
    tiny = sum(pair[0] for pair in found) / 2
    rate = 2 / sum(1 / pair[1] for pair in found)
    step = max(tiny - alpha, 0.0) / (hosts - 1)
    return {"gpus_per_host": local, "network_bytes_per_second": rate, "network_seconds": step}


def _alpha_and_rate(kind: str, device: torch.device, n: int, group: Any) -> tuple[float, float]:
    """(seconds of a tiny one, bytes that a rank sends per second inside of a large one). group: None on ranks that wait."""
    alpha, seconds = (_seconds_of(kind, count, device, n, group) for count in (2 * n, REDUCE_BYTES[device.type] // 4))
    return alpha, payload(kind, REDUCE_BYTES[device.type] // 4 // n * n, n) * 4 / max(seconds - alpha, 1e-9)


def _seconds_of(kind: str, count: int, device: torch.device, n: int, group: Any) -> float:
    """Of a collective of so many fp32 elements in all; what the slowest rank measured, on every rank."""
    whole = torch.zeros(count // n * n, device=device)
    part = whole[: whole.numel() // n].clone()
    runs: dict[str, Callable[[], object]] = {
        ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
        ALL_GATHER: lambda: dist.all_gather_into_tensor(whole, part, group=group),
        REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }
    return _seconds(runs[kind] if group is not None else lambda: None, device)


def _link_of(profile: str | None) -> tuple[float, float]:
    assert profile is not None
    known = Hardware.load(profile)
    return known.alpha_seconds, known.link_bytes_per_second


# -- what a schedule needs, on GPUs


def _kernel_seconds(run: Callable[[], object]) -> float:
    """Of what runs on the device, many times without a pause, under load; of several ranks, the slowest."""
    for _ in range(math.ceil(LOADED / max(_seconds(run, torch.device("cuda")), 1e-5))):
        run()
    found = []
    for _ in range(REPEATS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        run()
        events[0].record()
        for _ in range(LOOPS):
            run()
        events[1].record()
        torch.cuda.synchronize()
        found.append(events[0].elapsed_time(events[1]) / 1e3 / LOOPS)
    seconds = torch.tensor(sorted(found)[REPEATS // 2], dtype=torch.float64, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _schedule(device: torch.device, ranks: int) -> dict[str, Any]:
    """The fields of `Hardware` that price schedules."""
    tiny = torch.zeros(64, device=device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        tiny.add_(1)
    launch = (time.perf_counter() - start) / 1000
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(100):
            tiny.add_(1)
    found: dict[str, Any] = {
        "launch_seconds": launch,
        "kernel_seconds": _kernel_seconds(graph.replay) / 100,
        "products": [list(row) for row in _products(device)],
        "attention": _attention(device),
    }
    return found | (_beside(device, ranks) if ranks > 1 else {})


def _products(device: torch.device) -> Iterator[tuple[int, int, int, float]]:
    for m in TOKENS:
        for n, k in WEIGHTS:
            a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((m, k), (k, n)))
            yield m, n, k, _kernel_seconds(functools.partial(torch.mm, a, b))


def _attention(device: torch.device) -> dict[str, float]:
    """FLOP/s of causal attention, forward and backward, without and with dropout, and of long sequences."""
    found: dict[str, float] = {}
    seed = torch.zeros((), dtype=torch.int64, device=device)
    rest: Any = (ATTENTION[-1] ** -0.5, True, 0, 0.0, 0, 0.1, 1, -1, [], "tp")
    library: Callable[..., torch.Tensor] = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    dropped: Callable[..., torch.Tensor] = lambda q, k, v: torch.ops.megafx.attention(
        q, k, v, None, None, None, None, seed, *rest
    )
    for kind, shape, op in (("", ATTENTION, library), ("dropout ", ATTENTION, dropped), ("long ", LONG, library)):
        b, h, s, d = shape
        q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3))
        flops, run = 2.0 * b * h * s * s * d, functools.partial(op, q, k, v)
        out = run()
        grad = torch.ones_like(out)
        found[f"{kind}forward"] = flops / _kernel_seconds(run)
        back = _kernel_seconds(functools.partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
        found[f"{kind}backward"] = ATTENTION_BACKWARD * flops / back
    return found


def _beside(device: torch.device, ranks: int) -> dict[str, Any]:
    """What products and transfers do to each other: a gradient of a weight, and a collective of its operand. Of the ranks of a
    host, on all hosts at once."""
    world = dist.get_world_size()
    hosts = (
        [dist.new_group([*range(i, i + ranks)]) for i in range(0, world, ranks)]
        if ranks < world
        else [dist.group.WORLD]
    )
    group: Any = hosts[dist.get_rank() // ranks]
    a, b = (torch.randn(4096, 4096, device=device).bfloat16() for _ in range(2))
    product: Callable[[], object] = lambda: torch.mm(a, b)
    whole = torch.zeros(REDUCED // 2 // ranks * ranks, dtype=torch.bfloat16, device=device)
    alone, collective = (
        _kernel_seconds(lambda: [product() for _ in range(4)]),
        _kernel_seconds(lambda: dist.all_reduce(whole, group=group)),
    )

    def both() -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        for _ in range(4):
            product()
        assert work is not None
        work.wait()

    together = _kernel_seconds(both)
    hidden = min(max((alone + collective - together) / collective, 0.0), 1.0)
    found: dict[str, Any] = {"hidden": hidden, "beside": {"library": 1.0}}
    try:
        peers = PeerMemory(group)
        memory = peers.allocate(TRANSFER)
    except (RuntimeError, ValueError, ImportError):  # ranks do not reach each other's memory
        return found
    target, other = torch.empty(TRANSFER, dtype=torch.uint8, device=device), memory[(dist.get_rank(group) + 1) % ranks]

    def copy(size: int, busy: bool = False) -> None:
        peers.begin()
        peers.barrier()
        (event,) = peers.copy([(target[:size], other[:size])])
        for _ in range(4 if busy else 0):
            product()
        peers.arrived(event)

    tiny, large, half = (_kernel_seconds(functools.partial(copy, size)) for size in (16, TRANSFER, TRANSFER // 2))
    together = _kernel_seconds(lambda: copy(REDUCED, busy=True))
    slower = together / max(alone, _kernel_seconds(lambda: copy(REDUCED)))
    found["beside"]["copies"] = max(slower, 1.0)
    return found | {"transfer_seconds": tiny, "transfer_bytes_per_second": TRANSFER / 2 / max(large - half, 1e-9)}
