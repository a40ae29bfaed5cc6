"""`megafx.search`: which layout of a model on so many GPUs is the fastest that fits, by the cost model.

Tried are all ways to share the GPUs between tensor, context and data parallelism, the forms of the latter, sequence
parallelism on and off, micro-batch sizes, and budgets for what is kept for backward; beyond one host also pipelines, and
sequence parallelism on alone. Every layout of tensor- and context-parallel ranks is planned as `megafx.plan` does, at the
first batch size; planner/whole_step.py adds the rest of a step. Tensor-parallel ranks are of one host. Sequences are cut where
they are so long that each rank has LEAST_TOKENS of them, or where the config says so. Experts of mixtures are shared out among
data-parallel ranks of one host, or as many as the config says.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from megafx.analysis.costed_graph import costed_graph
from megafx.compiler.choose import tried
from megafx.compiler.cut_sequence import cut_sequence
from megafx.compiler.stages import before, describe_plan, passes_of, since
from megafx.config import Config
from megafx.errors import MegafxError, UsageError
from megafx.ir.program import VAL, Input, Program
from megafx.passes.experts.capacity_experts import most_experts
from megafx.passes.experts.expert_chains import chains
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.placements.data_axis import DDP, DataAxis
from megafx.planner.context import CompileContext, price_workload
from megafx.planner.costed import CostedGraph
from megafx.planner.hardware import Hardware
from megafx.planner.pipeline_step import Split
from megafx.planner.timeline import StepTimes, timeline
from megafx.planner.whole_step import ONE, copies_of, in_form, out_of_reach, whole_steps
from megafx.progress import stage
from megafx.units import bytes_text, time_text

CHUNKS = (1, 2, 4, 8)  # stages of a pipeline rank
MICROBATCHES = 4  # for each pipeline rank, where no global batch is given
LEAST_TOKENS = 4096  # of a context-parallel rank: with fewer, products lose rate, and other axes serve as well
TWINS_SHOWN = 3
COLUMNS = "tp cp pp dp form sp batch budget step rows/s MFU memory sends why"  # of the table
TWINS = 0.02  # forms of data parallelism whose steps differ by no more are one choice: the model knows steps to several percent


@dataclass(frozen=True)
class Candidate:
    """One configuration."""

    config: Config
    parts: dict[str, float]  # microseconds of a step by cause
    memory: dict[str, int]  # bytes of a rank by kind
    rows: int  # of all ranks in a step
    flops: float  # of one rank in a step
    sent: int  # bytes of a rank
    rate: float  # FLOP/s of large products by the hardware's profile
    peak: float = 0.0  # those of its datasheet, 0.0 where the profile has none
    split: Split = ONE
    # the same with other forms of data parallelism, whose steps are at most TWINS longer and which fit too, fastest first
    twins: tuple[Candidate, ...] = ()

    @property
    def step_us(self) -> float:
        return sum(self.parts.values())

    @property
    def us_a_row(self) -> float:
        return self.step_us / self.rows

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: of the datasheet's FLOP/s. What causal masks leave of attention is counted."""
        return self.of_products * self.rate / self.peak if self.peak else None

    @property
    def of_products(self) -> float:
        """FLOP/s of a step as a fraction of those of large products."""
        return self.flops / (self.step_us * 1e-6) / self.rate

    def slower_than(self, other: Candidate) -> float:
        """Fraction by which a row takes longer."""
        return self.us_a_row / other.us_a_row - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data: times in microseconds, sizes in bytes."""
        numbers = {
            "step_us": self.step_us,
            "rows_per_second": 1e6 / self.us_a_row,
            "mfu": self.mfu,
            "of_products": self.of_products,
            "bytes": self.bytes,
        }
        sizes = {"sent_bytes": self.sent, "rows": self.rows, "parts_us": self.parts, "memory_bytes": self.memory}
        twins = [twin.to_dict() | {"slower": twin.slower_than(self)} for twin in self.twins]
        split = {
            "pipeline_ranks": self.split.ranks,
            "stages": self.split.stages,
            "microbatches": self.split.microbatches,
        }
        return {"config": self.config.to_dict()} | split | numbers | sizes | {"twins": twins}

    def text(self) -> str:
        """The Config to paste, or the call of megafx.pipeline."""
        default = Config()
        given = {f.name: getattr(self.config, f.name) for f in fields(Config)}
        changed = [f"{name}={value!r}" for name, value in given.items() if value != getattr(default, name)]
        text, split = f"megafx.Config({', '.join(changed)})", self.split
        if split.ranks == 1:
            return text
        schedule = "1F1B" if split.chunks == 1 else "Interleaved1F1B"
        stages = f"stages={split.stages}, microbatches={split.microbatches}, schedule={schedule!r}"
        return f"megafx.pipeline(model, {text}, {stages})"


@dataclass
class SearchResult:
    """best first: those that fit, up to `shown`, no two of them twins. least: the one of the smallest memory."""

    gpus: int
    memory: int
    tried: int
    best: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # what could not be planned, and why
    least: Candidate | None = None

    @property
    def config(self) -> Config:
        """Of the best; of a pipeline that of a stage (`.best[0].split` has them). Raises UsageError where nothing fits."""
        if not self.best:
            if self.least is None:
                why = "; ".join(f"{layout}: {why}" for layout, why in self.refused.items())
                raise UsageError(f"no layout of {self.gpus} GPUs can be planned ({why})", fix="change what it names")
            raise UsageError(
                f"nothing fits into {bytes_text(self.memory)} on {self.gpus} GPUs; the least is {bytes_text(self.least.bytes)}",
                fix=f"more GPUs, or a smaller batch; the least was {self.least.text()}",
            )
        return self.best[0].config

    def why(self, other: Candidate) -> str:
        """Why another is slower than the best: where most of its time for a row goes more."""
        best = self.best[0]
        if other is best:
            return "the fastest"
        more = {
            cause: other.parts.get(cause, 0.0) / other.rows - best.parts.get(cause, 0.0) / best.rows
            for cause in other.parts | best.parts
        }
        cause = max(more, key=lambda c: more[c])
        slower = 100 * other.slower_than(best)
        if slower < 0.1:
            more_bytes = other.bytes - best.bytes
            return f"as fast, with {bytes_text(abs(more_bytes))} {'more' if more_bytes >= 0 else 'less'} memory"
        return f"{slower:.0f}% slower: {time_text(more[cause])} more a row for {cause}"

    def to_json(self) -> str:
        """Everything as data. configurations: `best`, each with its twins; `slower` of a twin: the fraction it takes longer."""
        found = [c.to_dict() | {"why": self.why(c)} for c in self.best]
        data = {"gpus": self.gpus, "memory_bytes": self.memory, "tried": self.tried}
        least = None if self.least is None else self.least.to_dict()
        return json.dumps(data | {"configurations": found, "refused": self.refused, "least": least}, indent=1)

    def __str__(self) -> str:
        from rich.console import Console  # not on top: every start imports this file
        from rich.table import Table

        if not self.best:
            try:
                return str(self.config)
            except UsageError as error:
                return str(error)
        out = io.StringIO()
        console = Console(file=out, width=160, color_system=None, legacy_windows=False)
        fits = f"{self.tried} configurations of {self.gpus} GPUs tried, {bytes_text(self.memory)} each"
        console.print(fits, highlight=False)
        table = Table(show_lines=False, pad_edge=False)
        for name in COLUMNS.split():
            table.add_column(name, overflow="fold")
        for c in self.best:
            k = c.config
            form = _form_text(k) if (k.data_parallel_size or 1) * k.context_parallel_size > 1 else ""
            mfu = "" if c.mfu is None else f"{100 * c.mfu:.0f}%"
            numbers = (time_text(c.step_us), f"{1e6 / c.us_a_row:.2f}", mfu)
            sizes = (bytes_text(c.bytes), bytes_text(c.sent))
            what = (
                k.tensor_model_parallel_size,
                k.context_parallel_size,
                c.split.ranks if c.split.chunks == 1 else f"{c.split.ranks}x{c.split.chunks}",
                f"{k.data_parallel_size or 1}{f', ep={e}' if (e := k.expert_model_parallel_size) > 1 else ''}",
                form,
                "on" if k.sequence_parallel else "off",
            )
            m = c.split.microbatches
            batch = k.micro_batch_size if m == 1 else f"{m}x{k.micro_batch_size}"
            budget = "" if k.activation_memory_budget is None else k.activation_memory_budget
            more = [f"or {len(c.twins) - TWINS_SHOWN} more"] if len(c.twins) > TWINS_SHOWN else []
            why = "\n".join([self.why(c), *(f"or {_twin_text(twin, c)}" for twin in c.twins[:TWINS_SHOWN]), *more])
            table.add_row(*map(str, (*what, batch, budget, *numbers, *sizes, why)))
        console.print(table)
        for layout, why in self.refused.items():
            console.print(f"not planned: {layout}: {why}", highlight=False, markup=False)
        if any(c.twins for c in self.best):
            note = (
                f"'or': the same with another form of data parallelism, at most {100 * TWINS:.0f}% slower than its row"
            )
            console.print(note, highlight=False)
        best = self.best[0]
        peak = f"of the datasheet's {best.peak / 1e12:.0f} TFLOP/s" if best.peak else "unknown: the profile has no peak"
        large = f"{100 * best.of_products:.0f}% of large products, {best.rate / 1e12:.0f} TFLOP/s"
        notes = f"MFU: {peak}; the best is at {large}. Of attention, what causal masks leave is counted."
        console.print(
            f"{notes}\nmemory: with AdamW's moments in the parameters' dtype, without fp32 copies", highlight=False
        )
        return f"{out.getvalue()}\n{self.best[0].text()}"


def _twin_text(twin: Candidate, row: Candidate) -> str:
    slower = 100 * twin.slower_than(row)
    return f"{_form_text(twin.config)}: {slower:.1f}% slower, {bytes_text(twin.bytes)}"


def _form_text(config: Config) -> str:
    """'fsdp', or 'fsdp/8' where eight data-parallel ranks hold a copy."""
    shard = config.data_parallel_shard_size
    return config.data_parallel + ("" if shard is None else f"/{shard}")


def _without_twins(found: Iterable[Candidate]) -> list[Candidate]:
    """found: best first -> the same, but of forms of data parallelism whose steps are about equal the first has the others."""
    rows: list[tuple[Any, Candidate, list[Candidate]]] = []
    for candidate in found:
        choice = in_form(candidate.config, DDP), candidate.split
        for other, first, twins in rows:
            if other == choice and candidate.slower_than(first) <= TWINS:
                twins.append(candidate)
                break
        else:
            rows.append((choice, candidate, []))
    return [replace(first, twins=tuple(twins)) for _, first, twins in rows]


def search_call(
    program: Program,
    config: Config,
    hardware: Hardware,
    gpus: int,
    memory: int,
    batches: Sequence[int],
    shown: int,
    wants_grad: Callable[[Input], bool],
    global_batch: int | None = None,
) -> SearchResult:
    """CAPTURED program -> what was found. wants_grad: input -> whether its gradient is wanted. global_batch: rows of a step."""
    tried: list[Candidate] = []
    refused: dict[str, str] = {}
    search = _Search(program, hardware, batches, memory, config.data_parallel_shard_size, wants_grad, global_batch)
    for t in [t for t in range(gpus, 0, -1) if gpus % t == 0]:
        if why := out_of_reach(t, gpus, hardware):
            refused[why] = f"tp={t}" if t == gpus else f"tp={t} and more"
            continue
        for c in _context_sizes(config, gpus // t):
            d = gpus // (t * c)
            for sequence in _sequence(t, gpus > hardware.gpus_per_host):
                options = in_form(config, DDP).replace(
                    tensor_model_parallel_size=t,
                    context_parallel_size=c,
                    sequence_parallel=sequence,
                    data_parallel_size=d if d > 1 else None,
                    expert_model_parallel_size=1,
                )
                for e in search.expert_sizes(config, options):
                    what = f"tp={t}, {f'cp={c}, ' * (c > 1)}{f'ep={e}, ' * (e > 1)}sequence_parallel={sequence}"
                    try:
                        with stage(f"plan {what}"):
                            tried += search.candidates(options.replace(expert_model_parallel_size=e))
                    except MegafxError as error:
                        refused.setdefault(error.found, what)
    refused = {what: why for why, what in refused.items()}
    best = _without_twins(sorted((c for c in tried if c.bytes <= memory), key=lambda c: (c.us_a_row, c.bytes)))
    least = min(tried, key=lambda c: c.bytes, default=None)
    return SearchResult(gpus, memory, len(tried), best[:shown], refused, least)


def _context_sizes(config: Config, gpus: int) -> list[int]:
    """Numbers of context-parallel ranks to try on so many GPUs: that of the config, where it has one."""
    if config.context_parallel_size > 1:
        return [config.context_parallel_size] * (gpus % config.context_parallel_size == 0)
    most = max((config.seq_length or 1) // LEAST_TOKENS, 1)
    return [c for c in range(1, min(gpus, most) + 1) if gpus % c == 0]


def _sequence(t: int, several_hosts: bool) -> tuple[bool, ...]:
    """Sequence parallelism off and on; beyond one host, where there is more to choose among, on."""
    return (False,) if t == 1 else (True,) if several_hosts else (False, True)


@dataclass
class _Search:
    """Plans of one model."""

    captured: Program
    hardware: Hardware
    batches: Sequence[int]
    memory: int
    shard: int | None  # data-parallel ranks that hold a copy, as the config asks for
    wants_grad: Callable[[Input], bool]
    global_batch: int | None
    whole: Program | None = None  # the program before the sequence is cut
    most_experts: int | None = None
    # (sequence parallelism, context-parallel ranks) -> the program up to planning, where it is the same for other numbers
    # of tensor-parallel ranks, as it is without experts
    ready: dict[tuple[bool | str, int], Program] = field(default_factory=dict)

    def candidates(self, config: Config) -> Iterator[Candidate]:
        hardware = self.hardware
        dtype, rate = max(hardware.flops_per_second.items(), key=lambda item: item[1])
        peak = hardware.peak_flops_per_second.get(dtype, 0.0)
        for costed, step, batch in self._priced(config):
            fits = False
            for options, split in self._splits(config.replace(micro_batch_size=batch), len(costed.order)):
                shards = copies_of(options, hardware) if self.shard is None else [self.shard]
                shards = [s for s in shards if (options.data_parallel_size or 1) % s == 0]
                shards = [s for s in shards if s % options.expert_model_parallel_size == 0]
                for one in whole_steps(costed, step, options, hardware, self.memory, shards, split):
                    fits = fits or sum(one.memory.values()) <= self.memory
                    numbers = (one.parts, one.memory, one.rows, one.flops, one.sent, rate, peak)
                    yield Candidate(one.config, *numbers, one.split)
            if not fits:
                break  # larger batches hold more

    def _splits(self, config: Config, parts: int) -> Iterator[tuple[Config, Split]]:
        """The config with fewer data-parallel ranks, for pipelines beyond one host, and micro-batches. parts: of the model."""
        d, batch, experts = (
            config.data_parallel_size or 1,
            config.micro_batch_size or 1,
            config.expert_model_parallel_size,
        )
        inner = (config.tensor_model_parallel_size or 1) * config.context_parallel_size
        most = parts if d * inner > self.hardware.gpus_per_host else 1
        for ranks in [p for p in range(1, most + 1) if d % (p * experts) == 0]:
            rest = d // ranks
            count = 1 if ranks == 1 else MICROBATCHES * ranks
            if self.global_batch is not None:
                if self.global_batch % (rest * batch):
                    continue
                count = self.global_batch // (rest * batch)
            options = config.replace(data_parallel_size=rest if rest > 1 else None)
            for chunks in CHUNKS if ranks > 1 else (1,):
                if count >= ranks and (chunks == 1 or count % ranks == 0):
                    yield options, Split(ranks, chunks, count)

    def _context(self, config: Config) -> CompileContext:
        t, data = config.tensor_model_parallel_size or 1, DataAxis.of_context(config)
        return CompileContext(config, t, self.hardware, data, wants_grad=self.wants_grad)

    def expert_sizes(self, config: Config, options: Config) -> list[int]:
        """Numbers of ranks that share out experts to try beside these options: that of the config, where it has one."""
        d, wanted = options.data_parallel_size or 1, config.expert_model_parallel_size
        if wanted > 1:
            return [wanted] * (d % wanted == 0)
        inner = (options.tensor_model_parallel_size or 1) * options.context_parallel_size
        most = min(d, self.hardware.gpus_per_host // inner, self._experts(options))
        return [1, *(e for e in range(2, most + 1) if d % e == 0)]

    def _experts(self, config: Config) -> int:
        """Experts of the largest mixture that is computed by grouped products, is a list, or has a capacity."""
        if self.most_experts is None:
            targets = (torch.ops.megafx.grouped_mm.default, torch.ops.aten._grouped_mm.default)
            found = [n for target in targets for n in self.captured.graph.find_nodes(op="call_function", target=target)]
            most = [n.args[1].meta[VAL].shape[0] for n in found]
            if not found and any(
                "index_add" in str(n.target) or "index_put" in str(n.target) for n in self.captured.graph.nodes
            ):
                most += map(len, chains(self._without_experts(config).graph))
            if not most and any(s.kind == "param" and n.meta[VAL].dim() == 3 for n, s in self.captured.input_nodes()):
                most.append(most_experts(self._without_experts(config)))
            self.most_experts = max(most, default=1)
        return self.most_experts

    def _ready(self, config: Config) -> tuple[Program, dict[str, int]]:
        """(the program up to planning, parameters of which ranks hold their experts alone)."""
        if config.expert_model_parallel_size > 1:
            context = self._context(config)
            made, context, _ = tried(self.captured, context, before(plan_sharding, passes_of(context, "planning")))
            return made, context.experts
        return self._without_experts(config), {}

    def _without_experts(self, config: Config) -> Program:
        """The same where no ranks share out experts."""
        key, t = (config.sequence_parallel, config.context_parallel_size), config.tensor_model_parallel_size
        if key in self.ready and t != 1:
            return self.ready[key]
        context = self._context(config)
        passes = before(plan_sharding, passes_of(context, "planning"))
        start, shared = self.whole, self.whole is not None
        if start is None:
            start, _, records = tried(self.captured, context, before(cut_sequence, passes))
            shared = not any(r.changes for r in records if "experts" in r.name)
        made, _, records = tried(start, context, since(cut_sequence, passes))
        if shared:
            self.whole = start
            if not any(r.changes for r in records if "experts" in r.name):
                self.ready[key] = made
        return made

    def _priced(self, config: Config) -> Iterator[tuple[CostedGraph, StepTimes, int]]:
        """The plan of the first batch size, at each of them."""
        first = config.replace(micro_batch_size=self.batches[0])
        context = self._context(first)
        ready, context.experts = self._ready(config)
        passes = before(describe_plan, since(plan_sharding, passes_of(context, "planning")))
        program, context, _ = tried(ready, context, passes)
        for batch in self.batches:
            price_workload(program, config.replace(micro_batch_size=batch))
            costed = costed_graph(program, context)
            yield costed, timeline(costed), batch


def modelled_step(
    costed: CostedGraph, step: StepTimes, config: Config, hardware: Hardware, split: Split = ONE
) -> tuple[dict[str, float], list[str]]:
    """(microseconds of a step of this config by cause, what of it is not priced)."""
    t, d = config.tensor_model_parallel_size or 1, config.data_parallel_size or 1
    left = [f"{what} are not in the step" for what in _not_priced(config)]
    if why := out_of_reach(t, t * d * config.context_parallel_size, hardware):
        left.append(f"data-parallel collectives are not in the step: {why}")
        config = in_form(config, DDP).replace(data_parallel_size=None, context_parallel_size=1)
    elif d * config.context_parallel_size == 1:
        config = in_form(config, DDP)
    shards = [config.data_parallel_shard_size or config.data_parallel_size or 1]
    found = whole_steps(costed, step, config, hardware, sys.maxsize, shards, split)
    return next(c.parts for c in found if c.config.data_parallel == config.data_parallel), left


def _not_priced(config: Config) -> Iterator[str]:
    if isinstance(config.activation_memory_budget, str):
        yield "values computed again for activation_memory_budget"
