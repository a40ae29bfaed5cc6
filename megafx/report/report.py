"""The report: what was done and why, as a table by layer with identical layers folded; `describe.py` makes it."""

from __future__ import annotations

import difflib
import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafx.analysis.communication import Communication
from megafx.analysis.memory import Memory
from megafx.errors import UsageError
from megafx.ir.program import Fusion, Note, Program
from megafx.placements.data_axis import OUTER_AXES
from megafx.placements.types import LOCAL
from megafx.planner.costed import PricedTransition
from megafx.planner.plan import INDEX, folded_name
from megafx.report.curve import Curve, curve
from megafx.report.exports import trace_events
from megafx.report.page import data_of, drawn_data, page
from megafx.units import bytes_text, time_text

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Line:
    """One op worth a line: it has a weight, or it communicates, or it stayed whole."""

    fqn: str
    op: str
    style: str
    placements: str
    weight: str
    transitions: tuple[PricedTransition, ...]
    source: str


@dataclass(frozen=True)
class Fused:
    """Matches of one pattern in like modules. modules: `h.[0-11].mlp`; source: the user's line of the first."""

    pattern: str
    modules: str
    count: int
    source: str


@dataclass(frozen=True)
class Measured:
    """Microseconds of a step under one module (like layers together), as measured and by the cost model: of what it computes,
    and of its collectives, which run beside that."""

    direction: str
    module: str
    us: float
    modelled_us: float
    collectives_us: float = 0.0

    def __str__(self) -> str:
        beside = f", collectives {self.collectives_us:.1f} us" if self.collectives_us else ""
        return f"{self.direction} {self.module}: {self.us:.1f} us (modelled {self.modelled_us:.1f} us{beside})"


@dataclass(frozen=True)
class Balance:
    """Rows of each expert of a mixture in one call, of all ranks; tensor-parallel ranks that have the same rows count each."""

    module: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        all_, count = max(sum(self.rows), 1), len(self.rows)
        most, least = max(self.rows) / all_, min(self.rows) / all_
        busy = f"the busiest gets {most:.1%} of the rows ({most * count:.2f} times an equal share), the least busy {least:.1%}"
        return f"{self.module}: of {count} experts {busy}"


