"""Measure on this machine's device which fusions pay: `megafx profile-fusions`. The result is a `FusionProfile`.

Each chain of fusion_cases.py goes through the whole pipeline twice, with every fusion and with none, and what comes out is
run: as eager code, timed from call to call with the host's share, and under Inductor, timed by its kernels alone (a CUDA
graph of the call is replayed; without CUDA, from call to call), for a compiled model hides the host behind other kernels.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megafx.capture import capture_call
from megafx.compiler import Request, compile_program
from megafx.config import MEASURE_NOTHING, Config
from megafx.errors import UsageError
from megafx.executable import Executable
from megafx.fusion_cases import CASES, FusionCase, Widths
from megafx.fusion_profile import FusionProfile, Measured, Times, mode_of
from megafx.hardware import Hardware
from megafx.ir import Program
from megafx.params import parameter_slots, place_joined
from megafx.planning import price_workload

TOKENS = (16, 2048, 16384)  # decoding, a short and a long batch; of each, BATCH sequences
BATCH = 2
FIRST = 8  # sequence of the call that compiles
LONGEST = 2048  # sequence of a case whose values are seq x seq
ROUND_SECONDS = 0.02  # of calls between two looks at the clock
ROUNDS = 5
REPLAYED = 4  # calls in one CUDA graph


@dataclass(frozen=True)
class Setting:
    """What all chains are measured with. hardware: the profile that the measurements go with; compiled: under Inductor too."""

    hardware: Hardware
    device: torch.device
    tokens: tuple[int, ...] = TOKENS
    widths: Widths = field(default_factory=Widths)
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = True

    @property
    def ways(self) -> tuple[bool, ...]:
        """Eager (False), under Inductor (True)."""
        return (False, True) if self.compiled else (False,)


@dataclass
class Job:
    """One chain, compiled. program: the fused one; runs: (fused, with gradients, under Inductor) -> what runs it."""

    name: str
    case: FusionCase
    widths: list[int]
    parameters: dict[str, Tensor]
    program: Program
    runs: dict[tuple[bool, bool, bool], tuple[Executable, Program]]


def profile_fusions(
    setting: Setting, only: Sequence[str] = (), processes: int = 1, say: Callable[[str], None] = print
) -> FusionProfile:
    """Measure the chains named in `only`, or all. processes: that many compile side by side; then one at a time measures."""
    unknown = sorted({*only} - {*CASES})
    if unknown:
        raise UsageError(f"no chain '{unknown[0]}' is measured", fix=f"there are {', '.join(CASES)}")
    names = list(only or CASES)
    found: dict[str, Measured] = {}
    if processes > 1:
        found = _side_by_side(setting, names, processes, say)
    else:
        for name in names:
            try:
                found[name] = measure(prepare(name, setting), setting, say)
            except Exception as error:  # the other chains are worth having
                say(_failed(name, error))
            torch._dynamo.reset()
    if not found:
        raise UsageError("nothing could be measured", fix="the lines above say why, chain by chain")
    device = setting.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else setting.hardware.name
    how = f"torch {torch.__version__}, {str(setting.dtype)[6:]}, widths {setting.widths}"
    source = f"measured {datetime.date.today()}, {how}, megafx profile-fusions"
    return FusionProfile(where, (setting.hardware.name,), source, {n: found[n] for n in names if n in found})


def _side_by_side(
    setting: Setting, names: list[str], processes: int, say: Callable[[str], None]
) -> dict[str, Measured]:
    context = multiprocessing.get_context("spawn")
    found: dict[str, Measured] = {}
    workers = []
    for names_of in (names[i::processes] for i in range(min(processes, len(names)))):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, setting, names_of), daemon=True)
        worker.start()
        theirs.close()
        workers.append((worker, ours, names_of))
    try:
        for _, pipe, names_of in workers:
            _hear(pipe, names_of)
        for _, pipe, names_of in workers:
            pipe.send("measure")
            for name in names_of:
                measured, lines = _hear(pipe, names_of)
                if measured is not None:
                    found[name] = measured
                for line in lines:
                    say(line)
    finally:
        for worker, pipe, _ in workers:
            pipe.close()
            worker.terminate()
            worker.join()
    return found


def _hear(pipe: Any, names: list[str]) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise UsageError(f"the process that measures {', '.join(names)} died: its output says why") from None


def _work(pipe: Any, setting: Setting, names: list[str]) -> None:
    """A process of _side_by_side: compile everything, wait for its turn, measure."""
    torch.set_num_threads(1)
    jobs: list[Job | str] = []
    for name in names:
        try:
            jobs.append(prepare(name, setting))
        except Exception as error:
            jobs.append(_failed(name, error))
    pipe.send("ready")
    pipe.recv()
    for job in jobs:
        lines: list[str] = []
        found = None
        if isinstance(job, str):
            lines.append(job)
        else:
            try:
                found = measure(job, setting, lines.append)
            except Exception as error:
                lines.append(_failed(job.name, error))
        pipe.send((found, lines))
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def _failed(name: str, error: Exception) -> str:
    return f"{name}: not measured, so that it is made wherever it is found: {type(error).__name__}: {error}"


def prepare(name: str, setting: Setting) -> Job:
    """Compile a chain with every fusion and with none, and call it at each size."""
    case, device = CASES[name], setting.device
    torch.manual_seed(0)
    module, last = case.build(setting.widths)
    module = module.to(device, setting.dtype)
    inputs = example_inputs(case, last, BATCH, FIRST, setting)
    runs: dict[tuple[bool, bool, bool], tuple[Executable, Program]] = {}
    for fused, training in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(training):
            program = capture_call(module, tuple(inputs), device=device)
        wants = (lambda index, spec: True) if training else None
        request = Request(_config(() if fused else case.off), 1, setting.hardware, {}, wants_grad=wants)
        compiled = compile_program(program, request)
        run = compiled.executable(None)
        names = [spec.name for spec in compiled.program.inputs]
        place_joined(module, dict(parameter_slots(module)), [[names[i] for i in group] for group in run.parts.joins])
        for way in setting.ways:
            runs[fused, training, way] = (run.compiled() if way else run, compiled.program)
    program = runs[True, True, False][1]
    if not any(f.pattern in case.patterns for f in program.fusions):
        raise UsageError(f"none of {', '.join(case.patterns)} is found in the chain '{name}', which is to measure it")
    job = Job(name, case, last, dict(module.named_parameters()), program, runs)
    for batch, seq in [(BATCH, FIRST), *_shapes(case, setting.tokens)]:
        user = [x.detach() for x in example_inputs(case, last, batch, seq, setting)]
        for run, made in runs.values():
            _step(run, call_values(job, made, user, device))()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return job


def _config(off: Sequence[str]) -> Config:
    knobs: dict[str, Any] = dict.fromkeys(off, False)
    return Config(fusion_profile=MEASURE_NOTHING, **knobs)


def measure(job: Job, setting: Setting, say: Callable[[str], None]) -> Measured:
    times = []
    for batch, seq in _shapes(job.case, setting.tokens):
        modes = dict(_measure(job, batch, seq, setting))
        times.append(Times(elements(job, batch, seq), modes))
        parts = [f"{mode} {a:.4f} / {b:.4f}" for mode, (a, b) in modes.items()]
        say(f"{job.name} [{batch}, {seq}]: fused / unfused ms: {', '.join(parts)}")
    return Measured(job.case.patterns, job.case.needs, tuple(times))


def elements(job: Job, batch: int, seq: int) -> int:
    """Of the largest value that the case's patterns cover."""
    price_workload(job.program, Config(micro_batch_size=batch, seq_length=seq))
    count = job.program.sizes.workload
    return max(count(f.elements) for f in job.program.fusions if f.pattern in job.case.patterns)


