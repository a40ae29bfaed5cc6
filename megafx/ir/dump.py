"""Graphs as text: canonical (for goldens, dumps and diffs) and readable (for one module of the user's model).

Canonical text has neither FX names nor addresses, and dims that are symbols are shown by name:

    %0 = x                       # bf16[b 8/2] S1@tp
    %1 = w                       # bf16[8/2 6] S0@tp
    %2 = mm(%0, %1)              # bf16[b 6] P@tp
    %3 = transition(%2, P -> I)  # bf16[b 6] I@tp
    return %3

`8/2` is a dim of 8 cut over 2 ranks (each holds ceil(8/2); the placement says how it is cut).
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from megafx.errors import UsageError
from megafx.ir.contracts import is_transition, ranks_of
from megafx.ir.nodes import in_backward
from megafx.ir.program import MADE_BY, PLACEMENT, VAL, Input, Output, Phase, Program, fqn_of, source_of
from megafx.placements.types import Owned

AXIS = "tp"
_COLUMN = 100  # of comments; longer calls do not move it
_DTYPES = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}
_DTYPES |= {"int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool", "complex64": "c64", "complex128": "c128"}


def dtype_text(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def target_text(target: Any, *, qualified: bool = False) -> str:
    """aten.mm.default -> mm (qualified: aten.mm); aten.sum.dim_IntList -> sum.dim_IntList."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        overload = target._overloadname
        name += "" if overload in ("default", "Tensor") else f".{overload}"
        short = namespace in ("aten", "megafx", "_c10d_functional") and not qualified
        return name if short else f"{namespace}.{name}"
    name = getattr(target, "__name__", str(target))
    return f"operator.{name}" if getattr(operator, name, None) is target else name


def op_text(node: fx.Node) -> str:
    """For messages: 'linear (%x)' for an op, '%x' for an input."""
    return f"{target_text(node.target)} (%{node.name})" if node.op == "call_function" else f"%{node.name}"


class Shapes:
    """Texts of sizes, dtypes, placements of one program. Symbols without a name are d0, d1, ... as they appear."""

    def __init__(self, program: Program, t: int | None = None) -> None:
        self.program = program
        self.t = t if t is not None else ranks_of(program)
        sizes = program.sizes
        self._names = {symbol: name for name, symbol in sizes.symbols.items()}
        self._names |= {symbol: count.name for symbol, count in sizes.row_counts.items()}
        self._unnamed = 0

    def size(self, size: int | torch.SymInt) -> str:
        return str(size) if isinstance(size, int) else self.expr(size.node.expr)

    def expr(self, expr: sympy.Expr) -> str:
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._names:
                self._names[symbol] = f"d{self._unnamed}"
                self._unnamed += 1
        named = {s: sympy.Symbol(self._names[s], integer=True, positive=True) for s in expr.free_symbols}
        return str(expr.xreplace(named)).replace(" ", "")

    def value(self, value: Any, placement: Any = None) -> str:
        """A node's value: `bf16[4 8/2]`, `int s*768`, or a tuple of them."""
        if isinstance(value, torch.Tensor):
            dims = [self.size(n) for n in value.shape]
            cut = placement is not None and placement.is_shard and not isinstance(placement, Owned)
            if cut and self.t not in (None, 1):
                whole = self.program.sizes.expr(placement.cut.size)
                dims[placement.dim] = f"{self.expr(whole)}/{self.t}"
            return f"{dtype_text(value.dtype)}[{' '.join(dims)}]"
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return f"int {self.size(value)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.value(v) for v in value)})"
        return type(value).__name__

    def node(self, node: fx.Node) -> str:
        placement = node.meta.get(PLACEMENT)
        if VAL not in node.meta:
            return "no value"
        return self.value(node.meta[VAL], placement) + (f" {placement}@{AXIS}" if placement is not None else "")


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, names) for v in value)}]"
    if isinstance(value, slice):
        return ":".join("" if v is None else _argument(v, names) for v in (value.start, value.stop, value.step))
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, fx.GraphModule):
        return f"<graph of {len(value.graph.nodes)} nodes>"
    return repr(value)


