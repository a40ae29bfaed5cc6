"""Modelled beside recorded: what the schedule (megafx/report/steps.py) says of the training steps in RESULTS.md. Needs no GPU.

    python benchmarks/modelled_steps.py                              # by the profile that comes with megafx
    python benchmarks/modelled_steps.py --hardware mine.yaml         # by one that `megafx profile-hardware` measured
    python benchmarks/modelled_steps.py --row llama,2,sp,4=223.2     # rows of your own: model, ranks, mode, batch = ms

Modes are those of train_tp.py. `ideal` is a step of one GPU, undivided. Rows stand for runs of 2026-11-23 on 2 x H200. TP was
measured before all-reduces ran in pieces, so that it is `tp-plain` here.
"""

from __future__ import annotations

import argparse
import time

import torch
from train_tp import SHAPES, Model, WithLoss, places_of

import megafx
from megafx.report.report import Report

RECORDED = {
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


def row_of(text: str) -> tuple[Row, float]:
    row, _, ms = text.partition("=")
    name, ranks, mode, batch = row.split(",")
    return (name, int(ranks), mode, int(batch)), float(ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200-nvlink", help="name or path of a profile")
    parser.add_argument("--row", action="append", type=row_of, help="model,ranks,mode,batch=ms")
    args = parser.parse_args()
    print("| model | ranks | mode | batch | modelled ms | recorded ms | off | waits ms | collectives ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst, start = 0.0, time.monotonic()
    for row, recorded in args.row or RECORDED.items():
        step = report_of(row, args.hardware).step
        off = step.total_us / 1e3 / recorded - 1
        worst = max(worst, abs(off))
        numbers = f"{step.total_us / 1e3:.1f} | {recorded:.1f} | {off:+.1%}"
        times = f"{step.exposed_us / 1e3:.1f} | {step.send_us / 1e3:.1f}"
        print(f"| {' | '.join(map(str, row))} | {numbers} | {times} |", flush=True)
    print(f"\nthe farthest is {worst:.1%} off; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
