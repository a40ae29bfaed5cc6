"""Modelled beside recorded times (megafx/planner/timeline.py) of the training steps in RESULTS.md. Needs no GPU.

    python benchmarks/modelled_steps.py                              # by the H200's profile that comes with megafx
    python benchmarks/modelled_steps.py --hardware h100-nvlink       # by the H100's, beside steps on H100
    python benchmarks/modelled_steps.py --hardware mine.yaml         # by one that `megafx profile-hardware` measured
    python benchmarks/modelled_steps.py --row llama,2,sp,4=223.2     # rows of your own: model, ranks, mode, batch = ms
    python benchmarks/modelled_steps.py --auto                       # only what "auto" picks
    python benchmarks/modelled_steps.py --context                    # steps of context-parallel ranks on H100

Modes are those of train_tp.py. `ideal` is a step of one GPU, undivided. Rows are runs of 2026-11-23 on 2 x H200, where TP was
measured before all-reduces ran in pieces and is `tp-plain`; and of 2026-11-25 on 2 x H100.

A second table has the fastest row of each run, and the row of what "auto" picks: layout, overlap, Inductor, and
CUDA graphs (by the cost model; on a GPU the second call is measured). Rows of different runs are not compared.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from torch import nn
from train_tp import SHAPES, LlamaBlock, Model, Shape, WithLoss, places_of

import megafx
from megafx.capture.export import capture_call
from megafx.compiler.pipeline import compile_program
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware
from megafx.planner.timeline import graphs_pay
from megafx.report.report import Report
from megafx.what_if import modelled_step

H200 = "h200-nvlink"
RECORDED = {
    H200: {
        ("llama", 1, "ideal", 4): 400.6,
        ("llama", 2, "tp-plain", 4): 234.0,
        ("llama", 2, "sp-plain", 4): 232.2,
        ("llama", 2, "sp", 4): 223.2,
        ("llama", 1, "ideal", 1): 112.8,
        ("llama", 2, "tp-plain", 1): 66.3,
        ("llama", 2, "sp-plain", 1): 65.6,
        ("llama", 2, "sp", 1): 63.1,
        ("gpt", 1, "ideal", 8): 457.8,
        ("gpt", 2, "tp-plain", 8): 261.5,
        ("gpt", 2, "sp-plain", 8): 259.0,
        ("gpt", 2, "sp", 8): 251.4,
    },
    "h100-nvlink": {
        ("llama", 1, "ideal", 4): 404.8,
        ("llama", 2, "tp-plain", 4): 240.2,
        ("llama", 2, "tp", 4): 234.2,
        ("llama", 2, "sp-plain", 4): 239.7,
        ("llama", 2, "sp", 4): 228.4,
        ("llama", 1, "ideal", 1): 116.4,
        ("llama", 2, "tp-plain", 1): 69.3,
        ("llama", 2, "sp-plain", 1): 68.4,
        ("gpt", 1, "ideal", 8): 469.0,
        ("gpt", 2, "tp-plain", 8): 276.0,
        ("gpt", 2, "sp-plain", 8): 273.0,
        ("gpt", 2, "sp", 8): 264.7,
    },
}
# (model, ranks, batch): the modes of one run each.
RUNS = {
    H200: [
        (("llama", 2, 4), {"sp-plain": 232.2, "sp": 223.2, "sp-graphs": 225.3}),
        (("llama", 2, 4), {"tp": 225.7, "sp": 221.4, "sp-compile": 220.8}),
        (("llama", 2, 1), {"tp-plain": 66.3, "sp-plain": 65.6, "sp": 63.1, "sp-graphs": 65.6}),
        (("gpt", 2, 8), {"tp-plain": 261.5, "sp-plain": 259.0, "sp": 251.4}),
    ],
    "h100-nvlink": [
        (("llama", 2, 4), {"tp-plain": 240.2, "tp": 234.2, "sp-plain": 239.7, "sp": 228.4}),
        (("llama", 2, 1), {"tp-plain": 69.3, "tp": 69.5, "sp-plain": 68.4, "sp": 72.5}),
        (("gpt", 2, 8), {"tp-plain": 276.0, "sp-plain": 273.0, "sp": 264.7}),
    ],
}
# (tokens, tensor-, context-parallel ranks): four layers of Llama-8B's shape, without embedding and head, on H100, 2026-11-27.
CONTEXT = {
    (32768, 1, 2): 275.8,
    (32768, 2, 1): 261.2,
    (131072, 1, 4): 1229.0,
    (131072, 2, 2): 1237.0,
    (131072, 4, 1): 1246.0,
}
Row = tuple[str, int, str, int]


def report_of(row: Row, hardware: str) -> Report:
    """The report of a plan of this row's model on meta."""
    name, ranks, mode, batch = row
    layout, *flags = mode.split("-")
    shape = SHAPES[name]
    with torch.device("meta"):
        model = WithLoss(Model(shape).bfloat16())
    config = megafx.Config(
        tensor_model_parallel_size=ranks,
        sequence_parallel={"sp": True, "tp": False, "ideal": False, "auto": "auto"}[layout],
        tp_comm_overlap=False if "plain" in flags else "auto",
        micro_batch_size=batch,
        seq_length=shape.seq,
        hardware=hardware,
    )
    ids = torch.zeros(2, shape.seq, dtype=torch.long)
    places = places_of(shape, torch.device("cpu"))
    return megafx.explain(megafx.plan(model, config, example_inputs=(ids, places)))


