"""Measure which fusions pay on this machine's device, and write the `FusionProfile` that says so.

    python benchmarks/profile_fusions.py --out mine.yaml [--only glu,rope] [--tokens 16,2048] [--eager-only] [--processes 8]

CASES holds chains of ops as models have them, one for each family of patterns. Each chain goes through the whole pipeline
twice, with every fusion and with none. Both results are timed as eager code, from call to call with the host's share. They are
timed under Inductor too, there by their kernels alone, since a compiled model hides the host behind other kernels: a CUDA graph
of the call is replayed. (Without CUDA these times are also taken from call to call.)
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafx.capture.export import capture_call
from megafx.compiler.compiled import Compiled
from megafx.compiler.executable import Executable
from megafx.compiler.pipeline import compile_program
from megafx.config import FUSIONS, MEASURE_NOTHING, Config
from megafx.distributed.parameters import parameter_slots, place_joined
from megafx.errors import MegafxError, UsageError
from megafx.example_call import hardware_of
from megafx.ir.program import Program
from megafx.planner.context import CompileContext, price_workload
from megafx.planner.fusion_profile import MERGE_GATE_UP, MERGE_LINEARS, FusionProfile, Measured, Times, mode_of
from megafx.planner.hardware import Hardware

P = 0.1  # of dropout
EPS = 1e-5


@dataclass(frozen=True)
class Widths:
    """Sizes that do not vary: hidden size, columns of a head, vocabulary."""

    hidden: int = 4096
    head: int = 64
    vocab: int = 65536

    @property
    def heads(self) -> int:
        return self.hidden // self.head


@dataclass(frozen=True)
class FusionCase:
    """One chain. build(widths) -> (module, last dims of its inputs [batch, seq, last]); patterns, needs: as in `Measured`.

    scores: its largest value has seq x seq elements a head, so that its sequences are shorter. ids: it takes targets too.
    off: knobs that are off where it is measured unfused.
    """

    patterns: tuple[str, ...]
    build: Callable[[Widths], tuple[nn.Module, list[int]]]
    needs: tuple[str, ...] = ()
    scores: bool = False
    ids: bool = False
    off: tuple[str, ...] = FUSIONS


class Chain(nn.Module):
    """function(*parameters, *inputs), the parameters being vectors and matrices of these shapes."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        scale = [n[-1] ** -0.5 if len(n) == 2 else 1.0 for n in shapes]
        self.weights = nn.ParameterList(torch.randn(n) * s for n, s in zip(shapes, scale, strict=True))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.weights, *inputs)


def _chain(inputs: int, function: Callable[..., Any], *shapes: str) -> Callable[[Widths], tuple[nn.Module, list[int]]]:
    """shapes: 'h' a vector of the hidden size, 'hh' a square matrix."""

    def build(w: Widths) -> tuple[nn.Module, list[int]]:
        return Chain(function, *[(w.hidden,) * len(s) for s in shapes]), [w.hidden] * inputs

    return build


def _new_gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0))))