def _shapes(case: FusionCase, tokens: Sequence[int]) -> list[tuple[int, int]]:
    found = [(BATCH, max(n // BATCH, 2)) for n in tokens]
    return [(b, min(s, LONGEST)) for b, s in found] if case.scores else found


def example_inputs(case: FusionCase, last: list[int], batch: int, seq: int, setting: Setting) -> list[Tensor]:
    how: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    found = [torch.randn(batch, seq, n, **how).requires_grad_() for n in last]
    return [*found, torch.randint(last[0], (batch, seq), device=setting.device)] if case.ids else found


def _measure(job: Job, batch: int, seq: int, setting: Setting) -> Iterator[tuple[str, tuple[float, float]]]:
    """(mode, (fused, unfused) milliseconds)."""
    device = setting.device
    user = [x.detach() for x in example_inputs(job.case, job.widths, batch, seq, setting)]
    for way in setting.ways:
        for training in (True, False):
            steps = []
            for fused in (True, False):
                run, program = job.runs[fused, training, way]
                steps.append(_step(run, call_values(job, program, user, device)))
            yield mode_of(way, training), _times(steps, way and device.type == "cuda", device)


def call_values(job: Job, program: Program, user: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors of a call in the order of the program's inputs."""
    given, found = iter(user), []
    for spec in program.inputs:
        if spec.kind == "param":
            found.append(job.parameters[spec.name].detach())
        elif spec.kind == "user":
            found.append(next(given))
        elif spec.kind == "constant":
            found.append(program.constants[spec.name])
        elif spec.kind == "seed":
            found.append(torch.tensor(1, device=device))
    return found


def _step(run: Executable, values: list[Tensor]) -> Callable[[], Any]:
    """One call of it; with its backward, where it has one."""
    outputs, kept = run.forward(values)
    if kept is None:
        return lambda: run.forward(values)
    tangents: list[Any] = [torch.ones_like(outputs[i]) for i in run.differentiated]

    def both() -> Any:
        _, kept = run.forward(values)
        assert kept is not None
        return run.backward(kept, tangents)

    return both


def _times(steps: list[Callable[[], Any]], replayed: bool, device: torch.device) -> tuple[float, float]:
    """Milliseconds a call of each, one call after another: what takes longer of host and device.

    Medians of rounds that take turns, so that both find the device as warm. replayed: of the kernels alone.
    """
    if replayed:
        steps = [_graph(step, device).replay for step in steps]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = [_calls_a_round(step, wait) for step in steps]
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, count, times in zip(steps, calls, found, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                step()
            wait()
            times.append((time.perf_counter() - start) / count)
    fused, unfused = (statistics.median(times) * 1e3 / (REPLAYED if replayed else 1) for times in found)
    return round(fused, 5), round(unfused, 5)


def _calls_a_round(step: Callable[[], Any], wait: Callable[[], Any]) -> int:
    for _ in range(3):
        step()
    wait()
    start = time.perf_counter()
    step()
    wait()
    return min(max(int(ROUND_SECONDS / (time.perf_counter() - start)), 1), 200)


def _graph(step: Callable[[], Any], device: torch.device) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            step()
    return graph
