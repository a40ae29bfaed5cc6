"""Errors by their rows on docs/errors.md: a test raises one, and then does what its `fix` says.

    with refused("'<text>' is no placement"):
        megafx.testing.placement("X")

tests/house/test_advice.py counts the rows that are named so.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from errors_page import CLASSES, PAGE

from megafx.errors import MegafxError

LEAVE_EAGER, CLOSE = "; or leave the module eager", "did you mean <close>? "


@cache
def rows() -> list[tuple[str, str, str]]:
    """(class, what was found, what to do) of every row of the page."""
    found = []
    for line in PAGE.read_text().partition("\n## ")[2].splitlines():
        if line.startswith("| ") and not line.startswith("| found "):
            row, fix, name = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
            found.append((plain(name), plain(row), plain(fix)))
    return found


def rows_of(found: str) -> list[tuple[str, str, str]]:
    """The rows whose first column begins with this text."""
    return [row for row in rows() if row[1].startswith(found)]


def plain(cell: str) -> str:
    return html.unescape(cell).removeprefix("`").removesuffix("`") if cell.startswith("`") else html.unescape(cell)


def _pattern(text: str) -> str:
    eager = text.endswith(LEAVE_EAGER)
    close = text.startswith(CLOSE)
    parts = re.split(r"<[^<>]*>", text.removesuffix(LEAVE_EAGER).removeprefix(CLOSE))
    body = r"[\s\S]*".join(re.escape(part).replace(r"\ ", r"\s+") for part in parts)
    return (r"(did you mean .*\? ?)?" if close else "") + body + (r"[\s\S]*" if eager else "")


@contextmanager
def refused(found: str) -> Iterator[list[MegafxError]]:
    """An error of such a row is raised inside, with its text and its advice; the list has it afterwards."""
    caught: list[MegafxError] = []
    wanted = rows_of(found)
    assert wanted, f"docs/errors.md has no row that begins with {found!r}"
    try:
        yield caught
    except tuple(CLASSES[name] for name, _, _ in wanted) as error:
        caught.append(error)
        text, advice = str(error.found), error.fix
        kinds = (type(error), type(error).__base__)  # a CaptureError may be a RuntimeError, too, as eager mode's is
        fitting = [fix for name, row, fix in wanted if re.match(_pattern(row), text) and CLASSES[name] in kinds]
        assert fitting, f"another error than {found!r}: {error}"
        ways = [way for fix in fitting for way in fix.split(" or: ")]
        assert any(re.match(_pattern(way), advice) for way in ways), f"other advice than {ways}: {advice}"
    else:
        raise AssertionError(f"no error {found!r}")
