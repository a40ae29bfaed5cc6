"""Table, JSON and plot of benchmarks/kernels.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HEADER = (
    f"{'case':34} {'implementation':16} {'fwd ms':>8} {'of floor':>8} {'f+b ms':>8} {'of floor':>8} "
    f"{'host us':>8} {'f+b':>7} {'saved MB':>8} {'err out':>8} {'grads':>8}"
)


def line(row: dict[str, Any]) -> str:
    head = f"{row['case']:34} {row['implementation']:16} "
    if "note" in row:
        return head + row["note"]
    n = {k: row.get(k) for k in row}
    return head + (
        f"{_n(n['forward_ms'], '8.4f')} {_n(n['forward_fraction'], '8.2f')} {_n(n['both_ms'], '8.4f')} "
        f"{_n(n['both_fraction'], '8.2f')} {_n(n['host_us'], '8.0f')} {_n(n['both_host_us'], '7.0f')} "
        f"{_n(n['saved_mb'], '8.1f')} {_n(n['error'], '8.1e')} {_n(n['gradient_error'], '8.1e')}"
        + ("" if n["method"] == "graph" else "  (events)")
    )


def _n(value: float | None, spec: str) -> str:
    width = int(spec.split(".")[0])
    return "-".rjust(width) if value is None or not math.isfinite(value) else format(value, spec)


def write_json(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


def plot(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Fractions of the floor, forward with backward, a bar an implementation, of the cases that have peers."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in rows if "note" not in r and r["headline"]]
    cases = list(dict.fromkeys(r["case"] for r in shown))
    names = list(dict.fromkeys(r["implementation"] for r in shown))
    if not cases:
        return "no plot: no case with peers was run"
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.24 * len(cases) * len(names)))
    height = 0.8 / len(names)
    for k, name in enumerate(names):
        values = [
            next((_fraction(r) for r in shown if (r["case"], r["implementation"]) == (c, name)), 0) for c in cases
        ]
        axes.barh([i + k * height for i in range(len(cases))], values, height, label=name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"fraction of the floor ({meta['copy_gb_s']:.0f} GB/s copy), forward + backward; {meta['device']}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return f"plot: {path}"


def _fraction(row: dict[str, Any]) -> float:
    return row["both_fraction"] or row["forward_fraction"] or 0.0
