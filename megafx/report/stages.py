"""A balanced cut of a model into pipeline stages, priced by the cost model; schedules are torch.distributed.pipelining's.

The stages are runs of regions (what is before the layers, each layer, what is after them), so that the slowest stage is as fast
as it can be. Embedding and head are priced as all else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafx.errors import UsageError
from megafx.planner.pipeline_step import balanced, places, us_of
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
    found = _places(report)
    if not 1 <= count <= len(found):
        raise UsageError(f"{count} stages for a model of {len(found)} parts", fix=f"ask for 1 to {len(found)}")
    return _stages(found, balanced([cost for _, cost in found], count))


def stages_from(report: Report, names: Sequence[str]) -> list[Stage]:
    """The stages of a planned model that begin with these modules, and a first one. Raises UsageError for other names."""
    found, begins = _places(report), [0]
    for name in names:
        at = next((i for i, (modules, _) in enumerate(found) if name in modules), 0)
        if at <= begins[-1]:
            known = ", ".join(_short(tuple(modules[0] for modules, _ in found[1:])))
            raise UsageError(
                f"no stage can begin with '{name}' after the one before it", fix=f"name some of {known}, in order"
            )
        begins.append(at)
    return _stages(found, begins)


def _places(report: Report) -> list[tuple[tuple[str, ...], float]]:
    """The parts of a model in order: their modules, and their time."""
    if report.costed is None:
        raise UsageError("this report has no graph", fix="plan the model: megafx.explain(megafx.plan(...))")
    us = us_of(report.costed, report.step)
    return [(modules, sum(us[region] for region in regions)) for modules, regions in places(report.costed)]


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