class Layers(nn.Module):
    """Layers alone, and a loss of them."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaBlock(s) for _ in range(s.layers))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, places)
        return x.float().square().mean()


def context_ms(tokens: int, t: int, c: int, hardware: str = "h100-nvlink") -> tuple[float, float]:
    """(milliseconds of a step of one sequence on these ranks, of which collectives of the context axis are waited for)."""
    shape = replace(SHAPES["llama"], layers=4, seq=tokens)
    with torch.device("meta"):
        model = Layers(shape).bfloat16()
        example = torch.zeros(2, tokens, shape.hidden).bfloat16(), torch.zeros(2, tokens, 128).bfloat16()
    config = megafx.Config(
        tensor_model_parallel_size=t,
        context_parallel_size=c,
        sequence_parallel=t > 1,
        micro_batch_size=1,
        seq_length=tokens,
    )
    report = megafx.explain(megafx.plan(model, config, example_inputs=example))
    parts, _ = modelled_step(report.costed, report.step, config, Hardware.load(hardware))
    return sum(parts.values()) / 1e3, parts["context-parallel collectives"] / 1e3


def picked(name: str, ranks: int, batch: int, hardware: str, layers: int = 0) -> str:
    """The mode that "auto" of every field comes to. layers: fewer ones, to be faster; 0: all."""
    shape = replace(SHAPES[name], layers=layers or SHAPES[name].layers)
    with torch.device("meta"):
        model = WithLoss(Model(shape).bfloat16())
    config = megafx.Config(
        tensor_model_parallel_size=ranks,
        sequence_parallel="auto",
        tp_comm_overlap="auto",
        cuda_graphs="auto",
        compile="auto",
        micro_batch_size=batch,
        seq_length=shape.seq,
    )
    inputs = torch.zeros(batch, shape.seq, dtype=torch.long), places_of(shape, torch.device("cpu"))
    profile = Hardware.load(hardware)
    context = CompileContext(config, ranks, profile, None, wants_grad=lambda spec: spec.kind == "param")
    made = compile_program(capture_call(model, inputs, {}), context)
    notes = made.for_rank(None).notes
    report = context.solved.report
    flags = {
        "sp" if context.solved.sequence_parallel else "tp": True,
        "plain": not report.costed.overlap,
        "graphs": graphs_pay(report.step, profile)[0],
        "compile": any(n.topic == "compile" and "Inductor compiles" in n.message for n in notes),
    }
    return "-".join(flag for flag, on in flags.items() if on)


def row_of(text: str) -> tuple[Row, float]:
    row, _, ms = text.partition("=")
    name, ranks, mode, batch = row.split(",")
    return (name, int(ranks), mode, int(batch)), float(ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default=H200, help="name or path of a profile")
    parser.add_argument("--row", action="append", type=row_of, help="model,ranks,mode,batch=ms")
    parser.add_argument("--auto", action="store_true", help='only what "auto" picks')
    parser.add_argument("--context", action="store_true", help="only steps of context-parallel ranks")
    args = parser.parse_args()
    if args.context:
        return print_context()
    if not args.auto:
        print_modelled(args.row or list(RECORDED.get(args.hardware, RECORDED[H200]).items()), args.hardware)
    if not args.row:
        print_picked(args.hardware)


def print_context() -> None:
    print("| tokens | tp | cp | modelled ms | recorded ms | off | waits for keys ms |\n|---|---|---|---|---|---|---|")
    for row, recorded in CONTEXT.items():
        ms, waits = context_ms(*row)
        print(
            f"| {' | '.join(map(str, row))} | {ms:.1f} | {recorded:.1f} | {ms / recorded - 1:+.1%} | {waits:.1f} |",
            flush=True,
        )


def print_picked(hardware: str) -> None:
    print('\n| model | ranks | batch | fastest recorded | ms | "auto" picks | ms | ratio |')
    print("|---|---|---|---|---|---|---|---|")
    modes: dict[tuple[str, int, int], str] = {}
    for run, times in RUNS.get(hardware, RUNS[H200]):
        mode = modes[run] = modes.get(run) or picked(*run, hardware)
        best = min(times, key=times.__getitem__)
        own = f"{times[mode]:.1f} | {times[mode] / times[best]:.3f}" if mode in times else "not recorded | "
        print(f"| {' | '.join(map(str, run))} | {best} | {times[best]:.1f} | {mode} | {own} |", flush=True)


def print_modelled(rows: list[tuple[Row, float]], hardware: str) -> None:
    print("| model | ranks | mode | batch | modelled ms | recorded ms | off | waits ms | collectives ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst, start = 0.0, time.monotonic()
    for row, recorded in rows:
        step = report_of(row, hardware).step
        off = step.total_us / 1e3 / recorded - 1
        worst = max(worst, abs(off))
        numbers = f"{step.total_us / 1e3:.1f} | {recorded:.1f} | {off:+.1%}"
        times = f"{step.exposed_us / 1e3:.1f} | {step.send_us / 1e3:.1f}"
        print(f"| {' | '.join(map(str, row))} | {numbers} | {times} |", flush=True)
    print(f"\nthe farthest is {worst:.1%} off; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
