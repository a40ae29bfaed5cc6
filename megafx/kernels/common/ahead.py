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
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megafx.ir.program import VAL
from megafx.kernels.common import op
from megafx.kernels.common.recording import Address, Foreseen, foreseeing
from megafx.progress import stage

MOST_THREADS = 8
# Seconds after which a thread that runs Python has to let others in. Those that compile ask for the lock hundreds of times a
# kernel; at Python's 0.005 sixteen of them took 35 s beside a thread that computes, at this 19 s (2 cores, 2026-11-27).
TURN = 0.0005
logger = logging.getLogger("megafx")
_local = threading.local()
_lock, _loading = threading.Lock(), threading.Lock()
_jobs: set[Future[None]] = set()  # that run or wait
_turn_before = 0.0
_ready: list[Future[None]] = []


class Compiling:
    """Kernels that are being compiled."""

    def __init__(self, jobs: Sequence[Future[None]]) -> None:
        self.jobs = jobs

    def finish(self) -> None:
        """Wait. What could not be compiled is compiled at its launch, which raises the error."""
        with stage("compile kernels") if self.jobs else nullcontext():
            wait(self.jobs)
        self.jobs = ()


def compiles_here() -> bool:
    """True if this thread is one that compiles kernels."""
    return getattr(_local, "compiles", False)


def get_ready(graph: fx.Graph) -> None:
    """Start what comes with the first kernel of a process, once: Triton compiles its driver, and reads its own libraries.
    graph: whether its values lie where kernels run."""
    if not _ready and _can_compile() and any(_runs(n.meta[VAL]) for n in graph.find_nodes(op="placeholder")):
        from megafx.kernels.common.nothing_triton import nothing

        device = torch.device("cuda", torch.cuda.current_device())
        _ready.extend(_start([Foreseen(nothing, (1,), device, [Address(0, torch.float32)], {})], 1))


def compile_ahead(graphs: Sequence[fx.Graph], sizes: Mapping[sympy.Symbol, int]) -> list[Compiling]:
    """Start to compile the kernels of each graph; those that an earlier one has too belong to that. sizes: of the call."""
    if not _can_compile():
        return [Compiling(()) for _ in graphs]
    for graph in graphs:
        get_ready(graph)
    known: set[Any] = set()
    made = []
    # Ranks of one host share its cores.
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for graph in graphs:
        found = {key: launch for key, launch in foresee(graph, sizes).items() if key not in known}
        known |= found.keys()
        made.append([*found.values()])
    jobs = iter(_start([launch for each in made for launch in each], min(MOST_THREADS, max(1, cores))))
    return [Compiling([next(jobs) for _ in each]) for each in made]


def _runs(value: Any) -> bool:
    return isinstance(value, Tensor) and op.runs_triton(value)


def _can_compile() -> bool:
    if not (op.HAVE_TRITON and torch.cuda.is_available()):
        return False
    from triton import knobs

    return not knobs.runtime.interpret


def _start(launches: Sequence[Foreseen], threads: int) -> list[Future[None]]:
    global _turn_before
    if not launches:
        return []
    _keep_launchers_apart()
    executor = ThreadPoolExecutor(threads, "megafx compiles")
    with _lock:
        if not _jobs:
            _turn_before = sys.getswitchinterval()
            sys.setswitchinterval(min(TURN, _turn_before))
        jobs = [executor.submit(_compile, launch, tuple(_ready)) for launch in launches]
        _jobs.update(jobs)
    for job in jobs:
        job.add_done_callback(_ended)
    executor.shutdown(wait=False)
    return jobs


def _keep_launchers_apart() -> None:
    """Triton 3.6 compiles a launcher in C for each signature, and loads it by this function; 3.9 has one launcher for all."""
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is not None and not hasattr(load, "apart"):
        build._load_module_from_path = apart(load)


def apart(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """`load` of C modules that share one name, for several threads: each gets a module that no other load changes.

    Where a path was loaded before, Python fills the module that has the name by now, which another thread may have received and
    not yet read: that one would launch its kernel with the arguments of another one.
    """

    def loaded(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with _loading:
            own.__dict__.update(load(name, path).__dict__)
        return own

    loaded.apart = True  # type: ignore[attr-defined]  # mypy has none of functions
    return loaded


def _ended(job: Future[None]) -> None:
    with _lock:
        _jobs.discard(job)
        if not _jobs:
            sys.setswitchinterval(_turn_before)


def _compile(launch: Foreseen, after: Sequence[Future[None]]) -> None:
    _local.compiles = True
    wait(after)
    try:
        launch.compile()
    except Exception as error:
        logger.debug("%s is compiled when it is launched: %s", launch.kernel, error)
        raise


class _Unknown(Exception):
    """A size that data decides."""


def foresee(graph: fx.Graph, sizes: Mapping[sympy.Symbol, int]) -> dict[Any, Foreseen]:
    """The kernels that the graph will launch, by what distinguishes them."""
    found: dict[Any, Foreseen] = {}
    seen = set()
    for node in graph.nodes:
        run = op.computes(node.target) if node.op == "call_function" else None
        if run is None or not any(_runs(n.meta.get(VAL)) for n in node.all_input_nodes):
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
            # such as: it reads values. The call will do what it does; if it fails, it says why
            except Exception as error:
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
