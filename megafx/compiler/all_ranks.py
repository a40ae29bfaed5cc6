"""What real ranks run, all of them in one process: each its own executable, in a thread; they meet at collectives.

    run_ranks(compiled, values) -> Logical      outputs, gradients and changed buffers of all ranks together

Each rank has what `Compiled.executable` makes: its graphs, bound to it, cut into forward and backward, with buffers reused and
as generated code. Collectives alone are others: they give what `simulate.CROSS_RANK` says. One rank runs at a time, until its
next collective. Nothing goes through Inductor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from megafx.checks.simulate import CROSS_RANK, EXCHANGES, Logical, local_inputs, logical_of, shapes_of
from megafx.compiler.compiled import Compiled
from megafx.compiler.executable import Executable, LazyOutput
from megafx.compiler.kept_values import KeptValues
from megafx.distributed import exchange
from megafx.errors import PlacementError
from megafx.ir.program import fqn_of, source_of
from megafx.kernels.common.op import direct
from megafx.kernels.experts.dispatch_rows import ENDS
from megafx.ops.axes import Mesh, off_mesh, on_mesh
from megafx.placements.data_axis import TENSOR_AXIS

BARRIER = "the barrier of an exchange"
# Exchanges by what `call_directly` makes of them, and by what starts them.
CALLED_DIRECTLY: dict[Any, Any] = {direct(op): op for op in EXCHANGES} | {begin: op for op, (begin, _) in ENDS.items()}
_WAITS = {end for _, end in ENDS.values()}


def run_ranks(compiled: Compiled, values: Mapping[str, Any]) -> Logical:
    """All ranks of one call: forward, backward once, then lazy outputs. values: logical, by input; tangents by output.

    The ranks are those of the mesh that the call is compiled for: data-parallel ones have parts of the values. Raises
    PlacementError where ranks call different collectives, or where results that should be the same differ.
    """
    data = compiled.context.data
    mesh = Mesh({**(data.mesh if data is not None else {}), TENSOR_AXIS: compiled.plan.t})
    device = next((x.device for x in values.values() if isinstance(x, torch.Tensor)), torch.device("cpu"))
    meeting = _Meeting(mesh, device)
    with meeting.exchanges(compiled.context.config.tp_comm_overlap is True):
        return _run(compiled, meeting, values)


def _run(compiled: Compiled, meeting: _Meeting, values: Mapping[str, Any]) -> Logical:
    t, program, placements, data = compiled.plan.t, compiled.program, compiled.plan.params, compiled.context.data
    inputs = local_inputs(program, values, placements, t, data)
    executables = [meeting.executable(compiled, rank) for rank in range(meeting.size)]
    late = [spec.kind == "tangent" for spec in program.inputs]

    def run(rank: int) -> list[Any]:
        given, tangents = ([x for x, is_late in zip(inputs[rank], late, strict=True) if is_late == k] for k in (0, 1))
        outputs, kept = executables[rank].forward(given)
        gradients = [] if kept is None else executables[rank].backward(kept, tangents)
        return [*(x.make() if isinstance(x, LazyOutput) else x for x in outputs), *gradients]

    return logical_of(program, meeting.run(run), inputs, values, placements, t, data)


class _Meeting:
    """Where ranks wait for one another. The rank that computes holds `turn`; where it waits another takes it."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.size, self.turn, self.device = mesh, len(mesh.ranks), threading.Condition(), device
        self.brought: dict[int, tuple[fx.Node | None, Any, tuple[Any, ...]]] = {}  # of the ranks that wait
        self.given: list[Any] = []  # what the last collective gave each rank
        self.held = self.ended = 0  # collectives so far; ranks that are done
        self.errors: list[BaseException] = []
        self.memory: dict[int, list[torch.Tensor]] = {}  # of an exchange, by its first rank

    @contextlib.contextmanager
    def exchanges(self, wanted: bool) -> Iterator[None]:
        """Let the ranks' graphs exchange through memory, as tp_comm_overlap=True asks for."""
        for rank in range(self.size) if wanted else ():
            exchange.install(self.mesh.ranks[rank][TENSOR_AXIS].group_name, _OneProcess(self, rank))
        try:
            yield
        finally:
            for axes in self.mesh.ranks:
                exchange.remove(axes[TENSOR_AXIS].group_name)

    def executable(self, compiled: Compiled, rank: int) -> Executable:
        """What `compiled.executable` is on this rank, with collectives that meet here."""
        axes = self.mesh.ranks[rank] if self.size > 1 else None
        program = compiled.for_rank(axes)
        parts = program.partition
        assert parts is not None
        for gm in (parts.forward, parts.backward, parts.last_backward, parts.lazy_graph, parts.cast_weights):
            if gm is not None and any([self._change(node, rank) for node in gm.graph.nodes]):  # this rank's own graphs
                gm.recompile()
        context = contextlib.nullcontext if axes is None else lambda: on_mesh(axes)
        return Executable(program, context, _Gathered(self, rank))

    def _change(self, node: fx.Node, rank: int) -> bool:
        called = node.target
        target = CALLED_DIRECTLY.get(called, called)
        if target in _WAITS:  # what the start gives here is there
            node.target = lambda begun, *_: begun
            return True
        if target not in {*CROSS_RANK, *EXCHANGES} or target is torch.ops._c10d_functional.wait_tensor.default:
            return False

        def meet(*args: Any) -> Any:
            return self.meet(rank, (node, target, args))

        node.target = meet
        return True

    def meet(self, rank: int, call: tuple[fx.Node | None, Any, tuple[Any, ...]]) -> Any:
        self.brought[rank], meeting = call, self.held
        if len(self.brought) == self.size:
            self._collect()
        else:
            self._check_ends()
            with off_mesh():
                self.turn.wait_for(lambda: self.held > meeting or self.errors)
        if self.errors:
            raise _Ended
        return self.given[rank]

    def _group(self, rank: int) -> list[int]:
        """The ranks that the call of this one is among: of an axis, or of a group by its name; all where it has none."""
        for a in self.brought[rank][2][1:]:
            if isinstance(a, str) and a in self.mesh.ranks[rank]:
                a = self.mesh.ranks[rank][a].group_name
            if isinstance(a, str) and a in self.mesh.named:
                return self.mesh.named[a]
        return [*range(self.size)]

    def _collect(self) -> None:
        self.given = [None] * self.size
        for first in range(self.size):
            group = self._group(first)
            if first != group[0]:
                continue
            node, target, args = self.brought[first]
            for rank in group:
                _, other, theirs = self.brought[rank]
                own = target in EXCHANGES and other == target  # each rank's rows are its own
                if not own and (other, theirs[1:], shapes_of(theirs[0])) != (target, args[1:], shapes_of(args[0])):
                    calls = f"{other} with {shapes_of(theirs[0])}, {theirs[1:]}"
                    found = f"rank {rank} calls {calls} where rank {first} calls {target} with {shapes_of(args[0])}, {args[1:]}"
                    raise PlacementError(found, **_located(node))
            if target in EXCHANGES:
                made = EXCHANGES[target]([self.brought[rank][2] for rank in group])
            else:
                operands = [self.brought[rank][2][0] for rank in group]
                made = operands if target == BARRIER else CROSS_RANK[target](operands, *args[1:])
            for rank, value in zip(group, made, strict=True):
                self.given[rank] = value
        self.brought, self.held = {}, self.held + 1
        self.turn.notify_all()

    def _check_ends(self) -> None:
        """No rank may wait for one that is done."""
        if self.ended and len(self.brought) + self.ended == self.size:
            node, target, _ = next(iter(self.brought.values()))
            raise PlacementError(
                f"rank {next(iter(self.brought))} waits at {target} for ranks that call nothing", **_located(node)
            )

    def run(self, function: Callable[[int], list[Any]]) -> list[list[Any]]:
        """function(rank) of every rank; raises what the first one to fail raises."""
        results: list[Any] = [None] * self.size

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

        threads = [threading.Thread(target=rank_runs, args=(rank,), daemon=True) for rank in range(self.size)]
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
        place = meeting.mesh.ranks[rank][TENSOR_AXIS]
        self.meeting, self.rank, self.size = meeting, place.rank, place.size
        self.at, self.group = rank, meeting.mesh.named[place.group_name]

    def allocate(self, nbytes: int) -> list[torch.Tensor]:
        self.barrier()
        if self.rank == 0:
            empty = partial(torch.empty, nbytes, dtype=torch.uint8, device=self.meeting.device)
            self.meeting.memory[self.at] = [empty() for _ in range(self.size)]
        self.barrier()
        return self.meeting.memory[self.group[0]]

    def barrier(self) -> None:
        self.meeting.meet(self.at, (None, BARRIER, (None,)))


class _Gathered(KeptValues):
    """Gathers of parameters that whoever runs the graph makes, among the threads: in each call."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        super().__init__()
        self.meeting, self.rank = meeting, rank

    def values(
        self, key: Any, names: frozenset[str], make: Callable[[], Sequence[torch.Tensor]], stays: bool
    ) -> list[torch.Tensor]:
        return [*make()]

    def gather(self, shards: Sequence[torch.Tensor], ranks: int, axis: str) -> torch.Tensor:
        call = (None, torch.ops.megafx.gather_region.default, ([*shards], ranks, axis))
        found: torch.Tensor = self.meeting.meet(self.rank, call)
        return found


class _Ended(BaseException):
    """Another rank failed."""
