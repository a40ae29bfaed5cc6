"""`megafx models`: run the model matrix of a checkout (tests/models) and print its table."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megafx
from megafx.errors import UsageError


def model_table(names: Sequence[str], jobs: int, some: bool, write: Path | None) -> int:
    """Print the table of these architectures (none named: all), write it as a page; 0 if all cells are exact.

    some: a tenth of the cells of each.
    """
    table = _table()
    known = list(importlib.import_module("catalogue").rows())
    chosen = [_find(name, known) for name in names]
    entries = []
    for entry in table.run(chosen, jobs, some):
        print(f"{entry.name}: {entry.exact} of {len(entry.results)} cells exact", file=sys.stderr, flush=True)
        entries.append(entry)
    print(table.markdown(entries))
    failures = table.failures(entries)
    for line in failures:
        print(line)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        command = f"megafx models {' '.join(names)}{' ' * bool(names)}{'--some ' * some}--write {write}"
        write.write_text(table.page(entries, command))
    return 1 if failures else 0


def _find(name: str, known: list[str]) -> str:
    """The row of this name, whatever its case and punctuation."""
    plain = lambda text: "".join(c for c in text.lower() if c.isalnum())  # noqa: E731
    for row in known:
        if plain(row) == plain(name):
            return row
    raise UsageError(f"the matrix has no architecture '{name}'", fix=f"architectures: {', '.join(known)}")


def _table() -> Any:
    """The module tests/models/table.py beside the installed package, or in the present folder."""
    for root in (Path(megafx.__file__).resolve().parents[1], Path.cwd()):
        tests = root / "tests"
        if (tests / "models" / "table.py").is_file():
            sys.path[:0] = [str(tests / "models"), str(tests)]
            return importlib.import_module("table")
    raise UsageError("the model matrix is part of megafx's repository", fix="run `megafx models` in a checkout of it")
