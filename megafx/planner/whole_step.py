"""A step of all ranks: the timeline of one rank's plan, and what data-parallel ranks and budgets add to it.

What is added is coarser than the timeline:

- Collectives of data-parallel ranks overlap with forward and backward, which hides a part of them (`Hardware.hidden`): products
  leave the library few multiprocessors, and are slower for what it takes. A group that spans hosts takes as long as the network
  does (planner/cost.py), but its kernels no more of the device than on one host.
- Parameters are gathered, and gradients scattered, a layer at a time; each call has a latency, which grows with the hosts.
- Ranks that cut a sequence have summands of the same gradients, and share them out as data-parallel ranks do.
- Of experts that data-parallel ranks share out, those that have the same ones are the data-parallel ranks: they gather and
  reduce them beside the other parameters.
- Pipeline stages and micro-batches: planner/pipeline_step.py. Gradients of micro-batches add up before they are reduced, but
  for those of fsdp without a pipeline, which ranks could not hold whole.
- A budget of a fraction f costs at most (1 - f) of a forward pass.
- Memory is that of parameters, gradients, AdamW's moments in the parameters' dtype (no fp32 copies) and of what is kept for
  backward, an upper bound. The context of the device and buffers of libraries are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megafx.config import Config
from megafx.placements.data_axis import CONTEXT_AXIS, DDP, FSDP, TENSOR_AXIS, ZERO1
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, payload
from megafx.planner.cost import library_seconds
from megafx.planner.costed import CostedGraph
from megafx.planner.hardware import Hardware
from megafx.planner.pipeline_step import Split, message_us, share_of
from megafx.planner.timeline import StepTimes

ONE = Split()
FRACTIONS = (None, 0.5, 0.25, 0.1)  # budgets, as Config.activation_memory_budget has them


@dataclass(frozen=True)
class WholeStep:
    """One configuration."""

    config: Config
    parts: dict[str, float]  # microseconds of a step by cause
    memory: dict[str, int]  # bytes of a rank by kind
    rows: int  # of all ranks in a step
    sent: int  # bytes of a rank
    flops: float  # of a rank
    split: Split  # its pipeline stages and micro-batches


def whole_steps(
    costed: CostedGraph,
    step: StepTimes,
    config: Config,
    hardware: Hardware,
    memory: int,
    shards: Sequence[int],
    split: Split = ONE,
) -> Iterator[WholeStep]:
    """One for each form of data parallelism and each budget; of the budgets those up to the first that fits. None for a model
    of fewer parts than stages.

    costed, step: of one micro-batch. shards: numbers of data-parallel ranks that hold one copy of the parameters."""
    t, c, d = config.tensor_model_parallel_size or 1, config.context_parallel_size, config.data_parallel_size or 1
    n, m = d * c, split.microbatches  # n: ranks that have summands of a gradient
    own = share_of(costed, step, split)
    if own is None:
        return
    held = {kind: int(size * own.held) for kind, size in costed.memory.items()}
    of_experts = costed.experts / max(costed.memory["parameters"], 1)  # of these bytes
    of_others = 1 - of_experts
    experts = {kind: int(size * of_experts) for kind, size in held.items()}
    params, grads, moments = (held[kind] - experts[kind] for kind in ("parameters", "gradients", "AdamW's moments"))
    times = [r.times for r in costed.regions]
    forward, backward = (
        own.time * sum(p.times * p.us for p in step.parts if p.direction == way) for way in ("forward", "backward")
    )
    moves = [(times[node.region], node.move) for node in costed.nodes if node.move]
    moved = sum(often * (move.forward_bytes + move.backward_bytes) for often, move in moves)
    computing = (step.compute_us + step.host_us - costed.optimizer_us) * own.time
    outer = {axis: us * own.time for axis, us in step.exposed_by_axis.items() if axis != TENSOR_AXIS}
    of_context, of_data = outer.pop(CONTEXT_AXIS, 0.0), sum(outer.values())
    of_all = step.exposed_us * own.time
    of_tensor = of_all - of_context - of_data
    message, size = message_us(costed, hardware, t * n) if split.ranks > 1 else (0.0, 0)
    messages = 2 * split.chunks * m
    layers = max(round(sum(times) * own.held), 1)
    sharded = [(form, shard) for form in (ZERO1, FSDP) for shard in shards] if n > 1 else []
    bucket, e = config.data_parallel_bucket_mib * 2**20, config.expert_model_parallel_size
    for form, shard in [(DDP, 1), *sharded]:
        group = _DataGroup(hardware, t, c, d, shard, layers, bucket, split)
        waits = group.waits(form, params, grads, of_others * forward, of_others * backward)
        alike = 1 if form == DDP else shard // e  # ranks that hold shards of the same experts
        same = _DataGroup(hardware, t * e, 1, n // e, alike, layers, bucket, split)
        of_same = form if alike > 1 else DDP
        if e > 1:  # collectives of both share the step
            of_both = experts["parameters"], experts["gradients"]
            waits += same.waits(of_same, *of_both, of_experts * forward, of_experts * backward)
        whole = 1 if form == DDP else shard * c
        gathered = {DDP: 0, ZERO1: params, FSDP: 2 * params // layers}[form]
        gathered += {DDP: 0, ZERO1: experts["parameters"], FSDP: 2 * experts["parameters"] // layers}[of_same]
        for fraction in fractions_of(config):
            again = 0.0 if fraction is None else (1 - fraction) * computing / 3
            parts = {
                "computing": m * computing,
                "tensor-parallel collectives": m * of_tensor,
                "context-parallel collectives": m * of_context,
                "data-parallel collectives": m * of_data + waits,
                "the optimizer": costed.optimizer_us * own.held * (of_experts / alike + of_others / whole),
                "computing again in backward": m * again,
                "idle pipeline ranks": (split.ranks - 1) / split.chunks * (computing + again + of_all),
                "messages between stages": messages * message,
            }
            used = {
                "parameters": params // whole + experts["parameters"] // alike + gathered,
                "gradients": (
                    grads // (1 if group.holds(form) else whole)
                    + experts["gradients"] // (1 if group.holds(form) else alike)
                ),
                "AdamW's moments": moments // whole + experts["AdamW's moments"] // alike,
                "kept for backward": int(own.kept * (1 if fraction is None else fraction)),
            }
            changed = in_form(config, form, shard, activation_memory_budget=fraction)
            sent = int(m * moved * own.time) + messages * size + group.sent(form, params, grads)
            sent += same.sent(of_same, experts["parameters"], experts["gradients"])
            rows, flops = (config.micro_batch_size or 1) * d * m, step.flops * m / split.ranks
            yield WholeStep(changed, parts, used, rows, sent, flops, split)
            if sum(used.values()) <= memory:
                break


def fractions_of(config: Config) -> Sequence[float | None]:
    """Budgets to try: that of the config, where it is a fraction."""
    budget = config.activation_memory_budget
    return FRACTIONS if budget is None or isinstance(budget, str) else (float(budget),)


def copies_of(config: Config, hardware: Hardware) -> list[int]:
    """Numbers of data-parallel ranks that may hold one copy of the parameters: all, or those of some hosts."""
    d = config.data_parallel_size or 1
    host = max(hardware.gpus_per_host // ((config.tensor_model_parallel_size or 1) * config.context_parallel_size), 1)
    return [
        *(s for s in range(host, d, host) if d % s == 0 and s > 1 and s % config.expert_model_parallel_size == 0),
        d,
    ]


@dataclass(frozen=True)
class _DataGroup:
    """Ranks that have summands of the same gradients: d data-parallel ones, each c that cut a sequence."""

    hardware: Hardware
    t: int
    c: int
    d: int
    shard: int  # of the d, those that hold one copy
    layers: int  # whose parameters are gathered apart
    bucket: int  # bytes of gradients that are reduced together
    split: Split

    def waits(self, form: str, params: int, grads: int, forward: float, backward: float) -> float:
        """Microseconds that the device waits in a step of so many microseconds of forward and backward."""
        if self.d * self.c == 1:
            return 0.0
        latest = min(self.bucket / max(grads, 1), 1.0)  # of the gradients, those of the last bucket
        if form == DDP:
            whole = self._us(ALL_REDUCE, grads, self.d * self.c, self.t, -(-grads // self.bucket))
            return self._exposed(whole, backward, latest)
        copy, inner = self.shard * self.c, self.t
        gather, scatter = (
            self._us(kind, size, copy, inner, self.layers)
            for kind, size in ((ALL_GATHER, params), (REDUCE_SCATTER, grads))
        )
        buckets = -(-grads // copy // self.bucket)
        between = self._us(ALL_REDUCE, grads // copy, self.d // self.shard, inner * copy, max(buckets, 1))
        again = [gather] if form == FSDP else []
        once = self._exposed(gather, forward) + self._exposed(_sum([*again, scatter, between]), backward, latest)
        if form == ZERO1:  # gathered once a step
            return once
        each = _sum([gather] if self.holds(form) else [gather, scatter])
        more = self._exposed(gather, forward) + self._exposed(each, backward)
        return once + (self.split.microbatches - 1) * more

    def holds(self, form: str) -> bool:
        """True if whole gradients of micro-batches add up, and are reduced after the last: those of fsdp in a pipeline only."""
        return self.split.microbatches > 1 and (form != FSDP or self.split.ranks > 1)

    def _us(self, kind: str, size: int, ranks: int, inner: int, calls: int) -> tuple[float, float]:
        """(microseconds, those at the rate of a host's link) of collectives of `size` bytes in all."""
        sent = payload(kind, size, ranks) / calls
        machines = (self.hardware, self.hardware.one_host)
        found = [1e6 * calls * library_seconds(kind, sent, hw, ranks, inner) for hw in machines]
        return found[0], found[1]

    def _exposed(self, us: tuple[float, float], computing: float, latest: float = 0.0) -> float:
        """What is waited for: what products leave no multiprocessors for, what takes longer than they do, or comes last."""
        whole, of_link = us
        return max(whole - computing, (1 - self.hardware.hidden) * of_link, latest * whole)

    def sent(self, form: str, params: int, grads: int) -> int:
        """Bytes of a rank in a step."""
        if form == DDP:
            return payload(ALL_REDUCE, grads, self.d * self.c)
        copy = self.shard * self.c
        often = self.split.microbatches if form == FSDP else 1
        gathers, scatters = (2 * often if form == FSDP else 1), (1 if self.holds(form) else often)
        inside = gathers * payload(ALL_GATHER, params, copy) + scatters * payload(REDUCE_SCATTER, grads, copy)
        return inside + payload(ALL_REDUCE, grads // copy, self.d // self.shard)


def _sum(us: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in us), sum(b for _, b in us)


def in_form(config: Config, form: str, shard: int | None = None, **changes: Any) -> Config:
    """The config with another form of data parallelism, and other changes; "ddp" has no shards. shard: data-parallel ranks that
    hold a copy."""
    shard = config.data_parallel_shard_size if shard is None else shard
    alone = form == DDP or shard == (config.data_parallel_size or 1)
    return config.replace(data_parallel=form, data_parallel_shard_size=None if alone else shard, **changes)


def out_of_reach(t: int, gpus: int, hardware: Hardware) -> str:
    """Why groups of t tensor-parallel ranks of so many GPUs cannot be priced; '' where they can."""
    if t > hardware.gpus_per_host:
        return f"tensor-parallel ranks are of one host, which has {hardware.gpus_per_host} GPUs (gpus_per_host of the profile)"
    if gpus > hardware.gpus_per_host and hardware.network_bytes_per_second is None:
        return f"the profile '{hardware.name}' does not say what hosts send each other (network_bytes_per_second)"
    return ""
