"""Compile the kernels of a graph before it first runs: several at a time, while the process does other things.

Triton compiles a kernel when it is launched, one after the other: most of a model's first step. `compile_ahead` calls the
launchers of a graph's ops on fake tensors, of the forms that the nodes have, and what these would `launch` is compiled by
threads (Triton's passes, ptxas and the C compiler run without Python's lock) into the very table that launches look into. A
launch that was not foreseen (a start that 16 bytes do not divide, sizes that data decides, another batch) compiles its kernel
itself.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megafx.ir.program import VAL
from megafx.kernels.common.op import HAVE_TRITON, computes
from megafx.kernels.common.recording import Foreseen, foreseeing
from megafx.progress import stage

MOST_THREADS = 16
logger = logging.getLogger("megafx")
_local = threading.local()


class Compiling:
    """Kernels that are being compiled."""

    def __init__(self, jobs: Sequence[Future[Any]]) -> None:
        self.jobs = jobs

    def finish(self) -> None:
        """Wait. What could not be compiled is compiled at its launch, which raises the error."""
        with stage("compile kernels") if self.jobs else nullcontext():
            wait(self.jobs)
        self.jobs = ()


def compiles_here() -> bool:
    """Whether this thread is one that compiles kernels."""
    return getattr(_local, "compiles", False)


class _Unknown(Exception):
    """A size that data decides."""


def compile_ahead(graphs: Sequence[fx.Graph], sizes: Mapping[sympy.Symbol, int]) -> list[Compiling]:
    """Start to compile the kernels of each graph; those that an earlier one has too belong to that. sizes: of the call."""
    if not (HAVE_TRITON and torch.cuda.is_available()):
        return [Compiling(()) for _ in graphs]
    from triton import knobs

    if knobs.runtime.interpret:
        return [Compiling(()) for _ in graphs]
    # Ranks of one host share its cores.
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = ThreadPoolExecutor(min(MOST_THREADS, max(1, cores)), "megafx compiles")
    known: set[Any] = set()
    made = []
    for graph in graphs:
        found = {key: launch for key, launch in foresee(graph, sizes).items() if key not in known}
        known |= found.keys()
        made.append(Compiling([threads.submit(_compile, launch) for launch in found.values()]))
    threads.shutdown(wait=False)
    return made


def _compile(launch: Foreseen) -> None:
    _local.compiles = True
    try:
        launch.compile()
    except Exception as error:
        logger.debug("%s is compiled when it is launched: %s", launch.kernel, error)
        raise


def foresee(graph: fx.Graph, sizes: Mapping[sympy.Symbol, int]) -> dict[Any, Foreseen]:
    """The kernels that the graph will launch, by what tells them apart."""
    found: dict[Any, Foreseen] = {}
    seen = set()
    for node in graph.nodes:
        run = computes(node.target) if node.op == "call_function" else None
        if run is None:
            continue
        with FakeTensorMode(allow_non_fake_inputs=True), foreseeing() as launches, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # launchers ask where memory starts, which fakes do not like: at 0
            try:
                args = [_at_call(x, sizes) for x in node.args]
                form = run, str([_form(x) for x in args])
                if form not in seen:
                    seen.add(form)
                    run(*args)
            except _Unknown:
                continue
            except (
                Exception
            ) as error:  # such as: it reads values. The call will do what it does; if it fails, it says why
                logger.debug("kernels of %s are compiled when they are launched: %s", node, error)
        found = {x.key: x for x in launches} | found
    return found


def _at_call(x: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """An argument of a node, at these sizes: tensors are fakes of the mode."""
    value = x.meta[VAL] if isinstance(x, fx.Node) else x
    if isinstance(value, torch.SymInt):
        return _size(value, sizes)
    if isinstance(value, (list, tuple)):
        return [_at_call(y, sizes) for y in value]
    if not isinstance(value, Tensor):
        return value
    shape, strides = ([_size(n, sizes) for n in of] for of in (value.shape, value.stride()))
    start = _size(value.storage_offset(), sizes)
    if not start:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    whole = torch.empty(start + max(span, 0), dtype=value.dtype, device=value.device)
    return whole.as_strided(shape, strides, start)


def _size(n: int | torch.SymInt, sizes: Mapping[sympy.Symbol, int]) -> int:
    if isinstance(n, int):
        return n
    found = n.node.expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    if not found.is_Integer:
        raise _Unknown
    return int(found)


def _form(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset()
    return [_form(y) for y in x] if isinstance(x, (list, tuple)) else x
