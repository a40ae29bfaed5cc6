"""What things cost: bytes and seconds of collectives, transitions, ops, parameters. No torch import.

Seconds are model numbers for choosing between plans, not predictions of a step time. Sizes are at the workload (plain element
counts), but for those of `in_pieces`. `numel` is that of the whole value, `t` the ranks of the axis. All ranks have local
tensors of one size, so each costs what the busiest does: padding is computed, sent and stored as elements are.

The solver's costs are sums over placements. Behind them are those for a schedule, which says what runs beside what
(planner/timeline.py), by what was measured (`Hardware`): products by their shape, forward and backward apart, collectives by
kind and number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megafx.ir.facts import ATTENTION, FREE, MATMUL, facts_of
from megafx.placements.types import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LOCAL,
    REDUCE_SCATTER,
    Owned,
    Placement,
    collectives,
    payload,
)
from megafx.planner.hardware import Hardware

# Tie-breaks (seconds): small enough to decide only between plans of equal cost. Without them the all-reduce slides past
# dropout and residual add: legal, equally fast, and not what anybody expects to read.
TRANSITION_TIE_SECONDS = 1e-9
PARTIAL_TIE_SECONDS = 2e-9
PARTIAL_GRADIENT_TIE_SECONDS = 1e-10  # of an R: its gradient's all-reduce stays at the products that made it partial

# Gradient all-reduces of replicated parameters are coalesced into one call a step, so each pays a share of alpha. With
# a whole alpha each, norm weights come out stored sharded and gathered.
COALESCED_ALPHA = 0.05

# Bytes over device memory per parameter and step, AdamW with fp32 state in a bf16 model: read and write two moments
# (16) and the fp32 master (8), read the gradient (2) and write it (2), write the bf16 weight (2). torch's fused AdamW with its
# state in bf16 moves 14 bytes, in the time of 23: 8 ms for 1.5B parameters (H200, 2026-11-22).
OPTIMIZER_BYTES = 24

# Forward, gradient of the input, gradient of the weight: a training step does each op's work about three times.
TRAINING_PASSES = 3

# Exchange rate of memory: a byte saved for backward is priced as one byte of memory traffic, about where recomputing an
# elementwise op (which reads its input once more) costs as much as keeping its result.
SAVED_TRAFFIC = 1.0

DTYPE_OF_ITEMSIZE = {2: "bfloat16", 4: "float32", 8: "float64"}

# What ops do, by name; megafx's own say it where they are defined (`OpFacts.cost`). Views and reshapes move nothing.
_MATMULS = "linear mm addmm matmul bmm baddbmm einsum"
_VIEWS = (
    "view reshape _unsafe_view transpose permute t expand expand_as unsqueeze squeeze flatten unflatten slice select narrow "
    "split split_with_sizes chunk unbind alias detach getitem"
)
_KINDS = dict.fromkeys(_MATMULS.split(), MATMUL) | dict.fromkeys(_VIEWS.split(), FREE)
_KINDS["scaled_dot_product_attention"] = ATTENTION


class Cost(NamedTuple):
    """Time and bytes sent by one rank, forward and backward."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def bytes_moved(self) -> int:
        return self.forward_bytes + self.backward_bytes

    @property
    def cost_us(self) -> float:
        return self.seconds * 1e6


# -- what a rank holds


def padding(placement: Placement, t: int) -> float:
    """How much larger padding makes a shard; experts that have owners are taken to be shared evenly."""
    return placement.cut.padding(t) if placement.is_shard and not isinstance(placement, Owned) else 1.0


def share(placement: Placement, t: int) -> float:
    """The part of a value that each rank holds, padding included."""
    return padding(placement, t) / t if placement.is_shard else 1.0


# -- communication


def collective_bytes(collective: str, numel: int, itemsize: int, t: int) -> int:
    """Bytes that one rank sends (ring), from `placements.payload`."""
    return payload(collective, numel, t) * itemsize


def collective_seconds(
    collective: str, numel: int, itemsize: int, hardware: Hardware, t: int, *, alphas: float = 1.0, inner: int = 1
) -> float:
    """alpha + bytes / bandwidth; `alphas`: the share of a launch that it pays. Local or t = 1: nothing. inner: ranks of the
    axes inside of that of the t ranks, which says on how many hosts these are."""
    if collective == LOCAL or t == 1:
        return 0.0
    sent = collective_bytes(collective, numel, itemsize, t)
    alpha, rate = across_hosts(
        collective, hardware.alpha_seconds, hardware.link_bytes_per_second, hardware, t, hardware.hosts(t, inner)
    )
    return alphas * alpha + sent / rate


# One step of a ring inside of a host, where the ring goes on to others; on one host it is in the measured alpha. Source: NCCL's
# model, src/graph/tuning.cc, hwLat: NVLink, ring, LL128. A step of a tree between hosts takes TREE_STEP of a ring's there.
RING_STEP_SECONDS = 1.9e-6
TREE_STEP = 2.1


