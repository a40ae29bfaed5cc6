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
from megafx.planner.context import CompileContext
from megafx.planner.plan import Plan


def compile_program(program: Program, context: CompileContext, runner: Runner | None = None) -> Compiled:
    """CAPTURED program -> LOWERED; or PLACED, as `plan_only` has left program, context and runner. Raises what the passes
    raise."""
    planned = program.phase >= Phase.PLACED
    passes = passes_of(context, *EVERY_RANK[planned:])
    runner = runner_of(context) if runner is None else runner
    numbers = _numbers(context, runner)
    fits = context.config.activation_memory_budget == FIT and context.training
    if fits and context.device_bytes is None:
        found = f"activation_memory_budget='fit' on a device whose memory is not known ({context.hardware.name})"
        raise PlanError(found, fix="give the bytes (activation_memory_budget='24GiB'), or a profile with memory_bytes")
    with alone(), own_functional():
        if fits:
            runner.run(program, before(choose_kept, passes))
            return fitting(program, context, since(choose_kept, passes), runner)
        runner.run(program, passes, numbers)
    return Compiled(program, context, runner)


def plan_only(program: Program, context: CompileContext, runner: Runner | None = None) -> Plan:
    """CAPTURED program -> its plan, with the report; the program is left PLACED."""
    passes = passes_of(context, "planning")
    runner = runner_of(context) if runner is None else runner
    numbers = _numbers(context, runner)
    with alone(), own_functional():
        runner.run(program, before(flatten_tokens, passes), numbers)
        rest = since(flatten_tokens, passes)
        chosen, trial = sequence_parallel(program, context, rest)
        agree = context.agree
        if trial is not None and numbers is None and runner.shows_nothing:
            plan = trial.context.solved
            agreed = plan if agree is None else agree(plan)
            if agreed is plan:
                _take(trial, program, context, runner)
                return plan
            agree = lambda own: agreed
        with meanwhile(context, config=context.config.replace(sequence_parallel=chosen), agree=agree):
            runner.run(program, rest, numbers)
    return context.solved


def _take(trial: Trial, program: Program, context: CompileContext, runner: Runner) -> None:
    """Let all three be as after a run of the trial's passes."""
    program.become(trial.program)
    asked = {name: getattr(context, name) for name in ("config", "agree")}
    vars(context).update(vars(trial.context) | asked)
    runner.records += trial.records


def _numbers(context: CompileContext, runner: Runner) -> NumberCheck | None:
    """Under MEGAFX_CHECK=2 each pass is followed by a comparison of numbers."""
    return NumberCheck(context.t, context.data) if runner.settings.check >= 2 else None
