"""docs/errors.md, generated: every error that the sources raise, with what it says and what to do about it.

python tests/house/errors_page.py    write the page anew, after a text has changed
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megafx import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
HEAD = """# Errors

Every error of megafx is a `MegafxError`. Its text says what was found, where (the module of your model, and `file:line` with
the code), and after `fix:` what to do. `error.found`, `error.module`, `error.source` and `error.fix` give the same to programs.

This page is generated from the sources (`python tests/house/errors_page.py`), and a test compares it with them. `<...>` stands
for what an error fills in.
"""
CLASSES = {c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.MegafxError)}


def text_of(node: ast.expr | None, function: ast.AST, line: int) -> list[str]:
    """The texts that an expression may be: strings, with `<...>` for what is filled in; [] where that is not said here."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(p) for p in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [
                a + b
                for a in text_of(left, function, line) or ["<...>"]
                for b in text_of(right, function, line) or ["<...>"]
            ]
        case ast.IfExp(body=body, orelse=other):
            return text_of(body, function, line) + text_of(other, function, line)
        case ast.Call(func=ast.Name(id="or_leave_eager"), args=[first, *_]):
            return [f"{text}; or leave the module eager" for text in text_of(first, function, line)]
        case ast.Name(id=name):  # what was assigned since the last raise
            since = max(
                (n.lineno for n in ast.walk(function) if isinstance(n, ast.Raise) and n.lineno < line), default=0
            )
            given = [
                n.value
                for n in ast.walk(function)
                if isinstance(n, ast.Assign)
                and since <= n.lineno <= line
                and any(isinstance(t, ast.Name) and t.id == name for t in n.targets)
            ]
            texts = [
                text
                for value in given
                if not isinstance(value, ast.Name)
                for text in text_of(value, function, value.lineno - 1)
            ]
            return list(dict.fromkeys(texts))
    return []


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(part.value))
    return f"<{words[-1]}>" if words else "<...>"


def raised() -> Iterator[tuple[str, str, str]]:
    """(class, what was found, what to do) of each error that is made in the sources."""
    files = [f for folder in ("megafx", "passes", "patterns") for f in sorted((ROOT / folder).rglob("*.py"))]
    for file in files:
        tree = ast.parse(file.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for call in ast.walk(tree):
            if not (
                isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CLASSES and call.args
            ):
                continue
            around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
            function = max(around, key=lambda f: f.lineno, default=tree)
            fixes = [k.value for k in call.keywords if k.arg == "fix"]
            fix = " or: ".join(text_of(fixes[0], function, call.lineno)) if fixes else ""
            for found in text_of(call.args[0], function, call.lineno):
                yield call.func.id, found, fix


def page() -> str:
    entries: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for name, found, fix in raised():
        entries[name][found, fix] = None
    parts = [HEAD]
    for name, cls in CLASSES.items():
        if name == "MegafxError":
            continue
        cause = " ".join((cls.__doc__ or "").split())
        parts.append(f"## {name}\n\n{cause} {cls.what_to_do}\n\n| found | fix |\n|---|---|")
        rows = sorted(f"| {_cell(found)} | {_cell(fix)} |" for found, fix in entries[name])
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line and "`" not in line else line.replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
