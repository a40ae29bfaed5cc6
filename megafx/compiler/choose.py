"""Choices between compiles or plans: each candidate is tried on a copy of the program, quietly, and the best is kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from megafx.analysis.memory import MARGIN
from megafx.compiler.compiled import Compiled
from megafx.compiler.runner import Pass, PassRecord, Runner
from megafx.compiler.stages import runner_of
from megafx.errors import PlanError
from megafx.ir.program import Program
from megafx.planner.context import CompileContext
from megafx.planner.timeline import LEAST_GAIN
from megafx.units import bytes_text


class Trial(NamedTuple):
    """What passes made of a copy. records: what each did."""

    program: Program
    context: CompileContext
    records: list[PassRecord]


def tried(
    program: Program, context: CompileContext, passes: Sequence[Pass], *, stops: bool = False, **settings: Any
) -> Trial:
    """Run passes on copies of both; nothing is logged or dumped. settings: fields of the context that differ. stops: as of
    `runner_of`. Raises what the passes raise."""
    made, own = program.copy(), copy.copy(context)
    for name, value in settings.items():
        setattr(own, name, value)
    return Trial(made, own, runner_of(own, quiet=True, stops=stops).run(made, passes))


def fitting(program: Program, context: CompileContext, passes: Sequence[Pass], runner: Runner) -> Compiled:
    """The program with the largest budget whose predicted peak the device has room for, with AdamW's moments.

    passes: those that a budget changes. runner: has run the passes before. Raises PlanError where none fits.
    """
    assert context.device_bytes is not None
    room, peaks = int((1 - MARGIN) * context.device_bytes), []
    for tenths in range(10, -1, -1):
        config = context.config.replace(activation_memory_budget=tenths / 10)
        try:
            made, own, _ = tried(program, context, passes, stops=True, config=config, fits=True)
        except PlanError:
            break
        peaks.append(Compiled(made, own).memory().peak)
        if peaks[-1] <= room:
            return Compiled(made, own, runner)
    raise PlanError(
        f"the model does not fit into {bytes_text(room)}: the least that a step takes is {bytes_text(min(peaks))}",
        fix="more tensor-parallel ranks, sequence_parallel=True, data_parallel='fsdp', or a smaller batch",
    )


def sequence_parallel(
    program: Program, context: CompileContext, passes: Sequence[Pass]
) -> tuple[bool | str, Trial | None]:
    """What to plan with instead of 'auto': the layout that the solver takes, by its sum of costs, or the other one, if its
    schedule is shorter. With the trial that planned so, where there was one of all that is asked. passes: those that plan."""
    wanted = context.config.sequence_parallel
    free = context.given is None and not context.config.passes and context.config.planner_policy != "free"
    if wanted != "auto" or context.t == 1 or not free:
        return wanted, None

    trial = _planned(program, context, passes, wanted, context.keeps_problem)
    if trial is None:
        return wanted, None
    chosen = trial.context.solved
    other = _planned(program, context, passes, not chosen.sequence_parallel, False)
    if other is None:
        return wanted, trial
    better = other.context.solved
    if chosen.sequence_parallel == better.sequence_parallel or better.step_us > (1 - LEAST_GAIN) * chosen.step_us:
        return wanted, trial
    times = f"{better.step_us:.0f} us by its schedule, against {chosen.step_us:.0f} us"
    program.note("plan", f"sequence parallelism is {'on' if better.sequence_parallel else 'off'}: a step takes {times}")
    return better.sequence_parallel, None


def _planned(
    program: Program, context: CompileContext, passes: Sequence[Pass], wanted: bool | str, keeps_problem: bool
) -> Trial | None:
    """A plan of this rank alone; None where there is none."""
    config = context.config.replace(sequence_parallel=wanted)
    try:
        return tried(program, context, passes, config=config, agree=None, keeps_problem=keeps_problem)
    except PlanError:
        return None