def across_hosts(
    collective: str, alpha: float, rate: float, hardware: Hardware, ranks: int, hosts: int
) -> tuple[float, float]:
    """(seconds of a tiny collective, bytes that a rank sends in a second) of a group on so many hosts. alpha, rate: on one.

    Every GPU has its part of the network, so the ranks of a host send together. A ring goes through all ranks; an all-reduce
    may be a tree of hosts instead, and an all-to-all sends to all at once.
    """
    if hosts <= 1 or hardware.network_bytes_per_second is None:
        return alpha, rate
    own = ranks / hosts  # on a host
    if collective == ALL_TO_ALL:
        outside = (ranks - own) / (ranks - 1)
        return alpha + hardware.network_seconds, min(rate, hardware.network_bytes_per_second / outside)
    ring = (ranks - hosts) * RING_STEP_SECONDS + (hosts - 1) * hardware.network_seconds
    if collective == ALL_REDUCE:
        tree = (own - 1) * RING_STEP_SECONDS + math.log2(hosts) * TREE_STEP * hardware.network_seconds
        ring = 2 * min(ring, tree)
    return alpha + ring, min(rate, own * hardware.network_bytes_per_second)


def _copied(collective: str, t: int) -> float:
    """Part of the value that a collective of shards in pieces copies on each rank: one that exchanges, before and after it."""
    return {ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0, ALL_TO_ALL: 2 / t}.get(collective, 0.0)


def in_pieces(placement: Placement, shape: Sequence[int]) -> bool:
    """True if a rank's shard of a value of `shape` (structural) may be several ranges of its memory."""
    return placement.is_shard and (math.prod(shape[: placement.dim]) > 1 or not placement.cut.simple())


def transition_cost(
    src: Placement,
    dst: Placement,
    numel: int,
    itemsize: int,
    hardware: Hardware,
    t: int,
    needs_grad: bool = True,
    is_param: bool = False,
    in_pieces: bool = False,
    inner: int = 1,
) -> Cost:
    """src -> dst of one value, by the transition table. is_param: its gradient all-reduce is coalesced with others.
    in_pieces: a shard is not one range of the whole value's memory (`in_pieces`), so that what is gathered or scattered is
    copied in addition. inner: as in `collective_seconds`."""
    row = collectives(src, dst)
    numel = round(numel * padding(src, t) * padding(dst, t))
    backward = row.backward if needs_grad else LOCAL
    coalesced = COALESCED_ALPHA if is_param and backward == ALL_REDUCE else 1.0
    copied = memory_seconds(2 * numel * itemsize, hardware) if in_pieces and t > 1 else 0.0  # read and written once
    return Cost(
        collective_seconds(row.forward, numel, itemsize, hardware, t, inner=inner) + copied * _copied(row.forward, t),
        collective_seconds(backward, numel, itemsize, hardware, t, alphas=coalesced, inner=inner)
        + copied * _copied(backward, t),
        collective_bytes(row.forward, numel, itemsize, t),
        collective_bytes(backward, numel, itemsize, t),
    )


def transition_seconds(src: Placement, dst: Placement, *sizes: Any, **options: Any) -> float:
    """What the planner minimises: `transition_cost`, and the tie-break against needless transitions."""
    return 0.0 if src == dst else transition_cost(src, dst, *sizes, **options).seconds + TRANSITION_TIE_SECONDS


# -- computation


def matmul_seconds(flops: float, dtype: str, hardware: Hardware) -> float:
    return flops / hardware.flops(dtype)


def memory_seconds(bytes_moved: float, hardware: Hardware) -> float:
    return bytes_moved / hardware.memory_bytes_per_second


def optimizer_seconds(numel: int, hardware: Hardware) -> float:
    """Optimizer traffic of a parameter kept whole on every rank; its `share` where it is sharded."""
    return memory_seconds(OPTIMIZER_BYTES * numel, hardware)


def cost_kind(name: str) -> str:
    """MATMUL, ATTENTION, FREE or '' of the op of this name ('linear')."""
    return _KINDS.get(name) or facts_of(f"megafx.{name}.default").cost


def op_flops(name: str, out_numel: int, contraction: int) -> int:
    """FLOPs of one forward pass. contraction: terms summed per output element (of a matmul), keys (of attention)."""
    return {MATMUL: 2, ATTENTION: 4}.get(cost_kind(name), 0) * out_numel * contraction


def op_bytes(name: str, out_bytes: int, operand_bytes: Sequence[int]) -> int:
    """Bytes over device memory in one forward pass: each operand read and the result written once."""
    if cost_kind(name) == FREE:
        return 0
    if name in ("embedding", "embedding_of_rank"):
        return 2 * out_bytes  # only the rows looked up are read
    return out_bytes + sum(operand_bytes)


