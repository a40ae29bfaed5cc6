"""What real ranks run, all of them in one process: each its own executable, in a thread; they meet at collectives.

    run_ranks(compiled, values) -> Logical      outputs, gradients and changed buffers of all ranks together

Each rank has what `Compiled.executable` makes: its graphs, bound to it, cut into forward and backward, with buffers reused and
as generated code. Collectives alone are others: they give what `simulate.CROSS_RANK` says. One rank runs at a time, until its
next collective. Nothing goes through Inductor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megafx.checks.simulate import CROSS_RANK, Logical, local_inputs, logical_of, shapes_of
from megafx.compiler.compiled import Compiled
from megafx.compiler.executable import Executable, LazyOutput
from megafx.distributed import exchange
from megafx.errors import PlacementError
from megafx.ir.nodes import changed_copy
from megafx.ir.program import fqn_of, source_of
from megafx.ops.axes import AxisContext, off_mesh, on_mesh
from megafx.placements.data_axis import TENSOR_AXIS

BARRIER = "the barrier of an exchange"


def run_ranks(compiled: Compiled, values: Mapping[str, Any]) -> Logical:
    """All ranks of one call: forward, backward once, then lazy outputs. values: logical, by input; tangents by output.

    Raises PlacementError where ranks call different collectives, or where results that should be the same differ.
    """
    t, program, placements = compiled.plan.t, compiled.program, compiled.plan.params
    meeting, inputs = _Meeting(t), local_inputs(program, values, placements, t)
    with meeting.exchanges(compiled.planner.config.tp_comm_overlap is True):
        return _run(compiled, meeting, inputs)


def _run(compiled: Compiled, meeting: _Meeting, inputs: list[list[Any]]) -> Logical:
    t, program, placements = compiled.plan.t, compiled.program, compiled.plan.params
    executables = [meeting.executable(compiled, rank) for rank in range(t)]
    late = [spec.kind == "tangent" for spec in program.inputs]

    def run(rank: int) -> list[Any]:
        given, tangents = ([x for x, is_late in zip(inputs[rank], late, strict=True) if is_late == k] for k in (0, 1))
        outputs, kept = executables[rank].forward(given)
        gradients = [] if kept is None else executables[rank].backward(kept, tangents)
        return [*(x.make() if isinstance(x, LazyOutput) else x for x in outputs), *gradients]

    return logical_of(program, meeting.run(run), inputs[0], placements, t)


class _Meeting:
    """Where ranks wait for one another. The rank that computes holds `turn`; where it waits another takes it."""

    def __init__(self, t: int) -> None:
        self.t, self.turn = t, threading.Condition()
        self.brought: dict[int, tuple[fx.Node | None, Any, tuple[Any, ...]]] = {}  # of the ranks that wait
        self.given: list[Any] = []  # what the last collective gave each rank
        self.held = self.ended = 0  # collectives so far; ranks that are done
        self.errors: list[BaseException] = []
        self.memory: list[torch.Tensor] = []  # of the ranks' exchange

    @contextlib.contextmanager
    def exchanges(self, wanted: bool) -> Iterator[None]:
        """Let the ranks' graphs exchange through memory, as tp_comm_overlap=True asks for."""
        for rank in range(self.t) if wanted else ():
            exchange.install(TENSOR_AXIS, _OneProcess(self, rank))
        try:
            yield
        finally:
            exchange.remove(TENSOR_AXIS)

    def executable(self, compiled: Compiled, rank: int) -> Executable:
        """What `compiled.executable` is on this rank, with collectives that meet here."""
        axes = {TENSOR_AXIS: AxisContext(rank, self.t, TENSOR_AXIS)} if self.t > 1 else None
        program = compiled.for_rank(axes)
        parts = program.partition
        assert parts is not None
        names = ("forward", "backward", "last_backward", "lazy_graph")
        graphs: dict[str, Any] = {name: getattr(parts, name) for name in names}
        for name, gm in graphs.items():
            if gm is not None:
                graphs[name] = changed_copy(gm, lambda node: self._change(node, rank))[0]
        program.partition = replace(parts, **graphs)
        return Executable(program, contextlib.nullcontext if axes is None else lambda: on_mesh(axes))

    def _change(self, node: fx.Node, rank: int) -> bool:
        target = node.target
        if target not in CROSS_RANK or target is torch.ops._c10d_functional.wait_tensor.default:
            return False

        def meet(*args: Any) -> Any:
            return self.meet(rank, (node, target, args))

        node.target = meet
        return True

    def meet(self, rank: int, call: tuple[fx.Node | None, Any, tuple[Any, ...]]) -> Any:
        self.brought[rank], meeting = call, self.held
        if len(self.brought) == self.t:
            self._collect()
        else:
            self._check_ends()
            with off_mesh():
                self.turn.wait_for(lambda: self.held > meeting or self.errors)
        if self.errors:
            raise _Ended
        return self.given[rank]

    def _collect(self) -> None:
        node, target, args = self.brought[0]
        for rank, (_, other, theirs) in sorted(self.brought.items()):
            if (other, theirs[1:], shapes_of(theirs[0])) != (target, args[1:], shapes_of(args[0])):
                raise PlacementError(
                    f"rank {rank} calls {other} with {shapes_of(theirs[0])}, {theirs[1:]} where rank 0 calls {target} "
                    f"with {shapes_of(args[0])}, {args[1:]}",
                    **_located(node),
                )
        operands = [self.brought[rank][2][0] for rank in range(self.t)]
        self.given = operands if target == BARRIER else CROSS_RANK[target](operands, *args[1:])
        self.brought, self.held = {}, self.held + 1
        self.turn.notify_all()

    def _check_ends(self) -> None:
        """No rank may wait for one that is done."""
        if self.ended and len(self.brought) + self.ended == self.t:
            node, target, _ = next(iter(self.brought.values()))
            raise PlacementError(
                f"rank {next(iter(self.brought))} waits at {target} for ranks that call nothing",
                **_located(node),
            )

    def run(self, function: Callable[[int], list[Any]]) -> list[list[Any]]:
        """function(rank) of every rank; raises what the first one to fail raises."""
        results: list[Any] = [None] * self.t

        def rank_runs(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = function(rank)
                    self.ended += 1
                    if self.brought:
                        self._check_ends()
                except _Ended:
                    pass
                except BaseException as error:  # the thread ends here; others must not wait for it
                    self.errors.append(error)
                self.turn.notify_all()

        threads = [threading.Thread(target=rank_runs, args=(rank,), daemon=True) for rank in range(self.t)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return results


def _located(node: fx.Node | None) -> dict[str, Any]:
    return {} if node is None else {"module": fqn_of(node), "source": source_of(node)}


class _OneProcess(exchange.Transport):
    """Memory of all ranks, which are threads. They meet as at collectives."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.t

    def allocate(self, nbytes: int) -> list[torch.Tensor]:
        self.barrier()
        if self.rank == 0:
            self.meeting.memory = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(self.size)]
        self.barrier()
        return self.meeting.memory

    def barrier(self) -> None:
        self.meeting.meet(self.rank, (None, BARRIER, (None,)))


class _Ended(BaseException):
    """Another rank failed."""
