"""Covers: docs/figures and benchmarks/figures.py: the pictures are those of the commands beside them."""

from __future__ import annotations

import json
import re
import shlex
import struct
from pathlib import Path

import pytest
from figures import FIGURES, FOLDER, SHOWN, facts, page_of

TEXT = (FOLDER.parent / "debugging.md").read_text()
COMMANDS = sorted({figure.command for figure in FIGURES.values()})


def test_pictures_are_made_by_the_commands_of_the_page() -> None:
    """Each is in the page, after its command; it is small, of the size that is asked for, and made by that command."""
    assert {path.name for path in FOLDER.glob("*.png")} == {*FIGURES} == {*re.findall(r"figures/(\w+\.png)", TEXT)}
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    written = [shlex.join(shlex.split(block.replace("\\\n", " "))) for block in blocks]
    shown = json.loads(SHOWN.read_text())
    for name, figure in FIGURES.items():
        assert written.count(shlex.join(shlex.split(figure.command))) == 1, figure.command
        data = Path(FOLDER / name).read_bytes()
        assert len(data) < 200_000 and struct.unpack(">II", data[16:24]) == figure.size, name
        assert shown[name]["command"] == figure.command, "run `python benchmarks/figures.py`"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=["gpt2", "llama"])
def test_pictures_are_of_today(command: str) -> None:
    """Step, peak of memory, and bytes sent are still those that the pictures show."""
    now = facts(page_of(command))
    for name, shown in json.loads(SHOWN.read_text()).items():
        if shown["command"] == command:
            wanted = {key: value for key, value in shown.items() if key != "command"}
            assert now["sent"] == wanted.pop("sent"), f"run `python benchmarks/figures.py {name}`"
            assert {k: now[k] for k in wanted} == pytest.approx(wanted, rel=5e-3), (
                f"run `python benchmarks/figures.py {name}`"
            )