def op_seconds(
    name: str,
    *,
    out_numel: int,
    out_itemsize: int,
    operand_bytes: Sequence[int],
    contraction: int,
    hardware: Hardware,
    training: bool,
    dtype: str | None = None,
) -> float:
    """Time of the whole op on one rank, the slower of arithmetic and memory; training: with its backward and the price
    of its saved result. dtype: of its operands, if not that of the result. An op that the plan shards costs its `share`."""
    out_bytes = out_numel * out_itemsize
    moved = op_bytes(name, out_bytes, operand_bytes)
    dtype = dtype or DTYPE_OF_ITEMSIZE.get(out_itemsize, "float32")
    arithmetic = matmul_seconds(op_flops(name, out_numel, contraction), dtype, hardware)
    once = max(arithmetic, memory_seconds(moved, hardware))
    if not training:
        return once
    return TRAINING_PASSES * once + (memory_seconds(SAVED_TRAFFIC * out_bytes, hardware) if moved else 0.0)


# -- seconds of kernels, for a schedule

# Attention's backward makes five products, its forward two.
ATTENTION_BACKWARD = 2.5
# Keys of a query in the attention that a profile's rates are of, and in that of its 'long' ones.
ATTENTION_KEYS, LONG_KEYS = 2048, 32768


def product_seconds(m: float, n: float, k: float, dtype: str, itemsize: int, hardware: Hardware) -> float:
    """Seconds of [m, k] @ [k, n]: the larger of arithmetic, at the rate of measured shapes nearby, and memory traffic."""
    flops = 2.0 * m * n * k
    moved = memory_seconds((m * k + k * n + m * n) * itemsize, hardware)
    return hardware.kernel_seconds + max(flops / product_rate(m, n, k, dtype, hardware), moved)


# How much longer groups of a grouped product take than products of their shape, by the FLOPs of a group: the line through these
# two in log FLOPs, and level beyond them. Measured: steps of benchmarks/expert_parallel.py, H100, 2026-11-27 (RESULTS.md: 62.2,
# 73.6 and 67.4 ms; groups of 1.6e9 to 6.4e9), and of benchmarks/grouped_experts.py --experts 8 (groups of 7e10 and 1.4e11): of
# 8.27 ms on an H100, 2026-11-27, 0.9 is left; of 10.33 on an H200, 2026-11-22, less a pass over all results and waits that are
# no more, 1.06. Steps, not kernels: what they take more than the model says counts as the products'.
GROUPED = ((3e9, 2.1), (1e11, 1.0))


def grouped_seconds(groups: int, m: float, n: float, k: float, dtype: str, itemsize: int, hardware: Hardware) -> float:
    """Seconds of so many products [m, k] @ [k, n] in one kernel; m, n, k: those of one group."""
    (few, slow), (many, fast) = GROUPED
    at = math.log(max(2.0 * m * n * k, 1.0) / few) / math.log(many / few)
    slower = slow + min(max(at, 0.0), 1.0) * (fast - slow)
    each = product_seconds(m, n, k, dtype, itemsize, hardware) - hardware.kernel_seconds
    return hardware.kernel_seconds + slower * groups * each


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


def attention_seconds(
    flops: float, dtype: str, hardware: Hardware, *, dropout: bool, keys: int = 0
) -> tuple[float, float]:
    """(forward, backward). flops: of forward, unmasked part only; keys: of a query, masked ones too."""
    scale = hardware.flops(dtype) / hardware.flops("bfloat16")
    rates = [scale * _attention_rate(way, hardware, dropout, keys) for way in ("forward", "backward")]
    forward, backward = (
        hardware.kernel_seconds + times * flops / rate
        for times, rate in zip((1.0, ATTENTION_BACKWARD), rates, strict=True)
    )
    return forward, backward


def _attention_rate(way: str, hardware: Hardware, dropout: bool, keys: int) -> float:
    """FLOP/s. What a sequence takes beside its products (ends of the mask, of kernels) is a share that falls with its length:
    seconds a FLOP are a line in 1 / keys through the two lengths that are measured."""
    rate = hardware.attention.get(f"{'dropout ' * dropout}{way}", hardware.flops("bfloat16"))
    of_long = hardware.attention.get(f"{'dropout ' * dropout}long {way}")
    if of_long is None or keys <= ATTENTION_KEYS:
        return rate
    at = (1 / keys - 1 / LONG_KEYS) / (1 / ATTENTION_KEYS - 1 / LONG_KEYS)
    return 1 / (at / rate + (1 - at) / of_long)


def library_seconds(collective: str, sent: float, hardware: Hardware, t: int, inner: int = 1) -> float:
    """A collective of NCCL (or gloo) while nothing else runs. sent: bytes that one rank sends. For a number of ranks that was
    not measured, the nearest one. inner: as in `collective_seconds`."""
    if collective == LOCAL or t == 1:
        return 0.0
    hosts = hardware.hosts(t, inner)
    alpha, rate = hardware.alpha_seconds, hardware.link_bytes_per_second
    if measured := hardware.collectives.get(collective):
        alpha, rate = measured[min(measured, key=lambda ranks: abs(math.log(ranks * hosts / t)))]
    alpha, rate = across_hosts(collective, alpha, rate, hardware, t, hosts)
    return alpha + sent / rate


def sum_seconds(whole: float, hardware: Hardware, t: int) -> float:
    """Summing t received shards of a value of `whole` bytes."""
    return hardware.kernel_seconds + memory_seconds((t + 1) * whole / t, hardware)