def _written_rms(w: Tensor, x: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _library_rms(w: Tensor, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def _layer(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, EPS)


def _add_rms(w: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return h, _written_rms(w, h)


def _linear_add_norm(m: Tensor, c: Tensor, w: Tensor, b: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + F.linear(x, m, c)
    return h, _layer(w, b, h)


def _dropout_add_norm(m: Tensor, c: Tensor, w: Tensor, b: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + F.dropout(F.linear(x, m, c), P, True)
    return h, _layer(w, b, h)


def _heads(x: Tensor, d: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1, d).transpose(1, 2)


def _causal(scores: Tensor) -> Tensor:
    s = scores.shape[-1]
    hidden = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


def _weights(q: Tensor, k: Tensor, d: int) -> Tensor:
    scores = torch.matmul(_heads(q, d), _heads(k, d).transpose(2, 3)) * d**-0.5
    return F.dropout(torch.softmax(_causal(scores), -1, dtype=torch.float32).to(q.dtype), P, True)


def _softmax(w: Widths) -> tuple[nn.Module, list[int]]:
    return Chain(lambda q, k: _weights(q, k, w.head)), [w.hidden // 4] * 2


def _attention(w: Widths) -> tuple[nn.Module, list[int]]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(_weights(q, k, w.head), _heads(v, w.head))

    return Chain(function), [w.hidden // 4] * 3


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin


def _rope(w: Widths) -> tuple[nn.Module, list[int]]:
    d = w.head

    return Chain(lambda q, k: _turned(q, k, d)), [w.hidden, w.hidden // 4]


def _turned(q: Tensor, k: Tensor, d: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (torch.arange(0, d, 2, device=q.device).float() / -d)
    angles = torch.arange(q.shape[1], device=q.device).float()[None, :, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    return _turn(_heads(q, d), cos, sin), _turn(_heads(k, d), cos, sin)


def _projections(w: Widths) -> tuple[nn.Module, list[int]]:
    """Queries, keys and values, grouped 4 to 1, of half the hidden size."""
    n, d = w.hidden // 2, w.head

    def function(wq: Tensor, wk: Tensor, wv: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return *_turned(F.linear(x, wq), F.linear(x, wk), d), _heads(F.linear(x, wv), d)

    return Chain(function, (n, n), (n // 4, n), (n // 4, n)), [n]


def _gate_and_up(w: Widths) -> tuple[nn.Module, list[int]]:
    n = w.hidden // 2

    def function(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    return Chain(function, (4 * n, n), (4 * n, n)), [n]


def _loss(w: Widths) -> tuple[nn.Module, list[int]]:
    def function(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), target.view(-1))

    return Chain(function), [w.vocab]


_NORMS = ("layer_norm", "rms_norm", "written_rms_norm")

CASES: dict[str, FusionCase] = {
    "bias_activation": FusionCase(
        ("linear_bias_activation", "bias_activation"),
        _chain(1, lambda m, b, x: F.gelu(F.linear(x, m, b), approximate="tanh"), "hh", "h"),
    ),
    "written_activation": FusionCase(("written_activation",), _chain(1, _new_gelu)),
    "glu": FusionCase(("glu",), _chain(2, lambda gate, up: F.silu(gate) * up)),
    "glu_packed": FusionCase(
        ("glu_packed", "linear_bias_glu"), _chain(1, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    ),
    "bias_dropout_add": FusionCase(
        ("linear_bias_dropout_add", "bias_dropout_add"),
        _chain(2, lambda m, b, x, residual: residual + F.dropout(F.linear(x, m, b), P, True), "hh", "h"),
    ),
    "layer_norm": FusionCase(("layer_norm",), _chain(1, _layer, "h", "h")),
    "rms_norm": FusionCase(("rms_norm",), _chain(1, _library_rms, "h")),
    "written_rms_norm": FusionCase(("written_rms_norm",), _chain(1, _written_rms, "h")),
    "add_norm": FusionCase(("add_norm",), _chain(2, _add_rms, "h"), _NORMS),
    "linear_add_norm": FusionCase(("linear_add_norm",), _chain(2, _linear_add_norm, "hh", "h", "h", "h"), _NORMS),
    "dropout_add_norm": FusionCase(
        ("dropout_add_norm",),
        _chain(2, _dropout_add_norm, "hh", "h", "h", "h"),
        (*_NORMS, "linear_bias_dropout_add", "bias_dropout_add"),
    ),
    "masked_softmax": FusionCase(("scale_mask_softmax", "scale_softmax"), _softmax, scores=True),
    "attention": FusionCase(("attention",), _attention, ("scale_mask_softmax", "scale_softmax"), scores=True),
    "rope": FusionCase(("rope", "rope_partial", "rope_pairs", "rope_qk"), _rope),
    "cross_entropy": FusionCase(("cross_entropy_of_cast",), _loss, ids=True),
    "merge_gate_up": FusionCase((MERGE_GATE_UP,), _gate_and_up, off=("merge_linears",)),
    "merge_linears": FusionCase((MERGE_LINEARS,), _projections, off=("merge_linears",)),
}

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
    source = f"measured {datetime.date.today()}, {how}, benchmarks/profile_fusions.py"
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
        wants = (lambda spec: True) if training else None
        context = CompileContext(_config(() if fused else case.off), 1, setting.hardware, wants_grad=wants)
        compiled = compile_program(program, context)
        run = compiled.executable()
        names = [spec.name for spec in compiled.program.inputs]
        place_joined(module, dict(parameter_slots(module)), [[names[i] for i in group] for group in run.parts.joins])
        inductor = Compiled(compiled.program, replace(context, config=context.config.replace(compile=True)))
        for way in setting.ways:
            runs[fused, training, way] = (inductor.executable() if way else run, compiled.program)
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="YAML to write, for Config.fusion_profile"
    )
    parser.add_argument("--only", default="", metavar="CHAINS", help="comma separated; default: all")
    parser.add_argument("--tokens", metavar="N,N", help="sizes to measure at (default: 16,2048,16384)")
    parser.add_argument("--hidden", type=int, default=4096, metavar="N")
    parser.add_argument("--vocab", type=int, default=65536, metavar="N")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager-only", action="store_true", help="not under Inductor, which takes most of the time")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that many compile; they measure in turn")
    parser.add_argument("--hardware", metavar="PROFILE", help="the profile it is for; default: that of the device")
    args = parser.parse_args(argv)
    try:
        profile = _profile(args)
    except MegafxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    profile.save(args.out)
    print(f"wrote {args.out}: use it as Config(fusion_profile='{args.out}')")
    return 0


def _profile(args: argparse.Namespace) -> FusionProfile:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(hardware=args.hardware, params_dtype=args.dtype)
    try:
        tokens = tuple(int(n) for n in args.tokens.split(",")) if args.tokens else TOKENS
    except ValueError:
        raise UsageError(f"--tokens {args.tokens} is no list of numbers", fix="write --tokens 16,2048") from None
    widths = Widths(args.hidden, min(64, max(args.hidden // 8, 1)), args.vocab)
    dtype = getattr(torch, str(config.params_dtype))
    setting = Setting(hardware_of(config, device), device, tokens, widths, dtype, not args.eager_only)
    return profile_fusions(setting, [name for name in args.only.split(",") if name], args.processes)


if __name__ == "__main__":
    sys.exit(main())
