"""Forward and backward of a compiled call as CUDA graphs: recorded once for each set of sizes, then replayed in one launch.

A recorded graph reads and writes the memory that it was recorded on:

    parameters, buffers      read where they are; a call that has them elsewhere runs as before
    the user's inputs        copied to memory of the graph
    outputs and gradients    copied out, so that they are the user's
    kept values              stay in the graph's memory from forward to backward. A forward that comes while values of the one
                             before are still held (two forwards before a backward) runs as before

Seeds of dropout are inputs, so that each replay draws its own masks. Collectives are recorded like kernels. The first calls run
as before, since they allocate what a recording may not (`WARM_UP`). What cannot be recorded runs as before, and a note says so.

A rank can replay while another one runs its kernels one by one: they do the same things in the same order.

NCCL does not end a communicator before the last graph with one of its collectives is gone (`commDestroySync`, its init.cc), and
a model may outlive its process group. So all graphs are dropped first, and recorded again should a call come.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WARM_UP = 2  # calls of each set of sizes before it is recorded
MOST = 4  # sets of sizes that are recorded; each holds the activations of one call
# The host is the limit where launching takes at least this part of the time that the GPU takes.
HOST_LIMITED = 0.8


@dataclass
class _Recorded:
    """One recorded function."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]  # in the graph's own memory; None for those at `fixed`
    fixed: list[int]  # positions of inputs whose memory must be the same again
    addresses: list[int]
    results: list[Any]

    def fits(self, arguments: Sequence[Any]) -> bool:
        return [arguments[i].data_ptr() for i in self.fixed] == self.addresses

    def replay(self, arguments: Sequence[Any], copied: Sequence[int]) -> None:
        for i in copied:
            self.inputs[i].copy_(arguments[i])
        self.graph.replay()


@dataclass
class _Sizes:
    """Calls of one set of sizes. refused: why it is not recorded."""

    calls: int = 0
    host: float = 0.0  # seconds that the host took for the last forward that ran as before
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    forward: _Recorded | None = None
    backward: _Recorded | None = None
    refused: str = ""
    waits: bool = False  # for the GPU, in the last forward that ran as before
    missed: int = 0  # calls whose parameters were not where they were
    held: list[weakref.ref[Tensor]] = field(default_factory=list)  # kept values of the last replay

    def is_held(self) -> bool:
        return any(ref() is not None for ref in self.held)


_all: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()


@cache
def _drop_before_shutdown() -> None:
    """Let process groups drop all graphs before they shut down. Done once."""
    shutdown = dist.ProcessGroup.shutdown

    def without_graphs(group: dist.ProcessGroup) -> None:
        for graphs in list(_all):
            graphs.drop()
        shutdown(group)

    setattr(dist.ProcessGroup, shutdown.__name__, without_graphs)  # `destroy_process_group` calls it for each group


