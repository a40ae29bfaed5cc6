"""A balanced cut of a model into pipeline stages, priced by the cost model; schedules are torch.distributed.pipelining's.

The stages are runs of regions (what is before the layers, each layer, what is after them), so that the slowest stage is as fast
as it can be: exact, by dynamic programming. Embedding and head are priced as all else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafx.errors import UsageError
from megafx.planner.plan import folded_name
from megafx.report.report import Report


@dataclass(frozen=True)
class Stage:
    """modules: paths of the modules that it runs, in order, but the root; us: forward and backward of one micro-batch."""

    modules: tuple[str, ...]
    us: float

    def __str__(self) -> str:
        return f"{self.us / 1e3:9.3f} ms  {', '.join(_short(self.modules))}"


def pipeline_stages(report: Report, count: int) -> list[Stage]:
    """`count` stages of a planned model. Raises UsageError where it has fewer layers than that."""
    places = _places(report)
    if not 1 <= count <= len(places):
        raise UsageError(f"{count} stages for a model of {len(places)} parts", fix=f"ask for 1 to {len(places)}")
    upto = [0.0]
    for _, cost in places:
        upto.append(upto[-1] + cost)
    # best[k][i]: the slowest stage of the best cut of the first i parts into k; cut[k][i]: where its last stage begins
    best, cut = [[0.0] + [float("inf")] * len(places)], [[0] * (len(places) + 1)]
    for k in range(1, count + 1):
        row, at = [float("inf")] * (len(places) + 1), [0] * (len(places) + 1)
        for i in range(k, len(places) + 1):
            row[i], at[i] = min((max(best[k - 1][j], upto[i] - upto[j]), j) for j in range(k - 1, i))
        best.append(row)
        cut.append(at)
    begins, end = list[int](), len(places)
    for k in range(count, 0, -1):
        begins.append(end := cut[k][end])
    return _stages(places, begins[::-1])


def stages_from(report: Report, names: Sequence[str]) -> list[Stage]:
    """The stages of a planned model that begin with these modules, and a first one. Raises UsageError for other names."""
    places, begins = _places(report), [0]
    for name in names:
        at = next((i for i, (modules, _) in enumerate(places) if name in modules), 0)
        if at <= begins[-1]:
            known = ", ".join(_short(tuple(modules[0] for modules, _ in places[1:])))
            raise UsageError(
                f"no stage can begin with '{name}' after the one before it", fix=f"name some of {known}, in order"
            )
        begins.append(at)
    return _stages(places, begins)


def _places(report: Report) -> list[tuple[tuple[str, ...], float]]:
    """The parts of a model in order: their modules, and their time."""
    if report.picture is None:
        raise UsageError("this report has no graph", fix="plan the model: megafx.explain(megafx.plan(...))")
    us = [0.0] * len(report.picture.regions)
    for part in report.step.parts:
        if part.region >= 0:
            us[part.region] += part.us
    places: list[tuple[tuple[str, ...], float]] = []
    for modules, region in report.picture.order:
        named = tuple(name for name in modules if name and name != "<root>")
        if named or not places:
            places.append((named, us[region]))
        else:  # what forward itself computes after a layer
            places[-1] = places[-1][0], places[-1][1] + us[region]
    return places


def _stages(places: list[tuple[tuple[str, ...], float]], begins: Sequence[int]) -> list[Stage]:
    """begins: the first part of each stage."""
    stages = []
    for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
        modules = dict.fromkeys(name for modules, _ in places[begin:end] for name in modules)
        stages.append(Stage(tuple(modules), sum(us for _, us in places[begin:end])))
    return stages


def _short(names: tuple[str, ...]) -> list[str]:
    """`h.0`, `h.1`, `h.2` as `h.[0-2]`."""
    runs: list[list[str]] = []
    for name in names:
        head, _, index = name.rpartition(".")
        last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if index.isdigit() and last[0] == head and last[2].isdigit() and int(index) == int(last[2]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [folded_name(f"{r[0].rpartition('.')[0]}.*", [f"{n}" for n in r]) if len(r) > 1 else r[0] for r in runs]
