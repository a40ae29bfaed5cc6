"""Make the screenshots of docs/figures from the commands that docs/debugging.md names.

    pip install pillow                                       and Chromium
    python benchmarks/figures.py                             runs each command, and photographs its page
    python benchmarks/figures.py report_gpt2.png ...         these alone

docs/figures/figures.json says what each shows: the command, and the step and memory that it gave. The drawings (*.svg) of
docs/how_it_works.md are their own source.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from megafx.cli import main
from megafx.report.page import data_of

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
SHOWN = FOLDER / "figures.json"
LLAMA = (
    "megafx explain LlamaForCausalLM --set hidden_size=4096 --set intermediate_size=14336 --set num_attention_heads=32 "
    "--set num_key_value_heads=8 --set num_hidden_layers=32 --set vocab_size=128256 --tp 8 --seq 8192 --params-dtype bf16 "
    "--hardware h100-nvlink --predict-memory --html llama.html"
)
GPT2 = (
    "megafx explain GPT2LMHeadModel --tp 8 --seq 1024 --params-dtype bf16 --hardware h100-nvlink --predict-memory "
    "--html gpt2.html"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Figure:
    """A page that a command writes, at a size in pixels, light or dark. at: what its address says is shown; without: a CSS
    selector of what is left out."""

    command: str
    size: tuple[int, int]
    theme: str
    at: str = ""
    without: str = ""


GATE = "#in=model.layers.[0-31]&module=mlp&node=linear_4"
CHARTS = "#headline, #facts, .drawn > :nth-child(-n+4)"  # all before them
FIGURES = {
    "report_llama_8b.png": Figure(LLAMA, (1400, 1300), "light", GATE),
    "report_llama_8b_dark.png": Figure(LLAMA, (1400, 2040), "dark"),
    "report_gpt2.png": Figure(GPT2, (1400, 1960), "light"),
    "report_narrow.png": Figure(GPT2, (500, 1720), "light"),
    "report_narrow_dark.png": Figure(GPT2, (500, 1720), "dark", without=CHARTS),
}


@cache
def page_of(command: str) -> str:
    """The page that a command writes."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(StringIO()):
        assert main(shlex.split(command)[1:]) == 0, command
        (page,) = Path(folder).glob("*.html")
        return page.read_text()


def facts(page: str) -> dict[str, Any]:
    """What the head of a page says of the step and of memory."""
    data = data_of(page)
    curve = data["curve"]
    peak = sum(curve["held"].values()) + max(sum(point[1:]) for point in curve["points"])
    return {"step_us": data["step"]["total_us"], "peak_bytes": peak, "sent": data["sent"]}


def photograph(page: str, figure: Figure, path: Path) -> None:
    """Write a PNG of a page, with 256 colours."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser is not None, f"install one of {', '.join(BROWSERS)}"
    width, height = figure.size
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "page.html"
        text = page.replace("<html ", f'<html data-theme="{figure.theme}" ', 1)
        left_out = (
            f"<style>{figure.without} {{ display: none !important; }}</style></head>" if figure.without else "</head>"
        )
        shown.write_text(text.replace("</head>", left_out, 1))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/browser",
        ]
        taken = f"--screenshot={folder}/taken.png"
        command = [browser, *options, f"--window-size={width},{height}", taken, f"file://{shown}{figure.at}"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        Image.open(f"{folder}/taken.png").convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


if __name__ == "__main__":
    names = sys.argv[1:] or [*FIGURES]
    shown = json.loads(SHOWN.read_text()) if SHOWN.is_file() else {}
    for name in names:
        figure = FIGURES[name]
        photograph(page_of(figure.command), figure, FOLDER / name)
        shown[name] = {"command": figure.command, **facts(page_of(figure.command))}
        print(f"{name}: {os.path.getsize(FOLDER / name)} bytes, {shown[name]}")
    SHOWN.write_text(json.dumps({name: shown[name] for name in FIGURES}, indent=1) + "\n")
