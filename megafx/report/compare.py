"""Two reports, of pages or JSON files that `explain` wrote, compared line by line: facts, times, memory, placements, notes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megafx.errors import UsageError
from megafx.report.page import data_of
from megafx.report.report import bytes_text


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
