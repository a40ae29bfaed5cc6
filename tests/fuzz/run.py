"""Thousands of random models, sharded, against eager: python tests/fuzz/run.py --cases 1000 --jobs 2 --seed 0

Prints each case that is wrong, ends in an error that is not ours, or is refused, once for a text (--shrink: with its smallest
form), and ends with 1 if there is any. A case is a value: `run.outcome(Case(...))` runs it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

import megafx
import megafx.equivalence
from megafx.errors import MegafxError
from megafx.meanwhile import meanwhile

sys.path.append(str(Path(__file__).parent))
import grammar
from grammar import CASE, Case
from loops import Kept, difference
from models import build

PLAIN = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": False}
# The plainest value of each field of a case, its blocks, their attention and MLP.
PLAINEST: dict[str, Any] = {
    "heads": 2, "key_value_heads": 2, "width": 4, "projection": "apart", "scores": "matmul", "mask": "none", "bias": False,
    "query_key_norm": False, "dropout": 0.0, "kind": "plain", "activation": "relu", "attention": None, "norm": "none",
    "residual": "pre", "view": "none", "position": "none", "embedding_scale": False, "embedding_norm": False,
    "frozen_embedding": False, "shared_blocks": False, "final_norm": "none", "head": "logits", "loss": "flat",
    "outputs": "tensor", "frozen": "", "ranks": 2, "sequence_parallel": False,
    "events": (),
}  # fmt: skip


def outcome(case: Case) -> tuple[str, str]:
    """-> ("exact", "wrong", "refused", "error" or "not a model", text). Ranks are simulated; a loop of events runs on one."""
    model, args = build(case)
    try:
        with torch.no_grad():
            model.eval()(*args)
    except Exception as e:  # the grammar's own limits
        return "not a model", f"{type(e).__name__}: {e}"
    model.train()
    config = megafx.Config(tensor_model_parallel_size=case.ranks, sequence_parallel=case.sequence_parallel)
    try:
        with warnings.catch_warnings(), meanwhile(megafx.equivalence, RepeatedCalls=Kept):
            warnings.simplefilter("ignore")
            # by name, as graphs know them: then repeated calls have the graph that was captured for the ranks
            verdict = megafx.verify(model, config, example_inputs=dict(zip(("ids", "labels"), args, strict=True)))
            differs = difference(case) if verdict and case.events else None
    except MegafxError as e:
        return "refused", str(e)
    except Exception as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if "megafx" in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return "error", f"{type(e).__name__} at {where}: {e}"
    if differs is not None:
        return "wrong", differs
    return ("exact", "") if verdict else ("wrong", str(verdict))


def kind_of(text: str) -> str:
    """The text without numbers and names of nodes, to tell findings apart."""
    return re.sub(r"[\d.]+(e-?\d+)?", "#", text)[:160]


def drawn(cases: int, seed: int) -> list[Case]:
    """So many cases, no two the same. Of four times as many that hypothesis makes: it begins with the smallest, and makes some
    of the one before."""
    found: dict[Case, None] = {}

    @hypothesis.seed(seed)
    @settings(max_examples=4 * cases, phases=[Phase.generate], **PLAIN)
    @given(CASE)
    def look(case: Case) -> None:
        found[case] = None

    look()
    return random.Random(seed).sample([*found], cases)


def some(cases: list[Case], until: float = math.inf) -> list[tuple[str, str, str, float]]:
    """(outcome, text, case, CPU seconds) of each; those that would begin after `until`, by time.time(), are left out.

    Cycles are collected in the end alone: most of what a compile makes stays until then anyway.
    """
    torch.set_num_threads(1)
    found = []
    gc.disable()
    for case in cases:
        if time.time() <= until:
            start = time.process_time()
            found.append((*outcome(case), repr(case), time.process_time() - start))
    gc.enable()
    gc.collect()
    return found


def smallest(kind: str, case: Case, tries: int = 200) -> Case:
    """A smaller case of the same kind of finding: fewer blocks, and each field at its plainest, one by one."""

    def same(other: Case) -> bool:
        nonlocal tries
        tries -= 1
        return tries >= 0 and kind_of(outcome(other)[1]) == kind

    def plainer(value: Any) -> Iterator[Any]:
        if isinstance(value, tuple) and len(value) > 1:
            yield from ((part,) for part in value)
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                yield from ((*value[:i], other, *value[i + 1 :]) for other in plainer(part))
        elif is_dataclass(value):
            for field in fields(value):
                now = getattr(value, field.name)
                plain = [PLAINEST[field.name]] if field.name in PLAINEST and now != PLAINEST[field.name] else []
                yield from (replace(value, **{field.name: other}) for other in (*plain, *plainer(now)))

    found = True
    while found and tries > 0:
        found = False
        for other in plainer(case):
            if same(other):
                case, found = other, True
                break
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more cases after so many")
    parser.add_argument("--shrink", action="store_true", help="print the smallest form of each finding")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    options = parser.parse_args()
    start, until = time.monotonic(), time.time() + options.seconds
    cases, lot = drawn(options.cases, options.seed), 5
    lots = [cases[i : i + lot] for i in range(0, len(cases), lot)]
    every: list[tuple[str, str, str, float]] = []
    seen: Counter[str] = Counter()
    firsts: list[tuple[str, str]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        begun = [pool.submit(some, each, until) for each in lots]
        for done in as_completed(begun):
            for what, text, case, seconds in done.result():
                every.append((what, text, case, seconds))
                if what != "exact":
                    seen[what + " " + kind_of(text)] += 1
                    if seen[what + " " + kind_of(text)] == 1:
                        print(f"\n{what}: {text[:600]}\n  {case}", flush=True)
                        firsts.append((kind_of(text), case))
            if len(every) % 100 < len(done.result()):
                print(f"{len(every)} cases: {dict(Counter(what for what, *_ in every))}", flush=True)
    counts = Counter(what for what, *_ in every)
    slowest = max(every, key=lambda row: row[3], default=("", "", "", 0.0))
    mean = sum(row[3] for row in every) / max(len(every), 1)
    print(f"\n{dict(counts)} in {time.monotonic() - start:.0f} s, {mean:.1f} s of CPU a case")
    print(f"the slowest {slowest[3]:.0f} s: {slowest[2]}")
    for text, count in seen.most_common():
        print(f"{count:5} {text}")
    if options.shrink:
        for kind, case in firsts:
            print(f"\n{kind}\n  {smallest(kind, eval(case, vars(grammar)))}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(every, indent=1))
    return int(any(what not in ("exact", "not a model") for what, *_ in every))


if __name__ == "__main__":
    sys.exit(main())