@dataclass
class Report:
    """str(report), .table(), .html(path), .trace(path), .to_json()."""

    header: dict[str, Any]
    rows: list[Line]
    params: dict[str, tuple[str, str, str]]  # FQN -> (global shape, placement, why whole)
    removed: dict[str, int]  # reason -> strategies taken away
    notes: list[str] = field(default_factory=list)
    emitted: list[Communication] | None = None  # what the compiled graph does; None where there is only a plan
    fusions: list[Fused] = field(default_factory=list)
    costed: Any = None  # CostedGraph: ops and collectives of each kind of layer
    step: Any = None  # StepTimes: when they run in a training step
    measured: list[Measured] = field(default_factory=list)  # by megafx.profile
    experts: list[Balance] = field(default_factory=list)  # likewise
    predict: Callable[..., Memory] | None = None  # memory of a rank over a step of the compiled call
    model: str = ""  # name of its class

    def memory(self, optimizer: str = "adamw") -> Memory:
        """Predicted memory of a rank, and what is alive at the peak by module and op. optimizer: as in `predict_memory`. Raises
        UsageError for a plan alone."""
        if self.predict is None:
            found = "a plan alone has no graphs whose memory could be predicted"
            raise UsageError(found, fix="megafx.predict_memory(model, config), or explain() of a parallelized model")
        return self.predict(optimizer=optimizer)

    def __str__(self) -> str:
        from rich.console import Console  # 0.1 s, and most starts print no report

        out = io.StringIO()
        console = Console(file=out, width=150, color_system=None, legacy_windows=False)
        console.print(", ".join(f"{k} {v}" for k, v in self.header.items()), highlight=False)
        console.print(self.table())
        for title, lines in self._lists():
            for line in [f"\n{title}", *(f"  {line}" for line in lines)] if lines else ():
                console.print(line, highlight=False, markup=False)
        return out.getvalue()

    def table(self) -> Table:
        """A rich table; identical layers are one row, their number in the last column."""
        from rich.table import Table

        table = Table(show_lines=False, pad_edge=False)
        for name in ("module", "op", "style", "placements", "weight", "collectives (bytes a rank sends)", "times"):
            table.add_column(name, overflow="fold")
        for row, times in self.folded():
            transitions = "\n".join(map(str, row.transitions))
            table.add_row(row.fqn, row.op, row.style, row.placements, row.weight, transitions, str(times))
        return table

    def folded(self) -> list[tuple[Line, int]]:
        """Rows of layers that differ in their index alone become one row, with how many they are."""
        groups: dict[Any, list[Line]] = defaultdict(list)
        for row in self.rows:
            groups[INDEX.sub(".*", row.fqn), row.op, row.style, row.weight, row.transitions].append(row)
        folded = ((folded_name(key[0], [row.fqn for row in rows]), rows) for key, rows in groups.items())
        return [(replace(rows[0], fqn=name), len(rows)) for name, rows in folded]

    def collectives(self) -> dict[str, tuple[int, int]]:
        """'forward all_reduce' -> (count, bytes a rank sends in one step): of the compiled graph, else of the plan. Those of
        data parallelism, which the plan does not have, name their axis: 'backward all_reduce on dp'.

        The graph has fewer than its plan: the gradients of replicated parameters share all-reduces.
        """
        total: dict[str, tuple[int, int]] = {}
        for what, size in self._sent():
            count, bytes_moved = total.get(what, (0, 0))
            total[what] = (count + 1, bytes_moved + size)
        return total

    def _sent(self) -> Iterator[tuple[str, int]]:
        if self.emitted is not None:
            for c in self.emitted:
                yield (
                    f"{c.direction} {c.collective}" + (f" on {c.axis}" if c.axis in OUTER_AXES else ""),
                    c.bytes_moved,
                )
            return
        for t in (t for row in self.rows for t in row.transitions):
            if t.forward != LOCAL:
                yield f"forward {t.forward}", t.forward_bytes
            if t.backward != LOCAL:
                yield f"backward {t.backward}", t.backward_bytes

    def to_json(self) -> str:
        """Everything as data: also ops, collectives and their times, as `planner/costed.py` and `planner/timeline.py` say."""
        rows, fusions = [asdict(r) for r in self.rows], [asdict(f) for f in self.fusions]
        data = {"header": self.header, "rows": rows, "params": self.params, "fusions": fusions}
        return json.dumps(data | {"removed": self.removed, "notes": self.notes} | self.page_data(), indent=1)

    def html(self, path: str | Path) -> None:
        """Write the report as one page, which opens offline: the graph of each kind of layer, a step, memory, tables."""
        Path(path).write_text(page(self.page_data()))

    def trace(self, path: str | Path) -> None:
        """Write the modelled step as a Chrome trace (JSON), which Perfetto shows: every op, wait and collective of every layer,
        and the memory. Raises UsageError for a report without a graph."""
        if self.costed is None:
            raise UsageError("this report has no graph", fix="plan the model: megafx.explain(megafx.plan(...))")
        about = {"model": self.model, "modelled by": "megafx", **self.header}
        Path(path).write_text(json.dumps(trace_events(self.costed, self.step, self.curve(), about)))

    def curve(self) -> Curve:
        """Memory of a rank over the modelled step: of the compiled call, else at most what the plan keeps."""
        return curve(self.costed, self.step, None if self.predict is None else self.memory())

    def page_data(self) -> dict[str, Any]:
        """What the page holds: its tables are of folded layers."""
        columns = ["module", "op", "style", "placements", "weight", "collectives (bytes a rank sends)", "times"]
        rows = [
            [r.fqn, r.op, r.style, r.placements, r.weight, "; ".join(map(str, r.transitions)), n]
            for r, n in self.folded()
        ]
        tables: list[Any] = [["Every op with a weight or a collective", columns, rows]]
        for title, lines in self._lists():
            if title == "Fused":
                fusions = [[f.count, f.pattern, f.modules, f.source] for f in self.fusions]
                tables.append([title, ["times", "pattern", "modules", "source"], fusions])
            elif title not in ("A step by the cost model", "Memory of a rank", "Measured, one step"):  # which are drawn
                tables.append([title, [""], [[line] for line in lines]])
        elements = sum(math.prod(map(int, shape.split("x"))) for shape, _, _ in self.params.values() if shape)
        sent, ranks = list(self.collectives().values()), str(self.header.get("axis", "")).partition("=")[2]
        data = {
            "title": self.model or "megafx plan",
            "about": f"{elements:,} parameters, tensor-parallel over {ranks} rank{'' if ranks == '1' else 's'}",
            "header": self.header,
            "tables": tables,
            "sent": [sum(count for count, _ in sent), sum(size for _, size in sent)],
            "measured": [asdict(m) for m in self.measured],
        }
        return data | self._drawn()

    def _drawn(self) -> dict[str, Any]:
        empty = {"parts": [], "total_us": 0.0, "exposed_us": 0.0, "send_us": 0.0}
        if self.costed is None:
            return {"regions": [], "nodes": [], "edges": [], "memory": {}, "step": empty, "curve": None}
        return drawn_data(self.costed, self.step) | {"curve": asdict(self.curve())}

    def _lists(self) -> Iterable[tuple[str, list[str]]]:
        sent = [f"{k}: {n} x, {bytes_text(b)} sent by a rank" for k, (n, b) in self.collectives().items()]
        yield "Collectives a step" + (" as planned" if self.emitted is None else ""), sent
        whole: dict[str, list[str]] = defaultdict(list)
        for fqn, (shape, placement, why) in self.params.items():
            if not placement.startswith("S"):
                whole[f"{INDEX.sub('.*', fqn)} {shape}: {why}"].append(fqn)
        texts = [k + (f" ({len(v)} of them)" if len(v) > 1 else "") for k, v in whole.items()]
        if self.step is not None:
            step = self.step
            total, computing, waiting, sending = map(
                time_text, (step.total_us, step.compute_us, step.exposed_us, step.send_us)
            )
            waits = f"{waiting} waiting for collectives, of {sending} in which they run"
            if step.host_us > 0.005 * step.total_us:
                waits += f", {time_text(step.host_us)} waiting for launches of kernels"
            yield "A step by the cost model", [f"{total}: {computing} computing, {waits}"]
            kept = sum(self.costed.regions[n.region].times * n.kept for n in self.costed.nodes)
            held = self.costed.memory | ({"kept for backward, at most": kept} if kept else {})
            yield "Memory of a rank", [f"{kind}: {bytes_text(size)}" for kind, size in held.items()]
        yield "Measured, one step", [str(m) for m in self.measured]
        yield "Balance of experts, measured in one call", [str(b) for b in self.experts]
        yield "Stored whole on every rank", texts
        yield "Fused", [f"{f.count} x {f.pattern} in {f.modules}" for f in self.fusions]
        yield "Strategies taken away by policies and overrides", [f"{n} x {why}" for why, n in self.removed.items()]
        yield "Notes", self.notes


