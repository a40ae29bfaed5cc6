"""The plan: a placement for every value of one graph, as a plain object that can be printed, saved, compared and loaded.

A plan names nodes by their graph name and parameters by FQN. Layout sizes that depend on batch or sequence are written as
expressions of those names, so a plan saved today loads on a graph captured tomorrow.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
from torch.utils._sympy import functions

from megafx.errors import PlanError
from megafx.ir.sizes import Sizes
from megafx.placements.types import Layout, Owned, Placement, S, owned

FORMAT = 3  # version of the JSON form
INDEX = re.compile(r"\.\d+(?=\.|$)")  # of a layer, in a module path
LEGEND = """\
operands -> result, the dim of the op's rule that is cut, [transitions of the result]. Placements: I whole on every rank, its
gradient too; R whole, gradients are summed over ranks; S<d> cut on dim d, S0/3*(4x32) in blocks (3 times 4 heads of 32);
P every rank has a summand. `megafx explain` gives reasons, bytes and times.
"""


def innermost(fqn: str, modules: Container[str]) -> tuple[str, str] | None:
    """(the innermost of these modules that a module is in, or is; its path in that); None where it is in none."""
    parts = fqn.split(".")
    found = ((".".join(parts[:end]), ".".join(parts[end:])) for end in range(len(parts), 0, -1))
    return next((pair for pair in found if pair[0] in modules), None)


def folded_name(pattern: str, fqns: list[str]) -> str:
    """`h.0.mlp` .. `h.11.mlp`, whose pattern is `h.*.mlp`, are `h.[0-11].mlp`."""
    first, last = (re.findall(r"(?<=\.)\d+(?=\.|$)", fqn) for fqn in (fqns[0], fqns[-1]))
    name = pattern
    for a, b in zip(first, last, strict=False):
        name = name.replace(".*", f".{a}" if a == b else f".[{a}-{b}]", 1)
    some, spans = len({*fqns}), re.findall(r"\[(\d+)-(\d+)\]", name)
    return name if math.prod(int(b) - int(a) + 1 for a, b in spans) == some else f"{name} ({some} of them)"


@dataclass(frozen=True)
class OpChoice:
    """The strategy of one op. ins: one placement per operand of its rule; factor: the factor that is sharded, if one is."""

    ins: tuple[Placement, ...]
    out: Placement
    factor: str = ""
    fqn: str = ""
    note: str = ""


@dataclass(frozen=True)
class Transition:
    """One transition of a value: from a placement that it has to one that a user wants."""

    src: Placement
    dst: Placement


@dataclass(frozen=True)
class Removal:
    """Strategies that a policy or an override took away from an op or a parameter, and why."""

    node: str
    fqn: str
    count: int
    reason: str


@dataclass
class Plan:
    """placement of everything on axis `axis` of size `t`.

    params: FQN -> storage placement (I or S). experts: those of which each expert-parallel rank holds its experts alone: -1, or
    of a parameter of one expert the rank that holds it.
    ops: node name -> OpChoice. transitions: node name -> transitions of its value, in the order in which they are made.
    Microseconds, modelled: cost_us, what the solver minimises; step_us, a step by its timeline. flat_tokens: the plan is of a
    graph in which the tokens are one dim (`flatten_tokens`).
    """

    t: int
    axis: str = "tp"
    sequence_parallel: bool = False
    flat_tokens: bool = False
    params: dict[str, Placement] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    ops: dict[str, OpChoice] = field(default_factory=dict)
    transitions: dict[str, tuple[Transition, ...]] = field(default_factory=dict)
    removals: list[Removal] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)  # FQN or node -> why it is not sharded
    cost_us: float = 0.0
    step_us: float = 0.0
    hardware: str = ""
    workload: dict[str, int] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes, repr=False)  # what the symbols in layouts mean
    report: Any = field(default=None, repr=False)  # megafx.report.report.Report of the graph that was planned

    def placement_of(self, param: str) -> Placement:
        """Storage placement of a parameter by FQN; raises PlanError for an unknown one."""
        if param not in self.params:
            close = difflib.get_close_matches(param, self.params, 3)
            fix = f"did you mean {', '.join(close)}?" if close else ""
            raise PlanError(f"the plan has no parameter '{param}'", fix=fix)
        return self.params[param]

    def __str__(self) -> str:
        """Layers that are alike are one, with a legend, and the notes of the report where there is one."""
        params: dict[Any, list[str]] = {}
        for fqn, p in self.params.items():
            params.setdefault((INDEX.sub(".*", fqn), self.text_of(p)), []).append(fqn)
        ops: dict[Any, list[str]] = {}
        seen: Counter[tuple[str, str]] = Counter()
        for name, op in self.ops.items():
            kind = re.sub(r"_\d+$", "", name)
            seen[op.fqn, kind] += 1  # ops of one module stay apart
            ops.setdefault((INDEX.sub(".*", op.fqn), kind, self._choice(name, op), seen[op.fqn, kind]), []).append(
                op.fqn
            )
        names = {key: folded_name(key[0], fqns) for group in (params, ops) for key, fqns in group.items()}
        wide = min(max(map(len, names.values()), default=0), 48)
        lines = [self._head(), "parameters, as they are stored"]
        lines += [f"  {names[key]:{wide}s} {key[1]}" for key in params]
        lines += [f"ops: {LEGEND}".rstrip()]
        lines += [f"  {names[key] or '<root>':{wide}s} {key[1]:24s} {key[2]}" for key in ops]
        notes = [] if self.report is None else self.report.notes
        return "\n".join(lines + (["notes", *(f"  {note}" for note in notes)] if notes else []))

    def _head(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.workload.items())
        what = f"sequence_parallel={self.sequence_parallel}, hardware {self.hardware}"
        return f"plan on {self.axis}={self.t}{sizes}, {what}"

    def _choice(self, name: str, op: OpChoice) -> str:
        ins = ", ".join(map(self.text_of, op.ins))
        moves = "  ".join(f"[{self.text_of(c.src)}->{self.text_of(c.dst)}]" for c in self.transitions.get(name, ()))
        return f"{ins} -> {self.text_of(op.out)}  {op.factor}  {moves}".rstrip()

    def lines(self) -> list[str]:
        """Each parameter and each op by itself."""
        lines = [self._head(), *(f"  {fqn:48s} {self.text_of(p)}" for fqn, p in self.params.items())]
        return lines + [f"  {name:32s} {self._choice(name, op)}" for name, op in self.ops.items()]

    def text_of(self, placement: Placement) -> str:
        """'S2' where the cut follows from the dim's size (elements in t ranges), else with it: 'S0/3*(25x64)'."""
        if not placement.is_shard:
            return placement.kind
        if isinstance(placement, Owned):
            return str(placement)
        cut, text = placement.cut, self.sizes.text
        if cut.simple() and (cut.blocks[0].unit == 1 or not cut.padded(self.t)):
            return placement.tag
        return f"{placement.tag}/{cut.text(text)}"

    def diff(self, other: Plan) -> str:
        """Unified diff of the two plans' text; empty when they place everything alike."""
        a, b = self.lines(), other.lines()
        return "\n".join(difflib.unified_diff(a, b, "this", "other", lineterm="", n=0))

    def to_json(self) -> str:
        sizes = _SizeText(self.sizes)

        def texts(placements: Iterable[Placement]) -> list[list[Any]]:
            return [_encode(p, sizes) for p in placements]

        plain = ("t", "axis", "sequence_parallel", "flat_tokens", "hardware", "workload", "cost_us", "experts")
        data: dict[str, Any] = {"format": FORMAT} | {name: getattr(self, name) for name in plain}
        data["params"] = {k: _encode(p, sizes) for k, p in self.params.items()}
        data["ops"] = {
            k: {"ins": texts(o.ins), "out": _encode(o.out, sizes), "factor": o.factor, "fqn": o.fqn, "note": o.note}
            for k, o in self.ops.items()
        }
        data["conversions"] = {k: [texts((c.src, c.dst)) for c in v] for k, v in self.transitions.items()}
        data["replicated"] = self.replicated
        data["removals"] = [[r.node, r.fqn, r.count, r.reason] for r in self.removals]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str, sizes: Sizes | None = None) -> Plan:
        """sizes: of the graph that the plan is for; without, the plan can be read and compared but not applied.

        Nothing in the text is run. Raises PlanError where it is no plan of this version.
        """
        try:
            return Plan._of(json.loads(text), Sizes() if sizes is None else sizes)
        except PlanError:
            raise
        except Exception as error:  # whatever json, ast and sympy raise
            found = f"this is no plan: {type(error).__name__}: {str(error)[:200]}"
            raise PlanError(found, fix="plan again, and save the plan with Plan.save") from error

    @staticmethod
    def _of(data: dict[str, Any], sizes: Sizes) -> Plan:
        if (found := data.pop("format", None)) != FORMAT:
            raise PlanError(f"plan format {found!r}, expected {FORMAT}", fix="plan again")
        if wrong := [
            f"{name} is {data[name]!r:.80}" for name, kinds in _KINDS.items() if type(data[name]) not in kinds
        ]:
            raise ValueError("; ".join(wrong))
        if data["t"] < 1 or any(type(size) is not int for size in data["workload"].values()):
            raise ValueError(f"t is {data['t']}, the workload {data['workload']!r:.80}")
        for name in data["workload"]:
            sizes.symbols.setdefault(name, sympy.Symbol(name, integer=True, positive=True))
        reader = _SizeText(sizes)

        def all_of(items: Iterable[list[Any]]) -> tuple[Placement, ...]:
            return tuple(_decode(p, reader) for p in items)

        if any(type(rank) is not int for rank in data["experts"].values()):
            raise ValueError(f"experts are {data['experts']!r:.80}")
        data["params"] = {k: _decode(p, reader) for k, p in data["params"].items()}
        data["ops"] = {
            k: OpChoice(all_of(o["ins"]), _decode(o["out"], reader), o["factor"], o["fqn"], o["note"])
            for k, o in data["ops"].items()
        }
        conversions = data.pop("conversions")
        data["transitions"] = {k: tuple(Transition(*all_of(c)) for c in v) for k, v in conversions.items()}
        data["removals"] = [Removal(*r) for r in data["removals"]]
        return Plan(**data, sizes=sizes)

    def bind(self, sizes: Sizes) -> Plan:
        """The same plan in the sizes of another capture of the graph."""
        return Plan.from_json(self.to_json(), sizes)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan saved at `path`; a PlanError names the file."""
        fix = "give the file that Plan.save wrote"
        try:
            size = Path(path).stat().st_size
            if size > _LARGEST_FILE:
                found = f"'{path}' has {size / 2**20:.0f} MiB; a plan has {_LARGEST_FILE / 2**20:.0f} MiB at most"
                raise PlanError(found, fix=fix)
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}", fix=fix) from error
        try:
            return Plan.from_json(text)
        except PlanError as error:
            raise PlanError(f"'{path}': {error.found}", fix=error.fix) from error


_LARGEST_FILE = 2**28  # a plan of 1,000 layers takes some MiB
_KINDS: dict[str, tuple[type, ...]] = {  # of the entries of a saved plan
    **{"t": (int,), "axis": (str,), "sequence_parallel": (bool,), "flat_tokens": (bool,), "hardware": (str,)},
    **dict.fromkeys(("workload", "params", "experts", "ops", "conversions", "replicated"), (dict,)),
    **{"removals": (list,), "cost_us": (int, float)},
}

_CALLS: dict[str, Callable[..., sympy.Expr]] = {  # functions of sizes, by the names that sympy prints
    **{name: getattr(functions, name) for name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing")},
    **{name: getattr(functions, name) for name in ("Max", "Min", "CeilToInt", "FloorToInt", "IntTrueDiv")},
    **{"floor": sympy.floor, "ceiling": sympy.ceiling},
}
_OPERATORS: dict[type[ast.AST], Callable[..., sympy.Expr]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: functions.FloorDiv,
    ast.USub: lambda a: -a,
}
_LONGEST, _LARGEST_POWER = 1000, 8  # characters of an expression; of batch**2


class _SizeText:
    """Structural sizes as JSON: integers, or expressions in the names of their symbols."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.name_of = {s: sympy.Symbol(name, integer=True, positive=True) for name, s in sizes.symbols.items()}
        self.symbols = {str(s): s for s in (*sizes.workload_of, *sizes.row_counts)} | sizes.symbols

    def encode(self, size: int) -> int | str:
        return size if self.sizes.is_static(size) else str(self.sizes.expr(size).xreplace(self.name_of))

    def decode(self, size: int | str) -> int:
        if type(size) is int:
            return size
        if not isinstance(size, str) or len(size) > _LONGEST:
            raise ValueError(f"{str(size)[:80]!r} is no size")
        return self.sizes.of_expr(self._expr(ast.parse(size.strip(), mode="eval").body))

    def _expr(self, node: ast.expr) -> sympy.Expr:
        """Sums, products, powers and quotients of integers, names and `_CALLS`; raises ValueError for anything else."""
        match node:
            case ast.Constant(value=value) if type(value) is int:
                return sympy.Integer(value)
            case ast.Name(id=name):
                return self.symbols.setdefault(name, sympy.Symbol(name, integer=True, positive=True))
            case ast.UnaryOp(op=op, operand=value) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._expr(value))
            case ast.BinOp(
                op=ast.Pow(),
                left=ast.Name() | ast.Call() | ast.BinOp(op=ast.Add() | ast.Sub() | ast.FloorDiv()) as base,
            ):
                if isinstance(node.right, ast.Constant) and node.right.value in range(2, _LARGEST_POWER + 1):
                    return self._expr(base) ** node.right.value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._expr(left), self._expr(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
                return _CALLS[name](*map(self._expr, args))
        raise ValueError(f"{ast.unparse(node)[:80]!r} is no size")


def _encode(p: Placement, text: _SizeText) -> list[Any]:
    if isinstance(p, Owned):
        return ["O", p.owner, p.cut.size]
    return [p.tag, *(text.encode(n) for n in p.flat_layout)]


def _decode(data: list[Any], text: _SizeText) -> Placement:
    tag, *flat = data
    if tag == "O":
        owner, rows = flat
        return owned(rows, owner)
    if not tag.startswith("S"):
        return Placement.parse(tag)
    return S(int(tag[1:]), Layout.from_flat(text.decode(n) for n in flat))
