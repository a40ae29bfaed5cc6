"""docs/errors.md, generated: every error that the sources raise, with what it says and what to do about it.

python tests/house/errors_page.py    write the page anew, after a text has changed
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megafx import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
HEAD = """# Errors

Every error of megafx is a `MegafxError`. Its text says what was found, where (the module of your model, and `file:line` with
the code), and after `fix:` what to do. `error.found`, `error.module`, `error.source` and `error.fix` give the same to programs.
What eager mode raises as a RuntimeError, TypeError or the like is a `CaptureError` that is of that class, too.

Errors are listed by topic; `<...>` is replaced by what was found. The page is generated from the sources
(`python tests/house/errors_page.py`), and a test compares it with them.
"""
# title -> (what its errors are about, the files that raise them); a file belongs to the first topic that names it
TOPICS: dict[str, tuple[str, str]] = {
    "Options": (
        "A field of `Config`, an environment variable or a hardware profile.",
        "megafx/config.py megafx/debugging.py megafx/planner/hardware megafx/planner/fusion_profile.py",
    ),
    "The command, models by name, reports": (
        "What a command or one of the functions that plan, search and report was given.",
        "megafx/cli.py megafx/named_model.py megafx/measure.py megafx/what_if.py megafx/profiling.py megafx/replaying.py "
        "megafx/report megafx/api.py",
    ),
    "The code of your model": (
        "Code that a graph cannot hold, or operations that are given what they do not take. `Config(eager_modules=[...])` "
        "leaves a module out of the graph.",
        "megafx/capture megafx/ops/eager_call.py megafx/ops/hook_call.py megafx/ops/tapes.py megafx/analysis megafx/kernels "
        "megafx/ir/call_spec.py megafx/ir/sizes.py passes/canonicalize passes/experts passes/backward",
    ),
    "Plans and memory": (
        "Overrides that cannot be met, files of plans, memory budgets, recompute and offload.",
        "megafx/planner megafx/placements passes/plan passes/recompute megafx/compiler/pipeline.py "
        "megafx/compiler/choose.py",
    ),
    "Pipelines": (
        "What `megafx.pipeline` and `step` were given, and models that cannot be cut ([pipelines](pipelines.md)).",
        "megafx/pipelining.py megafx/staging.py megafx/rehearsal_of_stages.py megafx/compiler/cut_stages.py",
    ),
    "Calls of a parallelized model": (
        "What is done with the model, its parameters and its outputs after `megafx.parallelize`.",
        "megafx/runtime megafx/compiler megafx/integrations megafx/ops",
    ),
    "Ranks": ("Process groups, meshes, data, and ranks that do different things.", "megafx/distributed"),
    "Weights": ("Safetensors files, constructors, weights of a whole model.", "megafx/weights"),
    "Checkpoints": ("Saving, loading and converting.", "megafx/checkpoint"),
    "Rules, patterns, passes and tests of your own": (
        "What extends megafx, and what checks it ([extending](extending.md)).",
        "megafx passes patterns",
    ),
}
CLASSES = {c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.MegafxError)}
CLASSES = {name: c for name, c in CLASSES.items() if c not in errors.ALSO.values()}  # forms of CaptureError


@dataclass
class Source:
    """A file: its functions, and the values that it names at its top."""

    path: Path
    tree: ast.Module
    functions: list[ast.FunctionDef] = field(init=False)
    calls: list[ast.Call] = field(init=False)
    constants: dict[str, ast.expr] = field(init=False)

    def __post_init__(self) -> None:
        nodes = list(ast.walk(self.tree))
        self.functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
        self.calls = [n for n in nodes if isinstance(n, ast.Call)]
        self.constants = {
            t.id: n.value
            for n in self.tree.body
            if isinstance(n, ast.Assign)
            for t in n.targets
            if isinstance(t, ast.Name)
        }


@dataclass
class Place:
    """A line of a file, and the innermost function around it (None at the top of the file)."""

    source: Source
    line: int
    function: ast.FunctionDef | None = field(init=False)

    def __post_init__(self) -> None:
        around = [f for f in self.source.functions if f.lineno <= self.line <= (f.end_lineno or 0)]
        self.function = max(around, key=lambda f: f.lineno, default=None)

    def assigned(self) -> list[ast.Assign]:
        """The assignments since the last `raise` of the function."""
        inside = list(ast.walk(self.function)) if self.function else []
        since = max((n.lineno for n in inside if isinstance(n, ast.Raise) and n.lineno < self.line), default=0)
        return [n for n in inside if isinstance(n, ast.Assign) and since <= n.lineno <= self.line]


@cache
def sources() -> list[Source]:
    files = [f for folder in ("megafx", "passes", "patterns") for f in sorted((ROOT / folder).rglob("*.py"))]
    return [Source(file, ast.parse(file.read_text())) for file in files]


@cache
def callers() -> dict[str, list[tuple[Source, ast.Call]]]:
    """The calls of a function or method, by its name."""
    found: dict[str, list[tuple[Source, ast.Call]]] = defaultdict(list)
    for source in sources():
        for call in source.calls:
            if isinstance(call.func, (ast.Name, ast.Attribute)):
                found[call.func.id if isinstance(call.func, ast.Name) else call.func.attr].append((source, call))
    return found


@cache
def imported() -> dict[str, ast.expr]:
    """The texts that a file may take from another one."""
    return {name: value for source in sources() for name, value in source.constants.items() if name.isupper()}


def text_of(node: ast.expr | None, place: Place) -> list[str]:
    """The texts that an expression may be: strings, with `<...>` for what is filled in; [] where that is not said here."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(p) for p in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in text_of(left, place) or ["<...>"] for b in text_of(right, place) or ["<...>"]]
        case ast.IfExp(body=body, orelse=other):
            return text_of(body, place) + text_of(other, place)
        case ast.BoolOp(values=values):
            return [text for value in values for text in text_of(value, place)]
        case ast.Call(func=ast.Name(id="or_leave_eager"), args=[first, *_]):
            return [f"{text}; or leave the module eager" for text in text_of(first, place)]
        case ast.Call(func=ast.Name(id="did_you_mean")):
            return ["did you mean <close>? "]
        case ast.Subscript(value=value):  # the first characters
            return text_of(value, place)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=[first, *_])]):
            return [f"{text} <...>" for text in text_of(first, place)]
        case ast.Call(func=ast.Attribute(value=value, attr="strip")):
            return [text.strip() for text in text_of(value, place)]
        case ast.Name(id=name):
            given = [
                n.value for n in place.assigned() if any(isinstance(t, ast.Name) and t.id == name for t in n.targets)
            ]
            texts = [
                text
                for value in given
                if not isinstance(value, ast.Name)
                for text in text_of(value, Place(place.source, value.lineno - 1))
            ]
            constant = place.source.constants.get(name) or imported().get(name)
            return list(dict.fromkeys(texts)) if given or constant is None else text_of(constant, place)
    return []


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(part.value))
    return f"<{words[-1]}>" if words else "<...>"


