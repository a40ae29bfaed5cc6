"""Times, errors and saved bytes of one implementation of one case. Needs CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases.case import DEVICE, Case
from torch import Tensor

L2_BYTES = 64 * 2**20  # of an H200, and some
CALLS = 8  # in one CUDA graph
REPLAYS = 11


@dataclass
class Times:
    """Milliseconds a call. method: 'graph' (replay of a CUDA graph) or 'events' (launch gaps included)."""

    forward: float
    both: float | None
    method: str


def copy_rate() -> float:
    """Bytes a second (read and written) of a device copy of 2 GiB."""
    a = [torch.empty(2**29, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    b = [torch.empty_like(x) for x in a]
    calls = [lambda x=x, y=y: y.copy_(x) for x, y in zip(a, b, strict=True)]
    return 2 * 2**31 / (_events(calls) * 1e-3)


def matmul_rate(n: int = 8192) -> float:
    """Operations a second of a bf16 product of square matrices."""
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    return 2 * n**3 / (_events([lambda: a @ b]) * 1e-3)


def warm_up(seconds: float = 1.0) -> None:
    """Bring the clocks up: the first kernels of a process run up to a tenth slower."""
    a = torch.randn(4096, 4096, device=DEVICE).bfloat16()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def tensors(value: Any) -> list[Tensor]:
    flat = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in flat if isinstance(v, Tensor)]


def leaves(inputs: Sequence[Any]) -> list[Tensor]:
    """The inputs that want a gradient."""
    return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]


def _outputs(value: Any) -> list[Tensor]:
    return [y for y in tensors(value) if y.requires_grad]


class Runner:
    """One callable on rotating sets of inputs, so that no call finds its inputs in the cache."""

    def __init__(self, case: Case, function: Callable[..., Any]) -> None:
        self.function = function
        first = case.inputs()
        size = sum(x.numel() * x.element_size() for x in tensors(first))
        count = max(2, min(4, -(-4 * L2_BYTES // max(size, 1)))) if size > L2_BYTES // 16 else 1
        self.sets = [first, *(case.inputs() for _ in range(count - 1))]
        torch.manual_seed(1)
        self.grads = [torch.randn_like(y) for y in _outputs(function(*first))]

    def forward(self, i: int) -> Any:
        return self.function(*self.sets[i % len(self.sets)])

    def both(self, i: int) -> Any:
        inputs = self.sets[i % len(self.sets)]
        return torch.autograd.grad(_outputs(self.function(*inputs)), leaves(inputs), self.grads, allow_unused=True)

    def times(self) -> Times:
        steps = [self.forward] + ([self.both] if self.grads else [])
        times, method = [], "events"
        if not getattr(self.function, "synchronises", False):
            try:
                times, method = [_graph(step) for step in steps], "graph"
            except Exception:  # what cannot be captured: synchronising or host-driven code
                torch.cuda.synchronize()
                _end_capture()
        if not times:
            times = [_events([lambda i=i, s=s: s(i) for i in range(len(self.sets))]) for s in steps]
        return Times(times[0], times[1] if len(times) > 1 else None, method)

    def host(self) -> tuple[float, float | None]:
        """Microseconds of host time a call, forward and forward with backward: nothing waits for the device."""
        steps = [self.forward] + ([self.both] if self.grads else [])
        found = []
        for step in steps:
            for i in range(3):
                step(i)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(10):
                step(i)
            found.append((time.perf_counter() - start) / 10 * 1e6)
            torch.cuda.synchronize()
        return found[0], found[1] if len(found) > 1 else None

    def saved(self) -> int:
        """Bytes kept for backward that are neither inputs nor outputs."""
        inputs = self.sets[0]
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = max(kept.get(storage.data_ptr(), 0), storage.nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = self.function(*inputs)
        for x in (*tensors(inputs), *tensors(out)):
            kept.pop(x.untyped_storage().data_ptr(), None)
        return sum(kept.values())


def errors(case: Case, function: Callable[..., Any]) -> tuple[float, float | None] | None:
    """Relative errors (norms) of outputs and of gradients, the largest of each, against case.eager in fp32."""
    if case.random or case.eager is None:
        return None
    torch.manual_seed(0)
    inputs = case.inputs()
    exact = tuple(
        x.detach().float().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    )
    got, expected = tensors(function(*inputs)), tensors(case.eager(*exact))
    worst = max(_error(a, b) for a, b in zip(got, expected, strict=True))
    if not _outputs(got):
        return worst, None
    seeds = [torch.randn_like(y) for y in _outputs(got)]
    found = torch.autograd.grad(_outputs(got), leaves(inputs), seeds, allow_unused=True)
    del got
    right = torch.autograd.grad(_outputs(expected), leaves(exact), [s.float() for s in seeds], allow_unused=True)
    pairs = [(a, b) for a, b in zip(found, right, strict=True) if a is not None and b is not None]
    return worst, max(_error(a, b) for a, b in pairs)


def _error(value: Tensor, exact: Tensor) -> float:
    value, exact = value.detach(), exact.detach()
    return float((value.float() - exact).norm() / exact.norm().clamp_min(1e-30))


def _end_capture() -> None:
    """After a capture that failed: torch's generator takes itself for captured, and refuses all draws."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(DEVICE).graphsafe_get_state())


def _graph(step: Callable[[int], Any]) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            step(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            step(i)
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / CALLS)
    return statistics.median(found)


def _events(calls: Sequence[Callable[[], Any]]) -> float:
    """Median over calls, the L2 cache overwritten before each."""
    flush = torch.empty(L2_BYTES, dtype=torch.int32, device=DEVICE)
    for call in calls:
        call()
    found = []
    for i in range(2 * REPLAYS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)
