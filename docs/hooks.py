"""Hooks of mkdocs: pages of the site that are made of other files of the repository, and links to them.

The README is the front page; benchmarks/RESULTS.md and the scripts of examples/ are pages too, so that every link of every page
leads to a page of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[\w-]+)?\))")
MADE = {"index.md": "README.md", "results.md": "benchmarks/RESULTS.md"}  # page of the site -> file of the repository
MADE |= {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MADE |= {
    f"examples/{file.stem}.md": f"examples/{file.name}" for file in sorted((ROOT / "examples").glob("*.[pi][yp]*"))
}
PAGE_OF = {file: page for page, file in MADE.items()}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for page, file in MADE.items():
        text = (ROOT / file).read_text()
        if file.endswith(".py"):
            text = f"---\nhide: [toc]\n---\n\n# {file}\n\n````python\n{text}````\n"  # room for lines of 128 characters
        elif file.endswith(".ipynb"):
            text = "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
        files.append(File.generated(config, page, content=text))
    return files


def _cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook: its text, or its code and what that printed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = "".join(text for output in cell["outputs"] for text in output["text"])
    return f"````python\n{source}\n````" + (f"\n\n````text\n{shown}````" if shown else "")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages; what a fence says beside its language is dropped."""
    here = page.file.src_uri
    source = MADE.get(here, f"docs/{here}")

    def rewritten(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        to = PAGE_OF.get(target, target.removeprefix("docs/"))
        return found[1] + posixpath.relpath(to, posixpath.dirname(here) or ".") + found[3]

    markdown = re.sub(r"^```(\w+) .+$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(r"```.*?```|" + LINK.pattern, lambda m: rewritten(m) if m[1] else m[0], markdown, flags=re.DOTALL)