def rows(found: ast.expr, fix: ast.expr | None, place: Place) -> Iterator[tuple[str, str]]:
    """(what was found, what to do) of an error that is made there, once for each text that these may be."""
    names = [x.id for x in (found, fix) if isinstance(x, ast.Name)]
    for node in place.assigned():  # found, fix = ...
        if isinstance(node.targets[0], ast.Tuple) and [ast.unparse(t) for t in node.targets[0].elts] == names:
            yield from _pairs(node.value, place)
            return
    arguments = [a.arg for a in (*place.function.args.args, *place.function.args.kwonlyargs)] if place.function else []
    passed = set(names) & set(arguments) - {
        t.id for n in place.assigned() for t in n.targets if isinstance(t, ast.Name)
    }
    if place.function and passed:  # by callers of a function that makes the error
        called = arguments[arguments[:1] == ["self"] :]
        for source, call in callers().get(place.function.name, ()):
            given = dict(zip(called, call.args, strict=False)) | {k.arg or "": k.value for k in call.keywords}
            a, b = (given.get(x.id) if isinstance(x, ast.Name) and x.id in passed else x for x in (found, fix))
            if a is not None:
                yield from rows(a, b, Place(source, call.lineno))
        return
    fixes = " or: ".join(filter(None, text_of(fix, place)))
    yield from ((text, fixes) for text in text_of(found, place))


def _pairs(value: ast.expr, place: Place) -> Iterator[tuple[str, str]]:
    """The rows of a tuple, of a name of one, or of a function that returns one."""
    match value:
        case ast.Tuple(elts=[found, fix]):
            yield from rows(found, fix, place)
        case ast.Name(id=name) if name in place.source.constants:
            yield from _pairs(place.source.constants[name], place)
        case ast.IfExp(body=body, orelse=other):
            yield from (*_pairs(body, place), *_pairs(other, place))
        case ast.Call(func=ast.Name(id=name)):
            for function in place.source.functions:
                for node in ast.walk(function):
                    if function.name == name and isinstance(node, ast.Return) and node.value is not None:
                        yield from _pairs(node.value, Place(place.source, node.lineno))


def raised() -> Iterator[tuple[str, str, str, str]]:
    """(topic, what was found, what to do, class) of each error that is made in the sources."""
    for source in sources():
        for call in source.calls:
            match call:
                case ast.Call(func=ast.Name(id=name), args=[found, *_]) if name in CLASSES:
                    fix = next((k.value for k in call.keywords if k.arg == "fix"), None)
                    topic = topic_of(source.path)
                    yield from ((topic, *row, name) for row in rows(found, fix, Place(source, call.lineno)))


def topic_of(file: Path) -> str:
    path = str(file.relative_to(ROOT))
    fits = lambda name: path == name or path.startswith(name + "/")
    return next(topic for topic, (_, names) in TOPICS.items() if any(map(fits, names.split())))


def table() -> dict[str, list[tuple[str, str, str]]]:
    """Topic -> (what was found, what to do, class) of its errors, as the page has them."""
    entries: dict[str, set[tuple[str, str, str]]] = defaultdict(set)
    for topic, found, fix, name in raised():
        entries[topic].add((_cell(found), _cell(fix), f"`{name}`"))
    return {topic: sorted(entries[topic]) for topic in TOPICS}


def page() -> str:
    parts = [HEAD, "| class | when | what to do |\n|---|---|---|"]
    for name, cls in CLASSES.items():
        cause = " ".join((cls.__doc__ or "").split())
        cause = "Anything else, of a pass of your own for instance." if cls is errors.MegafxError else cause
        parts.append(f"| `{name}` | {cause} | {cls.what_to_do} |")
    for topic, rows_ in table().items():
        parts.append(f"\n## {topic}\n\n{TOPICS[topic][0]}\n\n| found | fix | class |\n|---|---|---|")
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows_))
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line and "`" not in line else line.replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
