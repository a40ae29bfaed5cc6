"""The graphs that real ranks run (`bind_mesh`), each its own, in one process: a thread a rank; they meet at collectives.

`run_bound(made, model, call, tangents)` is `calls.simulated` with them: a rank that needs what only another computes fails.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness import values_of
from lowered import bound
from torch import Tensor, fx, nn

from megafx.checks.simulate import CROSS_RANK, Logical, local_inputs, logical_of
from megafx.compiler.pipeline import Compiled
from megafx.ir.program import Program
from megafx.ops.axes import AxisContext


def bound_programs(made: Compiled) -> list[Program]:
    """Each rank's. The axis is its own group."""
    t = made.plan.t
    return [bound(made.program, {"tp": AxisContext(rank, t, "tp")}) for rank in range(t)]


class _Rank(fx.Interpreter):
    def __init__(self, program: Program, rank: int, meeting: threading.Barrier, brought: list[Any]) -> None:
        super().__init__(program.gm)
        self.rank, self.meeting, self.brought = rank, meeting, brought

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in CROSS_RANK:
            return super().call_function(target, args, kwargs)
        self.brought[self.rank] = (target, args)
        self.meeting.wait()
        assert all(theirs[0] is target and theirs[1][1:] == args[1:] for theirs in self.brought), "ranks disagree"
        found = CROSS_RANK[target]([theirs[1][0] for theirs in self.brought], *args[1:], **kwargs)[self.rank]
        self.meeting.wait()
        return found


def run_ranks(programs: Sequence[Program], inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Outputs of each rank."""
    t = len(programs)
    meeting, brought = threading.Barrier(t, timeout=60), [None] * t
    results: list[Any] = [None] * t
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = list(_Rank(programs[rank], rank, meeting, brought).run(*inputs[rank]))
        except BaseException as error:  # the thread's end: the others must not wait for it
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(t)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors, "ranks wait for each other"
    return results


def run_bound(made: Compiled, model: nn.Module, call: Mapping[str, Any], tangents: Mapping[str, Tensor]) -> Logical:
    """Outputs and gradients of all ranks together. tangents: by name of output; 1 where there is none."""
    values = {n: v.detach() if isinstance(v, Tensor) else v for n, v in values_of(made.program, model, call).items()}
    t, params = made.plan.t, made.plan.params
    inputs = local_inputs(made.program, {**values, **tangents}, params, t)
    results = run_ranks(bound_programs(made), inputs)
    return logical_of(made.program, results, inputs[0], params, t)
