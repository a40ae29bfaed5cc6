"""examples/tour.ipynb with its outputs: runs its cells, one after another, in one namespace.

python tests/house/notebook.py    write the outputs anew, after what the notebook shows has changed
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def read() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(PATH.read_text())
    return notebook


def printed(cell: dict[str, Any]) -> str:
    """What a cell printed when the notebook was written."""
    return "".join(text for output in cell["outputs"] for text in output["text"])


def run(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    torch.manual_seed(0)
    for number, cell in enumerate(c for c in notebook["cells"] if c["cell_type"] == "code"):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile("".join(cell["source"]), f"cell {number + 1}", "exec"), names)
        texts.append(re.sub(r" +$", "", shown.getvalue(), flags=re.MULTILINE))
    return texts


def alike(text: str) -> str:
    """A text without its numbers and what follows from them: times, prices and rounding may change."""
    words = " ".join(re.sub(r"[\u2500-\u257f|]", " ", text).split())
    words = re.sub(r"\([\w.]+\.(weight|bias)\)", "(#)", words)  # the gradient that is farthest off by rounding
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", words)


if __name__ == "__main__":
    notebook = read()
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(codes, run(notebook), strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        cell["execution_count"] = number
    PATH.write_text(json.dumps(notebook, indent=1) + "\n")
