"""Cells of the model matrix: one architecture in one mode, compiled for t ranks, against one process.

A model is captured once for each mode and attention, with batch and sequence as symbols where it trains without dropout with
its first attention, and with the sizes of the call elsewhere. Canonicalization and fusion are done once for all degrees, and
where two cells come to the same graph and the same plan (training without dropout and eval, mostly), it is compiled once.
Compared are loss, every output and every gradient, at fp64: with dropout off against the plain eager model, with dropout on
against megafx on one rank.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from catalogue import DROPOUT, Architecture
from eager import default_dtype, eager
from harness import RTOL, Case, errors, promote_casts
from torch import nn

from megafx.capture.export import capture_call
from megafx.checks.simulate import Logical
from megafx.compiler.compiled import Compiled
from megafx.compiler.runner import Pass
from megafx.compiler.runner import Runner as PassRunner
from megafx.compiler.stages import EVERY_RANK, passes_of
from megafx.config import Config
from megafx.ir import dump
from megafx.ir.program import Program
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware

FIRST_OF_DEGREE = "join_experts"  # the first pass that asks how many ranks there are
# What the planner prices (not what runs), such that it plans models of these sizes as it plans large ones on an H100: as few
# tokens for the vocabulary, and as much time in collectives, memory traffic, matmuls and latency for one another.
WORKLOAD: dict[str, Any] = {"micro_batch_size": 1, "seq_length": 5}
SLOW = Hardware(
    "h100-slowed-down",
    {"float64": 2.6e7},
    memory_bytes_per_second=5.3e7,
    link_bytes_per_second=5.7e6,
    alpha_seconds=2.4e-5,
    source="h100-nvlink, where hidden size is 4096, tokens 8192 and vocabulary 128k; divided for 36, 5 and 67 in fp64",
)


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    attention: str
    training: bool
    dropout: bool
    t: int
    sequence_parallel: bool | str

    def __str__(self) -> str:
        mode = ("training" if self.training else "eval") + (" with dropout" if self.dropout else "")
        return f"{mode}, {self.attention}, t={self.t}, sequence parallelism {self.sequence_parallel or 'off'}"


@dataclass
class Result:
    """What a cell came to. error: the greatest of all relative errors, that of `worst`; failure: why there is none."""

    cell: Cell
    error: float = float("inf")
    worst: str = ""
    failure: str = ""

    @property
    def exact(self) -> bool:
        return not self.failure and self.error <= RTOL

    def __str__(self) -> str:
        what = self.failure or f"{self.worst} is off by {self.error:.1e}"
        return f"{self.cell}: {'exact' if self.exact else what}"


def all_cells(row: Architecture) -> Iterator[Cell]:
    """Every cell that the architecture has; of one that was tried to see what else breaks, a tenth."""
    if row.tried:
        yield from some_cells(row)
        return
    for attention in row.attention:
        for training in (True, False):
            for t in row.degrees:
                for sequence_parallel in (False, "auto"):
                    yield Cell(attention, training, False, t, sequence_parallel)
        if row.has_dropout:
            for t in row.degrees:
                yield Cell(attention, True, True, t, "auto")


def some_cells(row: Architecture) -> list[Cell]:
    """A tenth of the cells: each attention, mode, degree and kind of sequence parallelism, and dropout, once."""
    first, last = row.attention[0], row.attention[-1]
    cells = [Cell(first, True, False, 2, "auto"), Cell(last, False, False, 4, False)]
    return [*cells, Cell(last, True, True, 3, "auto")] if row.has_dropout else cells


@dataclass
class Prepared:
    """One capture, canonical and fused. key: equal for graphs that compute the same. dynamic: sizes are symbols."""

    case: Case
    call: dict[str, Any]
    key: Any
    dynamic: bool
    capture_seconds: float
    reference: Logical | None = None


@dataclass
class Runner:
    """Runs cells of one architecture; keeps what they share. dynamic: sizes are symbols in all cells, not in some."""

    row: Architecture
    dynamic: bool = False
    prepared: dict[Any, Prepared] = field(default_factory=dict)
    compiled: dict[Any, Compiled] = field(default_factory=dict)
    planned: list[tuple[Program, CompileContext]] = field(default_factory=list)

    def run(self, cell: Cell) -> Result:
        try:
            prepared = self.prepare(cell)
            found = self.simulate(cell, prepared)
            off = errors(found, self.reference(cell, prepared))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:400]
            return Result(cell, failure=f"{type(error).__name__}: {text} ({frame.name}:{frame.lineno})")
        worst = max(off, key=lambda name: off[name])
        return Result(cell, off[worst], worst)

    def prepare(self, cell: Cell) -> Prepared:
        """Capture, canonicalize and fuse, once for each mode."""
        mode = (cell.attention, cell.training, cell.dropout)
        if mode not in self.prepared:
            model = self.row.build(attention=cell.attention, dropout=DROPOUT if cell.dropout else 0.0)
            model.train(cell.training)
            call = self.row.inputs(model)
            start = time.perf_counter()
            dynamic = self.dynamic or mode == (self.row.attention[0], True, False)
            program = captured(model, call, dynamic)
            seconds = time.perf_counter() - start
            passes, context = self.passes(1, "auto")
            PassRunner(context).run(program, passes[: _index(passes, FIRST_OF_DEGREE)])
            constants = tuple((n, str(v)) for n, v in program.constants.items())
            key = (dump.text(program), constants, tuple((i.kind, i.name) for i in program.inputs))
            self.prepared[mode] = Prepared(Case(model, None, program), call, key, dynamic, seconds)
        return self.prepared[mode]

    def passes(self, t: int, sequence_parallel: bool | str) -> tuple[list[Pass], CompileContext]:
        """The pipeline of a cell, with casts promoted as in the eager model."""
        config = Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel, **WORKLOAD)  # type: ignore[arg-type]
        context = CompileContext(config, t, SLOW, wants_grad=lambda spec: spec.kind == "param")
        passes = passes_of(context, *EVERY_RANK)
        passes.insert(_index(passes, "canonicalize") + 1, Pass.of(promote_casts))
        return passes, context

    def compile(self, prepared: Prepared, t: int, sequence_parallel: bool | str) -> Compiled:
        """The joint graph of t ranks; one for all that share graph and plan."""
        key = (prepared.key, t, sequence_parallel)
        if key not in self.compiled:
            passes, context = self.passes(t, sequence_parallel)
            program = prepared.case.program.copy()
            at = _index(passes, "plan_sharding")
            PassRunner(context).run(program, passes[_index(passes, FIRST_OF_DEGREE) : at + 1])
            if prepared.dynamic:  # the plans of others are priced for the sizes of these calls, not for WORKLOAD
                self.planned.append((prepared.case.program, context))
            same = (prepared.key, t, *context.solved.lines())
            if same not in self.compiled:
                PassRunner(context).run(program, passes[at + 1 :])
                self.compiled[same] = Compiled(program, context)
            self.compiled[key] = self.compiled[same]
        return self.compiled[key]

    def simulate(self, cell: Cell, prepared: Prepared) -> Logical:
        return prepared.case.run(self.compile(prepared, cell.t, cell.sequence_parallel), prepared.call)

    def reference(self, cell: Cell, prepared: Prepared) -> Logical:
        if prepared.reference is None:
            if cell.dropout:
                prepared.reference = prepared.case.run(self.compile(prepared, 1, "auto"), prepared.call)
            else:
                prepared.reference = eager(prepared.case.model, prepared.case.program, prepared.call)
        return prepared.reference


def _index(passes: list[Pass], name: str) -> int:
    return next(i for i, p in enumerate(passes) if p.name == name)


def captured(model: nn.Module, call: dict[str, Any], dynamic: bool) -> Program:
    """The program of a call; numbers of the default dtype are fp64 as the model is."""
    with default_dtype(torch.float64):
        return capture_call(model, (), call, dynamic=dynamic)


def run_cells(row: Architecture, cells: Iterable[Cell]) -> list[Result]:
    runner = Runner(row)
    return [runner.run(cell) for cell in cells]
