"""docs/api.md, generated: every public function and class with its docstring, and every field of Config.

python tests/house/api_page.py    write the page anew, after a docstring has changed
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import megafx
from megafx import testing
from megafx.analysis.memory import Memory
from megafx.config import GROUPS as CONFIG_GROUPS
from megafx.config import grouped_fields
from megafx.meter import Meter
from megafx.planner.plan import Plan
from megafx.report.report import Report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HEAD = """# Every function and option

What `import megafx` gives, with the docstrings of the sources (`python tests/house/api_page.py` writes this page, and a test
compares it with them). The model that `parallelize` returns has two more methods: `no_sync()` (accumulate gradients without
reducing them) and `print_readable(path)` (the rewritten graph of one module, as Python).
"""
GROUPS = {
    "Parallelize and train": [
        "parallelize", "pipeline", "Meter", "broadcast_data", "check_data", "full_gradients", "full_state_dict",
    ],
    "See": ["plan", "explain", "fp8_health", "search", "predict_memory", "profile", "diff", "load_model", "profile_hardware"],
    "Verify": ["verify", "rehearse", "sabotage", "replay", "debug", "MegafxError"],
    "Weights and checkpoints": [
        "load_safetensors", "initialize", "save_pretrained", "save_checkpoint", "load_checkpoint", "latest_checkpoint",
        "LoadedCheckpoint", "whole_parameters",
    ],
    "Extend": ["register_rule", "Pattern", "register_pattern"],
}  # fmt: skip
OBJECTS: dict[type, tuple[str, ...]] = {
    Report: ("table", "html", "trace", "to_json", "collectives", "memory"),
    Plan: ("placement_of", "diff", "save", "load"),
    Memory: (),
    Meter: ("start", "step"),
}
TESTING = ("graph", "run_pass", "expect", "assert_same")


def signature(name: str, of: Any) -> str:
    """`name(a, b: int = 1) -> T`, an argument a line where it is long."""
    found = inspect.signature(of)
    if inspect.isclass(of) and not dataclasses.is_dataclass(of):
        return f"class {name}"
    plain = lambda text: re.sub(r"\b(?:torch\.nn\.modules\.module|torch|nn|collections\.abc|typing)\.", "", text)
    kept = [p for p in found.parameters.values() if p.name != "self"]
    text = plain(str(found.replace(parameters=kept)).replace("'", ""))
    if len(text) + len(name) <= 110:
        return name + text
    parts, star = [], False
    for p in kept:
        if p.kind is p.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        parts.append(plain(str(p).replace("'", "")))
    end = "" if found.return_annotation is inspect.Signature.empty else plain(f" -> {found.return_annotation}")
    return f"{name}(\n" + "".join(f"    {p},\n" for p in parts) + ")" + end.replace("'", "")


def entry(name: str, of: Any, head: str = "###") -> str:
    doc = (inspect.getdoc(of) or "").replace("<", "&lt;")
    return f"{head} {name}\n\n```text\n{signature(name, of)}\n```\n\n{doc}\n"


def page() -> str:
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *(entry(name, getattr(megafx, name)) for name in names)]
    parts.append("## Config\n\nThe fields of `megafx.Config`. Each is an option of [the command](command.md) too.\n")
    for title, f in [(title, f) for title, fields in grouped_fields().items() for f in fields]:
        if f.name == CONFIG_GROUPS[title]:
            parts.append(f"\n### Config: {title}\n\n| field | default | what it is |\n|---|---|---|")
        made = f.default_factory() if f.default is dataclasses.MISSING else f.default  # type: ignore[misc]
        doc = f.metadata["doc"].replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        parts.append(f"| `{f.name}` | `{made!r}` | {doc} |")
    parts.append("\n## What they return\n")
    for cls, names in OBJECTS.items():
        parts.append(f"### {cls.__name__}\n\n{inspect.getdoc(cls)}\n")
        parts += [entry(name, getattr(cls, name), "####") for name in names]
    parts.append(
        "## Testing rules, patterns and passes\n\n`from megafx.testing import ...` ([extending](extending.md)).\n"
    )
    parts += [entry(name, getattr(testing, name)) for name in TESTING]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
