"""From a call of a model to the graph that this rank runs: plan its training form once, capture, compile, partition."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from megafx.compiler.compiled import Compiled
from megafx.compiler.kept_values import KeptValues
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.compiler.runner import Runner
from megafx.compiler.stages import runner_of
from megafx.debugging import current
from megafx.errors import CaptureError, UsageError
from megafx.ir.program import PLACEMENT, Program, differentiable_outputs
from megafx.kernels.common.ahead import get_ready
from megafx.placements.types import I, Placement
from megafx.planner.context import CompileContext, in_training
from megafx.planner.plan import Plan
from megafx.runtime.bound_graph import CompiledCall
from megafx.runtime.cache_shard import CacheShard
from megafx.runtime.held_gradients import HeldBack
from megafx.runtime.keys import Call
from megafx.runtime.program_cache.cache_key import watching
from megafx.runtime.program_cache.fingerprint import digest
from megafx.runtime.program_cache.program_cache import Found, Situation

Capture = Callable[[bool], Program]  # whether the call's training form is wanted -> CAPTURED program


@dataclass
class Settled:
    """What the first calls of a model decide for later ones."""

    plan: Plan | None = None  # of the training call; it says how parameters are stored
    of_parts: bool = (
        False  # only submodules were called so far: the next call plans the parameters that these do not have
    )
    # path in a key-value cache -> the placement that graphs leave it at
    caches: dict[str, Placement] = field(default_factory=dict)
    last: Compiled | None = None  # the graph that users are shown: of the last training call, where there is one
    gathered: KeptValues = field(default_factory=functools.partial(KeptValues, whole=True))
    casts: KeptValues = field(default_factory=KeptValues)

    @property
    def whole(self) -> bool:
        return self.plan is not None and not self.of_parts

    def take(self, plan: Plan | None, part: str) -> None:
        """A call of the model, or of this part of it, was planned. What was stored by an earlier plan is in it as it was."""
        if plan is not None:
            before = self.plan
            self.plan = plan if before is None else replace(plan, params=before.params | plan.params)
            self.of_parts = bool(part)


@dataclass
class Planned:
    """A call whose plan was made. captured: its program, in training form; the others are as `plan_only` left them."""

    captured: Program
    placed: Program
    context: CompileContext
    runner: Runner

    def serves(self, context: CompileContext) -> bool:
        """True if the call is compiled with what it was planned with. Dumps are of whole compiles, which can be replayed."""
        mine, wanted = self.context.wants_grad, context.wants_grad
        if mine is None or wanted is None or self.context.config is not context.config or current().dump is not None:
            return False
        return all(mine(spec) == wanted(spec) for spec in self.captured.inputs)


def settle(
    call: Call,
    capture: Capture,
    context: CompileContext,
    settled: Settled,
    is_training: bool,
    situation: Situation | None = None,
) -> Planned | None:
    """Plan the training form of a call; None where there was a plan already, or one on disk (situation). A call of an
    evaluation is planned as it is where the model does not train on such arguments."""
    if settled.whole:
        return None
    if situation is not None and (found := situation.read()) is not None:
        settled.take(found.plan, call.part)
        return None
    if settled.plan is not None:
        context = replace(context, fixed=settled.plan.params, fixed_experts=settled.plan.experts)
    with watching(None if situation is None else situation.environment):
        try:
            program = capture(True)
        except CaptureError:
            if is_training:
                raise
            program = capture(False)
        get_ready(program.graph)
        context = replace(context, wants_grad=in_training(call.differentiable()))
        made = Planned(program, program.copy(), context, runner_of(context))
        settled.take(plan_only(made.placed, made.context, made.runner), call.part)
    if situation is not None:
        situation.write(program, settled.plan)
    return made


def compile_call(
    call: Call,
    is_training: bool,
    capture: Capture,
    context: CompileContext,
    settled: Settled,
    situation: Situation | None = None,
) -> CompiledCall:
    """The graph of one call. The first call plans, by its training form, which it may be itself (is_training).

    situation: of the call in the cache on disk, where that is on.
    """
    plans = not settled.whole
    if plans and not is_training:
        settle(call, capture, context, settled, False, None if situation is None else situation.plan())
    if situation is not None and (found := situation.read()) is not None:
        return _found(found, call, capture, context, settled)
    with watching(None if situation is None else situation.environment):
        made, compiled, captured = _made(call, is_training, capture, context, settled)
    if situation is not None:
        situation.write(compiled.program, settled.plan if plans and is_training else None, compiled, captured)
    return made


def _found(found: Found, call: Call, capture: Capture, context: CompileContext, settled: Settled) -> CompiledCall:
    """What an entry of the cache holds, bound on this rank."""
    settled.take(found.plan, call.part)
    assert settled.plan is not None and found.compiled is not None
    stored = dict(settled.plan.params)
    compiled, general = (
        found.compiled,
        replace(context, fixed=stored | _shards(call), fixed_experts=settled.plan.experts),
    )
    compiled.context.fixed = general.fixed
    made = _bound(compiled, call, context, settled, stored)

    def again() -> Program:
        program = capture(False)
        if digest(without_sizes(program)) != found.captured:
            raise UsageError(
                "gradients arrive at outputs beside the loss, and the model has changed since the forward",
                fix="Config(differentiable_outputs=True)",
            )
        return program

    if found.captured:
        _beside(made, compiled, again, general, call, settled, stored)
    return made


def without_sizes(program: Program) -> str:
    """The code of a program without which inputs it reads sizes from: processes may differ in that (capture/quick_fakes.py)."""
    return re.sub(r"sym_size(_int(_\d+)?|\.int\(\w+, \d+\))", "size", program.gm.code)


def _shards(call: Call) -> dict[str, Placement]:
    pairs = zip(call.names(), call.leaves, strict=True)
    return {n: x.placement for n, x in pairs if isinstance(x, CacheShard)}


def _made(
    call: Call, is_training: bool, capture: Capture, context: CompileContext, settled: Settled
) -> tuple[CompiledCall, Compiled, str]:
    """(the graph of a call, its program, digest of the code that was captured, where another form of it may be needed)."""
    planned = settle(call, capture, context, settled, is_training)
    assert settled.plan is not None
    stored = dict(settled.plan.params)
    general = replace(context, fixed=stored | _shards(call), fixed_experts=settled.plan.experts)
    planned = planned if is_training else None  # this call is the one that was planned
    captured = planned.captured if planned is not None else capture(False)
    if any(o.kind == "order" for o in captured.outputs):  # hooks: the call cannot be computed once more
        context = replace(context, config=context.config.replace(differentiable_outputs=True))
        general = replace(general, config=context.config)
    kept = captured.copy() if _gives_more_than_a_loss(captured, context) else None
    if planned is not None and planned.serves(context):
        own = planned.context
        own.wants_grad, own.fixed, own.given, own.agree = context.wants_grad, stored, settled.plan, None
        compiled = compile_program(planned.placed, own, planned.runner)
    elif planned is not None:
        compiled = compile_program(captured, replace(context, fixed=stored, given=settled.plan, agree=None))
    else:
        compiled = compile_program(captured, general)
    made = _bound(compiled, call, context, settled, stored)
    if kept is None:
        return made, compiled, ""
    _beside(made, compiled, kept.copy, general, call, settled, stored)
    return made, compiled, digest(without_sizes(kept))


def _beside(
    made: CompiledCall,
    compiled: Compiled,
    captured: Callable[[], Program],
    general: CompileContext,
    call: Call,
    settled: Settled,
    stored: Mapping[str, Placement],
) -> None:
    """Let the graph be compiled once more, of the captured program, where outputs beside the loss need gradients."""
    made.beside = beside_the_loss(compiled)
    other = replace(general, config=general.config.replace(differentiable_outputs=True))
    made.differentiable = lambda: _bound(compile_program(captured(), other), call, other, settled, stored)


def _gives_more_than_a_loss(captured: Program, context: CompileContext) -> bool:
    """True if outputs beside a loss require a gradient in eager mode, and are compiled without."""
    if context.wants_grad is None or context.config.differentiable_outputs or not any(o.loss for o in captured.outputs):
        return False
    return any(o.requires_grad and not o.loss for o in captured.outputs)


def beside_the_loss(compiled: Compiled) -> list[int]:
    """Indices of outputs that require a gradient in eager mode, and that the graph does not differentiate."""
    known = {*compiled.differentiated}
    return [i for i in differentiable_outputs(compiled.program) if i not in known]


def _bound(
    compiled: Compiled, call: Call, context: CompileContext, settled: Settled, stored: Mapping[str, Placement]
) -> CompiledCall:
    """What this rank runs of a compiled program."""
    program = compiled.program
    for spec, node in zip(program.outputs, program.results(), strict=True):
        if spec.cache and (placement := node.meta.get(PLACEMENT)) is not None:
            settled.caches.setdefault(spec.cache, placement if placement.is_shard else I)
    if (context.training and not call.part) or settled.last is None:
        settled.last = compiled
    executable = compiled.executable(settled.gathered, settled.casts)
    executable.compile_kernels(program.sizes.workload_of | program.sizes.of_call)
    names, parts = [spec.name for spec in program.inputs], executable.parts
    joined = [[names[i] for i in indices] for k, indices in enumerate(parts.joins) if k not in parts.gathered]
    made = CompiledCall(program, executable, compiled.wrt, compiled.differentiated, stored, joined)
    if program.before_reduction is not None:
        of = functools.cache(functools.partial(compiled.deferred, executable))
        made.holding = HeldBack(of, context.config.gradient_accumulation_fusion)
    if not compiled.context.keeps_casts and (weights := compiled.weights_in_fp8):
        made.weights_in_fp8 = weights
        keeping = compiled.keeping_casts()
        made.casts_fit = keeping.casts_fit
        made.keeping_casts = lambda: _keeping(made, keeping, call, context, settled, stored)
    return made


def _keeping(
    made: CompiledCall,
    keeping: Compiled,
    call: Call,
    context: CompileContext,
    settled: Settled,
    stored: Mapping[str, Placement],
) -> CompiledCall:
    """The form of a call that keeps casts of weights."""
    other = _bound(keeping, call, context, settled, stored)
    other.beside, other.differentiable = made.beside, made.differentiable
    return other
