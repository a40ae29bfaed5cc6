"""`megafx.profile`: measured times of a few steps beside those of the cost model, module by module, in one report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from megafx.errors import UsageError
from megafx.ops.ranges import PREFIX
from megafx.planner.costed import CostedGraph
from megafx.planner.plan import innermost
from megafx.planner.timeline import COMPUTE, WAIT, StepTimes
from megafx.report.report import Measured, Report


def profile_steps(step: Callable[[], None], steps: int, report: Report) -> None:
    """Run `step` once to warm up and then `steps` times; fill `report.measured`.

    Raises UsageError where the graphs have no ranges (Config.profiler_ranges).
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step()
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in trace.key_averages():
        if event.key.startswith(PREFIX):
            us = event.device_time_total or event.cpu_time_total  # on a device: of the kernels that it started
            found[event.key.removeprefix(PREFIX)] = max(found.get(event.key.removeprefix(PREFIX), 0.0), us / steps)
    if not found:
        fix = "parallelize the model with Config(profiler_ranges=True)"
        raise UsageError("the graphs of this model name no modules", fix=fix)
    report.measured = beside_model(found, report.costed, report.step)


def beside_model(found: dict[str, float], costed: CostedGraph, step: StepTimes) -> list[Measured]:
    """'forward h.0.mlp' -> microseconds, in the order of the graph; like layers together, beside what the schedule says."""
    layers = {modules[0]: region for modules, region in costed.order if costed.regions[region].layer}

    def place(fqn: str) -> str:
        found = innermost(fqn, layers)
        return fqn if found is None else ".".join(filter(None, [costed.regions[layers[found[0]]].name, found[1]]))

    computed: dict[tuple[str, str], float] = defaultdict(float)
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for part in step.parts:
        for segment in part.segments:
            if segment.node >= 0 and segment.lane != WAIT:
                node = costed.nodes[segment.node]
                region = costed.regions[node.region]
                name = ".".join(filter(None, [region.name if region.layer else "", node.module])) or "<root>"
                into = computed if segment.lane == COMPUTE else sent
                into[part.direction, name] += part.times * segment.us
    measured: dict[tuple[str, str], float] = defaultdict(float)
    for text, us in found.items():
        direction, _, fqn = text.partition(" ")
        measured[direction, place(fqn)] += us
    return [
        Measured(*key, round(us, 1), round(computed.get(key, 0.0), 1), round(sent.get(key, 0.0), 1))
        for key, us in measured.items()
    ]


def loss_of(output: Any) -> torch.Tensor:
    """The loss among what a model returns: `.loss`, the output itself, or the first single number that takes a gradient."""
    leaves = [getattr(output, "loss", None), *torch.utils._pytree.tree_leaves(output)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad:
            return leaf
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    if not tensors:
        raise UsageError("the model returns nothing that takes a gradient", fix="profile a training call")
    return tensors[0].float().sum()
