"""A step of all ranks: the timeline of one rank's plan, and what data-parallel ranks and budgets add to it.

What is added is coarser than the timeline:

- Collectives of data-parallel ranks overlap with forward and backward, which hides a part of them (`Hardware.hidden`): products
  leave the library few multiprocessors, and are slower for what it takes. Ranks of one host use the link. A group that spans
  hosts is limited by the network: by its ranks on a host times what each sends (`network_bytes_per_second`).
- Ranks that cut a sequence have summands of the same gradients, and share them out as data-parallel ranks do.
- A budget of a fraction f costs at most (1 - f) of a forward pass.
- Memory is that of parameters, gradients, AdamW's moments in the parameters' dtype (no fp32 copies) and of what is kept for
  backward, an upper bound. The context of the device and buffers of libraries are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafx.config import Config
from megafx.placements.data_axis import CONTEXT_AXIS, TENSOR_AXIS
from megafx.planner.costed import CostedGraph
from megafx.planner.hardware import Hardware
from megafx.planner.timeline import StepTimes

FRACTIONS = (None, 0.5, 0.25, 0.1)  # budgets, as Config.activation_memory_budget has them
BUCKET = 25 * 2**20


@dataclass(frozen=True)
class WholeStep:
    """One configuration. parts: microseconds of a step by cause; memory: bytes of a rank by kind; rows: of all ranks in a step;
    sent: bytes of a rank."""

    config: Config
    parts: dict[str, float]
    memory: dict[str, int]
    rows: int
    sent: int


def whole_steps(
    picture: CostedGraph, step: StepTimes, config: Config, hardware: Hardware, memory: int
) -> Iterator[WholeStep]:
    """One for each form of data parallelism and each budget; of the budgets those up to the first that fits."""
    t, c, d = config.tensor_model_parallel_size or 1, config.context_parallel_size, config.data_parallel_size or 1
    n = d * c  # ranks that have summands of a gradient
    held = picture.memory
    params, grads, moments = held["parameters"], held["gradients"], held["AdamW's moments"]
    times = [r.times for r in picture.regions]
    kept = sum(times[node.region] * node.kept for node in picture.nodes)
    forward, backward = (
        sum(p.times * p.us for p in step.parts if p.direction == way) for way in ("forward", "backward")
    )
    moves = [(times[node.region], node.move) for node in picture.nodes if node.move]
    moved = sum(often * (move.forward_bytes + move.backward_bytes) for often, move in moves)
    computing = step.compute_us + step.host_us - picture.optimizer_us
    outer = {axis: us for axis, us in step.exposed_by_axis.items() if axis != TENSOR_AXIS}
    of_context, layers = outer.pop(CONTEXT_AXIS, 0.0), max(sum(times), 1)
    rate = data_link(t, n, hardware)
    once = 1e6 * grads * (n - 1) / n / rate
    latest = 1e6 * min(grads, BUCKET) * (n - 1) / n / rate  # of the last bucket
    exposed = lambda us, computing: max(us - computing, (1 - hardware.hidden) * us)  # noqa: E731
    for form in ("ddp", "zero1", "fsdp") if n > 1 else ("ddp",):
        waits = {
            "ddp": max(exposed(2 * once, backward), 2 * latest),
            "zero1": exposed(once, forward) + max(exposed(once, backward), latest),
            "fsdp": exposed(once, forward) + max(exposed(2 * once, backward), latest),
        }
        whole = {"ddp": 1, "zero1": n, "fsdp": n}[form]
        gathered = {"ddp": 0, "zero1": params, "fsdp": 2 * params // layers}[form]
        for fraction in FRACTIONS:
            parts = {
                "computing": computing,
                "tensor-parallel collectives": step.exposed_us - of_context - sum(outer.values()),
                "context-parallel collectives": of_context,
                "data-parallel collectives": sum(outer.values()) + (waits[form] if n > 1 else 0.0),
                "the optimizer": picture.optimizer_us / whole,
                "computing again in backward": 0.0 if fraction is None else (1 - fraction) * computing / 3,
            }
            used = {
                "parameters": params // whole + gathered,
                "gradients": grads // whole,
                "AdamW's moments": moments // whole,
                "kept for backward": int(kept * (1 if fraction is None else fraction)),
            }
            sent = moved + (0 if n == 1 else int(grads * (n - 1) / n * {"ddp": 2, "zero1": 2, "fsdp": 3}[form]))
            changed = in_form(config, form).replace(activation_memory_budget=fraction)
            yield WholeStep(changed, parts, used, (config.micro_batch_size or 1) * d, sent)
            if sum(used.values()) <= memory:
                break


def in_form(config: Config, form: str) -> Config:
    """The config with another form of data parallelism; "ddp" has no shards."""
    return config.replace(
        data_parallel=form, data_parallel_shard_size=None if form == "ddp" else config.data_parallel_shard_size
    )


def out_of_reach(t: int, gpus: int, hardware: Hardware) -> str:
    """Why groups of t tensor-parallel ranks of so many GPUs cannot be priced; '' where they can."""
    if t > hardware.gpus_per_host:
        return f"tensor-parallel ranks are of one host, which has {hardware.gpus_per_host} GPUs (gpus_per_host of the profile)"
    if gpus > hardware.gpus_per_host and hardware.network_bytes_per_second is None:
        return f"the profile '{hardware.name}' does not say what hosts send each other (network_bytes_per_second)"
    return ""


def data_link(t: int, n: int, hardware: Hardware) -> float:
    """Bytes a second of the link between n ranks of which each holds one of t tensor-parallel ones."""
    if t * n <= hardware.gpus_per_host:
        return hardware.link_bytes_per_second
    assert hardware.network_bytes_per_second is not None
    return min(hardware.link_bytes_per_second, hardware.gpus_per_host // t * hardware.network_bytes_per_second)
