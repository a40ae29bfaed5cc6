"""Pipeline stages in a step: where the model is cut, what the busiest rank does and holds, how long it waits for the others.

Ranks of a pipeline have `chunks` stages each: rank r those numbered r, r + ranks, ... The schedule is 1F1B, interleaved with
several stages a rank. Of m micro-batches, a rank is idle for as long as the (ranks - 1) before it take for one, divided by
chunks; what it keeps for backward is that of the micro-batches that are under way. Source: Narayanan et al. 2021 (Megatron-LM).
Between stages each tensor-parallel rank sends what the last op of a layer gives, whole, and waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megafx.placements.types import ALL_GATHER
from megafx.planner.cost import library_seconds
from megafx.planner.costed import CostedGraph
from megafx.planner.hardware import Hardware
from megafx.planner.timeline import StepTimes


@dataclass(frozen=True)
class Split:
    """How a pipeline cuts a step."""

    ranks: int = 1  # of a pipeline
    chunks: int = 1  # stages of each
    microbatches: int = 1  # one after the other in a step, of each data-parallel rank
    begins: tuple[int, ...] = ()  # the first part of each stage, where the cut is not the balanced one

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks


@dataclass(frozen=True)
class Share:
    """Of the whole model, what the ranks of a pipeline have at most."""

    time: float  # time, held: fractions of a micro-batch's time and of the parameters' bytes
    held: float
    kept: int  # bytes for backward, of all micro-batches under way


def share_of(costed: CostedGraph, step: StepTimes, split: Split) -> Share | None:
    """None where the model has fewer parts than stages."""
    kept = [0.0] * len(costed.regions)
    for node in costed.nodes:
        kept[node.region] += node.kept
    if split.ranks == 1:
        times = [region.times for region in costed.regions]
        return Share(1.0, 1.0, int(sum(n * k for n, k in zip(times, kept, strict=True))))
    parts = [regions for _, regions in places(costed)]
    if split.stages > len(parts):
        return None
    us = us_of(costed, step)
    begins = split.begins or balanced([sum(us[region] for region in part) for part in parts], split.stages)
    stages = [[*chain(*parts[a:b])] for a, b in zip(begins, [*begins[1:], len(parts)], strict=True)]
    ranks = [[*chain(*stages[r :: split.ranks])] for r in range(split.ranks)]
    order = [region for _, region in costed.order]
    total, held = sum(us[region] for region in order), sum(costed.regions[region].held for region in order)
    return Share(
        max(sum(us[region] for region in rank) for rank in ranks) / total,
        max(sum(costed.regions[region].held for region in rank) for rank in ranks) / max(held, 1.0),
        int(max(sum(kept[region] for region in rank) * under_way(split, r) for r, rank in enumerate(ranks))),
    )


def places(costed: CostedGraph) -> list[tuple[tuple[str, ...], list[int]]]:
    """The parts of a model between which it may be cut, in order: their modules, and indices of their regions."""
    found: list[tuple[tuple[str, ...], list[int]]] = []
    for modules, region in costed.order:
        named = tuple(name for name in modules if name and name != "<root>")
        if named or not found:
            found.append((named, [region]))
        else:  # what forward itself computes after a layer
            found[-1][1].append(region)
    return found


def us_of(costed: CostedGraph, step: StepTimes) -> list[float]:
    """Microseconds of each region, forward and backward, of one of its layers."""
    us = [0.0] * len(costed.regions)
    for part in step.parts:
        if part.region >= 0:
            us[part.region] += part.us
    return us


def under_way(split: Split, rank: int) -> float:
    """Micro-batches whose values a rank keeps at most."""
    behind = split.ranks - rank - 1
    if split.chunks == 1:
        return min(split.microbatches, behind + 1)
    chunks = (split.chunks - 1) * split.ranks + 2 * behind + 1
    return min(split.microbatches * split.chunks, chunks) / split.chunks


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """Where `count` runs of these parts begin, each of at least one, so that the largest sum is the least that there is. Of
    such cuts one whose last runs are long: the first ranks of a pipeline keep most."""
    low, high = max(costs), sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_runs(costs, middle)) <= count else (middle, high)
    begins = _runs(costs, high * (1 + 1e-12))
    while len(begins) < count:  # a run of several parts gives one away
        ends = [*begins[1:], len(costs)]
        at = next(i for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end - begin > 1)
        begins.insert(at + 1, begins[at] + 1)
    return begins


def _runs(costs: Sequence[float], most: float) -> list[int]:
    """Where runs begin that are filled one after the other from the end, up to a sum."""
    begins, now = [0], 0.0
    for i in range(len(costs))[::-1]:
        if now and now + costs[i] > most:
            begins.insert(1, i + 1)
            now = 0.0
        now += costs[i]
    return begins


def message_us(costed: CostedGraph, hardware: Hardware, inner: int) -> tuple[float, int]:
    """(microseconds, bytes) of what a stage sends to the next. inner: ranks of one stage."""
    layer = next((region for region in costed.regions if region.layer), costed.regions[-1])
    sent = next((costed.nodes[i].bytes for i in layer.nodes[::-1] if costed.nodes[i].move is None), 0)
    return 1e6 * library_seconds(ALL_GATHER, sent, hardware, 2, inner), sent