class CudaGraphs:
    """Runs forward(*inputs) -> results and backward([*kept, *tangents]) -> gradients, by replay where it can.

    outputs: how many of forward's results are the user's; the others are kept. stored: indices of inputs that are parameters
    or buffers. always: also where the host is not the limit. note: called once for each reason why something is not recorded.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[[list[Any]], Any] | None,
        outputs: int,
        stored: Collection[int],
        always: bool,
        note: Callable[[str], None],
    ) -> None:
        self._forward, self._backward = forward, backward
        self.outputs, self.stored, self.always, self.note = outputs, stored, always, note
        self.sizes: dict[Any, _Sizes] = {}
        self.last: _Sizes | None = None  # of the forward that was replayed last
        _all.add(self)
        if dist.is_available():
            _drop_before_shutdown()

    def drop(self) -> None:
        """Free what was recorded. Later calls are recorded again."""
        for graph in [r.graph for s in self.sizes.values() for r in (s.forward, s.backward) if r is not None]:
            graph.reset()
        self.sizes, self.last = {}, None

    def forward(self, *inputs: Any) -> list[Any]:
        here = self._of(inputs)
        here.calls += 1
        self.last = None
        if here.refused or here.calls <= WARM_UP or here.is_held():
            return self._timed(here, inputs)
        if here.forward is None:
            here.refused = self._refusal(here)
            if not here.refused:
                fixed = [i for i, x in enumerate(inputs) if i in self.stored and isinstance(x, Tensor)]
                here.forward, here.refused = self._record(lambda given: self._forward(*given), inputs, fixed, None)
        recorded = here.forward
        if recorded is None or not recorded.fits(inputs):
            return self._elsewhere(here, inputs)
        recorded.replay(inputs, [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and i not in self.stored])
        self.last = here
        kept = [x.detach() if isinstance(x, Tensor) else x for x in recorded.results[self.outputs :]]
        here.held = [weakref.ref(x) for x in kept if isinstance(x, Tensor)]
        return [*_copies(recorded.results[: self.outputs]), *kept]

    def backward(self, arguments: list[Any]) -> list[Any]:
        """arguments: emptied, as generated code does."""
        assert self._backward is not None
        here, self.last = self.last, None
        if here is None or here.refused:
            return list(self._backward(arguments))
        if here.backward is None:
            assert here.forward is not None
            made = {x.data_ptr() for x in here.forward.results if isinstance(x, Tensor)} | {*here.forward.addresses}
            fixed = [i for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.data_ptr() in made]
            run = self._backward
            pool = here.forward.graph.pool()
            here.backward, here.refused = self._record(lambda given: run([*given]), arguments, fixed, pool)
        recorded = here.backward
        if recorded is None or not recorded.fits(arguments):
            return list(self._backward(arguments))
        fixed_ones = {*recorded.fixed}
        copied = [i for i, x in enumerate(arguments) if isinstance(x, Tensor) and i not in fixed_ones]
        recorded.replay(arguments, copied)
        arguments.clear()
        return _copies(recorded.results)

    def _elsewhere(self, here: _Sizes, inputs: Sequence[Any]) -> list[Any]:
        if not here.refused:
            here.missed += 1
            if here.missed > WARM_UP:
                here.forward = here.backward = None
                here.refused = self._refused("its parameters are in other memory on each call")
        return list(self._forward(*inputs))

    def _of(self, inputs: Sequence[Any]) -> _Sizes:
        key = tuple(
            (*x.shape, x.dtype) if isinstance(x, Tensor) else x for i, x in enumerate(inputs) if i not in self.stored
        )
        if key not in self.sizes:
            self.sizes[key] = _Sizes()
        return self.sizes[key]

    def _timed(self, here: _Sizes, inputs: Sequence[Any]) -> list[Any]:
        """Forward as before, with the times of host and GPU, and whether it waits for the GPU."""
        if here.refused:
            return list(self._forward(*inputs))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begun, mode = time.perf_counter(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                results = list(self._forward(*inputs))
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        here.host = time.perf_counter() - begun
        end.record()
        here.events, here.waits = (start, end), False  # the first call waits while its kernels are loaded
        for warning in caught:
            if "synchroniz" in str(warning.message):
                here.waits = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return results

    def _refusal(self, here: _Sizes) -> str:
        if sum(s.forward is not None for s in self.sizes.values()) >= MOST:
            return self._refused(f"more than {MOST} sets of sizes")
        if here.waits:
            return self._refused("an op waits for the GPU to give a number to the host")
        if self.always or here.events is None:
            return ""
        start, end = here.events
        end.synchronize()
        seconds = start.elapsed_time(end) / 1000
        times = f"it launches forward in {here.host * 1e3:.1f} ms, which runs for {seconds * 1e3:.1f} ms"
        if here.host < HOST_LIMITED * seconds:
            return self._refused(f"the host is not the limit ({times})")
        self.note(f"a call is recorded as CUDA graphs: the host is the limit ({times})")
        return ""

    def _refused(self, reason: str) -> str:
        self.note(f"a call runs kernel by kernel, without a CUDA graph: {reason}")
        return reason

    def _record(
        self, run: Callable[[list[Any]], Any], arguments: Sequence[Any], fixed: list[int], pool: Any
    ) -> tuple[_Recorded | None, str]:
        """(the function as a graph, '') or (None, why it cannot be one). pool: of the graph's memory."""
        fixed_ones = {*fixed}
        # Results may be inputs that were written over. They must not hold the tensors that `is_held` looks for.
        inputs: list[Any] = [
            x if not isinstance(x, Tensor) else x.detach() if i in fixed_ones else x.clone()
            for i, x in enumerate(arguments)
        ]
        try:
            graph, results = self._graph(run, inputs, pool)
        except Exception as error:
            torch.cuda.synchronize()
            # a recording that breaks off leaves them waiting for its end
            for generator in torch.cuda.default_generators:
                generator.graphsafe_set_state(generator.clone_state())
            return None, self._refused(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        addresses = [arguments[i].data_ptr() for i in fixed]
        inputs = [None if i in fixed_ones else x for i, x in enumerate(inputs)]
        return _Recorded(graph, inputs, fixed, addresses, results), ""

    def _graph(
        self, run: Callable[[list[Any]], Any], inputs: list[Any], pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        """(the graph, the results that its replays write). Nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = list(run(inputs))
        return graph, results


def _copies(values: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in values]