def _call(node: fx.Node, names: dict[fx.Node, str], *, qualified: bool = False) -> str:
    if is_transition(node) and not qualified:
        x, src, dst = node.args[:3]
        return f"transition({_argument(x, names)}, {src} -> {dst})"
    arguments = [_argument(a, names) for a in node.args]
    arguments += [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    return f"{target_text(node.target, qualified=qualified)}({', '.join(arguments)})"


def text(program: Program, *, t: int | None = None, details: bool = False) -> str:
    """Canonical text of a program. details: also each node's [fqn], the user's line and the passes that made it."""
    shapes = Shapes(program, t)
    names: dict[fx.Node, str] = {}
    rows: list[tuple[str, str]] = []
    inputs = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        names[node] = f"%{len(names)}"
        comment = shapes.node(node)
        if node.op == "placeholder":
            spec = next(inputs)
            body = spec.name
            comment += "" if spec.kind == "user" else f" {spec.kind}"
        else:
            body = str(node.target) if node.op == "get_attr" else _call(node, names)
        if details:
            source, by = source_of(node), node.meta.get(MADE_BY)
            comment += f"  [{fqn_of(node)}]" if fqn_of(node) else ""
            comment += f"  {Path(source.file).name}:{source.line}" if source is not None else ""
            comment += f"  by {','.join(by)}" if by else ""
        rows.append((f"{names[node]} = {body}", comment))
    width = max((len(left) for left, _ in rows if len(left) <= _COLUMN), default=0)
    lines = [f"{left:<{width}}  # {comment}".rstrip() for left, comment in rows]
    returned = [_argument(v, names) for v in program.results()]
    if all(spec.kind == "user" for spec in program.outputs):
        return "\n".join([*lines, f"return {', '.join(returned)}"])
    specs = zip(returned, program.outputs, strict=True)
    return "\n".join([*lines, *(f"return {v}  # {spec.kind} {spec.name}" for v, spec in specs)])


def graph_text(program: Program, gm: fx.GraphModule) -> str:
    """The same with details, of a graph that the program was cut into."""
    inputs = [Input("user", node.name) for node in gm.graph.find_nodes(op="placeholder")]
    results: Any = gm.graph.output_node().args[0]
    outputs = [Output("user", "")] * len(results)
    return text(replace(program, gm=gm, inputs=inputs, outputs=outputs), details=True)


# -- diffs


@dataclass(frozen=True)
class _Line:
    """A canonical line: its text, the text with numbers and padding masked, the number it defines and those it uses."""

    text: str
    masked: str
    defines: str | None
    uses: tuple[str, ...]

    @staticmethod
    def of(line: str) -> _Line:
        body, mark, comment = line.partition("  #")
        numbers = re.findall(r"%\d+", body)
        defines = numbers[0] if re.match(r"%\d+ = ", body) else None
        masked = re.sub(r"%\d+", "%", body.rstrip() + mark + comment)
        return _Line(line.rstrip(), masked, defines, tuple(numbers[1:] if defines else numbers))


def diff(before: str, after: str, *, context: int = 2) -> str:
    """Unified diff of two canonical texts ('' when equal). Mere renumbering is no change; another operand is one."""
    old, new = ([_Line.of(line) for line in side.splitlines()] for side in (before, after))
    matcher = SequenceMatcher(None, [a.masked for a in old], [b.masked for b in new], autojunk=False)
    pairs = [(m.a + i, m.b + i) for m in matcher.get_matching_blocks() for i in range(m.size)]
    forward = {old[i].defines: new[j].defines for i, j in pairs}
    matched = set(forward.values())

    def same(i: int, j: int) -> bool:
        """Operands correspond; two operands that are both without counterpart are one replaced value."""
        uses = zip(old[i].uses, new[j].uses, strict=True)
        return all(forward[a] == b if a in forward else b not in matched for a, b in uses)

    rows: list[tuple[str, str]] = []
    i = j = 0
    for a, b in [*(pair for pair in pairs if same(*pair)), (len(old), len(new))]:
        rows += [("-", line.text) for line in old[i:a]]
        rows += [("+", line.text) for line in new[j:b]]
        if b < len(new):
            rows.append((" ", new[b].text))
        i, j = a + 1, b + 1
    changed = [n for n, (sign, _) in enumerate(rows) if sign != " "]
    shown = sorted({n for c in changed for n in range(max(0, c - context), min(len(rows), c + context + 1))})
    lines: list[str] = []
    for previous, n in zip([-1, *shown], shown, strict=False):
        if n != previous + 1:
            lines.append("  ...")
        lines.append(f"{rows[n][0]} {rows[n][1]}")
    return "\n".join(lines)


def diff_folders(before: str | Path, after: str | Path) -> str:
    """Diff of two dump folders, graph by graph ('' when equal)."""
    before, after = Path(before), Path(after)
    for folder in (before, after):
        if not folder.is_dir():
            raise UsageError(f"'{folder}' is not a dump folder", fix="make one with MEGAFX_DUMP=<folder>")
    names = sorted({p.relative_to(folder) for folder in (before, after) for p in folder.rglob("*.txt")})
    sections = []
    for name in names:
        sides = [(folder / name).read_text() if (folder / name).exists() else "" for folder in (before, after)]
        body = diff(*sides)
        if body:
            sections.append(f"--- {before / name}\n+++ {after / name}\n{body}")
    return "\n\n".join(sections)


# -- readable code


def readable(program: Program, fqn: str = "", *, t: int | None = None) -> str:
    """The part of a program under one module path ('' is all of it), as readable Python.

    Each line has its value's shape and placement and the passes that made it; the user's lines are above their nodes.
    """
    prefix = f"{fqn}." if fqn else ""
    calls = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    inside = [n for n in calls if not fqn or fqn_of(n) == fqn or fqn_of(n).startswith(prefix)]
    if not inside:
        known = sorted({fqn_of(n) for n in calls})
        near = ", ".join(f"'{k}'" for k in get_close_matches(fqn, known, n=3)) or f"for example '{known[-1]}'"
        raise UsageError(f"no node of the graph belongs to module '{fqn}'", fix=f"modules with nodes: {near}")
    shapes = Shapes(program, t)
    parts = [_function(program, shapes, [n for n in inside if not in_backward(n)], fqn, "forward")]
    backward = [n for n in inside if in_backward(n)]
    if backward:
        parts.append(_function(program, shapes, backward, fqn, "backward"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _function(program: Program, shapes: Shapes, nodes: list[fx.Node], fqn: str, name: str) -> str:
    """One direction of a region as a function of the values that come from outside of it."""
    if not nodes:
        return ""
    names = {n: n.name for n in program.graph.nodes}
    members = set(nodes)
    incoming = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in members))
    outgoing = [n.name for n in nodes if any(user not in members for user in n.users)]
    specs = dict(program.input_nodes())
    lines = [f"# {name} of '{fqn or '<root>'}': {len(nodes)} nodes, phase {Phase(program.phase).name}", f"def {name}("]
    width = max((len(n.name) for n in incoming), default=0) + 1
    for node in incoming:
        spec = specs.get(node)
        origin = f"{spec.kind} {spec.name}" if spec else f"from {fqn_of(node) or '<root>'}"
        lines.append(f"    {node.name + ',':<{width}}  # {shapes.node(node)}, {origin}")
    lines.append("):")
    calls = (_call(n, names, qualified=True) if n.op == "call_function" else str(n.target) for n in nodes)
    bodies = [f"    {n.name} = {call}" for n, call in zip(nodes, calls, strict=True)]
    width = min(max(len(b) for b in bodies), 72)
    line_of_user = None
    for node, body in zip(nodes, bodies, strict=True):
        source = source_of(node)
        if source is not None and source != line_of_user:
            lines.append(f"    # {source}")
            line_of_user = source
        by = f"; {', '.join(node.meta[MADE_BY])}" if node.meta.get(MADE_BY) else ""
        lines.append(f"{body:<{width}}  # {shapes.node(node)}{by}")
    return "\n".join([*lines, f"    return {', '.join(outgoing)}"])
