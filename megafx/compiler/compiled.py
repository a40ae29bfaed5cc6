"""A graph that is the same on every rank, as compiled: what a rank runs of it, its memory and its communication."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from megafx.analysis.casts import casts_of_weights
from megafx.analysis.communication import Communication, collective_nodes, communication
from megafx.analysis.memory import MARGIN, Memory, memory
from megafx.capture.prepare import alone
from megafx.compiler.executable import Executable
from megafx.compiler.kept_values import KeptValues
from megafx.compiler.runner import Runner
from megafx.compiler.stages import passes_of, runner_of, since
from megafx.ir.program import RECOMPUTE, VAL, Program
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.communicate.add_pending import add_pending
from megafx.passes.experts.drop_expert_values import drop_expert_values
from megafx.passes.lower.bind_mesh import bind_mesh
from megafx.passes.lower.keep_casts import keep_casts
from megafx.passes.lower.partition import partition
from megafx.passes.lower.regather import regather
from megafx.passes.lower.reuse_buffers import reuse_buffers
from megafx.passes.lower.schedule_offload import schedule_offload
from megafx.planner.context import CompileContext, Gradients
from megafx.planner.plan import Plan
from megafx.units import bytes_text


class Pending(NamedTuple):
    """A gradient of earlier calls that a backward graph takes: this rank's, as the graph makes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Compiled:
    """One graph of a model, the same on every rank. program: lowered, joint where gradients are taken."""

    program: Program
    context: CompileContext
    runner: Runner | None = None  # which has run its passes so far

    @property
    def plan(self) -> Plan:
        return self.context.solved

    @property
    def wrt(self) -> list[int]:
        """Indices of inputs whose gradients the program gives."""
        names = {spec.name: i for i, spec in enumerate(self.program.inputs) if spec.kind in ("param", "user")}
        return [names[spec.name] for spec in self.program.outputs if spec.kind == "gradient"]

    @property
    def differentiated(self) -> list[int]:
        """Indices of outputs that bring a tangent."""
        names = [spec.name for spec in self.program.outputs]
        return [names.index(spec.name) for spec in self.program.inputs if spec.kind == "tangent"]

    @property
    def weights_in_fp8(self) -> list[str]:
        """Parameters whose casts `keeping_casts` would keep."""
        return sorted({name for names in casts_of_weights(self.program).values() for name in names})

    def keeping_casts(self) -> Compiled:
        """The form that keeps casts of weights until one changes, for steps of several micro-batches."""
        return Compiled(self.program, replace(self.context, keeps_casts=True))

    def casts_fit(self) -> tuple[bool, str]:
        """(True if the device has room for a step of this form, the numbers in words)."""
        predicted, there = self.memory(), self.context.device_bytes
        text = f"{bytes_text(predicted.casts)} of casts, {bytes_text(predicted.peak)} in all by the model of memory"
        if there is None:
            return True, text
        room = int((1 - MARGIN) * there)
        return predicted.peak <= room, f"{text}, of {bytes_text(room)} that are to be had"

    def executable(self, gathered: KeptValues | None = None, casts: KeptValues | None = None) -> Executable:
        """What this rank runs. gathered, casts: what the graphs of the model have gathered and cast of parameters, and keep."""
        program = self.program.copy()
        made = _executable(program, self.context, self.runner or runner_of(self.context, "lowered"), gathered, casts)
        self.program.notes += [note for note in program.notes if note not in self.program.notes]
        wanted = self.context.config.cuda_graphs
        if wanted is False:
            return made
        note = partial(self.program.note, "cuda graphs")
        if not torch.cuda.is_available():
            note("calls run op by op: there is no CUDA device")
        elif self.context.config.cpu_offloading:
            note("calls run kernel by kernel: copies of cpu_offloading are on streams of their own")
        else:
            made = made.recorded(wanted is True, note)
        return made

    def for_rank(self, axes: Mapping[str, AxisContext] | None) -> Program:
        """PARTITIONED: what the rank at this place runs. Nothing is logged or dumped."""
        program, context = self.program.copy(), replace(self.context, axes=axes)
        runner_of(context, "lowered", quiet=True).run(program, passes_of(context, "rank"))
        return program

    def bound(self, axes: Mapping[str, AxisContext]) -> Program:
        """BOUND: the graph of the rank at this place, before it is cut into forward and backward."""
        program, context = self.program.copy(), replace(self.context, axes=axes)
        for step in (drop_expert_values, bind_mesh):
            step(program, context)
        return program

    def with_gradients(self, gradients: Gradients) -> Compiled:
        """The same with another backward, which takes what this one's forward keeps (`add_pending`, `data_parallel`)."""
        assert self.program.before_reduction is not None
        program, context = self.program.before_reduction.copy(), replace(self.context, gradients=gradients)
        runner = runner_of(context, "before_reduction")
        with alone():
            runner.run(program, since(add_pending, passes_of(context, "communication")))
        return Compiled(program, context, runner)

    def deferred(self, executable: Executable, gradients: Gradients) -> tuple[Executable, list[Pending]]:
        """What this rank runs of another backward than that of `executable`, and the gradients that it takes in addition."""
        other = self.with_gradients(gradients)
        program = other.program
        assert other.runner is not None
        made = _executable(program, other.context, other.runner)
        assert made.takes_what(executable), "the backward graphs of one call keep the same"
        late = [(i.name, n.meta[VAL]) for n, i in program.input_nodes() if i.kind == "pending"]
        return made, [Pending(name, tuple(map(int, value.shape)), value.dtype) for name, value in late]

    def memory(
        self, optimizer: str = "adamw", held: int | None = None, axes: Mapping[str, AxisContext] | None = None
    ) -> Memory:
        """Predicted memory of one rank, as `analysis.memory.memory` says. axes: its place, where that is known."""
        program = self.program.copy() if axes is None else self.bound(axes)
        for step in (keep_casts, partition, schedule_offload, regather, reuse_buffers):
            step(program, self.context)
        with program.sizes.at_call() if self.context.at_call else contextlib.nullcontext():
            return memory(program, optimizer, held)

    def communication(self, sizes: Mapping[str, int]) -> list[Communication]:
        """Every collective of one step, those that backward repeats included. sizes: of the axes other than the plan's."""
        if not any(n.meta.get(RECOMPUTE) for n in collective_nodes(self.program.graph)):
            return communication(self.program, self.plan.t, sizes)
        program = self.program.copy()
        partition(program, self.context)
        regather(program, self.context)
        assert program.partition is not None
        found = []
        for direction, part in (("forward", program.partition.forward), ("backward", program.partition.backward)):
            if part is not None:
                made = communication(replace(program, gm=part), self.plan.t, sizes)
                found += [replace(c, direction=direction) for c in made]
        return found


def _executable(
    program: Program,
    context: CompileContext,
    runner: Runner,
    gathered: KeptValues | None = None,
    casts: KeptValues | None = None,
) -> Executable:
    with alone():
        runner.run(program, passes_of(context, "rank"))
    axes = context.axes
    return Executable(program, contextlib.nullcontext if axes is None else lambda: on_mesh(axes), gathered, casts)
