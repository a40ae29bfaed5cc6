"""A pipeline before it has ranks: its schedules, what does not go together with stages, and the graphs of its stages.

`megafx.pipeline` runs these graphs, and `megafx.rehearse` proves them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from megafx.compiler.cut_stages import Cut, StageGraph, Whole, cut_program
from megafx.compiler.pipeline import plan_only
from megafx.config import FIT, Config
from megafx.errors import ConfigError
from megafx.placements.data_axis import PIPELINE_AXIS
from megafx.planner.context import CompileContext
from megafx.planner.pipeline_step import places
from megafx.planner.plan import Plan
from megafx.report.stages import Stage, pipeline_stages, stages_from

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}


def schedule_of(schedule: str) -> Any:
    """The class of torch.distributed.pipelining. Raises ConfigError for a schedule that does not run."""
    name = schedule.lower()
    kind = SCHEDULES.get(name)
    if kind is None:
        known = "GPipe, 1F1B or Interleaved1F1B"
        why = ": a stage's backward is one graph, which zero-bubble schedules would split" if "z" in name else ""
        raise ConfigError(f"schedule='{schedule}' is none of those that run{why}", fix=f"use {known}")
    return kind


def several_stages(kind: Any) -> bool:
    """True if a rank of this schedule has several stages."""
    return kind is ScheduleInterleaved1F1B


def with_stages(config: Config, microbatches: int) -> Config:
    """The config that stages are compiled with. Raises ConfigError for options that do not go together with stages."""
    if config.cuda_graphs not in (False, "auto"):
        what = f"cuda_graphs={config.cuda_graphs!r} does not go together with a pipeline"
        raise ConfigError(what, fix="Config(cuda_graphs=False), or megafx.parallelize without stages")
    if config.activation_memory_budget == FIT:
        raise ConfigError(
            "activation_memory_budget='fit' would fit one micro-batch of a pipeline, of which a schedule keeps several",
            fix="a fraction, such as 0.5: megafx.rehearse(..., stages=...) says what fits",
        )
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ConfigError(f"microbatches={microbatches!r}", fix="give a whole number of at least 1")
    return config.replace(cuda_graphs=False, cache=False)


def check_count(kind: Any, count: int, ranks: int) -> None:
    """Raise ConfigError unless the schedule runs so many stages on so many pipeline ranks."""
    several = several_stages(kind)
    if count % ranks or (count == ranks) == several:
        wanted = f"a multiple of {ranks}, and more than that" if several else str(ranks)
        raise ConfigError(
            f"{count} stages on {ranks} ranks of '{PIPELINE_AXIS}' with {kind.__name__}",
            fix=f"ask for as many stages as the schedule takes: {wanted}",
        )


def made_schedule(kind: Any, parts: Sequence[Any], microbatches: int) -> Any:
    """The schedule of these stages of a rank. Raises ConfigError where it does not take so many micro-batches."""
    given: Any = parts if several_stages(kind) else parts[0]
    try:
        return kind(given, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False)
    except ValueError as error:
        fix = "another number of microbatches: a multiple of the ranks of 'pp' serves every schedule"
        raise ConfigError(str(error), fix=fix) from None


@dataclass(frozen=True)
class Divided:
    """A call of a model as stages. plan: of the whole; stages: their modules and modelled time; graphs: of each stage."""

    plan: Plan
    stages: list[Stage]
    cut: Cut
    graphs: list[StageGraph]

    @property
    def begins(self) -> tuple[int, ...]:
        """The first part of each stage, of those between which the model may be cut."""
        assert self.plan.report is not None and self.plan.report.costed is not None
        parts = [modules for modules, _ in places(self.plan.report.costed)]
        later = (next(i for i, part in enumerate(parts) if stage.modules[0] in part) for stage in self.stages[1:])
        return (0, *later)


def divide(
    whole: Whole, context: CompileContext, kind: Any, stages: int | Sequence[str], ranks: int, trained: Collection[str]
) -> Divided:
    """stages: how many, or with which modules they begin, but for the first; ranks: of 'pp'; trained: names of parameters that
    require gradients. Raises ConfigError, PlanError, UsageError."""
    plan = plan_only(whole.program.copy(), context)
    assert plan.report is not None
    found = pipeline_stages(plan.report, stages) if isinstance(stages, int) else stages_from(plan.report, stages)
    check_count(kind, len(found), ranks)
    cut = Cut([stage.modules for stage in found])
    return Divided(plan, found, cut, cut_program(whole, cut, trained, 0))
