"""Compile a call: run the passes of stages.py over a captured program, as far as asked."""

from __future__ import annotations

from megafx.capture.prepare import alone
from megafx.checks.numbers import NumberCheck
from megafx.compiler.choose import Trial, fitting, sequence_parallel
from megafx.compiler.compiled import Compiled
from megafx.compiler.runner import Runner
from megafx.compiler.stages import EVERY_RANK, before, passes_of, runner_of, since
from megafx.config import FIT
from megafx.errors import PlanError
from megafx.ir.holders import own_functional
from megafx.ir.program import Phase, Program
from megafx.meanwhile import meanwhile
from megafx.passes.plan.flatten_tokens import flatten_tokens
from megafx.passes.recompute.choose_kept import choose_kept
from megafx.planner.context import Planner
from megafx.planner.plan import Plan


def compile_program(program: Program, planner: Planner, runner: Runner | None = None) -> Compiled:
    """CAPTURED program -> LOWERED; or PLACED, as `plan_only` has left program, planner and runner. Raises what the passes
    raise."""
    planned = program.phase >= Phase.PLACED
    passes = passes_of(planner, *EVERY_RANK[planned:])
    runner = runner_of(planner) if runner is None else runner
    numbers = _numbers(planner, runner)
    fits = planner.config.activation_memory_budget == FIT and planner.training
    if fits and planner.device_bytes is None:
        found = f"activation_memory_budget='fit' on a device whose memory is not known ({planner.hardware.name})"
        raise PlanError(found, fix="give the bytes (activation_memory_budget='24GiB'), or a profile with memory_bytes")
    with alone(), own_functional():
        if fits:
            runner.run(program, before(choose_kept, passes))
            return fitting(program, planner, since(choose_kept, passes), runner)
        runner.run(program, passes, numbers)
    return Compiled(program, planner, runner)


def plan_only(program: Program, planner: Planner, runner: Runner | None = None) -> Plan:
    """CAPTURED program -> its plan, with the report; the program is left PLACED."""
    passes = passes_of(planner, "planning")
    runner = runner_of(planner) if runner is None else runner
    numbers = _numbers(planner, runner)
    with alone(), own_functional():
        runner.run(program, before(flatten_tokens, passes), numbers)
        rest = since(flatten_tokens, passes)
        chosen, trial = sequence_parallel(program, planner, rest)
        agree = planner.agree
        if trial is not None and numbers is None and runner.shows_nothing:
            plan = trial.planner.solved
            agreed = plan if agree is None else agree(plan)
            if agreed is plan:
                _take(trial, program, planner, runner)
                return plan
            agree = lambda own: agreed
        with meanwhile(planner, config=planner.config.replace(sequence_parallel=chosen), agree=agree):
            runner.run(program, rest, numbers)
    return planner.solved


def _take(trial: Trial, program: Program, planner: Planner, runner: Runner) -> None:
    """Let all three be as after a run of the trial's passes."""
    program.become(trial.program)
    asked = {name: getattr(planner, name) for name in ("config", "agree")}
    vars(planner).update(vars(trial.planner) | asked)
    runner.records += trial.records


def _numbers(planner: Planner, runner: Runner) -> NumberCheck | None:
    """Under MEGAFX_CHECK=2 each pass is followed by a comparison of numbers."""
    return NumberCheck(planner.t, planner.data) if runner.settings.check >= 2 else None