def refresh_notes(report: Report, notes: Iterable[Note]) -> None:
    """Bring in what later passes and the runtime noted."""
    report.notes = list(dict.fromkeys([*report.notes, *(str(n) for n in notes)]))


def refresh(report: Report, notes: Iterable[Note], program: Program | None) -> None:
    """Bring in the runtime's notes, and what passes did to the last compiled program."""
    refresh_notes(report, notes)
    if program is not None:
        refresh_notes(report, program.notes)
        report.fusions = fused(program.fusions)
        if program.recomputed is not None:
            report.header["kept for backward"] = str(program.recomputed)


def fused(fusions: Iterable[Fusion]) -> list[Fused]:
    """Matches by pattern and module; layers that differ in their index alone are one."""
    groups: dict[tuple[str, str], list[Fusion]] = defaultdict(list)
    for fusion in fusions:
        groups[fusion.pattern, INDEX.sub(".*", fusion.fqn)].append(fusion)
    return [
        Fused(pattern, folded_name(folded, [f.fqn for f in same]) or "<root>", len(same), str(same[0].source or ""))
        for (pattern, folded), same in groups.items()
    ]


# -- two reports, of pages or JSON files that `explain` wrote, compared line by line


def read_report(path: str | Path) -> dict[str, Any] | None:
    """The data of a report's page or JSON file; None where the file is another one. Raises UsageError where there is none."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file '{path}'", fix="give two saved plans, two reports or two dump folders")
    try:
        text = path.read_text()
        data = data_of(text) if text.startswith("<!doctype html>") else json.loads(text)
    except (ValueError, UnicodeDecodeError) as error:
        fix = "write one with `megafx explain --html FILE` or `--json FILE`, or a plan with `megafx plan --save FILE`"
        raise UsageError(f"'{path}' is no report and no plan: {error}", fix=fix) from error
    return data if isinstance(data, dict) and "tables" in data else None


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A line with - or + for each line of one report that the other does not have; '' where there is none."""
    a, b = list(_lines(before)), list(_lines(after))
    return "\n".join(difflib.unified_diff(a, b, "before", "after", lineterm="", n=0))


def _lines(data: dict[str, Any]) -> Iterator[str]:
    for name, value in data["header"].items():
        if name != "planning":  # how long it took
            yield f"{name}: {value}"
    yield from (f"{kind}: {bytes_text(size)}" for kind, size in data["memory"].items())
    for title, _, rows in data["tables"]:
        yield from (f"{title}: {' | '.join(map(str, row))}" for row in rows)
    for node in data["nodes"]:
        where = f"{data['regions'][node['region']]['name']} {node['module']} {node['label']}"
        yield f"{where}: {node['placements']}, {node['us']:.1f} us"
