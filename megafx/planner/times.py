"""How long the kernels of a step take on one rank, by what was measured (`Hardware`). No torch import.

The solver's costs (cost.py) are sums over placements. These are for a schedule, which says what runs beside what
(planner/timeline.py): products by their shape, forward and backward apart, collectives by kind and number of ranks.
"""

from __future__ import annotations

import math
from functools import lru_cache

from megafx.placements.types import LOCAL
from megafx.planner.cost import memory_seconds
from megafx.planner.hardware import Hardware

# Attention's backward makes five products, its forward two.
ATTENTION_BACKWARD = 2.5


def product_seconds(m: float, n: float, k: float, dtype: str, itemsize: int, hardware: Hardware) -> float:
    """Seconds of [m, k] @ [k, n]: the larger of arithmetic, at the rate of measured shapes nearby, and memory traffic."""
    flops = 2.0 * m * n * k
    moved = memory_seconds((m * k + k * n + m * n) * itemsize, hardware)
    return hardware.kernel_seconds + max(flops / product_rate(m, n, k, dtype, hardware), moved)


def product_rate(m: float, n: float, k: float, dtype: str, hardware: Hardware) -> float:
    """FLOP/s. Shapes are measured in bfloat16; another dtype is scaled by the ratio of the large-product rates."""
    rows = tuple(tuple(row) for row in hardware.products)
    if not rows or min(m, n, k) < 1:
        return hardware.flops(dtype)
    return hardware.flops(dtype) / hardware.flops("bfloat16") * _nearest(m, n, k, rows, hardware.kernel_seconds)


@lru_cache(4096)
def _nearest(m: float, n: float, k: float, rows: tuple[tuple[float, ...], ...], fixed: float) -> float:
    """Mean rate of the rows, weighted by nearness in log(m, n, k); a product's operands may be swapped."""
    total = weights = 0.0
    for a, b, c, seconds in rows:
        apart = min(_distance((m, n, k), (a, b, c)), _distance((m, n, k), (b, a, c)))
        weight = 1.0 / (0.1 + apart) ** 2
        total += weight * 2.0 * a * b * c / max(seconds - fixed, 0.1 * seconds)
        weights += weight
    return total / weights


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return math.hypot(*(math.log(x / y) for x, y in zip(one, other, strict=True)))


def attention_seconds(flops: float, dtype: str, hardware: Hardware, *, dropout: bool) -> tuple[float, float]:
    """(forward, backward). flops: of forward, unmasked part only."""
    kind = "dropout " if dropout else ""
    scale = hardware.flops(dtype) / hardware.flops("bfloat16")
    rates = [
        scale * hardware.attention.get(f"{kind}{way}", hardware.flops("bfloat16")) for way in ("forward", "backward")
    ]
    return tuple(  # type: ignore[return-value]
        hardware.kernel_seconds + times * flops / rate
        for times, rate in zip((1.0, ATTENTION_BACKWARD), rates, strict=True)
    )


def library_seconds(collective: str, sent: float, hardware: Hardware, t: int) -> float:
    """A collective of NCCL (or gloo) while nothing else runs. sent: bytes that one rank sends. For a number of ranks that was
    not measured, the nearest one."""
    if collective == LOCAL or t == 1:
        return 0.0
    measured = hardware.collectives.get(collective)
    if not measured:
        return hardware.alpha_seconds + sent / hardware.link_bytes_per_second
    alpha, rate = measured[min(measured, key=lambda ranks: abs(math.log(ranks / t)))]
    return alpha + sent / rate


def sum_seconds(whole: float, hardware: Hardware, t: int) -> float:
    """Summing t received shards of a value of `whole` bytes."""
    return hardware.kernel_seconds + memory_seconds((t + 1) * whole / t, hardware)
