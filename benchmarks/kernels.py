"""Every kernel family against the floor of its bytes, and against peers. Needs a CUDA device.

    python benchmarks/kernels.py [--only bias_activation,norms] [--budget 120] [--peers eager,torch.compile] [--json out.json]

Floor: the fewest bytes that must move (each input read once, each output written once), over the bandwidth of a 2 GiB device
copy in this run; for ops with matrix products, whichever is longer of that and operations over the rate of an 8192^3 bf16
matmul. 'of floor' is floor / time: 1 is perfect. Times are medians of CUDA-graph replays over rotating buffers, second-stage
reductions included; '(events)' marks what cannot be captured: launch gaps then count. 'host us' is host time a call.
'saved MB': kept for backward in addition to inputs and outputs. Errors: relative, against the plain formula in fp32.

Cases: kernel_cases/<family>.py. Cases called headline run first and against all peers, the others against eager.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_cases.case import Case
from kernel_cases.measure import Runner, copy_rate, errors, matmul_rate, warm_up
from kernel_cases.output import HEADER, line, plot, write_json

FOLDER = Path(__file__).resolve().parent / "kernel_cases"
FAMILIES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("case", "measure", "output"))
NOT_RUN = "not run: the budget is spent"


def implementations(case: Case, peers: list[str] | None) -> list[tuple[str, Callable[[], Callable[..., Any]]]]:
    """(name, loader) in the order of the table. peers: the names wanted in addition to ours; None: all."""
    found: list[tuple[str, Callable[[], Callable[..., Any]]]] = [("megafx", lambda: case.ours)]
    others: dict[str, Callable[[], Callable[..., Any]]] = {}
    if case.eager is not None:
        others["eager"] = lambda: case.eager  # type: ignore[dict-item,return-value]
        others["torch.compile"] = lambda: torch.compile(case.eager, dynamic=False)  # type: ignore[arg-type,return-value]
    others |= case.peers
    for name, load in others.items():
        if (peers is None and (case.headline or name == "eager")) or (peers is not None and name in peers):
            found.append((name, load))
    return found


def measure(case: Case, name: str, load: Callable[[], Callable[..., Any]], rates: dict[str, float]) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"case": case.name, "implementation": name, "headline": case.headline}
    try:
        function = load()
    except ImportError:
        return row | {"note": "not installed"}
    torch._dynamo.reset()
    try:
        runner = Runner(case, function)
        times, host, saved = runner.times(), runner.host(), runner.saved() / 1e6
        del runner
        error = errors(case, function)
    except Exception as e:
        return row | {
            "note": f"failed: {type(e).__name__}: {str(e).strip().splitlines()[0][:90] if str(e).strip() else ''}"
        }
    finally:
        torch.cuda.empty_cache()
    floors = [
        max(case.forward_bytes / rates["copy"], case.forward_flops / rates["matmul"]) * 1e3,
        max(case.backward_bytes / rates["copy"], case.backward_flops / rates["matmul"]) * 1e3,
    ]
    return row | {
        "forward_ms": times.forward,
        "forward_floor_ms": floors[0],
        "forward_fraction": floors[0] / times.forward,
        "both_ms": times.both,
        "both_floor_ms": sum(floors),
        "both_fraction": sum(floors) / times.both if times.both else None,
        "method": times.method,
        "host_us": host[0],
        "both_host_us": host[1],
        "saved_mb": saved,
        "error": error[0] if error else None,
        "gradient_error": error[1] if error else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"families, comma separated, of: {', '.join(FAMILIES)}")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no more cases start")
    parser.add_argument("--peers", help="implementations to compare with, comma separated ('' for none); default: all")
    parser.add_argument("--headline", action="store_true", help="only the headline cases")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--plot", type=Path, help="image to write")
    arguments = parser.parse_args()
    start = time.monotonic()
    families = arguments.only.split(",") if arguments.only else FAMILIES
    if unknown := sorted({*families} - {*FAMILIES}):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a CUDA device: torch sees none here", file=sys.stderr)
        return 1
    cases: list[Case] = []
    for family in families:
        cases += importlib.import_module(f"kernel_cases.{family}").cases()
    cases = [c for c in cases if c.headline or not arguments.headline]
    cases.sort(key=lambda c: not c.headline)
    peers = None if arguments.peers is None else [p for p in arguments.peers.split(",") if p]
    warm_up()
    rates = {"copy": copy_rate()}
    rates["matmul"] = matmul_rate() if any(c.forward_flops for c in cases) else float("inf")
    meta = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_s": rates["copy"] / 1e9,
        "matmul_tflop_s": rates["matmul"] / 1e12,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(sys.argv),
    }
    print(", ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k, v in meta.items()), flush=True)
    print(HEADER, flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if time.monotonic() - start > arguments.budget:
            rows.append({"case": case.name, "implementation": "", "headline": case.headline, "note": NOT_RUN})
            continue
        for name, load in implementations(case, peers):
            rows.append(measure(case, name, load, rates))
            print(line(rows[-1]), flush=True)
    if skipped := [r["case"] for r in rows if r.get("note") == NOT_RUN]:
        print(f"{len(skipped)} cases not run, the budget is spent: {', '.join(skipped)}")
    if arguments.json:
        meta["matmul_tflop_s"] = meta["matmul_tflop_s"] if rates["matmul"] != float("inf") else None
        write_json(arguments.json, meta, rows)
    if arguments.plot:
        print(plot(arguments.plot, meta, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
