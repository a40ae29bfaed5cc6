"""The memory of a rank over the modelled step: what `analysis/memory.py` says that graphs hold, at the times of the timeline.

A compiled call's nodes have their modules; each gets the time at which the schedule computes its module in that layer. Where
there is only a plan, values are counted that backward reads, from the op that makes them be kept to its backward: at most
this, since fused ops compute some of them again, and without what ops take while they run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megafx.analysis.memory import Memory, Timeline
from megafx.planner.costed import CostedGraph
from megafx.planner.plan import innermost
from megafx.planner.timeline import COMPUTE, Run, StepTimes, runs

LEAST, KEPT, GRADIENTS, WORKING = "kept for backward, at most", "kept for backward", "gradients", "working memory"
SHOWN = 400  # spans of time of which a curve keeps the highest point


@dataclass
class Curve:
    """held: bytes by kind, over all of the step. points: (microseconds, bytes of each of `kinds` from then on).

    predicted: of a compiled call; else at most what a plan keeps.
    """

    held: dict[str, int]
    kinds: list[str]
    points: list[tuple[float, ...]]
    predicted: bool

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + int(max(sum(point[1:]) for point in self.points))


def curve(costed: CostedGraph, step: StepTimes, memory: Memory | None) -> Curve:
    """memory: of the compiled call; None where there is only a plan."""
    order = runs(costed, step)
    if memory is None:
        planned = [*_kept(costed, order), (step.total_us, 0)]
        return Curve(dict(costed.memory), [LEAST], _thinned(planned, step.total_us), False)
    held = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "parameters of other ranks": memory.gathered,
        "casts of weights": memory.casts,
        "inputs, workspace of cuBLAS": memory.inputs + memory.workspace,
    }
    points: list[tuple[float, ...]] = []
    for direction, timeline in (("forward", memory.forward), ("backward", memory.backward)):
        own = [run for run in order if run.part.direction == direction and run.part.region >= 0]
        for t, point in zip(_times(timeline, own, costed), timeline.points, strict=True) if timeline else ():
            kept, made = (point.results, 0) if direction == "forward" else (point.given, point.results)
            points.append((t, kept, made, point.bytes - kept - made))
    if memory.backward is not None:
        points.append((order[-1].start, 0, memory.gradients, memory.step))
    points.append((step.total_us, *points[-1][1:]))
    kinds = [KEPT, GRADIENTS, WORKING]
    return Curve({k: v for k, v in held.items() if v}, kinds, _thinned(points, step.total_us), True)


def _kept(costed: CostedGraph, order: Sequence[Run]) -> list[tuple[float, int]]:
    changes: dict[float, int] = defaultdict(int)
    changes[0.0] = 0
    for run in order if costed.training else ():
        ends: dict[int, float] = {}
        for segment in run.part.segments:
            if segment.lane == COMPUTE:
                ends[segment.node] = segment.start - run.part.start + segment.us
        for i in costed.regions[run.part.region].nodes if run.part.region >= 0 else ():
            kept = costed.nodes[i].kept
            changes[run.start + ends.get(i, 0.0)] += kept if run.part.direction == "forward" else -kept
    found, now = [], 0
    for t in sorted(changes):
        now += changes[t]
        found.append((round(t, 3), now))
    return found


def _times(timeline: Timeline, order: Sequence[Run], costed: CostedGraph) -> list[float]:
    """When each point of a graph is, by the schedule: these runs. Times never fall from one point to the next."""
    starts: dict[tuple[int, str], list[float]] = defaultdict(list)  # of the ops of a module in a run
    layers: dict[str, int] = {}
    others: dict[str, int] = {}
    for number, run in enumerate(order):
        region = costed.regions[run.part.region]
        for segment in run.part.segments:
            if segment.lane == COMPUTE and segment.node >= 0:
                module = costed.nodes[segment.node].module
                starts[number, module].append(run.start + segment.start - run.part.start)
                if not region.layer:
                    others.setdefault(module, number)
        if region.layer:
            layers[run.name] = number
    where = [_place(point.module, layers, others) for point in timeline.points]
    count: dict[tuple[int, str], int] = defaultdict(int)
    for place in where:
        if place is not None:
            count[place] += 1
    seen: dict[tuple[int, str], int] = defaultdict(int)
    known: list[tuple[int, float]] = []
    for i, place in enumerate(where):
        if place is not None and (ops := starts.get(place)):
            known.append((i, ops[seen[place] * len(ops) // count[place]]))
            seen[place] += 1
    known = _rising(known)
    end = order[-1].start + order[-1].part.us
    at = [-1, *(i for i, _ in known), len(where)]
    return [*np.interp(range(len(where)), at, [order[0].start, *(t for _, t in known), end]).round(3).tolist()]


def _place(fqn: str, layers: dict[str, int], others: dict[str, int]) -> tuple[int, str] | None:
    """(run, module within it) of a node of this module."""
    found = innermost(fqn, layers | others)
    if found is None or found[0] in layers:
        return found and (layers[found[0]], found[1])
    return others[found[0]], found[0]


def _rising(known: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """As many of them as can be kept so that times do not fall: a node that passes moved far is not followed."""
    ends: list[float] = []  # ends[k]: the earliest end of k + 1 that rise
    which: list[int] = []
    before: list[int] = []
    for number, (_, t) in enumerate(known):
        length = bisect_right(ends, t)
        before.append(which[length - 1] if length else -1)
        ends[length : length + 1] = [t]
        which[length : length + 1] = [number]
    found, number = [], which[-1] if which else -1
    while number >= 0:
        found.append(known[number])
        number = before[number]
    return found[::-1]


def _thinned(points: Sequence[tuple[float, ...]], total: float) -> list[tuple[float, ...]]:
    """Of each span of time the highest point and the last, so that a page of many layers stays small."""
    spans: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for point in points:
        spans[int(SHOWN * point[0] / (total or 1.0))].append(point)
    found = []
    for span in spans.values():
        highest = max(range(len(span)), key=lambda i: sum(span[i][1:]))
        found += [span[i] for i in sorted({highest, len(span) - 1})]
    return found
